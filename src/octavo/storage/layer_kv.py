"""One layer's part of every block: the interface between models, attention and the arena's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

SideArguments = torch.Tensor | tuple[str, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""The keys or the values of a layer for the C++ library: floats, or a codec, its codes, scales of vectors, zero points
and scales of heads."""


class LayerKV(ABC):
    """One layer's part of every block.

    Attributes:
        group: index of the layer's group, which determines its block tables.
    """

    group: int
    sliding_window: int | None

    @property
    def parts(self) -> Sequence[LayerKV]:
        """Where new keys and values are written: the layer itself, unless it is stored twice."""
        return (self,)

    @property
    @abstractmethod
    def for_kernels(self) -> tuple[SideArguments, SideArguments]:
        """The keys and values as arguments of the C++ library, without copies of some blocks."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """The number of tokens in a block."""

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """The number of dimensions of a value head."""

    @abstractmethod
    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim] at int64 `slots` [tokens]."""

    @abstractmethod
    def gather_heads(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [kv_heads, key_dim, num_tokens] and values [kv_heads, num_tokens, value_dim] of one block table.

        Matrix products need this order of dimensions.
        """

    def gather(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [num_tokens, kv_heads, key_dim] and values [num_tokens, kv_heads, value_dim] of a block table."""
        key, value = self.gather_heads(block_table, num_tokens)
        return key.permute(2, 0, 1), value.transpose(0, 1)

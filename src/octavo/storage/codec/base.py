"""The protocol of a codec, and the layout of its bytes in a block.

A codec encodes one vector at a time, the key or the value of one token and head, as codes and additional fields (a
scale, a zero point). A coded layer's part of a block, in which tokens form groups of 16 lanes, the width of the
kernels' registers (a block whose size is not a multiple of 16 is one group):

    | codes of keys | codes of values | fields of keys | fields of values | padding to 64 bytes |

    codes of keys      [kv_heads][block_size / lanes][code_bytes / unit][lanes][unit]     tokens adjacent, so that a
                       register holds the same dimensions of 16 tokens; `unit` bytes of one token are adjacent
    codes of values    [kv_heads][block_size / together][code_bytes][together]            a token's dimensions adjacent,
                       or bytes of `together` tokens: the operand of an integer sum over tokens
    each field         [kv_heads][block_size][bytes of the field]

For a GPU's kernels tokens are stored one after the other, with one token per group and `together` = 1
(`BlockLayout.TOKENS`). In blocks whose size is not a multiple of 16, values are always stored like that.

No two tokens share a byte, so different threads may write tokens of one block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from octavo.kvcache.formats import CodeFormat

LANES = 16
LEAST_SCALE = 2.0**-100
"""The minimum scale, so that dividing by it cannot overflow; vectors this small are stored as zeros."""


class Coded(NamedTuple):
    """Encoded vectors: codes uint8 [..., code_bytes], and fields uint8 [..., bytes of the field] each."""

    codes: torch.Tensor
    fields: tuple[torch.Tensor, ...]


class VectorCodec(ABC):
    """Encodes and decodes vectors, slowly in plain torch, as the reference for the kernels.

    Attributes:
        format: the sizes.
        unit: for keys, how many bytes of a token's codes are adjacent.
        together: for values, how many tokens have adjacent bytes.
        largest: for a calibrated format, the largest code in units of the scale: a vector's largest element divided by
            this is the smallest scale that clips nothing.
    """

    format: CodeFormat
    unit: int = 1
    together: int = 1
    largest: float = 1.0

    @abstractmethod
    def encode(self, x: torch.Tensor, scale: torch.Tensor) -> Coded:
        """Encode float32 [..., heads, dim].

        Args:
            scale: float32 [heads], for calibrated formats; others ignore it.
        """

    @abstractmethod
    def decode(self, coded: Coded, dim: int, scale: torch.Tensor) -> torch.Tensor:
        """Decode the output of `encode` to float32 [..., heads, dim]."""


def split_last(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return `x` with its last dimension split into `sizes`, one of which may be -1."""
    return x.reshape(*x.shape[:-1], *sizes)


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return `x` with its last dimension padded with zeros to a multiple."""
    short = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, short)) if short else x


def ceil_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round `x` >= 0 up to bfloat16, returned as float32; infinities and NaN are unchanged.

    With a scale that is rounded up, no element exceeds the last code.
    """
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isfinite(), (bits + 0xFFFF) & -0x10000, bits).view(torch.float32)


def bfloat16_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes, uint8 [..., 2], of numbers [...] that are exact in bfloat16."""
    return x.to(torch.bfloat16).unsqueeze(-1).view(torch.uint8)


def from_bfloat16_bytes(field: torch.Tensor) -> torch.Tensor:
    """Return float32 [..., 1] from bfloat16 bytes, uint8 [..., 2]."""
    return field.contiguous().view(torch.bfloat16).float()

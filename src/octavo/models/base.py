"""The contract between the runner and whatever computes a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.kvcache.spec import LayerKVSpec
from octavo.storage.arena import LayerKV

LaterLogits = Callable[[int, int], torch.Tensor]
"""(first, last) -> float32 [last - first, vocab_size], of those rows; until the model computes its next step."""


class CausalLM(ABC):
    """A decoder-only language model whose keys and values live in blocks.

    Attributes:
        architecture: the Hugging Face class name.
        vocab_size: width of the logits.
        max_position_embeddings: the longest context that the model supports, in tokens.
        kv_layers: what each attention layer stores, in the order in which `forward` takes `kv`.
        eos_token_ids: every id that ends a generation.
        weight_bytes: bytes the weights take in memory, packed copies included.
    """

    architecture: str
    vocab_size: int
    max_position_embeddings: int
    kv_layers: tuple[LayerKVSpec, ...]
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one step's tokens and store their keys and values. Runs under the caller's `torch.inference_mode`.

        Args:
            token_ids: int64 [num_tokens], ragged as `batch` describes.
            kv: one for each of `kv_layers`.
            logits_indices: int64 [rows], the tokens of this step whose next-token logits are wanted.

        Returns:
            float32 [rows, vocab_size], which the next call may write over
        """

    def forward_in_part(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
        num_now: int,
    ) -> tuple[torch.Tensor, LaterLogits]:
        """The same, with the logits of the first `num_now` rows, and a way to have any others' a few at a time.

        Rows x vocabulary of a long prompt that is scored would be gigabytes. A model that can keep its rows before the
        head does; here all are computed at once.
        """
        logits = self.forward(token_ids, batch, kv, attention, logits_indices)
        return logits[:num_now], lambda first, last: logits[first:last]

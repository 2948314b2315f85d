"""The contract between the runner and whatever computes a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.kvcache.spec import LayerKVSpec
from octavo.storage.layer_kv import LayerKV


@dataclass(frozen=True, slots=True)
class LaterRows:
    """What can be had of a step's rows `first .. last` until the model computes its next step.

    Attributes:
        logits: (first, last) -> float32 [last - first, vocab_size].
        hidden: (first, last) -> float32 [last - first, hidden_size]: what the head makes logits of.
    """

    logits: Callable[[int, int], torch.Tensor]
    hidden: Callable[[int, int], torch.Tensor]


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

    @abstractmethod
    def forward_in_part(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
        num_now: int,
        num_logits: int,
    ) -> tuple[torch.Tensor, LaterRows]:
        """The same, with the logits of the first `num_now` rows, and a way to have more of any row.

        Rows x vocabulary of a long prompt that is scored would be gigabytes, so that the others' logits are asked for
        a few at a time. Of rows from `num_logits` on, only hidden states will be asked for.
        """

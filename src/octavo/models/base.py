"""The interface between the runner and the implementations of models."""

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
    """Functions that return results of a step's rows `first .. last`, until the model computes its next step.

    Attributes:
        logits: (first, last) -> float32 [last - first, vocab_size].
        hidden: (first, last) -> float32 [last - first, hidden_size], the input of the head.
    """

    logits: Callable[[int, int], torch.Tensor]
    hidden: Callable[[int, int], torch.Tensor]


class CausalLM(ABC):
    """A decoder-only language model whose keys and values live in blocks.

    Attributes:
        architecture: the Hugging Face class name.
        vocab_size: width of the logits.
        max_position_embeddings: maximum context length in tokens.
        kv_layers: what each attention layer stores, in the order of `kv` in `forward`.
        eos_token_ids: all ids that end a generation.
        weight_bytes: memory of the weights in bytes, including packed copies.
        budget_refusal: why its sequences cannot have budgets (`kv_budget.py`); empty if they can.
    """

    architecture: str
    vocab_size: int
    max_position_embeddings: int
    kv_layers: tuple[LayerKVSpec, ...]
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    budget_refusal = ""

    @abstractmethod
    def forward_in_part(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
        num_now: int,
    ) -> tuple[torch.Tensor, LaterRows]:
        """Compute one step's tokens and store their keys and values. Runs under the caller's `torch.inference_mode`.

        Args:
            token_ids: int64 [num_tokens], ragged as `batch` describes.
            kv: one for each of `kv_layers`.
            logits_indices: int64 [rows], the tokens of this step whose next-token logits or hidden states are wanted.
            num_now: number of rows whose logits are returned. All logits of a long prompt that is scored would take
                gigabytes, so the others are requested a few rows at a time.

        Returns:
            float32 [num_now, vocab_size], which the next call may overwrite, and access to all rows.
        """

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a step like `forward_in_part`, and return the logits of all rows, float32 [rows, vocab_size]."""
        return self.forward_in_part(token_ids, batch, kv, attention, logits_indices, len(logits_indices))[0]

"""The entropy of attention in each layer: how many tokens a layer attends to.

    H = -sum p ln p = ln Z + m - sum p s        of weights p = exp(s - m) / Z with scores s and their maximum m

It is divided by the logarithm of the number of tokens that a query sees, so it is from 0 (one token has all the weight)
to 1 (all have the same), and averaged over heads and over the last rows of windows of text, where a prompt's question
stands. A budget of sparse reads divides its tokens among layers by it (`KVBudget.layers`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.kvcache.spec import KVCacheSpec
from octavo.models.base import CausalLM
from octavo.storage.arena import KVArena
from octavo.storage.layer_kv import LayerKV
from octavo.workloads.forward_text import logits_of_chunks

ROWS = 64
_CHUNK = 256


def layer_entropies(
    model: CausalLM, attention: AttentionBackend, windows: Sequence[Sequence[int]], block_size: int = 16
) -> list[list[float]]:
    """Return the entropy of attention from the last `ROWS` tokens of each window: [windows][layers].

    Args:
        attention: computes the tokens before them.
    """
    spec = KVCacheSpec.build(model.kv_layers, block_size, str(model.dtype).removeprefix("torch."))
    longest = max(map(len, windows))
    arena = KVArena(spec, 1 + len(spec.groups) * spec.blocks_for_tokens(longest), model.device, attention.layout)
    found = []
    for window in windows:
        first = max(0, len(window) - ROWS)
        measured = MeasuredAttention(attention, first)
        for _ in logits_of_chunks(model, arena, measured, window, chunk=_CHUNK, wanted=False):
            pass
        found.append([sum(parts) / (len(window) - first) for parts in measured.entropies.values()])
    return found


class MeasuredAttention(AttentionBackend):
    """Attention that also sums up its entropy, from some position of a step's only sequence on.

    Attributes:
        entropies: for each layer, in the order of the model, the sums over the rows of each step.
    """

    name = "measured"

    def __init__(self, attention: AttentionBackend, first: int) -> None:
        self._attention = attention
        self.layout = attention.layout
        self._first = first
        self.entropies: dict[int, list[float]] = {}

    def attend(
        self,
        kv: LayerKV,
        query: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        parts = self.entropies.setdefault(id(kv), [])
        rows = batch.positions >= self._first
        if rows.any():
            key, _ = kv.gather_heads(batch.groups[kv.group].block_tables[0], batch.max_context_len)
            of_rows = entropies(query[rows], key.float(), scale=scale, window=kv.sliding_window, softcap=softcap)
            parts.append(of_rows.sum().item())
        return self._attention.attend(kv, query, batch, scale=scale, softcap=softcap, **others)


def entropies(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the entropy of attention of the last `queries` of `keys` tokens, averaged over heads: float32 [queries].

    Args:
        query: [queries, num_heads, key_dim]
        key: float32 [kv_heads, key_dim, keys]
    """
    num_queries, num_heads, _ = query.shape
    num_keys = key.shape[2]
    by_head = key.repeat_interleave(num_heads // len(key), dim=0)
    scores = (query.float().transpose(0, 1) * scale) @ by_head  # [heads, queries, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(num_keys, device=query.device)
    distance = positions[num_keys - num_queries :, None] - positions
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, -math.inf)
    log_z = scores.logsumexp(dim=-1)  # ln Z + m
    weighed = ((scores - log_z[..., None]).exp() * scores.masked_fill(hidden, 0.0)).sum(dim=-1)
    seen = (~hidden).sum(dim=-1)
    return (log_z - weighed).mean(dim=0) / seen.clamp(min=2).float().log()

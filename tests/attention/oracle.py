"""Attention as the textbook has it, over contiguous tensors in float64: no blocks, no chunks, no sharing of code."""

from __future__ import annotations

import torch


def oracle_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence's last `len(query)` tokens over all of its tokens (Vaswani et al. 2017, 3.2.1).

    Args:
        query: [queries, num_heads, key_dim]
        key: [tokens, kv_heads, key_dim]
        value: [tokens, kv_heads, value_dim]
        sinks: [num_heads]

    Returns:
        float64 [queries, num_heads, value_dim]
    """
    share = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(share, dim=1), value.double().repeat_interleave(share, dim=1)
    first = len(key) - len(query)
    output = torch.empty(len(query), query.shape[1], value.shape[2], dtype=torch.float64)
    for i in range(len(query)):
        position = first + i
        start = 0 if window is None else max(0, position - window + 1)
        scores = torch.einsum("hd,thd->ht", query[i].double(), key[start : position + 1]) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.exp()
        total = weights.sum(dim=1)
        if sinks is not None:
            total = total + sinks.double().exp()
        output[i] = torch.einsum("ht,thd->hd", weights, value[start : position + 1]) / total[:, None]
    return output

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

    Nothing that lies behind the first query's window is read: it may be NaN.

    Args:
        query: [queries, num_heads, key_dim]
        key: [tokens, kv_heads, key_dim]
        value: [tokens, kv_heads, value_dim]
        sinks: [num_heads]

    Returns:
        float64 [queries, num_heads, value_dim]
    """
    num_heads, kv_heads = query.shape[1], key.shape[1]
    positions = torch.arange(len(key) - len(query), len(key))[:, None]
    start = 0 if window is None else max(0, len(key) - len(query) - window + 1)
    tokens = torch.arange(start, len(key))
    seen = tokens <= positions
    if window is not None:
        seen &= tokens > positions - window
    outputs = []
    for head in range(num_heads):
        shared = head // (num_heads // kv_heads)
        scores = query[:, head].double() @ key[start:, shared].double().T * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.exp() * seen
        total = weights.sum(dim=1)
        if sinks is not None:
            total = total + sinks[head].double().exp()
        outputs.append(weights @ value[start:, shared].double() / total[:, None])
    return torch.stack(outputs, dim=1)

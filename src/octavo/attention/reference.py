"""Attention over block tables in plain torch, on any device; the reference for other backends."""

from __future__ import annotations

import torch

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.storage.layer_kv import LayerKV


class ReferenceAttention(AttentionBackend):
    """Gathers each sequence's blocks and attends to them in float32, one sequence after the other.

    A sequence's result depends only on its own tokens.
    """

    name = "reference"

    # The number of scores held at once, 16 MiB of float32, which bounds the memory for a long prompt.
    _MAX_SCORES = 1 << 22

    def attend(
        self,
        kv: LayerKV,
        query: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        output = query.new_empty(query.shape[0], query.shape[1], kv.value_dim)
        tables = batch.groups[kv.group].block_tables
        bounds, context_lens = batch.query_start.tolist(), batch.context_lens.tolist()
        rows = batch.table_rows.tolist()
        for i in range(batch.num_seqs):
            start, stop = bounds[i], bounds[i + 1]
            first_query = context_lens[i] - (stop - start)
            first_block = _window_start(first_query, kv.sliding_window) // kv.block_size
            last_block = -(-context_lens[i] // kv.block_size)
            # Only the blocks inside the window, because those before it are null blocks.
            first_key = first_block * kv.block_size
            key, value = kv.gather_heads(tables[rows[i], first_block:last_block], context_lens[i] - first_key)
            key, value = key.float(), value.float()
            at_once = max(1, self._MAX_SCORES // (query.shape[1] * key.shape[2]))
            for low in range(start, stop, at_once):
                high = min(low + at_once, stop)
                seen_from = _window_start(first_query + low - start, kv.sliding_window) - first_key
                seen_to = first_query + high - start - first_key
                output[low:high] = attend_dense(
                    query[low:high],
                    key[:, :, seen_from:seen_to],
                    value[:, seen_from:seen_to],
                    scale=scale,
                    window=kv.sliding_window,
                    softcap=softcap,
                    sinks=sinks,
                )
        return output


def _window_start(position: int, window: int | None) -> int:
    """Return the first position that a query at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute causal attention of the last `queries` of `keys` tokens of one sequence.

    Args:
        query: [queries, num_heads, key_dim]
        key: float32 [kv_heads, key_dim, keys]
        value: float32 [kv_heads, keys, value_dim]

    Returns:
        float32 [queries, num_heads, value_dim]
    """
    num_queries, num_heads, key_dim = query.shape
    kv_heads, _, num_keys = key.shape
    share = num_heads // kv_heads
    # [kv_heads, queries * share, key_dim]: the query heads of one KV head are rows of one matrix product.
    rows = query.float().view(num_queries, kv_heads, share, key_dim).permute(1, 0, 2, 3).reshape(kv_heads, -1, key_dim)
    scores = (rows * scale) @ key
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(kv_heads, num_queries, share, num_keys)
    if num_queries > 1 or (window is not None and num_keys > window):
        positions = torch.arange(num_keys, device=query.device)
        distance = positions[num_keys - num_queries :, None] - positions
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(kv_heads, 1, share, 1).expand(-1, num_queries, -1, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    mixed = weights.reshape(kv_heads, num_queries * share, num_keys) @ value
    return mixed.view(kv_heads, num_queries, share, -1).permute(1, 0, 2, 3).reshape(num_queries, num_heads, -1)

"""Attention over block tables in plain torch, on any device; the reference for other backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from octavo.attention.base import MASS_UNIT, AttentionBackend, AttentionBatch
from octavo.storage.arena import FloatKV
from octavo.storage.layer_kv import LayerKV
from octavo.storage.recent_kv import RecentKV, Span


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
        sink_query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        output = query.new_empty(query.shape[0], query.shape[1], kv.value_dim)
        apart = None if sink_query is None else batch.sinks
        budgets = [0] * batch.num_seqs if apart is None else apart.budgets.tolist()
        bounds, context_lens = batch.query_start.tolist(), batch.lengths(kv.group).tolist()
        rows = batch.table_rows.tolist()
        sparse = batch.sparse if isinstance(kv, FloatKV) and kv.bounds is not None else None
        num_read = [0] * batch.num_seqs
        if sparse is not None and isinstance(kv, FloatKV):
            num_read = sparse.num_read[kv.bounds_index].tolist()
        measured = batch.measured if kv.sliding_window is None else None
        begins = [-1] * batch.num_seqs if measured is None else measured.begins.tolist()
        for i in range(batch.num_seqs):
            of_blocks = None
            if measured is not None and begins[i] >= 0:
                of_blocks = measured.mass[kv.group, begins[i] : begins[i] - (-context_lens[i] // kv.block_size)]
            tables = [group.block_tables[rows[i]] for group in batch.groups]
            start, stop = bounds[i], bounds[i + 1]
            first_query = context_lens[i] - (stop - start)
            for low, high in _same_keys(kv, first_query, context_lens[i], budgets[i]):
                window, sinks_seen = kv.sliding_window, None
                if apart is not None and 0 < budgets[i] <= low:
                    window, sinks_seen = budgets[i] - apart.num_tokens, _gather_sinks(kv, tables, apart.num_tokens)
                first_block = _window_start(low, window) // kv.block_size
                first_key = first_block * kv.block_size
                key, value = _gather(kv, tables, first_block, high)
                unread = None
                if sparse is not None and 0 < num_read[i] * kv.block_size < high:
                    recent = int(sparse.num_recent[i])
                    unread = _unread(key, query[start:stop], kv.block_size, num_read[i], recent)
                at_once = max(1, self._MAX_SCORES // (query.shape[1] * key.shape[2]))
                for begin in range(low, high, at_once):
                    end = min(begin + at_once, high)
                    seen_from = _window_start(begin, window) - first_key
                    queries = slice(start + begin - first_query, start + end - first_query)
                    output[queries] = attend_dense(
                        query[queries],
                        key[:, :, seen_from : end - first_key],
                        value[:, seen_from : end - first_key],
                        scale=scale,
                        window=window,
                        softcap=softcap,
                        sinks=sinks,
                        unread=unread,
                        mass=None if of_blocks is None else (of_blocks, kv.block_size),
                        apart=None if sinks_seen is None or sink_query is None else (sink_query[queries], *sinks_seen),
                    )
        return output


def _same_keys(kv: LayerKV, first: int, end: int, budget: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the positions [first, end) in pieces that read the same stored keys and values, cut at a budget."""
    if first < budget < end:
        yield from _same_keys(kv, first, budget)
        first = budget
    if not isinstance(kv, RecentKV):
        yield first, end
        return
    while first < end:
        piece = min((first // kv.block_size + 1) * kv.block_size, end)
        yield first, piece
        first = piece


def _gather(
    kv: LayerKV, tables: Sequence[torch.Tensor], first_block: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the query before position `end` reads from block `first_block` on; blocks before it may be null.

    Returns:
        keys float32 [kv_heads, key_dim, tokens] and values float32 [kv_heads, tokens, value_dim]
    """
    size = kv.block_size
    spans = kv.spans(end - 1) if isinstance(kv, RecentKV) else (Span(kv, 0, -(-end // size)),)
    read = [
        span.kv.gather_heads(tables[span.kv.group][first : span.end], min(span.end * size, end) - first * size)
        for span in spans
        if (first := max(span.first, first_block)) < span.end
    ]
    keys, values = zip(*read, strict=True)
    return torch.cat(keys, 2).float(), torch.cat(values, 1).float()


def _unread(key: torch.Tensor, query: torch.Tensor, block_size: int, num_read: int, num_recent: int) -> torch.Tensor:
    """Return which keys the query [1, num_heads, key_dim] of a token does not read: bool [kv_heads, keys].

    A block's score for a KV head is the highest that any of the head's queries could have with a key within the
    elementwise bounds of the block's keys (Quest, Tang et al. 2024, section 3.3).

    Args:
        key: float32 [kv_heads, key_dim, keys], from the sequence's first block on.
    """
    kv_heads, key_dim, num_keys = key.shape
    num_blocks = -(-num_keys // block_size)
    candidates = num_blocks - num_recent
    blocks = key[:, :, : candidates * block_size].view(kv_heads, key_dim, candidates, block_size)
    queries = query.float().view(kv_heads, -1, key_dim)
    scores = queries.clamp(min=0) @ blocks.amax(dim=3) + queries.clamp(max=0) @ blocks.amin(dim=3)
    # Of equal scores the earlier block is read.
    best = scores.amax(dim=1)[:, 1:].argsort(dim=1, descending=True, stable=True)[:, : num_read - 1 - num_recent] + 1
    unread = torch.ones(kv_heads, num_blocks, dtype=torch.bool, device=key.device)
    unread[:, 0] = unread[:, candidates:] = False
    unread.scatter_(1, best, False)
    return unread.repeat_interleave(block_size, dim=1)[:, :num_keys]


def _add_mass(weights: torch.Tensor, mass: torch.Tensor, block_size: int) -> None:
    """Add the fourth powers of blocks' shares of all rows' attention: weights [kv_heads, queries, share, keys]."""
    num_blocks = -(-weights.shape[-1] // block_size)
    padded = torch.nn.functional.pad(weights, (0, num_blocks * block_size - weights.shape[-1]))
    shares = padded.view(*weights.shape[:-1], num_blocks, block_size).sum(dim=-1)
    mass[:num_blocks] += (shares.square().square() * MASS_UNIT).round().long().sum(dim=(0, 1, 2))


def _gather_sinks(kv: LayerKV, tables: Sequence[torch.Tensor], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the first tokens, as `_gather` does."""
    if isinstance(kv, RecentKV):
        kv = kv.copies if kv.kept.sink_blocks * kv.block_size >= num_tokens else kv.own
    key, value = kv.gather_heads(tables[kv.group][: -(-num_tokens // kv.block_size)], num_tokens)
    return key.float(), value.float()


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
    unread: torch.Tensor | None = None,
    mass: tuple[torch.Tensor, int] | None = None,
    apart: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute causal attention of the last `queries` of `keys` tokens of one sequence.

    Args:
        query: [queries, num_heads, key_dim]
        key: float32 [kv_heads, key_dim, keys]
        value: float32 [kv_heads, keys, value_dim]
        unread: bool [kv_heads, keys], keys that no query sees.
        mass: int64 [blocks] to add the mass of blocks to, and their number of tokens (`MeasuredRows`).
        apart: queries of other keys, which all queries see, with these keys and values.

    Returns:
        float32 [queries, num_heads, value_dim]
    """
    num_queries, num_heads, key_dim = query.shape
    kv_heads, _, num_keys = key.shape
    share = num_heads // kv_heads

    def scored(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # [kv_heads, queries * share, key_dim]: the query heads of one KV head are rows of one matrix product.
        by_head = query.float().view(num_queries, kv_heads, share, key_dim).permute(1, 0, 2, 3)
        scores = (by_head.reshape(kv_heads, -1, key_dim) * scale) @ key
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return scores.view(kv_heads, num_queries, share, -1)

    scores = scored(query, key)
    if num_queries > 1 or (window is not None and num_keys > window):
        positions = torch.arange(num_keys, device=query.device)
        distance = positions[num_keys - num_queries :, None] - positions
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
    if unread is not None:
        scores = scores.masked_fill(unread[:, None, None], float("-inf"))
    if apart is not None:
        scores = torch.cat((scored(*apart[:2]), scores), dim=-1)
        value = torch.cat((apart[2], value), dim=1)
    if sinks is not None:
        sink = sinks.float().view(kv_heads, 1, share, 1).expand(-1, num_queries, -1, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    if mass is not None:
        _add_mass(weights, *mass)
    mixed = weights.reshape(kv_heads, num_queries * share, -1) @ value
    return mixed.view(kv_heads, num_queries, share, -1).permute(1, 0, 2, 3).reshape(num_queries, num_heads, -1)

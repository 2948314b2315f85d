"""Decode attention: one query per sequence, whose context is split among programs, then a pass that joins the parts.

    context   | split 0    | split 1    | split 2 |         see `kvcache/splits.py`
    programs  (split, KV head): all query heads of the KV head as rows of one product
    splits    | sequence 0: 0 1 2 | sequence 1: 0 | sequence 3: 0 1 | without work |
    parts     maximum, total, mixed values of each          float32, in memory
    join      (sequence, query head)                        in the order of the splits

The host knows no more than a bound of the number of splits, so each program finds its sequence by summing those of the
sequences before it. The work of a step is thus proportional to the sum of the contexts, not to the longest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.attention.base import AttentionBatch
from octavo.attention.triton.launch import LOG2_E, MIN_DOT, ReadKV, computes_in_float32, padded, tile_tokens
from octavo.attention.triton.tiles import mix_tiles
from octavo.kvcache.splits import SPLIT, max_splits, most_splits

_JOINED = 16  # splits at a time
_COUNTED = 256  # sequences at a time


@triton.jit
def _split_of(context, SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first token that is attended to, and the tokens of a split, for one sequence or for several."""
    begin = context - context
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0)
    span = tl.maximum(context - begin, 1)
    return begin, (span + SPLIT_TOKENS * MOST_SPLITS - 1) // (SPLIT_TOKENS * MOST_SPLITS) * SPLIT_TOKENS


@triton.jit
def _count_splits(
    query_start, context_lens, sequences, end,
    SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the number of splits of each of the `sequences` before `end`: 0 for those with several queries."""
    present = sequences < end
    first = tl.load(query_start + sequences, mask=present, other=0)
    length = tl.load(query_start + sequences + 1, mask=present, other=0) - first
    context = tl.load(context_lens + sequences, mask=present, other=0)
    begin, tokens = _split_of(context, SPLIT_TOKENS, MOST_SPLITS, WINDOW)
    return tl.where(length == 1, (context + tokens - 1) // tokens - begin // tokens, 0)


# Sizes that change between steps must not be specialised, because each compilation takes seconds.
@triton.jit(do_not_specialize=["num_seqs"])
def _attend_split(
    out, parts, maxima, totals, query,
    key, value, key_scale, key_zero, value_scale, value_zero,
    tables, table_rows, query_start, context_lens, sinks, key_scales, value_scales, scale, softcap,
    num_seqs, table_stride, query_token_stride, query_head_stride,
    key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
    value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
    SHARE: tl.constexpr, ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, KEY_CODE: tl.constexpr, KEY_HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUE_CODE: tl.constexpr, VALUE_HALF: tl.constexpr,
    BLOCK: tl.constexpr, PAIR: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, COUNTED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALONE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    head = tl.program_id(1)
    sequence = item
    split = 0
    if not ALONE:
        sequence = 0
        first_item = 0
        num_items = 0
        for start in range(0, num_seqs, COUNTED):
            counts = _count_splits(
                query_start, context_lens, start + tl.arange(0, COUNTED), num_seqs, SPLIT_TOKENS, MOST_SPLITS, WINDOW
            )
            ends = num_items + tl.cumsum(counts, 0)
            before = ends <= item
            sequence += tl.sum(before.to(tl.int32), 0)
            first_item = tl.maximum(first_item, tl.max(tl.where(before, ends, 0), 0))
            num_items += tl.sum(counts, 0)
        if item >= num_items:
            return
        split = item - first_item
    token = tl.load(query_start + sequence).to(tl.int64)
    if ALONE:
        if tl.load(query_start + sequence + 1) - token != 1:
            return
    context = tl.load(context_lens + sequence).to(tl.int32)
    begin, split_tokens = _split_of(context, SPLIT_TOKENS, MOST_SPLITS, WINDOW)
    first = (begin // split_tokens + split) * split_tokens
    low = tl.maximum(first, begin)
    high = tl.minimum(first + split_tokens, context)
    table = tables + tl.load(table_rows + sequence) * table_stride

    rows = tl.arange(0, ROWS)
    present = rows < SHARE
    heads = head * SHARE + rows
    i = tl.arange(0, KEY_PADDED)
    j = tl.arange(0, VALUE_PADDED)
    q = tl.load(
        query + token * query_token_stride + heads[:, None] * query_head_stride + i[None, :],
        mask=present[:, None] & (i < KEY_DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    if SCALED:
        scale *= tl.load(key_scales + head)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    cache = (key, value, key_scale, key_zero, value_scale, value_zero)
    strides = (
        key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
        value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
    )  # fmt: skip
    maximum, total, mixed = mix_tiles(
        q, maximum, total, mixed, cache, strides, table, low // TILE * TILE, high, low, high, head, rows, scale,
        softcap, "range", WINDOW, SOFTCAP,
        KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, BLOCK, PAIR, TILE,
    )  # fmt: skip

    if SCALED:
        mixed *= tl.load(value_scales + head)
    kept = present[:, None] & (j < VALUE_DIM)[None, :]
    num_heads = tl.num_programs(1) * SHARE
    if ALONE:
        if SINKS:
            sink = tl.load(sinks + heads, mask=present, other=0.0).to(tl.float32) * 1.4426950408889634
            largest = tl.maximum(maximum, sink)
            mixed = mixed * tl.exp2(maximum - largest)[:, None]
            total = total * tl.exp2(maximum - largest) + tl.exp2(sink - largest)
        place = (token * num_heads + heads)[:, None] * VALUE_DIM + j[None, :]
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=kept)
    else:
        part = item.to(tl.int64) * num_heads + heads
        tl.store(maxima + part, maximum, mask=present)
        tl.store(totals + part, total, mask=present)
        tl.store(parts + part[:, None] * VALUE_DIM + j[None, :], mixed, mask=kept)


@triton.jit
def _join_splits(
    out, parts, maxima, totals, query_start, context_lens, sinks,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr, COUNTED: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(query_start + sequence).to(tl.int64)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    first_item = 0
    for start in range(0, sequence, COUNTED):
        counts = _count_splits(
            query_start, context_lens, start + tl.arange(0, COUNTED), sequence, SPLIT_TOKENS, MOST_SPLITS, WINDOW
        )
        first_item += tl.sum(counts, 0)
    context = tl.load(context_lens + sequence).to(tl.int32)
    begin, split_tokens = _split_of(context, SPLIT_TOKENS, MOST_SPLITS, WINDOW)
    count = (context + split_tokens - 1) // split_tokens - begin // split_tokens
    j = tl.arange(0, VALUE_PADDED)
    maximum = float("-inf")
    total = 0.0
    if SINKS:
        maximum = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    mixed = tl.zeros([VALUE_PADDED], tl.float32)
    for first in range(0, count, JOINED):
        split = first + tl.arange(0, JOINED)
        present = split < count
        part = (first_item + split).to(tl.int64) * num_heads + head
        part_maximum = tl.load(maxima + part, mask=present, other=float("-inf"))
        part_total = tl.load(totals + part, mask=present, other=0.0)
        part_mixed = tl.load(
            parts + part[:, None] * VALUE_DIM + j[None, :], mask=present[:, None] & (j < VALUE_DIM)[None, :], other=0.0
        )
        largest = tl.maximum(maximum, tl.max(part_maximum, 0))
        shrunk = tl.exp2(maximum - largest)
        weights = tl.exp2(part_maximum - largest)
        total = total * shrunk + tl.sum(weights * part_total, 0)
        mixed = mixed * shrunk + tl.sum(weights[:, None] * part_mixed, 0)
        maximum = largest
    place = (token * num_heads + head) * VALUE_DIM + j
    tl.store(out + place, (mixed / total).to(out.dtype.element_ty), mask=j < VALUE_DIM)


def attend_decodes(
    out: torch.Tensor,
    kv: ReadKV,
    query: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attend for the sequences of the batch that have one query; other rows of `out` are not written.

    Args:
        out: [num_tokens, num_heads, value_dim], contiguous.
        query: [num_tokens, num_heads, key_dim]; the last dimension must be contiguous.
    """
    group = batch.groups[kv.group]
    num_heads, value_dim = query.shape[1], kv.value_dim
    share, window = num_heads // kv.kv_heads, kv.sliding_window
    alone = batch.max_context_len <= SPLIT
    if alone:
        splits = batch.num_seqs
    else:
        total = batch.total_decode_len
        splits = max_splits(batch.num_seqs, batch.max_context_len, total, window, kv.kv_heads)
    maxima, totals = (torch.empty(splits, num_heads, dtype=torch.float32, device=query.device) for _ in range(2))
    parts = maxima if alone else torch.empty(splits, num_heads, value_dim, dtype=torch.float32, device=query.device)
    of_sinks = maxima if sinks is None else sinks
    dividing = {
        "SPLIT_TOKENS": SPLIT,
        "MOST_SPLITS": most_splits(kv.kv_heads),
        "COUNTED": _COUNTED,
        "WINDOW": window or 0,
        "SINKS": sinks is not None,
    }
    _attend_split[(splits, kv.kv_heads)](
        out,
        parts,
        maxima,
        totals,
        query,
        *kv.tensors,
        group.block_tables,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
        of_sinks,
        *(kv.scales or (out, out)),
        *score_factors(scale, softcap),
        batch.num_seqs,
        group.block_tables.stride(0),
        *query.stride()[:2],
        *kv.all_strides,
        **kv.constants,
        **dividing,
        SHARE=share,
        ROWS=padded(share, MIN_DOT),
        TILE=tile_tokens(
            padded(share, MIN_DOT),
            padded(kv.key_dim),
            padded(value_dim),
            query.dtype,
            most=kv.most_tile_tokens,
        ),
        SOFTCAP=softcap is not None,
        ALONE=alone,
        UPCAST=computes_in_float32(query.dtype),
        num_warps=_warps(kv, query.dtype),
        num_stages=kv.stages,
    )
    if not alone:
        _join_splits[(batch.num_seqs, num_heads)](
            out,
            parts,
            maxima,
            totals,
            batch.query_start,
            batch.context_lens,
            of_sinks,
            **dividing,
            VALUE_DIM=value_dim,
            VALUE_PADDED=padded(value_dim),
            JOINED=_JOINED,
            num_warps=4,
        )


def _warps(kv: ReadKV, dtype: torch.dtype) -> int:
    """Return the number of warps whose registers hold a program's data; decoding codes takes more of them."""
    wide = max(padded(kv.key_dim), padded(kv.value_dim))
    return 8 if dtype is torch.float32 or wide > 128 or (wide == 128 and not kv.is_float) else 4


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return scale and softcap for `scores_of`, both in units of log2."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2.0 * scale * LOG2_E / softcap, softcap * LOG2_E

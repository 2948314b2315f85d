"""Decode attention: one query per sequence, its context split among programs, then a pass that joins the parts.

    context   | split 0    | split 1    | split 2 |         SPLIT tokens each, counted from position 0
    programs  (sequence, KV head, split): all query heads of the KV head as rows of one product
    parts     maximum, total, mixed values of each        float32, in memory
    join      (sequence, query head)                      in the order of the splits

Splits lie where they lie whatever the batch, so a sequence's result depends on nothing but its own tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.attention.base import AttentionBatch
from octavo.attention.triton.launch import LOG2_E, MIN_DOT, ReadKV, computes_in_float32, padded, tile_tokens
from octavo.attention.triton.tiles import load_tile, scores_of, soften

SPLIT = 256
_JOINED = 16  # splits at a time


def num_splits(max_context_len: int, window: int | None) -> int:
    """Splits that the longest context of a batch may touch."""
    splits = -(-max_context_len // SPLIT)
    return splits if window is None else min(splits, -(-window // SPLIT) + 1)


# Sizes that change from step to step make no kernels of their own: a compilation takes seconds.
@triton.jit(do_not_specialize=["splits"])
def _attend_split(
    out,
    parts,
    maxima,
    totals,
    query,
    key,
    value,
    key_scale,
    key_zero,
    value_scale,
    value_zero,
    tables,
    table_rows,
    query_start,
    context_lens,
    sinks,
    key_scales,
    value_scales,
    scale,
    softcap,
    splits,
    table_stride,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_head_stride,
    key_dim_stride,
    key_token_stride,
    value_block_stride,
    value_head_stride,
    value_token_stride,
    value_dim_stride,
    block_bytes,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    KEY_CODE: tl.constexpr,
    KEY_HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIR: tl.constexpr,
    SCALED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALONE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start + sequence).to(tl.int64)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    context = tl.load(context_lens + sequence).to(tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0)
    first = (begin // SPLIT_TOKENS + split) * SPLIT_TOKENS
    low = tl.maximum(first, begin)
    high = tl.minimum(first + SPLIT_TOKENS, context)
    if low >= high:
        return
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
    for start in range(low // TILE * TILE, high, TILE):
        k, factor, v, tokens = load_tile(
            key, value, key_scale, key_zero, value_scale, value_zero, table, start, low, high, head, scale,
            key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
            value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
            KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, BLOCK, PAIR, TILE,
        )  # fmt: skip
        scores = scores_of(q, k.to(q.dtype), factor, softcap, SOFTCAP)
        scores = tl.where(((tokens >= low) & (tokens < high))[None, :], scores, float("-inf"))
        maximum, total, mixed = soften(scores, v.to(q.dtype), maximum, total, mixed)

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
        part = (sequence.to(tl.int64) * num_heads + heads) * splits + split
        tl.store(maxima + part, maximum, mask=present)
        tl.store(totals + part, total, mask=present)
        tl.store(parts + part[:, None] * VALUE_DIM + j[None, :], mixed, mask=kept)


@triton.jit(do_not_specialize=["splits"])
def _join_splits(
    out,
    parts,
    maxima,
    totals,
    query_start,
    context_lens,
    sinks,
    splits,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    JOINED: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(query_start + sequence).to(tl.int64)
    if tl.load(query_start + sequence + 1) - token != 1:
        return
    context = tl.load(context_lens + sequence).to(tl.int32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0)
    count = (context + SPLIT_TOKENS - 1) // SPLIT_TOKENS - begin // SPLIT_TOKENS
    j = tl.arange(0, VALUE_PADDED)
    maximum = float("-inf")
    total = 0.0
    if SINKS:
        maximum = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    mixed = tl.zeros([VALUE_PADDED], tl.float32)
    first_part = (sequence.to(tl.int64) * num_heads + head) * splits
    for first in range(0, count, JOINED):
        split = first + tl.arange(0, JOINED)
        present = split < count
        part = first_part + split
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
    """Attend for the sequences of the batch that have one query; the others' rows of `out` are left alone.

    Args:
        out: [num_tokens, num_heads, value_dim], contiguous.
        query: [num_tokens, num_heads, key_dim], of any strides but the last.
    """
    group = batch.groups[kv.group]
    num_heads, key_dim = query.shape[1:]
    kv_heads, value_dim = kv.kv_heads, kv.value_dim
    scales = kv.scales or (out, out)
    share, window = num_heads // kv_heads, kv.sliding_window or 0
    splits = num_splits(batch.max_context_len, kv.sliding_window)
    alone = splits == 1
    sums = (batch.num_seqs, num_heads, 1 if alone else splits)
    maxima, totals = (torch.empty(sums, dtype=torch.float32, device=query.device) for _ in range(2))
    parts = maxima if alone else torch.empty((*sums, value_dim), dtype=torch.float32, device=query.device)
    of_sinks = maxima if sinks is None else sinks
    _attend_split[(batch.num_seqs, kv_heads, splits)](
        out,
        parts,
        maxima,
        totals,
        query,
        kv.key,
        kv.value,
        *kv.fields,
        group.block_tables,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
        of_sinks,
        *scales,
        *score_factors(scale, softcap),
        splits,
        group.block_tables.stride(0),
        *query.stride()[:2],
        *kv.strides,
        kv.block_bytes,
        SHARE=share,
        ROWS=padded(share, MIN_DOT),
        KEY_DIM=key_dim,
        KEY_PADDED=padded(key_dim, MIN_DOT),
        KEY_CODE=kv.codes[0],
        KEY_HALF=kv.halves[0],
        VALUE_DIM=value_dim,
        VALUE_PADDED=padded(value_dim, MIN_DOT),
        VALUE_CODE=kv.codes[1],
        VALUE_HALF=kv.halves[1],
        BLOCK=kv.block_size,
        PAIR=kv.pair,
        SCALED=kv.scales is not None,
        TILE=tile_tokens(
            padded(share, MIN_DOT),
            padded(key_dim),
            padded(value_dim),
            query.dtype,
            crowded=kv.has_int4 and kv.is_padded,
        ),
        SPLIT_TOKENS=SPLIT,
        WINDOW=window,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        ALONE=alone,
        UPCAST=computes_in_float32(query.dtype),
        num_warps=_warps(kv, query.dtype),
        num_stages=2,
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
            splits,
            VALUE_DIM=value_dim,
            VALUE_PADDED=padded(value_dim),
            SPLIT_TOKENS=SPLIT,
            WINDOW=window,
            SINKS=sinks is not None,
            JOINED=_JOINED,
            num_warps=4,
        )


def _warps(kv: ReadKV, dtype: torch.dtype) -> int:
    """As many as keep what a program holds in registers: what codes of 4 bits become takes more while it is made."""
    is_wide = max(kv.key_dim, kv.value_dim) > 128 or kv.is_padded
    return 8 if dtype is torch.float32 or (any(kv.halves) and is_wide) else 4


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """`scores_of`'s scale and softcap: both in units of log2."""
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2.0 * scale * LOG2_E / softcap, softcap * LOG2_E

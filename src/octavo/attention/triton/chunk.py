"""Chunk attention: causal attention for many new tokens per sequence, over block tables and ragged.

    rows of a program     BLOCK_Q tokens x SHARE query heads of one KV head
    programs              (blocks of queries, KV head)

        query_start   [ 0            5     6           12 ]
        blocks of 4   | 0   1   -  | 2  - | 3    4   - |          sequence i's begin at query_start[i] // 4 + i

    keys                  | hidden by the window | some see it | all see it | some see it | future |
                          low                                  full                full_end      high

Each program finds its sequence by bisection, so that the host need not know the lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.attention.base import AttentionBatch
from octavo.attention.triton.decode import score_factors
from octavo.attention.triton.launch import (
    INTERPRETED,
    MIN_DOT,
    ReadKV,
    compute_capability,
    computes_in_float32,
    padded,
    tile_tokens,
)
from octavo.attention.triton.tiles import load_tile, scores_of, soften


# Sizes that change from step to step make no kernels of their own: a compilation takes seconds.
@triton.jit(do_not_specialize=["num_seqs"])
def _attend_chunk(
    out,
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
    num_seqs,
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
    BLOCK_Q: tl.constexpr,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    DECODES_APART: tl.constexpr,
    UPCAST: tl.constexpr,
):
    program = tl.program_id(0)
    head = tl.program_id(1)
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= program:
            left = middle + 1
        else:
            right = middle
    sequence = left - 1
    bound = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - bound
    first_query = (program - (bound // BLOCK_Q + sequence)) * BLOCK_Q
    if first_query >= length:
        return
    if DECODES_APART:
        if length == 1:
            return
    context = tl.load(context_lens + sequence).to(tl.int32)
    table = tables + tl.load(table_rows + sequence) * table_stride

    rows = tl.arange(0, ROWS)
    queries = first_query + rows // SHARE
    present = (rows < BLOCK_Q * SHARE) & (queries < length)
    positions = context - length + queries
    tokens = (bound + queries).to(tl.int64)
    heads = head * SHARE + rows % SHARE
    i = tl.arange(0, KEY_PADDED)
    j = tl.arange(0, VALUE_PADDED)
    q = tl.load(
        query + (tokens * query_token_stride + heads * query_head_stride)[:, None] + i[None, :],
        mask=present[:, None] & (i < KEY_DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    if SCALED:
        scale *= tl.load(key_scales + head)

    first_position = context - length + first_query
    last_position = tl.minimum(first_position + BLOCK_Q, context) - 1
    low = 0
    full = 0
    if WINDOW > 0:
        low = tl.maximum(first_position - WINDOW + 1, 0)
        full = tl.maximum(last_position - WINDOW + 1, 0)
    high = last_position + 1
    # Whole tiles between `full` and the first query's position are seen by every row: no score of them is hidden.
    begin = low // TILE * TILE
    full = tl.minimum((full + TILE - 1) // TILE * TILE, (last_position + TILE) // TILE * TILE)
    full_end = tl.maximum((first_position + 1) // TILE * TILE, full)

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = tl.load(sinks + heads, mask=present, other=0.0).to(tl.float32)
        maximum = sink * 1.4426950408889634
        total = total + 1.0
    mixed = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    if WINDOW > 0:
        for start in range(begin, full, TILE):
            k, factor, v, seen = load_tile(
                key, value, key_scale, key_zero, value_scale, value_zero, table, start, low, high, head, scale,
                key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
                value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
                KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF,
                BLOCK, PAIR, TILE,
            )  # fmt: skip
            scores = scores_of(q, k.to(q.dtype), factor, softcap, SOFTCAP)
            distance = positions[:, None] - seen[None, :]
            scores = tl.where((distance >= 0) & (distance < WINDOW), scores, float("-inf"))
            maximum, total, mixed = soften(scores, v.to(q.dtype), maximum, total, mixed)
    for start in range(full, full_end, TILE):
        k, factor, v, seen = load_tile(
            key, value, key_scale, key_zero, value_scale, value_zero, table, start, low, high, head, scale,
            key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
            value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
            KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, BLOCK, PAIR, TILE,
        )  # fmt: skip
        scores = scores_of(q, k.to(q.dtype), factor, softcap, SOFTCAP)
        maximum, total, mixed = soften(scores, v.to(q.dtype), maximum, total, mixed)
    for start in range(full_end, high, TILE):
        k, factor, v, seen = load_tile(
            key, value, key_scale, key_zero, value_scale, value_zero, table, start, low, high, head, scale,
            key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
            value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
            KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, BLOCK, PAIR, TILE,
        )  # fmt: skip
        scores = scores_of(q, k.to(q.dtype), factor, softcap, SOFTCAP)
        distance = positions[:, None] - seen[None, :]
        hidden = distance < 0
        if WINDOW > 0:
            hidden = hidden | (distance >= WINDOW)
        scores = tl.where(hidden, float("-inf"), scores)
        maximum, total, mixed = soften(scores, v.to(q.dtype), maximum, total, mixed)

    if SCALED:
        mixed *= tl.load(value_scales + head)
    place = (tokens * (tl.num_programs(1) * SHARE) + heads)[:, None] * VALUE_DIM + j[None, :]
    # Rows of no query have seen nothing where a window is: they divide by 1.
    total = tl.where(present, total, 1.0)
    tl.store(
        out + place,
        (mixed / total[:, None]).to(out.dtype.element_ty),
        mask=present[:, None] & (j < VALUE_DIM)[None, :],
    )


def attend_chunks(
    out: torch.Tensor,
    kv: ReadKV,
    query: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    decodes_apart: bool,
) -> None:
    """Attend for every sequence of the batch; arguments as of `attend_decodes`.

    Args:
        decodes_apart: leave alone the sequences with one query.
    """
    group = batch.groups[kv.group]
    num_heads, key_dim = query.shape[1:]
    kv_heads, value_dim = kv.kv_heads, kv.value_dim
    scales = kv.scales or (out, out)
    share = num_heads // kv_heads
    wide = max(key_dim, value_dim) > 128
    rows = padded(share, MIN_DOT if INTERPRETED else _rows(kv, wide, query.dtype))
    block_q = rows // share
    crowded = wide or query.dtype is torch.float32 or _decodes_before_hopper(kv)
    _attend_chunk[(batch.num_tokens // block_q + batch.num_seqs, kv_heads)](
        out,
        query,
        kv.key,
        kv.value,
        *kv.fields,
        group.block_tables,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
        out if sinks is None else sinks,
        *scales,
        *score_factors(scale, softcap),
        batch.num_seqs,
        group.block_tables.stride(0),
        *query.stride()[:2],
        *kv.strides,
        kv.block_bytes,
        SHARE=share,
        ROWS=rows,
        BLOCK_Q=block_q,
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
            rows, padded(key_dim), padded(value_dim), query.dtype, crowded=kv.has_int4 and (wide or kv.is_padded)
        ),
        WINDOW=kv.sliding_window or 0,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        DECODES_APART=decodes_apart,
        UPCAST=computes_in_float32(query.dtype),
        num_warps=4 if rows <= 64 and not crowded else 8,
        num_stages=2,
    )


def _rows(kv: ReadKV, wide: bool, dtype: torch.dtype) -> int:
    """Rows of a program, so that its sums stay in registers."""
    rows = 64 if wide else 128
    return rows // 2 if dtype is torch.float32 or _decodes_before_hopper(kv) else rows


def _decodes_before_hopper(kv: ReadKV) -> bool:
    """Whether codes become floats in the registers that products take their operands from."""
    return kv.codes != ("float", "float") and compute_capability() < 90

"""Chunk attention: causal attention for many new tokens per sequence, over block tables, with ragged batches.

    rows of a program     BLOCK_Q tokens x SHARE query heads of one KV head
    programs              (blocks of queries, KV head)

        query_start   [ 0            5     6           12 ]
        blocks of 4   | 0   1   -  | 2  - | 3    4   - |          sequence i's start at query_start[i] // 4 + i

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
from octavo.attention.triton.tiles import mix_tiles


# Sizes that change between steps must not be specialised, because each compilation takes seconds.
@triton.jit(do_not_specialize=["num_seqs"])
def _attend_chunk(
    out, query,
    key, value, key_scale, key_zero, value_scale, value_zero,
    tables, table_rows, query_start, context_lens, sinks, key_scales, value_scales, scale, softcap,
    num_seqs, table_stride, query_token_stride, query_head_stride,
    key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
    value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, KEY_CODE: tl.constexpr, KEY_HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUE_CODE: tl.constexpr, VALUE_HALF: tl.constexpr,
    BLOCK: tl.constexpr, PAIR: tl.constexpr, SCALED: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, DECODES_APART: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    # The last queries see the most keys, so start with them to avoid a long-running program at the end.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
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
    # Whole tiles between `full` and the first query's position are visible to every row, so they need no mask.
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
    cache = (key, value, key_scale, key_zero, value_scale, value_zero)
    strides = (
        key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
        value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
    )  # fmt: skip
    if WINDOW > 0:
        maximum, total, mixed = mix_tiles(
            q, maximum, total, mixed, cache, strides, table, begin, full, low, high, head, positions, scale, softcap,
            "causal", WINDOW, SOFTCAP,
            KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, BLOCK, PAIR, TILE,
        )  # fmt: skip
    maximum, total, mixed = mix_tiles(
        q, maximum, total, mixed, cache, strides, table, full, full_end, low, high, head, positions, scale, softcap,
        "none", WINDOW, SOFTCAP,
        KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, BLOCK, PAIR, TILE,
    )  # fmt: skip
    maximum, total, mixed = mix_tiles(
        q, maximum, total, mixed, cache, strides, table, full_end, high, low, high, head, positions, scale, softcap,
        "causal", WINDOW, SOFTCAP,
        KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, BLOCK, PAIR, TILE,
    )  # fmt: skip

    if SCALED:
        mixed *= tl.load(value_scales + head)
    place = (tokens * (tl.num_programs(1) * SHARE) + heads)[:, None] * VALUE_DIM + j[None, :]
    # Rows without a query may have seen no key if there is a window, so divide them by 1.
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
    """Attend for every sequence of the batch; arguments as for `attend_decodes`.

    Args:
        decodes_apart: whether to skip the sequences with one query.
    """
    group = batch.groups[kv.group]
    num_heads, key_dim = query.shape[1:]
    kv_heads, value_dim = kv.kv_heads, kv.value_dim
    share = num_heads // kv_heads
    least_rows, most_tokens, warps = _program(kv, query.dtype)
    rows = padded(share, MIN_DOT if INTERPRETED else least_rows)
    block_q = rows // share
    _attend_chunk[(batch.num_tokens // block_q + batch.num_seqs, kv_heads)](
        out,
        query,
        *kv.tensors,
        group.block_tables,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
        out if sinks is None else sinks,
        *(kv.scales or (out, out)),
        *score_factors(scale, softcap),
        batch.num_seqs,
        group.block_tables.stride(0),
        *query.stride()[:2],
        *kv.all_strides,
        **kv.constants,
        SHARE=share,
        ROWS=rows,
        BLOCK_Q=block_q,
        TILE=tile_tokens(
            rows,
            padded(key_dim),
            padded(value_dim),
            query.dtype,
            # Hopper's products read operands directly from shared memory, so prefetching needs a third buffer.
            buffers=3 if 90 <= compute_capability() < 100 else 2,
            most=min(kv.most_tile_tokens, most_tokens),
        ),
        WINDOW=kv.sliding_window or 0,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        DECODES_APART=decodes_apart,
        UPCAST=computes_in_float32(query.dtype),
        num_warps=warps,
        num_stages=kv.stages,
    )


def _program(kv: ReadKV, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return a program's rows, the most tokens of its tiles, and its warps, such that its registers suffice.

    `scripts/compile_kernels.py` shows what is spilled. A product of float32 is computed as three of tf32. Before
    Hopper, codes are converted in the registers from which products read their operands.
    """
    widest, hopper = max(padded(kv.key_dim), padded(kv.value_dim)), compute_capability() >= 90
    if dtype is torch.float32:
        crowded = widest > 128 or kv.is_padded
        return (16, 16, 8) if crowded else (32, 32 if hopper or widest <= 64 else 16, 4)
    if kv.is_float:
        return 64 if widest > 128 else 128, 64, 8
    if widest > 128:
        return 64 if hopper else 32, 16, 8
    if hopper:
        return 128, 64, 8
    return 32 if all(kv.halves) and widest > 64 else 64, 32, 8

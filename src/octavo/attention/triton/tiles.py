"""The parts shared by the attention kernels: tiles of keys and values, and the running softmax.

The TILE tokens of a tile are looked up one by one in the block table, so any block size works:

    tokens      | start .. start + TILE |
    block       table[token // BLOCK]                     int32, one load per token, mostly of the same line
    key         block, head, d // PAIR, token % BLOCK, d % PAIR
    value       block, head, token % BLOCK // PAIR, d, token % BLOCK % PAIR

PAIR is 1 in the layout of a GPU's arena; with 2 the kernels read the CPU's layout of floats.

Codes (`storage/codec/`) are converted to floats only for a product, never in memory:

    code               bytes of a vector                                  in the product          outside it
    "float"            floats, or fp8 if the GPU converts it              as they are
    "e4m3"             fp8_e4m3, by shifts                                c
    "int8"             one per dimension                                  c                       scale of a token
    "int4 by fours"    dimensions 8u + b and 8u + 4 + b, b < 4            c - zero                scale of a token
    "int4 halves"      dimensions d and n / 2 + d                         c - zero                scale of a token
    "nvfp4"            dimensions d and n / 2 + d                         c t, t of 16 dimensions

A byte with two dimensions is loaded for each of them, but both loads are from the same cache lines, so memory is read
once. The numbers in the product are exact in bfloat16. Scales of keys multiply scores; values are multiplied in
float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_floats(bits):
    """Convert e4m3 bytes to float32, as halves with an exponent that is smaller by 8."""
    half = ((bits & 0x80).to(tl.uint16) << 8) | ((bits & 0x7F).to(tl.uint16) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def e2m1_floats(nibbles):
    """Convert 4-bit codes to float32: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = (nibbles & 7).to(tl.float32)
    size = tl.where(size < 4.0, 0.5 * size, tl.where(size < 6.0, size - 2.0, 2.0 * size - 8.0))
    return tl.where(nibbles >= 8, -size, size)


@triton.jit
def byte_of(columns, CODE: tl.constexpr, HALF: tl.constexpr):
    """Return the index of the byte that holds each dimension."""
    if CODE == "int4 by fours":
        place = columns // 8 * 4 + columns % 4
    elif HALF > 0:
        place = columns % HALF
    else:
        place = columns
    return place


@triton.jit
def nibble_of(bits, columns, CODE: tl.constexpr, HALF: tl.constexpr):
    """Extract each dimension's four bits from the bytes at `byte_of`; `columns` must broadcast with `bits`."""
    if CODE == "int4 by fours":
        shift = columns // 4 % 2 * 4
    else:
        shift = columns // HALF * 4
    return (bits.to(tl.int32) >> shift) & 15


@triton.jit
def find_blocks(table, start, low, high, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the block of each of a tile's tokens, [TILE], once for its keys and once for its values.

    Call it one tile ahead, because loads whose addresses are loaded in the same iteration are not prefetched. The two
    loads differ on purpose: if they were merged, one result would pass through shared memory in each iteration.
    """
    tokens = start + tl.arange(0, TILE)
    present = (tokens >= low) & (tokens < high)
    places = table + tokens // BLOCK
    of_keys = tl.load(places, mask=present, other=0)
    of_values = tl.load(places, mask=present, other=0, cache_modifier=".ca")
    return of_keys, of_values


@triton.jit
def load_tile(
    cache, strides, key_blocks, value_blocks, start, low, high, head, scale,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, KEY_CODE: tl.constexpr, KEY_HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUE_CODE: tl.constexpr, VALUE_HALF: tl.constexpr,
    BLOCK: tl.constexpr, PAIR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load keys [KEY_PADDED, TILE], the factor of their scores (a number, or float32 [1, TILE]), values [TILE,
    VALUE_PADDED] and positions [TILE]; zeros outside of low <= token < high.

    The memory of other tokens is masked, because it may hold NaN, which a weight of zero would not cancel.

    Args:
        cache: keys, values, and their fields, as `ReadKV.tensors`.
        strides: as `ReadKV.all_strides`.
    """
    key, value, key_scale, key_zero, value_scale, value_zero = cache
    (
        key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
        value_block_stride, value_head_stride, value_token_stride, value_dim_stride, block_bytes,
    ) = strides  # fmt: skip
    tokens = start + tl.arange(0, TILE)
    present = (tokens >= low) & (tokens < high)
    key_blocks, value_blocks = key_blocks.to(tl.int64)[None, :], value_blocks.to(tl.int64)[:, None]
    offsets = tokens % BLOCK
    i = tl.arange(0, KEY_PADDED)
    j = tl.arange(0, VALUE_PADDED)
    of_keys, of_values = present[None, :], present[:, None]
    key_mask, value_mask = of_keys, of_values
    if KEY_DIM != KEY_PADDED:
        key_mask = key_mask & (i < KEY_DIM)[:, None]
    if VALUE_DIM != VALUE_PADDED:
        value_mask = value_mask & (j < VALUE_DIM)[None, :]
    if PAIR == 1:
        key_columns = byte_of(i, KEY_CODE, KEY_HALF) * key_dim_stride
        value_rows = offsets * value_token_stride
    else:
        key_columns = i // PAIR * key_dim_stride + i % PAIR
        value_rows = offsets // PAIR * value_token_stride + offsets % PAIR
    head_start, value_head_start = head.to(tl.int64) * key_head_stride, head.to(tl.int64) * value_head_stride
    key_tokens = key_blocks * key_block_stride + (head_start + offsets * key_token_stride)[None, :]
    value_tokens = value_blocks * value_block_stride + (value_head_start + value_rows)[:, None]
    value_columns = byte_of(j, VALUE_CODE, VALUE_HALF) * value_dim_stride
    key_places = key + key_tokens + key_columns[:, None]
    value_places = value + value_tokens + value_columns[None, :]
    if KEY_CODE == "float":
        k = tl.load(key_places, mask=key_mask, other=0.0)
    else:
        k = tl.load(key_places, mask=key_mask, other=0)
    if VALUE_CODE == "float":
        v = tl.load(value_places, mask=value_mask, other=0.0)
    else:
        v = tl.load(value_places, mask=value_mask, other=0)

    factor = scale
    of_token = head * BLOCK + offsets
    if KEY_CODE == "e4m3":
        k = e4m3_floats(k)
    elif KEY_CODE == "nvfp4":
        # Scales of 16 dimensions each, [dimensions / 16, TILE], broadcast to their dimensions.
        g = tl.arange(0, KEY_PADDED // 16)
        groups = key_blocks * block_bytes + (of_token * (KEY_HALF // 8))[None, :]
        t = tl.load(key_scale + groups + g[:, None], mask=of_keys & (g < KEY_HALF // 8)[:, None], other=0)
        t = tl.broadcast_to(e4m3_floats(t)[:, None, :], [KEY_PADDED // 16, 16, TILE])
        k = e2m1_floats(nibble_of(k, i[:, None], KEY_CODE, KEY_HALF)) * tl.reshape(t, [KEY_PADDED, TILE])
    elif KEY_CODE != "float":
        if KEY_CODE != "int8":
            zero = tl.load(key_zero + key_blocks * block_bytes + of_token[None, :], mask=of_keys, other=0)
            k = (nibble_of(k, i[:, None], KEY_CODE, KEY_HALF) - zero.to(tl.int32)).to(tl.float32)
        step = tl.load(key_scale + key_blocks * (block_bytes // 2) + of_token[None, :], mask=of_keys, other=0.0)
        factor = scale * step.to(tl.float32)

    if VALUE_CODE == "e4m3":
        v = e4m3_floats(v)
    elif VALUE_CODE == "nvfp4":
        g = tl.arange(0, VALUE_PADDED // 16)
        groups = value_blocks * block_bytes + (of_token * (VALUE_HALF // 8))[:, None]
        t = tl.load(value_scale + groups + g[None, :], mask=of_values & (g < VALUE_HALF // 8)[None, :], other=0)
        t = tl.broadcast_to(e4m3_floats(t)[:, :, None], [TILE, VALUE_PADDED // 16, 16])
        v = e2m1_floats(nibble_of(v, j[None, :], VALUE_CODE, VALUE_HALF)) * tl.reshape(t, [TILE, VALUE_PADDED])
    elif VALUE_CODE != "float":
        if VALUE_CODE != "int8":
            zero = tl.load(value_zero + value_blocks * block_bytes + of_token[:, None], mask=of_values, other=0)
            v = nibble_of(v, j[None, :], VALUE_CODE, VALUE_HALF) - zero.to(tl.int32)
        step = tl.load(value_scale + value_blocks * (block_bytes // 2) + of_token[:, None], mask=of_values, other=0.0)
        v = v.to(tl.float32) * step.to(tl.float32)
    return k, factor, v, tokens


@triton.jit
def scores_of(q, k, factor, softcap, SOFTCAP: tl.constexpr):
    """Compute scores in units of log2, so that exp2 gives the weights. `factor` includes log2(e) unless SOFTCAP."""
    scores = tl.dot(q, k, input_precision="tf32x3") * factor
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), whose limits are right; see `score_factors` for scale and softcap.
        scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)
    return scores


@triton.jit
def soften(scores, v, maximum, total, mixed):
    """Add a tile to a running softmax (Milakov & Gimelshein 2018); returns the new maximum, total and mixed values.

    maximum, total: float32 [rows]; mixed: float32 [rows, VALUE_PADDED]. A row that has seen no token yet has a maximum
    of -inf.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # Avoid NaN from -inf - -inf in a row whose tokens are all hidden.
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    shrunk = tl.exp2(maximum - safe)
    weights = tl.exp2(scores - safe[:, None])
    total = total * shrunk + tl.sum(weights, 1)
    mixed = mixed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
    return new_maximum, total, mixed


@triton.jit
def mix_tiles(
    q, maximum, total, mixed, cache, strides, table, begin, end, low, high, head, positions, scale, softcap,
    MASK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, KEY_CODE: tl.constexpr, KEY_HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUE_CODE: tl.constexpr, VALUE_HALF: tl.constexpr,
    BLOCK: tl.constexpr, PAIR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the tiles from token `begin`, a multiple of TILE, to `end` to a running softmax, as in `soften`.

    Args:
        low, high: tokens outside of low <= token < high are not read.
        positions: int32 [rows], of the queries.
        MASK: "none": every row sees all tokens; "range": those from low to high; "causal": those up to its position,
            within the window if there is one.
    """
    of_keys, of_values = find_blocks(table, begin, low, high, BLOCK, TILE)
    for start in range(begin, end, TILE):
        next_keys, next_values = find_blocks(table, start + TILE, low, high, BLOCK, TILE)
        k, factor, v, tokens = load_tile(
            cache, strides, of_keys, of_values, start, low, high, head, scale,
            KEY_DIM, KEY_PADDED, KEY_CODE, KEY_HALF, VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, BLOCK, PAIR, TILE,
        )  # fmt: skip
        scores = scores_of(q, k.to(q.dtype), factor, softcap, SOFTCAP)
        if MASK == "range":
            scores = tl.where(((tokens >= low) & (tokens < high))[None, :], scores, float("-inf"))
        elif MASK == "causal":
            distance = positions[:, None] - tokens[None, :]
            hidden = distance < 0
            if WINDOW > 0:
                hidden = hidden | (distance >= WINDOW)
            scores = tl.where(hidden, float("-inf"), scores)
        maximum, total, mixed = soften(scores, v.to(q.dtype), maximum, total, mixed)
        of_keys, of_values = next_keys, next_values
    return maximum, total, mixed

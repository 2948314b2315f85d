"""The parts that the attention kernels share: tiles of keys and values, and the running softmax.

Tiles of TILE tokens are looked up token by token in the block table, so that any block size will do:

    tokens      | start .. start + TILE |
    block       table[token // BLOCK]                     int32, one load a token, mostly of the same line
    key         block, head, d // PAIR, token % BLOCK, d % PAIR
    value       block, head, token % BLOCK // PAIR, d, token % BLOCK % PAIR

PAIR is 1 in the layout that a GPU's arena has; with 2 the kernels read the CPU's layout of floats.

Codes (`storage/codec/`) become floats on their way to a product, never in memory:

    code               bytes of a vector                                  in the product          beside it
    "float"            floats, fp8 where the GPU converts it              as they are
    "e4m3"             fp8_e4m3, by shifts                                c
    "int8"             one a dimension                                    c                       scale of a token
    "int4 by fours"    dimensions 8u + b and 8u + 4 + b, b < 4            c - zero                scale of a token
    "int4 halves"      dimensions d and n / 2 + d                         c - zero                scale of a token
    "nvfp4"            dimensions d and n / 2 + d                         c t, t of 16 dimensions

A byte of two dimensions is loaded for each of them, which reads memory once: both loads are of the same cache lines.
What is in the product is exact in bfloat16. The scales of keys multiply scores; values are multiplied in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_floats(bits):
    """float32 of uint8: a half with an exponent that is 8 less."""
    half = ((bits & 0x80).to(tl.uint16) << 8) | ((bits & 0x7F).to(tl.uint16) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def e2m1_floats(nibbles):
    """float32 of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = (nibbles & 7).to(tl.float32)
    size = tl.where(size < 4.0, 0.5 * size, tl.where(size < 6.0, size - 2.0, 2.0 * size - 8.0))
    return tl.where(nibbles >= 8, -size, size)


@triton.jit
def byte_of(columns, CODE: tl.constexpr, HALF: tl.constexpr):
    """The byte that holds each dimension."""
    if CODE == "int4 by fours":
        place = columns // 8 * 4 + columns % 4
    elif HALF > 0:
        place = columns % HALF
    else:
        place = columns
    return place


@triton.jit
def nibble_of(bits, columns, CODE: tl.constexpr, HALF: tl.constexpr):
    """Of the bytes at `byte_of`, each dimension's four bits; `columns` is shaped to go with `bits`."""
    if CODE == "int4 by fours":
        shift = columns // 4 % 2 * 4
    else:
        shift = columns // HALF * 4
    return (bits.to(tl.int32) >> shift) & 15


@triton.jit
def load_tile(
    key,
    value,
    key_scale,
    key_zero,
    value_scale,
    value_zero,
    table,
    start,
    low,
    high,
    head,
    scale,
    key_block_stride,
    key_head_stride,
    key_dim_stride,
    key_token_stride,
    value_block_stride,
    value_head_stride,
    value_token_stride,
    value_dim_stride,
    block_bytes,
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
    TILE: tl.constexpr,
):
    """Keys [KEY_PADDED, TILE], what their scores are multiplied by (a number, or float32 [1, TILE]), values [TILE,
    VALUE_PADDED] and positions [TILE]; zeros outside of low <= token < high.

    What lies in other tokens' places may be NaN, which a weight of zero would not silence.
    """
    tokens = start + tl.arange(0, TILE)
    present = (tokens >= low) & (tokens < high)
    blocks = tl.load(table + tokens // BLOCK, mask=present, other=0).to(tl.int64)
    offsets = tokens % BLOCK
    i = tl.arange(0, KEY_PADDED)
    j = tl.arange(0, VALUE_PADDED)
    key_mask = present[None, :]
    if KEY_DIM != KEY_PADDED:
        key_mask = key_mask & (i < KEY_DIM)[:, None]
    value_mask = present[:, None]
    if VALUE_DIM != VALUE_PADDED:
        value_mask = value_mask & (j < VALUE_DIM)[None, :]
    if PAIR == 1:
        key_columns = byte_of(i, KEY_CODE, KEY_HALF) * key_dim_stride
        value_rows = offsets * value_token_stride
    else:
        key_columns = i // PAIR * key_dim_stride + i % PAIR
        value_rows = offsets // PAIR * value_token_stride + offsets % PAIR
    key_tokens = blocks * key_block_stride + head * key_head_stride + offsets * key_token_stride
    value_tokens = blocks * value_block_stride + head * value_head_stride + value_rows
    value_columns = byte_of(j, VALUE_CODE, VALUE_HALF) * value_dim_stride
    key_places = key + key_tokens[None, :] + key_columns[:, None]
    value_places = value + value_tokens[:, None] + value_columns[None, :]
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
        # Scales of 16 dimensions each: [dimensions / 16, TILE], spread over their dimensions.
        g = tl.arange(0, KEY_PADDED // 16)
        groups = blocks * block_bytes + of_token * (KEY_HALF // 8)
        t = tl.load(
            key_scale + groups[None, :] + g[:, None], mask=present[None, :] & (g < KEY_HALF // 8)[:, None], other=0
        )
        t = tl.broadcast_to(e4m3_floats(t)[:, None, :], [KEY_PADDED // 16, 16, TILE])
        k = e2m1_floats(nibble_of(k, i[:, None], KEY_CODE, KEY_HALF)) * tl.reshape(t, [KEY_PADDED, TILE])
    elif KEY_CODE != "float":
        if KEY_CODE != "int8":
            zero = tl.load(key_zero + blocks * block_bytes + of_token, mask=present, other=0).to(tl.int32)
            k = (nibble_of(k, i[:, None], KEY_CODE, KEY_HALF) - zero[None, :]).to(tl.float32)
        step = tl.load(key_scale + blocks * (block_bytes // 2) + of_token, mask=present, other=0.0)
        factor = scale * step.to(tl.float32)[None, :]

    if VALUE_CODE == "e4m3":
        v = e4m3_floats(v)
    elif VALUE_CODE == "nvfp4":
        g = tl.arange(0, VALUE_PADDED // 16)
        groups = blocks * block_bytes + of_token * (VALUE_HALF // 8)
        t = tl.load(
            value_scale + groups[:, None] + g[None, :], mask=present[:, None] & (g < VALUE_HALF // 8)[None, :], other=0
        )
        t = tl.broadcast_to(e4m3_floats(t)[:, :, None], [TILE, VALUE_PADDED // 16, 16])
        v = e2m1_floats(nibble_of(v, j[None, :], VALUE_CODE, VALUE_HALF)) * tl.reshape(t, [TILE, VALUE_PADDED])
    elif VALUE_CODE != "float":
        if VALUE_CODE != "int8":
            zero = tl.load(value_zero + blocks * block_bytes + of_token, mask=present, other=0).to(tl.int32)
            v = nibble_of(v, j[None, :], VALUE_CODE, VALUE_HALF) - zero[:, None]
        step = tl.load(value_scale + blocks * (block_bytes // 2) + of_token, mask=present, other=0.0)
        v = v.to(tl.float32) * step.to(tl.float32)[:, None]
    return k, factor, v, tokens


@triton.jit
def scores_of(q, k, factor, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log2, so that exp2 makes weights of them. `factor` has log2(e) in it unless SOFTCAP."""
    scores = tl.dot(q, k, input_precision="tf32x3") * factor
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1), whose limits are right; `score_factors` says what is in scale and softcap.
        scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)
    return scores


@triton.jit
def soften(scores, v, maximum, total, mixed):
    """One tile more in a running softmax (Milakov & Gimelshein 2018): the new maximum, total and mixed values.

    maximum, total float32 [rows]; mixed float32 [rows, VALUE_PADDED]. A row that has seen nothing yet has a maximum of
    -inf.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # A row whose tokens are all hidden must not make NaN of -inf - -inf.
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    shrunk = tl.exp2(maximum - safe)
    weights = tl.exp2(scores - safe[:, None])
    total = total * shrunk + tl.sum(weights, 1)
    mixed = mixed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
    return new_maximum, total, mixed

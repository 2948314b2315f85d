"""The parts that the attention kernels share: tiles of keys and values, and the running softmax.

Tiles of TILE tokens are looked up token by token in the block table, so that any block size will do:

    tokens      | start .. start + TILE |
    block       table[token // BLOCK]                     int32, one load a token, mostly of the same line
    key         block, head, d // PAIR, token % BLOCK, d % PAIR
    value       block, head, token % BLOCK // PAIR, d, token % BLOCK % PAIR

Keys of coded layers have LANES tokens side by side: token % BLOCK // LANES, d, token % LANES.
PAIR is 1 in the layout that a GPU's arena has; with 2 the kernels read the CPU's layout.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    key,
    value,
    table,
    start,
    low,
    high,
    head,
    key_block_stride,
    key_head_stride,
    key_dim_stride,
    key_token_stride,
    value_block_stride,
    value_head_stride,
    value_token_stride,
    value_dim_stride,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIR: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keys [KEY_PADDED, TILE], values [TILE, VALUE_PADDED] and positions [TILE]; zeros outside of low <= token < high.

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
        key_columns = i * key_dim_stride
        value_rows = offsets * value_token_stride
    else:
        key_columns = i // PAIR * key_dim_stride + i % PAIR
        value_rows = offsets // PAIR * value_token_stride + offsets % PAIR
    if LANES == 0:
        key_rows = offsets * key_token_stride
    else:
        key_rows = offsets // LANES * key_token_stride + offsets % LANES
    key_tokens = blocks * key_block_stride + head * key_head_stride + key_rows
    value_tokens = blocks * value_block_stride + head * value_head_stride + value_rows
    k = tl.load(key + key_tokens[None, :] + key_columns[:, None], mask=key_mask, other=0.0)
    v = tl.load(value + value_tokens[:, None] + (j * value_dim_stride)[None, :], mask=value_mask, other=0.0)
    return k, v, tokens


@triton.jit
def scores_of(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log2, so that exp2 makes weights of them. `scale` has log2(e) in it unless SOFTCAP."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
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
    mixed = mixed * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_maximum, total, mixed

"""Encodes a step's keys and values into their slots, optionally normalising and rotating them first.

program     TOKENS tokens of one KV head, as in `store.py`; vectors are encoded as in `storage/codec/`
dimensions  for codes of 8 bits 0 .. n; for 4 bits those of the low nibbles, then those of the high ones:

    byte            | 0     | 1         | 2 …
    "int4 by fours" | 0, 4  | 1, 5      |
    others          | 0, n/2| 1, n/2 + 1|

All rounding uses float32 and integers, so that it works on any GPU, and follows the codecs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.attention.triton.launch import MIN_DOT, ReadKV, padded
from octavo.attention.triton.store import NewHeads, rotate_queries, tokens_at_once
from octavo.attention.triton.tiles import e4m3_floats
from octavo.storage.coded_kv import CodedKV, CodedSide


@triton.jit
def _nearest(x):
    """Round to integers, ties to even; |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _ceil_bfloat16(x):
    """Round x >= 0 up to bfloat16; infinities and NaN are unchanged."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0x7F800000, (bits + 0xFFFF) & -65536, bits).to(tl.float32, bitcast=True)


@triton.jit
def _float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Convert float32 within the range of the codes to uint8, rounding to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Subnormal numbers have the same step as the smallest normal one.
    exponent = tl.maximum(size >> 23, 128 - BIAS)
    steps = _nearest(
        size.to(tl.float32, bitcast=True) * ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    )
    rounded = (steps * ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    normal = (rounded >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    code = tl.where(rounded >= (128 - BIAS) << 23, normal, steps.to(tl.int32))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _vectors(
    heads, columns, present, positions, cos, sin, norm, factor,
    DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Load heads at pointers [tokens] as float32 [tokens, columns], normalised and rotated.

    ROTARY is half the number of rotated dimensions. Results are rounded to the model's type after each step, as in
    `store.py`.
    """
    element = heads.dtype.element_ty
    mask = present[:, None] & (columns < DIM)[None, :]
    x = tl.load(heads[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTARY > 0:
        turns = (columns < 2 * ROTARY)[None, :] & mask
        partners = tl.where(columns < ROTARY, columns + ROTARY, columns - ROTARY)
        y = tl.load(heads[:, None] + partners[None, :], mask=turns, other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(norm + columns, mask=columns < DIM, other=0.0).to(tl.float32)[None, :]
            x = (weight * (x * factor).to(element).to(tl.float32)).to(element).to(tl.float32)
            weight = tl.load(norm + partners, mask=columns < 2 * ROTARY, other=0.0).to(tl.float32)[None, :]
            y = (weight * (y * factor).to(element).to(tl.float32)).to(element).to(tl.float32)
        angle = (positions * ROTARY)[:, None] + (columns % ROTARY)[None, :]
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        x = (x * c + y * tl.where(columns < ROTARY, -1.0, 1.0)[None, :] * s).to(element).to(tl.float32)
    return x


@triton.jit
def _encode(
    heads, present, slots, head, positions, cos, sin, norm, eps,
    codes, scales, zeros, of_heads, turn,
    block_stride, head_stride, token_stride, block_bytes,
    DIM: tl.constexpr, PADDED: tl.constexpr, CODE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store one side of a head: vectors at pointers `heads` [tokens] go to `slots`."""
    blocks = slots // BLOCK
    offsets = slots % BLOCK
    places = codes + blocks * block_stride + head * head_stride + offsets * token_stride
    of_token = head * BLOCK + offsets
    i = tl.arange(0, PADDED)
    factor = tl.full([TOKENS, 1], 1.0, tl.float32)
    if NORM:
        plain = _vectors(heads, i, present, positions, cos, sin, norm, factor, DIM, 0, False)
        factor = (1.0 / tl.sqrt(tl.sum(plain * plain, 1) / DIM + eps))[:, None]
    if HALF == 0:
        x = _vectors(heads, i, present, positions, cos, sin, norm, factor, DIM, ROTARY, NORM)
        if CODE == "int8":
            step = _ceil_bfloat16(tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), 127.0), 7.888609052210118e-31))
            rounded = tl.clamp(_nearest(tl.div_rn(x, tl.broadcast_to(step[:, None], x.shape))), -127.0, 127.0)
            bits = tl.where(rounded == rounded, rounded, 0.0).to(tl.int8).to(tl.uint8, bitcast=True)
            tl.store(scales + blocks * (block_bytes // 2) + of_token, step.to(tl.bfloat16), mask=present)
        else:
            x = tl.div_rn(x, tl.broadcast_to(tl.load(of_heads + head), x.shape))
            if CODE == "fp8_e4m3":
                bits = _float8_bits(tl.clamp(tl.where(x == x, x, 448.0), -448.0, 448.0), 3, 7)
            else:
                bits = _float8_bits(tl.clamp(tl.where(x == x, x, 57344.0), -57344.0, 57344.0), 2, 15)
        tl.store(places[:, None] + i[None, :], bits, mask=present[:, None] & (i < DIM)[None, :])
    else:
        c = tl.arange(0, HALF_PADDED)
        if CODE == "int4 by fours":
            below = c // 4 * 8 + c % 4
            above = below + 4
        else:
            below = c
            above = c + HALF
        inside = c < HALF
        if CODE == "nvfp4":
            of_head = tl.load(of_heads + head)
            places_of_scales = scales + blocks * block_bytes + of_token * (HALF // 8)
            x = _vectors(heads, below, present, positions, cos, sin, norm, factor, HALF, ROTARY, NORM)
            low = _nvfp4_codes(x, of_head, places_of_scales, present, 0, HALF, HALF_PADDED, TOKENS)
            x = _vectors(heads, above, present, positions, cos, sin, norm, factor, DIM, ROTARY, NORM)
            high = _nvfp4_codes(x, of_head, places_of_scales, present, HALF // 16, HALF, HALF_PADDED, TOKENS)
        else:
            x = _vectors(heads, i, present, positions, cos, sin, norm, factor, DIM, ROTARY, NORM)
            rows = turn + (i * DIM)[:, None]
            known = (i < DIM)[:, None]
            is_low = inside & (below < DIM)
            is_high = inside & (above < DIM)
            turned = tl.load(rows + below[None, :], mask=known & is_low[None, :], other=0.0)
            first = tl.dot(x, turned, input_precision="tf32x3")
            turned = tl.load(rows + above[None, :], mask=known & is_high[None, :], other=0.0)
            second = tl.dot(x, turned, input_precision="tf32x3")
            least = tl.minimum(tl.minimum(tl.min(first, 1), tl.min(second, 1)), 0.0)
            most = tl.maximum(tl.maximum(tl.max(first, 1), tl.max(second, 1)), 0.0)
            step = _ceil_bfloat16(tl.maximum(tl.div_rn(most - least, 15.0), 7.888609052210118e-31))
            zero = tl.clamp(_nearest(tl.div_rn(-least, step)), 0.0, 15.0)
            zero = tl.where(zero == zero, zero, 0.0)
            low = _int4_codes(first, step, zero, is_low)
            high = _int4_codes(second, step, zero, is_high)
            tl.store(scales + blocks * (block_bytes // 2) + of_token, step.to(tl.bfloat16), mask=present)
            tl.store(zeros + blocks * block_bytes + of_token, zero.to(tl.uint8), mask=present)
        tl.store(
            places[:, None] + c[None, :], (low | (high << 4)).to(tl.uint8), mask=present[:, None] & inside[None, :]
        )


@triton.jit
def _int4_codes(x, step, zero, inside):
    code = tl.clamp(_nearest(tl.div_rn(x, tl.broadcast_to(step[:, None], x.shape))) + zero[:, None], 0.0, 15.0)
    return tl.where((code == code) & inside[None, :], code, 0.0).to(tl.int32)


@triton.jit
def _nvfp4_codes(
    x, of_head, places, present, first,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Return codes, int32 [TOKENS, HALF_PADDED], and store the scales of each 16 dimensions from index `first` on."""
    groups: tl.constexpr = HALF_PADDED // 16
    x = tl.div_rn(x, tl.broadcast_to(of_head, x.shape))
    size = tl.abs(x)
    largest = tl.max(tl.reshape(size, [TOKENS, groups, 16]), 2)
    bits = _float8_bits(tl.minimum(tl.div_rn(largest, 6.0), 448.0), 3, 7)
    g = tl.arange(0, groups)
    tl.store(places[:, None] + (first + g)[None, :], bits, mask=present[:, None] & (g < HALF // 16)[None, :])
    step = tl.reshape(tl.broadcast_to(e4m3_floats(bits)[:, :, None], [TOKENS, groups, 16]), [TOKENS, HALF_PADDED])
    size = tl.where(step > 0.0, tl.div_rn(size, tl.where(step > 0.0, step, 1.0)), 0.0)
    # Compare with the midpoints between two numbers; a tie goes to the even code.
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x < 0.0).to(tl.int32) << 3)


# Sizes that change between steps must not be specialised, because each compilation takes seconds.
@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_encode(
    qkv, slot_mapping, positions, cos, sin, query_norm, key_norm, eps, num_tokens, qkv_stride,
    key, value, key_scales, key_zeros, value_scales, value_zeros, keys_of_heads, values_of_heads, key_turn, value_turn,
    key_block_stride, key_head_stride, key_token_stride,
    value_block_stride, value_head_stride, value_token_stride, block_bytes,
    SHARE: tl.constexpr, SHARE_PADDED: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, CODE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, VALUE_CODE: tl.constexpr, VALUE_HALF: tl.constexpr,
    VALUE_HALF_PADDED: tl.constexpr,
    ROTARY: tl.constexpr, ROTARY_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    rotate_queries(
        qkv, head, first, positions, cos, sin, query_norm, eps, num_tokens, qkv_stride,
        SHARE, SHARE_PADDED, DIM, ROTARY, ROTARY_PADDED, REST, REST_PADDED, TOKENS, NORM,
    )  # fmt: skip
    tokens = first + tl.arange(0, TOKENS)
    present = tokens < num_tokens
    position = tl.load(positions + tokens, mask=present, other=0)
    slots = tl.load(slot_mapping + tokens, mask=present, other=0)
    rows = qkv + tokens * qkv_stride
    _encode(
        rows + (KV_HEADS * SHARE + head) * DIM, present, slots, head, position, cos, sin, key_norm, eps,
        key, key_scales, key_zeros, keys_of_heads, key_turn,
        key_block_stride, key_head_stride, key_token_stride, block_bytes,
        DIM, PADDED, CODE, HALF, HALF_PADDED, BLOCK, ROTARY, NORM, TOKENS,
    )  # fmt: skip
    _encode(
        rows + KV_HEADS * (SHARE + 1) * DIM + head * VALUE_DIM, present, slots, head, position, cos, sin, key_norm, eps,
        value, value_scales, value_zeros, values_of_heads, value_turn,
        value_block_stride, value_head_stride, value_token_stride, block_bytes,
        VALUE_DIM, VALUE_PADDED, VALUE_CODE, VALUE_HALF, VALUE_HALF_PADDED, BLOCK, 0, False, TOKENS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _encode_vectors(
    new, slot_mapping, num_tokens, token_stride, new_head_stride,
    codes, scales, zeros, of_heads, turn, block_stride, head_stride, code_stride, block_bytes,
    DIM: tl.constexpr, PADDED: tl.constexpr, CODE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    present = tokens < num_tokens
    slots = tl.load(slot_mapping + tokens, mask=present, other=0)
    _encode(
        new + tokens * token_stride + head * new_head_stride, present, slots, head, tokens, new, new, new, 0.0,
        codes, scales, zeros, of_heads, turn, block_stride, head_stride, code_stride, block_bytes,
        DIM, PADDED, CODE, HALF, HALF_PADDED, BLOCK, 0, False, TOKENS,
    )  # fmt: skip


def encodes(kv: CodedKV) -> bool:
    """Whether the kernels can encode for a layer that they read; nvfp4 requires heads in multiples of 32."""
    return all(side.codec.format.group is None or side.dim % 32 == 0 for side in (kv.keys, kv.values))


def encode(kv: CodedKV, read: ReadKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim] at int64 `slots` [tokens]."""
    for which, (side, new) in enumerate(((kv.keys, key), (kv.values, value))):
        if new.stride(2) != 1:
            new = new.contiguous()
        num_tokens, kv_heads, dim = new.shape
        tokens = _tokens(num_tokens, read.rotations[which])
        _encode_vectors[(-(-num_tokens // tokens), kv_heads)](
            new,
            slots,
            num_tokens,
            *new.stride()[:2],
            *_destination(side, read, which),
            *_strides(read, which),
            read.block_bytes,
            DIM=dim,
            PADDED=padded(dim, MIN_DOT),
            CODE=_code(side, read, which),
            HALF=read.halves[which],
            HALF_PADDED=padded(read.halves[which] or 1, MIN_DOT),
            BLOCK=read.block_size,
            TOKENS=tokens,
            num_warps=4 if read.rotations[which] is None else 8,
        )


def rotate_and_encode(new: NewHeads, kv: CodedKV, read: ReadKV) -> None:
    """Do the same as `store.rotate_and_store`, but encode keys and values."""
    num_tokens = new.qkv.shape[0]
    tokens = max(_tokens(num_tokens, turn) for turn in read.rotations)
    of_keys, of_values = _destination(kv.keys, read, 0), _destination(kv.values, read, 1)
    _rotate_and_encode[(-(-num_tokens // tokens), read.kv_heads)](
        *new.arguments,
        of_keys[0],
        of_values[0],
        *of_keys[1:3],
        *of_values[1:3],
        of_keys[3],
        of_values[3],
        of_keys[4],
        of_values[4],
        *_strides(read, 0),
        *_strides(read, 1),
        read.block_bytes,
        **new.constants(read.kv_heads, read.key_dim),
        PADDED=padded(read.key_dim, MIN_DOT),
        CODE=_code(kv.keys, read, 0),
        HALF=read.halves[0],
        HALF_PADDED=padded(read.halves[0] or 1, MIN_DOT),
        VALUE_DIM=read.value_dim,
        VALUE_PADDED=padded(read.value_dim, MIN_DOT),
        VALUE_CODE=_code(kv.values, read, 1),
        VALUE_HALF=read.halves[1],
        VALUE_HALF_PADDED=padded(read.halves[1] or 1, MIN_DOT),
        BLOCK=read.block_size,
        TOKENS=tokens,
        num_warps=4 if read.rotations == (None, None) else 8,
    )


def _tokens(num_tokens: int, turn: torch.Tensor | None) -> int:
    """Return the number of tokens per program; with a rotation, at least the rows of a matrix product."""
    return max(tokens_at_once(num_tokens), 1 if turn is None else MIN_DOT)


def _code(side: CodedSide, read: ReadKV, which: int) -> str:
    name = side.codec.format.name
    return name if name.startswith("fp8") else read.codes[which]


def _destination(side: CodedSide, read: ReadKV, which: int) -> tuple[torch.Tensor, ...]:
    """Return codes as bytes, scales, zero points, scales of heads, and the rotation."""
    turn = read.rotations[which]
    return side.codes, *read.fields[2 * which : 2 * which + 2], side.scale, side.scale if turn is None else turn


def _strides(read: ReadKV, which: int) -> tuple[int, ...]:
    """Return the strides of codes in bytes, for blocks, heads and tokens."""
    if which == 0:
        block, head, _, token = read.strides[:4]
        return block, head, token
    return read.strides[4:7]

"""Stores a step's keys and values in their slots, optionally normalising and rotating them first.

qkv row     | query heads | key heads | value heads |      as the fused projection returns it
program     TOKENS tokens of one KV head: its query heads are rotated in place, its key and value go to the slot
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.attention.triton.launch import INTERPRETED, kv_strides, padded
from octavo.storage.arena import FloatKV


@triton.jit
def _put(
    place, head, slots, present, columns, rows,
    block_stride, head_stride, dim_stride, token_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, PAIRS_ARE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Store rows [tokens, columns] at slots; `columns` are dimensions, and those past DIM are skipped."""
    blocks = slots // BLOCK
    offsets = slots % BLOCK
    base = place + blocks * block_stride + head * head_stride
    if PAIRS_ARE_TOKENS:
        base += offsets // PAIR * token_stride + offsets % PAIR
        across = columns * dim_stride
    else:
        base += offsets * token_stride
        across = columns // PAIR * dim_stride + columns % PAIR
    mask = present[:, None] & (columns < DIM)[None, :]
    tl.store(base[:, None] + across[None, :], rows.to(place.dtype.element_ty), mask=mask)


# Sizes that change between steps must not be specialised, because each compilation takes seconds.
@triton.jit(do_not_specialize=["num_tokens"])
def _store(
    new_key, new_value, key, value, slot_mapping, num_tokens,
    new_key_token_stride, new_key_head_stride, new_key_dim_stride,
    new_value_token_stride, new_value_head_stride, new_value_dim_stride,
    key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
    value_block_stride, value_head_stride, value_token_stride, value_dim_stride,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, PAIR: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    present = tokens < num_tokens
    slots = tl.load(slot_mapping + tokens, mask=present, other=0)
    i = tl.arange(0, KEY_PADDED)
    j = tl.arange(0, VALUE_PADDED)
    at = (tokens * new_key_token_stride + head * new_key_head_stride)[:, None] + (i * new_key_dim_stride)[None, :]
    k = tl.load(new_key + at, mask=present[:, None] & (i < KEY_DIM)[None, :], other=0.0)
    _put(
        key, head, slots, present, i, k,
        key_block_stride, key_head_stride, key_dim_stride, key_token_stride, KEY_DIM, BLOCK, PAIR, False,
    )  # fmt: skip
    at = (tokens * new_value_token_stride + head * new_value_head_stride)[:, None]
    at = at + (j * new_value_dim_stride)[None, :]
    v = tl.load(new_value + at, mask=present[:, None] & (j < VALUE_DIM)[None, :], other=0.0)
    _put(
        value, head, slots, present, j, v,
        value_block_stride, value_head_stride, value_dim_stride, value_token_stride, VALUE_DIM, BLOCK, PAIR, True,
    )  # fmt: skip


@triton.jit
def _rotated(
    heads, present, positions, cos, sin, norm, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Load heads at pointers [rows], normalise and rotate them: | first half | second half | rest, not rotated |.

    Results are rounded as in transformers: after the normalisation, after its weight, after the rotation.
    """
    element = heads.dtype.element_ty
    i = tl.arange(0, HALF_PADDED)
    j = tl.arange(0, REST_PADDED)
    in_half = i < HALF
    mask = present[:, None] & in_half[None, :]
    first = tl.load(heads[:, None] + i[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads[:, None] + HALF + i[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = first
    if REST > 0:
        rest_mask = present[:, None] & (j < REST)[None, :]
        rest = tl.load(heads[:, None] + 2 * HALF + j[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        factor = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        weight = tl.load(norm + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
        first = (weight * (first * factor).to(element).to(tl.float32)).to(element).to(tl.float32)
        weight = tl.load(norm + HALF + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
        second = (weight * (second * factor).to(element).to(tl.float32)).to(element).to(tl.float32)
        if REST > 0:
            weight = tl.load(norm + 2 * HALF + j, mask=j < REST, other=0.0).to(tl.float32)[None, :]
            rest = weight * (rest * factor).to(element).to(tl.float32)
    angle = (positions * HALF)[:, None] + i[None, :]
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    return first * c - second * s, second * c + first * s, rest


@triton.jit
def rotate_queries(
    qkv, head, first_token, positions, cos, sin, norm, eps, num_tokens, qkv_stride,
    SHARE: tl.constexpr, SHARE_PADDED: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotate in place the queries of TOKENS tokens and one KV head: TOKENS x SHARE rows."""
    i = tl.arange(0, HALF_PADDED)
    j = tl.arange(0, REST_PADDED)
    rows = tl.arange(0, TOKENS * SHARE_PADDED)
    tokens = first_token + rows // SHARE_PADDED
    present = (tokens < num_tokens) & (rows % SHARE_PADDED < SHARE)
    position = tl.load(positions + tokens, mask=present, other=0)
    heads = qkv + tokens * qkv_stride + (head * SHARE + rows % SHARE_PADDED) * DIM
    first, second, rest = _rotated(
        heads, present, position, cos, sin, norm, eps, DIM, HALF, HALF_PADDED, REST, REST_PADDED, NORM
    )
    element = qkv.dtype.element_ty
    mask = present[:, None] & (i < HALF)[None, :]
    tl.store(heads[:, None] + i[None, :], first.to(element), mask=mask)
    tl.store(heads[:, None] + HALF + i[None, :], second.to(element), mask=mask)
    if NORM and REST > 0:
        tl.store(heads[:, None] + 2 * HALF + j[None, :], rest.to(element), mask=present[:, None] & (j < REST)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_store(
    qkv, slot_mapping, positions, cos, sin, query_norm, key_norm, eps, num_tokens, qkv_stride, key, value,
    key_block_stride, key_head_stride, key_dim_stride, key_token_stride,
    value_block_stride, value_head_stride, value_token_stride, value_dim_stride,
    SHARE: tl.constexpr, SHARE_PADDED: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, ROTARY_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, PAIR: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first_token = tl.program_id(0).to(tl.int64) * TOKENS
    rotate_queries(
        qkv, head, first_token, positions, cos, sin, query_norm, eps, num_tokens, qkv_stride,
        SHARE, SHARE_PADDED, DIM, ROTARY, ROTARY_PADDED, REST, REST_PADDED, TOKENS, NORM,
    )  # fmt: skip
    i = tl.arange(0, ROTARY_PADDED)
    j = tl.arange(0, REST_PADDED)
    element = qkv.dtype.element_ty
    # Key and value.
    tokens = first_token + tl.arange(0, TOKENS)
    present = tokens < num_tokens
    position = tl.load(positions + tokens, mask=present, other=0)
    slots = tl.load(slot_mapping + tokens, mask=present, other=0)
    heads = qkv + tokens * qkv_stride + (KV_HEADS * SHARE + head) * DIM
    first, second, rest = _rotated(
        heads, present, position, cos, sin, key_norm, eps, DIM, ROTARY, ROTARY_PADDED, REST, REST_PADDED, NORM
    )
    _put(
        key, head, slots, present, i, first.to(element),
        key_block_stride, key_head_stride, key_dim_stride, key_token_stride, ROTARY, BLOCK, PAIR, False,
    )  # fmt: skip
    _put(
        key, head, slots, present, ROTARY + i, second.to(element),
        key_block_stride, key_head_stride, key_dim_stride, key_token_stride, 2 * ROTARY, BLOCK, PAIR, False,
    )  # fmt: skip
    if REST > 0:
        _put(
            key, head, slots, present, 2 * ROTARY + j, rest.to(element),
            key_block_stride, key_head_stride, key_dim_stride, key_token_stride, DIM, BLOCK, PAIR, False,
        )  # fmt: skip
    j = tl.arange(0, VALUE_PADDED)
    at = tokens * qkv_stride + KV_HEADS * (SHARE + 1) * DIM + head * VALUE_DIM
    v = tl.load(qkv + at[:, None] + j[None, :], mask=present[:, None] & (j < VALUE_DIM)[None, :], other=0.0)
    _put(
        value, head, slots, present, j, v,
        value_block_stride, value_head_stride, value_dim_stride, value_token_stride, VALUE_DIM, BLOCK, PAIR, True,
    )  # fmt: skip


def tokens_at_once(num_tokens: int) -> int:
    """Return the number of tokens per program, which is small for few tokens so that a decode uses the whole GPU."""
    return padded(min(num_tokens, 64)) if INTERPRETED else 1 if num_tokens <= 256 else 4


def store(kv: FloatKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim] at int64 `slots` [tokens]."""
    num_tokens, kv_heads, key_dim = key.shape
    tokens = tokens_at_once(num_tokens)
    _store[(-(-num_tokens // tokens), kv_heads)](
        key,
        value,
        kv.key,
        kv.value,
        slots,
        num_tokens,
        *key.stride(),
        *value.stride(),
        *kv_strides(kv),
        KEY_DIM=key_dim,
        KEY_PADDED=padded(key_dim),
        VALUE_DIM=value.shape[2],
        VALUE_PADDED=padded(value.shape[2]),
        BLOCK=kv.block_size,
        PAIR=kv.pair,
        TOKENS=tokens,
    )


@dataclass(frozen=True, slots=True)
class NewHeads:
    """A step's heads as the fused projection returns them, and how they are normalised and rotated.

    Attributes:
        qkv: [tokens, …]; queries are normalised and rotated in place.
        slots, positions: int64 [tokens].
        cos, sin: float32 [number of positions, rotary_dim / 2], contiguous.
        query_norm, key_norm: [key_dim], both or neither.
    """

    qkv: torch.Tensor
    num_heads: int
    slots: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    eps: float = 0.0

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The kernels' first arguments: qkv, slots, positions, cos, sin, both norms, eps, tokens, and qkv's stride."""
        qkv = self.qkv
        norms = (qkv if norm is None else norm for norm in (self.query_norm, self.key_norm))
        return qkv, self.slots, self.positions, self.cos, self.sin, *norms, self.eps, qkv.shape[0], qkv.stride(0)

    def constants(self, kv_heads: int, key_dim: int) -> dict[str, Any]:
        """Return the compile-time constants of the kernels. REST is the number of dimensions that are not rotated."""
        share, rotary = self.num_heads // kv_heads, self.cos.shape[1]
        rest = key_dim - 2 * rotary
        return {
            "SHARE": share, "SHARE_PADDED": padded(share), "KV_HEADS": kv_heads, "DIM": key_dim,
            "ROTARY": rotary, "ROTARY_PADDED": padded(rotary), "REST": rest, "REST_PADDED": padded(max(rest, 1)),
            "NORM": self.query_norm is not None,
        }  # fmt: skip


def rotate_and_store(new: NewHeads, kv: FloatKV) -> None:
    """Normalise and rotate queries in place; store keys, treated likewise, and values."""
    kv_heads, key_dim, value_dim = kv.key.shape[1], kv.key.shape[2] * kv.pair, kv.value.shape[3]
    num_tokens = new.qkv.shape[0]
    tokens = tokens_at_once(num_tokens)
    _rotate_and_store[(-(-num_tokens // tokens), kv_heads)](
        *new.arguments,
        kv.key,
        kv.value,
        *kv_strides(kv),
        **new.constants(kv_heads, key_dim),
        VALUE_DIM=value_dim,
        VALUE_PADDED=padded(value_dim),
        BLOCK=kv.block_size,
        PAIR=kv.pair,
        TOKENS=tokens,
    )

"""What all launches share: whether kernels are interpreted, and sizes of tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from octavo.attention.triton.interpreter import let_loops_end_at_tensors
from octavo.storage.arena import FloatKV
from octavo.storage.codec.fp8 import Float8Codec
from octavo.storage.coded_kv import CodedKV
from octavo.storage.layer_kv import LayerKV

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run in Triton's interpreter on a CPU: decided by TRITON_INTERPRET when triton is first imported."""

if INTERPRETED:
    let_loops_end_at_tensors()

LOG2_E = 1.4426950408889634
MIN_DOT = 16  # the least rows and columns of a tensor-core product


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size`, at least `least`: what `tl.arange` takes."""
    return max(least, 1 << (size - 1).bit_length())


def computes_in_float32(dtype: torch.dtype) -> bool:
    """Whether products of this dtype must be upcast: Triton 3.6's interpreter multiplies bfloat16 wrongly."""
    return INTERPRETED and dtype is torch.bfloat16


@dataclass(frozen=True, slots=True)
class ReadKV:
    """A layer's keys and values as the attention kernels read them.

    Attributes:
        strides: of keys (block, head, dimension, token), of values (block, head, token, dimension), in elements.
        lanes: 0, or tokens whose keys lie side by side; the stride of a key's token is then from group to group.
        scales: float32 [kv_heads] each, by which keys and values are multiplied; None: they are what they are.
    """

    key: torch.Tensor
    value: torch.Tensor
    strides: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    pair: int
    lanes: int
    scales: tuple[torch.Tensor, torch.Tensor] | None
    group: int
    sliding_window: int | None


def read_kv(kv: LayerKV) -> ReadKV | None:
    """The layer as kernels read it: floats, and floats of 8 bits; None where they cannot."""
    if isinstance(kv, FloatKV):
        heads, key_dim = kv.key.shape[1], kv.key.shape[2] * kv.pair
        return ReadKV(
            kv.key, kv.value, kv_strides(kv), heads, key_dim, kv.value_dim, kv.block_size, kv.pair, 0, None,
            kv.group, kv.sliding_window,
        )  # fmt: skip
    if not isinstance(kv, CodedKV):
        return None
    keys, values = kv.keys, kv.values
    if not (isinstance(keys.codec, Float8Codec) and isinstance(values.codec, Float8Codec)):
        return None
    if keys.codes.shape[3] != keys.dim or values.codes.shape[3] != values.dim:
        return None  # codes of dimensions that there are not
    of_keys, of_values = keys.codes.stride(), values.codes.stride()
    strides = (of_keys[0], of_keys[1], of_keys[3], of_keys[2], *of_values[:4])
    return ReadKV(
        keys.codes.view(keys.codec.dtype), values.codes.view(values.codec.dtype), strides, keys.codes.shape[1],
        keys.dim, values.dim, kv.block_size, 1, keys.codes.shape[4], (keys.scale, values.scale),
        kv.group, kv.sliding_window,
    )  # fmt: skip


def kv_strides(kv: FloatKV) -> tuple[int, ...]:
    """Strides of keys (block, head, dimension, token) and of values (block, head, token, dimension), in elements."""
    return (*kv.key.stride()[:4], *kv.value.stride()[:4])


def tile_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a tile of keys or values whose heads are padded to `head_dim`: two stages of both fit shared memory."""
    if INTERPRETED:
        return 128  # few, large steps: each costs the interpreter the same
    return 64 if head_dim * dtype.itemsize <= 512 else 32

"""Shared by all launches: whether kernels are interpreted, the kernels' view of layers, and sizes of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from octavo.attention.triton.interpreter import let_loops_end_at_tensors
from octavo.storage.arena import FloatKV
from octavo.storage.codec import Float8Codec, FloatCodec, Int4Codec, VectorCodec
from octavo.storage.codec.hadamard import rotate
from octavo.storage.coded_kv import CodedKV, CodedSide
from octavo.storage.layer_kv import LayerKV

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter on a CPU, set by TRITON_INTERPRET when triton is first imported."""

if INTERPRETED:
    let_loops_end_at_tensors()

LOG2_E = 1.4426950408889634
MIN_DOT = 16  # minimum number of rows and columns of a tensor-core product
_SCRATCH = 4096  # bytes that the warps of a program use to exchange maxima and sums


def padded(size: int, least: int = 1) -> int:
    """Return the next power of two, at least `least`, as `tl.arange` requires."""
    return max(least, 1 << (size - 1).bit_length())


def computes_in_float32(dtype: torch.dtype) -> bool:
    """Whether products of this dtype must be upcast, because Triton 3.6's interpreter multiplies bfloat16 wrongly."""
    return INTERPRETED and dtype is torch.bfloat16


@dataclass(frozen=True, slots=True)
class ReadKV:
    """A layer's keys and values as the attention kernels read them.

    Attributes:
        strides: strides of keys (block, head, dimension, token) and of values (block, head, token, dimension), in
            elements.
        codes: names of the codes of keys and of values, as in `tiles.py`.
        halves: half the number of stored dimensions of keys and of values if two of them share a byte, else 0.
        fields: scales and zero points of the keys, then of the values; an arbitrary tensor if a code has none.
        block_bytes: distance between blocks.
        scales: float32 [kv_heads] each, by which keys and values are multiplied; None if there are none.
        rotations: [dim, dim] for keys and for values; x is stored as x @ rotation, or as it is if None.
    """

    key: torch.Tensor
    value: torch.Tensor
    strides: tuple[int, ...]
    codes: tuple[str, str]
    halves: tuple[int, int]
    fields: tuple[torch.Tensor, ...]
    block_bytes: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    pair: int
    scales: tuple[torch.Tensor, torch.Tensor] | None
    rotations: tuple[torch.Tensor | None, torch.Tensor | None]
    group: int
    sliding_window: int | None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys, values and their fields, as the kernels take them."""
        return (self.key, self.value, *self.fields)

    @property
    def all_strides(self) -> tuple[int, ...]:
        """The strides of `tensors`, as the kernels take them."""
        return (*self.strides, self.block_bytes)

    @property
    def constants(self) -> dict[str, Any]:
        """The layer's compile-time constants of the kernels."""
        return {
            "KEY_DIM": self.key_dim, "KEY_PADDED": padded(self.key_dim, MIN_DOT),
            "KEY_CODE": self.codes[0], "KEY_HALF": self.halves[0],
            "VALUE_DIM": self.value_dim, "VALUE_PADDED": padded(self.value_dim, MIN_DOT),
            "VALUE_CODE": self.codes[1], "VALUE_HALF": self.halves[1],
            "BLOCK": self.block_size, "PAIR": self.pair, "SCALED": self.scales is not None,
        }  # fmt: skip

    @property
    def is_padded(self) -> bool:
        """Whether vectors need padding to a power of two."""
        return self.key_dim != padded(self.key_dim) or self.value_dim != padded(self.value_dim)

    @property
    def is_float(self) -> bool:
        """Whether products use stored values directly, or after one conversion for fp8."""
        return self.codes == ("float", "float")

    @property
    def stages(self) -> int:
        """The number of stages of loops over tiles; with 3, one tile is multiplied while two more are loaded or
        loading.

        Codes are loaded as single bytes, which are held in registers meanwhile, so a third stage would not fit. Nor
        would a third tile of float32 fit in the shared memory of small GPUs.
        """
        return 3 if self.is_float and self.key.dtype is not torch.float32 else 2

    @property
    def most_tile_tokens(self) -> int:
        """The maximum number of tokens in a tile, such that decoded codes fit in the registers."""
        return 16 if any(self.halves) and self.is_padded else 64


def read_kv(kv: LayerKV) -> ReadKV | None:
    """Return the kernels' view of a layer; None if they cannot read it, such as codes in the CPU's layout."""
    if isinstance(kv, FloatKV):
        heads, key_dim = kv.key.shape[1], kv.key.shape[2] * kv.pair
        return ReadKV(
            kv.key, kv.value, kv_strides(kv), ("float", "float"), (0, 0), (kv.key,) * 4, 0, heads, key_dim,
            kv.value_dim, kv.block_size, kv.pair, None, (None, None), kv.group, kv.sliding_window,
        )  # fmt: skip
    if not isinstance(kv, CodedKV) or not kv.by_tokens:
        return None
    keys, values = kv.keys, kv.values
    if isinstance(keys.codec, FloatCodec) or isinstance(values.codec, FloatCodec):
        return None  # floats and codes together, in a table of codecs by layer
    if any(f.shape[-1] == 2 and f.storage_offset() % 2 for f in (*keys.fields, *values.fields)):
        return None
    of_keys, of_values = keys.codes.stride(), values.codes.stride()
    strides = (of_keys[0], of_keys[1], 1, of_keys[2], *of_values[:4])
    codes = _code_name(keys.codec, fours=True), _code_name(values.codec, fours=False)
    return ReadKV(
        _typed(keys.codes, codes[0], keys.codec), _typed(values.codes, codes[1], values.codec), strides, codes,
        (_half(keys), _half(values)), (*_fields(keys), *_fields(values)), of_values[0],
        keys.codes.shape[1], keys.dim, values.dim, kv.block_size, 1,
        (keys.scale, values.scale) if keys.codec.format.calibrated or values.codec.format.calibrated else None,
        (_rotation_of(keys), _rotation_of(values)), kv.group, kv.sliding_window,
    )  # fmt: skip


def _code_name(codec: VectorCodec, *, fours: bool) -> str:
    name = codec.format.name
    if name == "int4":
        return "int4 by fours" if fours else "int4 halves"
    if name == "fp8_e4m3":
        return "float" if converts_e4m3() else "e4m3"
    return "float" if name == "fp8_e5m2" else name


def _typed(codes: torch.Tensor, name: str, codec: VectorCodec) -> torch.Tensor:
    if name == "float":
        assert isinstance(codec, Float8Codec)
        return codes.view(codec.dtype)
    return codes.view(torch.int8) if name == "int8" else codes


def _half(side: CodedSide) -> int:
    return side.codec.format.padded(side.dim) // 2 if side.codec.format.bits == 4 else 0


def _fields(side: CodedSide) -> tuple[torch.Tensor, torch.Tensor]:
    if not side.fields:
        return side.codes, side.codes
    scale = side.fields[0].view(torch.bfloat16) if side.codec.format.fields else side.fields[0]
    return scale, side.fields[-1]


def _rotation_of(side: CodedSide) -> torch.Tensor | None:
    return rotation(side.dim, side.codes.device) if isinstance(side.codec, Int4Codec) else None


@cache
def rotation(dim: int, device: torch.device) -> torch.Tensor:
    """Return float32 [dim, dim], such that x @ rotation is `hadamard.rotate(x)`, x @ rotation.T is `rotate_back(x)`."""
    with torch.inference_mode(False):
        return rotate(torch.eye(dim)).to(device)


def kv_strides(kv: FloatKV) -> tuple[int, ...]:
    """Return strides of keys (block, head, dimension, token), values (block, head, token, dimension), in elements."""
    return (*kv.key.stride()[:4], *kv.value.stride()[:4])


def tile_tokens(
    rows: int, key_dim: int, value_dim: int, dtype: torch.dtype, *, buffers: int = 2, most: int = 64
) -> int:
    """Return the number of tokens in a tile of keys and values, such that queries and all tiles fit in shared memory.

    Args:
        rows: number of query rows.
        key_dim, value_dim: padded dimensions.
        dtype: dtype of the products. Codes take less: tiles of bytes, and one decoded tile.
        buffers: number of tiles in memory at a time.
        most: maximum number of tokens.
    """
    if INTERPRETED:
        return 128  # few large steps, because each step costs the interpreter the same
    tile = min(most, 64 if max(key_dim, value_dim) <= (64 if dtype is torch.float32 else 256) else 32)
    # A product of float32 is computed as three of tf32, for which queries are split in two parts of 32 bits.
    room = _shared_memory(driver.active.get_current_device()) - (_SCRATCH if buffers == 2 else 0)
    queries = rows * key_dim * (2 if dtype is torch.float32 else 1)
    while tile > MIN_DOT and (queries + buffers * tile * (key_dim + value_dim)) * dtype.itemsize > room:
        tile //= 2
    return tile


@cache
def _shared_memory(device: int) -> int:
    """Return the maximum shared memory of a program, in bytes."""
    most: int = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return most


def converts_e4m3() -> bool:
    """Whether the GPU has instructions for fp8_e4m3, as from compute capability 8.9 on."""
    return compute_capability() >= 89


def compute_capability() -> int:
    """Return the compute capability of the current GPU, such as 90 for Hopper, which the interpreter also reports."""
    return 90 if INTERPRETED else int(driver.active.get_current_target().arch)

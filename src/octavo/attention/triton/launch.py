"""What all launches share: whether kernels are interpreted, and sizes of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.runtime.driver import driver

from octavo.attention.triton.interpreter import let_loops_end_at_tensors
from octavo.storage.arena import FloatKV
from octavo.storage.codec import VectorCodec
from octavo.storage.codec.floats import FloatCodec
from octavo.storage.codec.fp8 import Float8Codec
from octavo.storage.codec.hadamard import rotate
from octavo.storage.codec.int4 import Int4Codec
from octavo.storage.coded_kv import CodedKV, CodedSide
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
        codes: what is stored of keys, and of values: `tiles.py` has the names.
        halves: half the dimensions that are stored, where two of them share a byte; else 0.
        fields: scales and zero points of the keys' tokens, then of the values'; any tensor where a code has none.
        block_bytes: from one block to the next.
        scales: float32 [kv_heads] each, by which keys and values are multiplied; None: they are what they are.
        rotations: [dim, dim] for keys and for values: x @ rotation is what is stored of x; None: x itself.
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
    def is_padded(self) -> bool:
        """Whether vectors take more registers than they have dimensions."""
        return self.key_dim != padded(self.key_dim) or self.value_dim != padded(self.value_dim)

    @property
    def has_int4(self) -> bool:
        return any(code.startswith("int4") for code in self.codes)


def read_kv(kv: LayerKV) -> ReadKV | None:
    """The layer as kernels read it; None where they cannot: codes in the CPU's layout, blocks of an odd size."""
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
        return None  # floats beside codes, in a table of codecs by layer
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
    """float32 [dim, dim]: x @ rotation is `hadamard.rotate(x)`, x @ rotation.T is `rotate_back(x)`."""
    with torch.inference_mode(False):
        return rotate(torch.eye(dim)).to(device)


def kv_strides(kv: FloatKV) -> tuple[int, ...]:
    """Strides of keys (block, head, dimension, token) and of values (block, head, token, dimension), in elements."""
    return (*kv.key.stride()[:4], *kv.value.stride()[:4])


def tile_tokens(rows: int, key_dim: int, value_dim: int, dtype: torch.dtype, *, crowded: bool = False) -> int:
    """Tokens of a tile of keys and values, so that queries and two stages of both fit shared memory.

    Args:
        rows: of queries.
        key_dim, value_dim: padded.
        dtype: of the products. What is stored takes less: two stages of a byte, and one of what becomes of them.
        crowded: what becomes of a tile of 64 tokens does not fit the registers.
    """
    if INTERPRETED:
        return 128  # few, large steps: each costs the interpreter the same
    tile = 64 if max(key_dim, value_dim) <= (64 if dtype is torch.float32 else 256) else 32
    if crowded:
        tile = min(tile, 32)
    # A product of float32 is three of tf32, for which queries are cut in two parts of 32 bits.
    room = _shared_memory(driver.active.get_current_device())
    queries = rows * key_dim * (2 if dtype is torch.float32 else 1)
    while tile > MIN_DOT and (queries + 2 * tile * (key_dim + value_dim)) * dtype.itemsize > room:
        tile //= 2
    return tile


@cache
def _shared_memory(device: int) -> int:
    """Bytes that one program may have."""
    most: int = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return most


def converts_e4m3() -> bool:
    """Whether the GPU has instructions for fp8_e4m3: from compute capability 8.9 on."""
    return compute_capability() >= 89


def compute_capability() -> int:
    """Of the current GPU: 90 is Hopper's; of what the interpreter stands for, too."""
    return 90 if INTERPRETED else int(driver.active.get_current_target().arch)

"""The C++ kernels of `csrc/`, typed and documented.

Every function works on CPU tensors in bfloat16 or float32 (arithmetic is float32), releases the GIL, and checks shapes,
dtypes and indices on every call: a bad argument raises ValueError with the numbers, never touches foreign memory.
Rows may be strided, elements of a row may not. What writes into its arguments says so.

The instruction set is chosen when the library is loaded: "avx512_bf16", "avx512", "avx2" or "portable".
`OCTAVO_ISA` in the environment forces a level; one that the CPU lacks is an error.
"""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import torch  # before the library: both then use torch's OpenMP runtime, hence one set of threads

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo import _native

logger = logging.getLogger(__name__)

__all__ = [
    "PackedWeight",
    "add_rms_norm",
    "argmax",
    "attend",
    "available",
    "copy_blocks",
    "force_isa",
    "gelu_tanh_mul",
    "isa",
    "make_decoder",
    "num_threads",
    "rms_norm",
    "rope_write",
    "set_num_threads",
    "silu_mul",
    "supported_isas",
]


@cache
def _load() -> ModuleType | None:
    try:
        library = importlib.import_module("octavo._native")
    except ImportError as error:
        logger.warning(
            "the C++ kernels are not compiled (%s): using the reference path, which is many times slower; "
            "install a C++20 compiler and reinstall octavo",
            error,
        )
        return None
    if level := os.environ.get("OCTAVO_ISA"):
        try:
            library.force_isa(level)
        except ValueError as error:
            raise ConfigError(f"OCTAVO_ISA: {error}") from None
    return library


class _Missing:
    """Stands in for the library where it is not compiled."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"{name}: the C++ kernels are not compiled; ask kernels.available() first")


if not TYPE_CHECKING:
    _native = _load() or _Missing()


def available() -> bool:
    """Whether the library is compiled. Where it is not, a warning was logged once, when this module was imported."""
    return _load() is not None


def isa() -> str:
    """The instruction-set level in use: "avx512_bf16", "avx512", "avx2" or "portable"."""
    return _native.isa()


def supported_isas() -> list[str]:
    """The levels that this CPU has, slowest first."""
    return _native.supported_isas()


def force_isa(name: str) -> None:
    """Use another level from now on, in every thread. ValueError where it is unknown or the CPU lacks it."""
    _native.force_isa(name)


def make_decoder(
    dtype: torch.dtype,
    *,
    hidden: int,
    inner: int,
    vocab: int,
    num_heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    eps: float,
    activation: str,
) -> _native.Decoder:
    """A decoder without layers, to be filled by `models/native_decoder.py`; whole steps in one call."""
    name = str(dtype).removeprefix("torch.")
    return _native.Decoder(name, hidden, inner, vocab, num_heads, kv_heads, key_dim, value_dim, eps, activation)


def num_threads() -> int:
    """Threads that a kernel is spread over, the calling one included; at first the cores this process may use."""
    return _native.num_threads()


def set_num_threads(count: int) -> None:
    """Spread kernels over `count` threads (1 to 1024). Set torch's to the same: the two share one OpenMP team."""
    _native.set_num_threads(count)


def attend(
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of ragged new tokens over paged keys and values (FlashAttention's online softmax).

    Args:
        key: [num_blocks, kv_heads, key_dim // pair, block_size, pair], value: [num_blocks, kv_heads,
            block_size // pair, value_dim, pair]; pair is 2 in bfloat16, 1 in float32 (`storage/arena.py`).
        query: [num_tokens, num_heads, key_dim] in the cache's dtype; `num_heads` a multiple of `kv_heads`.
        block_tables: int32 [num_seqs, max_blocks]; query_start: int32 [num_seqs + 1]; context_lens: int32 [num_seqs].
        sinks: float32 [num_heads].
        out: [num_tokens, num_heads, value_dim] in the query's dtype; made when absent.

    The result of a token has the same bits whatever batch, chunk and number of threads it is computed with.

    Raises:
        ValueError: block_size or value_dim is no multiple of 16, a head over 256 dimensions, mismatched shapes or
            dtypes, a scale that is not positive, or a table that names blocks which do not exist.
    """
    if out is None:
        tokens, heads, key_dim = query.shape
        value_dim = value.shape[3]
        # empty_like is the cheaper by a microsecond
        out = torch.empty_like(query) if key_dim == value_dim else query.new_empty(tokens, heads, value_dim)
    _native.attend(
        key, value, query, out, block_tables, query_start, context_lens, scale, window or 0, softcap or 0.0, sinks
    )
    return out


def rope_write(
    qkv: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate a step's queries in place; rotate its keys and store them, and the values, in their slots.

    With `query_norm` and `key_norm` (QK-norm, Qwen 3), each head is RMS-normalised before it is rotated.

    Args:
        qkv: [num_tokens, num_heads * key_dim + kv_heads * (key_dim + value_dim)], the fused product; its queries are
            overwritten, its keys and values may be.
        key, value: one layer's cache, as in `attend`.
        cos, sin: float32 [max_position, rotary_dim / 2]; dimension i is paired with i + rotary_dim / 2.
        positions, slots: int64 [num_tokens]; a slot is block * block_size + offset.
        query_norm, key_norm: [key_dim] in qkv's dtype.

    Raises:
        ValueError: mismatched shapes or dtypes, a position outside the table, a slot outside the cache.
    """
    _native.rope_write(qkv, key, value, cos, sin, positions, slots, query_norm, key_norm, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over rows [rows, width] (Zhang & Sennrich 2019); `out` may be x.

    Float32 inside; rounded to x's dtype before the weight multiplies, as transformers does.
    """
    if out is None:
        out = torch.empty_like(x)
    _native.rms_norm(x, None, weight, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x += residual, in place; returns `rms_norm` of the sum. All [rows, width]; `out` may be residual."""
    if out is None:
        out = torch.empty_like(x)
    _native.rms_norm(x, residual, weight, out, eps)
    return out


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up [rows, width] of gate_up [rows, 2 * width] = | gate | up |."""
    if out is None:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _native.gated(gate_up, out, False)
    return out


def gelu_tanh_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up, in the tanh form (Hendrycks & Gimpel 2016), shapes as `silu_mul`."""
    if out is None:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _native.gated(gate_up, out, True)
    return out


def argmax(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [rows]: each row's first largest of logits [rows, vocab]; the first NaN where there is one."""
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.int64)
    _native.argmax(logits, out)
    return out


def copy_blocks(arena: torch.Tensor, copies: torch.Tensor) -> None:
    """Copy rows of arena uint8 [num_blocks, block_bytes] in place.

    Args:
        copies: int64 [n, 2] of (source, destination); every source is read before any destination is written.
    """
    _native.copy_blocks(arena, copies)


WeightFormat = Literal["bfloat16", "float32", "coded bfloat16", "Q4_0", "Q4_1", "Q8_0"]
QUANTISED_FORMATS: frozenset[WeightFormat] = frozenset(("Q4_0", "Q4_1", "Q8_0"))
FLOAT_FORMATS: dict[torch.dtype, WeightFormat] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_DECODING_ISAS = ("avx512_bf16", "avx512")
_MOST_ESCAPES = 1 / 256  # SmolLM2 has 1 in 8,500, its worst matrix 1 in 1,100


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [outputs, inputs] in the kernels' order, and its product with any number of rows.

    Quantised formats are GGUF's, byte for byte as large as in the file; activations are then quantised to int8 in
    groups of 32, each of which has a power of two of its row's scale. A row's result has the same bits whatever the
    other rows and the threads.

    Attributes:
        packed: uint8; panels of 32 outputs (drawn in `csrc/gemm.h` and `csrc/coded.h`) or tiles of 16 (`csrc/quant.h`).
    """

    format: WeightFormat
    outputs: int
    inputs: int
    packed: torch.Tensor

    @classmethod
    def empty(cls, format: WeightFormat, outputs: int, inputs: int) -> PackedWeight:
        """A matrix of zeros, to `put` rows into.

        Raises:
            ValueError: another format, or inputs of a quantised one that are no multiple of 32.
        """
        packed = torch.zeros(_native.packed_bytes(format, outputs, inputs), dtype=torch.uint8)
        return cls(format, outputs, inputs, packed)

    @classmethod
    def pack(cls, weight: torch.Tensor) -> PackedWeight:
        """weight: bfloat16 or float32 [outputs, inputs]."""
        if weight.dtype not in FLOAT_FORMATS:
            raise ValueError(f"a weight must be bfloat16 or float32, got {weight.dtype}")
        packed = cls.empty(FLOAT_FORMATS[weight.dtype], *weight.shape)
        packed.put(weight)
        return packed

    @classmethod
    def pack_quantised(cls, format: WeightFormat, blocks: torch.Tensor, inputs: int) -> PackedWeight:
        """blocks: uint8 [outputs, bytes per output], as a GGUF file holds them."""
        packed = cls.empty(format, blocks.shape[0], inputs)
        packed.put(blocks)
        return packed

    def put(self, rows: torch.Tensor, first_output: int = 0, step: int = 1) -> None:
        """Write rows [n, …] as the outputs from `first_output` on: all in a row, or 16 of every `step` * 16.

        A gated product (`linear`) takes its gates at first_output 0 and what they open at 16, both with step 2.

        Raises:
            ValueError: rows of another dtype or width, or more than there are outputs.
        """
        _native.pack_rows(self.format, self.packed, self.outputs, self.inputs, rows, first_output, step)

    def coded(self) -> PackedWeight:
        """The same matrix in twelve bits a weight (`csrc/coded.h`): exact, and its products have the same bits.

        Raises:
            ValueError: the format is not bfloat16.
        """
        if self.format != "bfloat16":
            raise ValueError(f"only a bfloat16 weight is coded, this one is {self.format}")
        return self._encode(*_native.plan_coding(self.packed, self.outputs, self.inputs))

    def compact(self) -> PackedWeight:
        """The matrix `coded` where that pays: few rows wait a quarter less for memory, many lose some 2 % to decoding.

        Not for exponents that are spread too wide, nor where the instruction set decodes slower than memory delivers.
        """
        if self.format != "bfloat16" or isa() not in _DECODING_ISAS:
            return self
        base, num_escapes, nbytes = _native.plan_coding(self.packed, self.outputs, self.inputs)
        pays = num_escapes <= _MOST_ESCAPES * self.outputs * self.inputs
        return self._encode(base, num_escapes, nbytes) if pays else self

    def _encode(self, base: int, num_escapes: int, nbytes: int) -> PackedWeight:
        packed = torch.empty(nbytes, dtype=torch.uint8)
        _native.encode(self.packed, self.outputs, self.inputs, base, num_escapes, packed)
        return PackedWeight("coded bfloat16", self.outputs, self.inputs, packed)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        activation: Literal["silu", "gelu_pytorch_tanh"] | None = None,
    ) -> torch.Tensor:
        """x @ weight.T + bias [rows, outputs], or activation(gate) * up [rows, outputs / 2] of | gate | up |.

        Args:
            x: [rows, inputs] in the weight's dtype; bfloat16 or float32 where the weight is quantised.
            bias: [outputs] in out's dtype; out: bfloat16 or float32, made in x's dtype when absent.
            activation: sums are | 16 gates | 16 ups | 16 gates | … (see `put`); rounded to out's dtype before the
                activation, after it and after the product, as separate steps would.
        """
        if out is None:
            out = x.new_empty(x.shape[0], self.outputs // 2 if activation else self.outputs)
        _native.linear(self.format, self.packed, self.outputs, x, bias, out, activation or "")
        return out

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Outputs `ids` int64 [n] as they were put, dequantised: [n, inputs] in `dtype` (the weight's own if float)."""
        out = torch.empty(len(ids), self.inputs, dtype=dtype)
        _native.unpack_rows(self.format, self.packed, self.outputs, self.inputs, ids, out)
        return out

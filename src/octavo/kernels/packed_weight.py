"""Weight matrices in the order in which the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from octavo.kernels.library import isa, native
from octavo.storage.arena import zero_pages

Activation = Literal["silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2"]
QuantisedFormat = Literal[
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
]
WeightFormat = Literal["bfloat16", "float32", "compressed bfloat16", QuantisedFormat]
QUANTISED_FORMATS: frozenset[WeightFormat] = frozenset(get_args(QuantisedFormat))
FLOAT_FORMATS: dict[torch.dtype, WeightFormat] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_DECODING_ISAS = ("avx512_bf16", "avx512_vnni", "avx512")
_MOST_ESCAPES = 1 / 256  # SmolLM2 has 1 in 8,500, its worst matrix 1 in 1,100


_SLAB_BYTES = 64 << 20
_slab: tuple[torch.Tensor, int] | None = None  # the current slab, and the bytes of it that are taken


def _zeros(nbytes: int, *, kept: bool = True) -> torch.Tensor:
    """uint8 [nbytes] of zeros, a line's multiple apart. `kept` ones share slabs of huge pages: a page is 2 MiB, many a
    matrix smaller. What is soon dropped would hold its slab in memory, and comes from the ordinary heap."""
    global _slab
    if not kept:
        return torch.zeros(nbytes, dtype=torch.uint8)
    if nbytes > _SLAB_BYTES // 4:
        return zero_pages(nbytes, "weights")
    pages, taken = _slab or (None, 0)
    if pages is None or taken + nbytes > _SLAB_BYTES:
        pages, taken = zero_pages(_SLAB_BYTES, "weights"), 0
    _slab = pages, taken + -(-nbytes // 64) * 64
    return pages[taken : taken + nbytes]


def _may_be_compressed(format: WeightFormat) -> bool:
    """Whether `PackedWeight.compact` may compress a weight."""
    return format == "bfloat16" and isa() in _DECODING_ISAS


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [outputs, inputs] in the kernels' order, and its product with any number of rows.

    Quantised formats are GGUF's, as large as in the file (Q3_K, Q4_K, Q5_K and IQ4_XS 3.6, 2.8, 2.3 and 1.5 % larger:
    their factors of six bits take a byte) but for outputs padded to a multiple of 32; activations are then quantised to
    int8 in groups of 32, each with a scale of its own, and a second time where outliers make that coarse. A row's
    result has the same bits whatever the other rows and the threads.

    Attributes:
        packed: uint8; panels of 32 outputs, drawn in `gemm.h`, `compressed.h` and `quant.h` of `csrc/level/`.
    """

    format: WeightFormat
    outputs: int
    inputs: int
    packed: torch.Tensor

    @classmethod
    def empty(cls, format: WeightFormat, outputs: int, inputs: int) -> PackedWeight:
        """A matrix of zeros, to `put` rows into.

        Raises:
            ValueError: another format, or inputs of a quantised one that are not a multiple of its block, 32 or 256.
        """
        packed = _zeros(native.packed_bytes(format, outputs, inputs), kept=not _may_be_compressed(format))
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
        native.pack_rows(self.format, self.packed, self.outputs, self.inputs, rows, first_output, step)

    def compressed(self) -> PackedWeight:
        """The same matrix in twelve bits a weight (`csrc/level/compressed.h`): exact; its products have the same bits.

        Raises:
            ValueError: the format is not bfloat16.
        """
        if self.format != "bfloat16":
            raise ValueError(f"only a bfloat16 weight is compressed, this one is {self.format}")
        return self._compress(*native.plan_compression(self.packed, self.outputs, self.inputs))

    def compact(self) -> PackedWeight:
        """The `compressed` matrix where it is faster: few rows read a quarter less, many lose some 2 % to decoding.
        Otherwise the matrix as it is, in huge pages.

        Not for exponents that are spread too wide, nor where the instruction set decodes slower than memory delivers.
        """
        if not _may_be_compressed(self.format):
            return self  # in huge pages already
        base, num_escapes, nbytes = native.plan_compression(self.packed, self.outputs, self.inputs)
        pays = num_escapes <= _MOST_ESCAPES * self.outputs * self.inputs
        if pays:
            return self._compress(base, num_escapes, nbytes)
        packed = _zeros(self.nbytes)
        native.copy_packed(self.packed, packed)
        return PackedWeight(self.format, self.outputs, self.inputs, packed)

    def _compress(self, base: int, num_escapes: int, nbytes: int) -> PackedWeight:
        packed = _zeros(nbytes)
        native.compress(self.packed, self.outputs, self.inputs, base, num_escapes, packed)
        return PackedWeight("compressed bfloat16", self.outputs, self.inputs, packed)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def linear(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
        exact: bool = True,
    ) -> torch.Tensor:
        """x @ weight.T + bias [rows, outputs], or activation(gate) * up [rows, outputs / 2] of | gate | up |.

        Args:
            x: [rows, inputs] in the weight's dtype; bfloat16 or float32 where the weight is quantised.
            bias: [outputs] in out's dtype; out: bfloat16 or float32, made in x's dtype when absent.
            activation: sums are | 16 gates | 16 ups | 16 gates | … (see `put`); rounded to out's dtype before the
                activation, after it and after the product, as separate steps would.
            exact: a row's result has the same bits whatever the other rows. If not, a quantised weight may be
                multiplied another way where rows are many: sooner, and within rounding.
        """
        if out is None:
            out = x.new_empty(x.shape[0], self.outputs // 2 if activation else self.outputs)
        native.linear(self.format, self.packed, self.outputs, x, bias, out, activation or "", exact)
        return out

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Outputs `ids` int64 [n] as they were put, as float32 or, unless the weight is that, bfloat16."""
        out = torch.empty(len(ids), self.inputs, dtype=dtype)
        native.unpack_rows(self.format, self.packed, self.outputs, self.inputs, ids, out)
        return out

"""Weights packed as they are read, and linear layers over packed weights, for the C++ library."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TypeVar, cast

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GGMLType

from octavo import kernels
from octavo.checkpoint.gguf_requantize import convert, kernel_type
from octavo.checkpoint.model_config import ModelConfig
from octavo.checkpoint.share import Share
from octavo.errors import CorruptModelError
from octavo.kernels import PackedWeight, WeightFormat
from octavo.models.linear import Linear, make_linear
from octavo.models.weight_reader import Split, WeightReader, Weights
from octavo.models.weights import RawTensor

logger = logging.getLogger(__name__)

TILE = 16  # outputs per vector register
_PANEL = 32  # outputs that are packed together
_BYTES_AT_ONCE = 16 << 20  # of a stored matrix that is being packed
# format, packed weight, outputs, inputs, bias
NativePart = tuple[str, torch.Tensor, int, int, torch.Tensor | None]

_L = TypeVar("_L", bound=Linear)


@dataclass(slots=True)
class _Part:
    weight: PackedWeight
    bias: torch.Tensor | None


class SideBySide(Linear):
    """Packed matrices with the same inputs, one for each run of equal formats: | Q4_0 q, k | Q8_0 v |."""

    def __init__(self, parts: list[_Part], columns: list[int] | None = None) -> None:
        """
        Args:
            columns: where the columns of the output begin that each rank computes, and where they end; None if this
                one computes them all, or what it needs alone.
        """
        self.parts = parts
        self.columns = columns
        self.nbytes = sum(part.weight.nbytes + (0 if part.bias is None else part.bias.nbytes) for part in parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out, first = x.new_empty(x.shape[0], sum(part.weight.outputs for part in self.parts)), 0
        for part in self.parts:
            last = first + part.weight.outputs
            part.weight.linear(x, part.bias, out[:, first:last])
            first = last
        return out


class _Interleaved(SideBySide):
    """Gate and up with outputs interleaved by 16, as gated products require; a call returns | gate | up |."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        sums = super().__call__(x)
        return sums.view(x.shape[0], sums.shape[1] // (2 * TILE), 2, TILE).transpose(1, 2).flatten(1)


def native_part(weight: PackedWeight, bias: torch.Tensor | None) -> NativePart:
    """Return a weight as the library takes it."""
    return weight.format, weight.packed, weight.outputs, weight.inputs, bias


def native_parts(linear: Linear, biases: torch.dtype | None = None) -> list[NativePart]:
    """Return the weights of a layer that `PackingReader` made, with the biases in their own dtype or another."""
    parts = cast(SideBySide, linear).parts
    return [
        native_part(each.weight, None if each.bias is None else each.bias.to(biases or each.bias.dtype))
        for each in parts
    ]


def columns_of(linear: Linear) -> list[int] | None:
    """Return where the columns begin that each rank computes, and where they end; None if it is not split."""
    return cast(SideBySide, linear).columns


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of the checkpoint that is read when it is packed.

    Attributes:
        name: of its tensor.
        format: the format to read it in.
        raw: its stored bytes if they are quantised and shall stay so.
    """

    name: str
    format: WeightFormat
    outputs: int
    raw: RawTensor | None
    get: Callable[[], torch.Tensor]

    def of_rows(self, kept: RowRanges) -> _Matrix:
        """Return the matrix of these rows alone."""
        get, raw = self.get, self.raw
        if raw is not None:
            rows = raw.rows[kept[0]] if len(kept) == 1 else np.concatenate([raw.rows[piece] for piece in kept])
            raw = replace(raw, rows=rows)
        outputs = sum(piece.stop - piece.start for piece in kept)
        return replace(self, outputs=outputs, raw=raw, get=lambda: _of_rows(get(), kept))

    def pack_into(self, packed: PackedWeight, *first_outputs: int, step: int = 1) -> None:
        """Read it into `packed`, in one equal part for each of `first_outputs`, see `PackedWeight.put`.

        Stored bytes are packed a piece at a time, and leave memory before the next: an embedding may be most of a file.

        Raises:
            CorruptModelError: its numbers cannot be packed.
        """
        rows = self.outputs // len(first_outputs)
        stored = self.get() if self.raw is None else None
        at_once = rows if self.raw is None else max(1, _BYTES_AT_ONCE // self.raw.rows.shape[1] // _PANEL) * _PANEL
        for part, first_output in enumerate(first_outputs):
            for start in range(0, rows, at_once):
                piece = slice(part * rows + start, part * rows + min(rows, start + at_once))
                try:
                    packed.put(
                        self._quantised(piece) if stored is None else stored[piece], first_output + start * step, step
                    )
                except ValueError as error:
                    among = "" if at_once >= self.outputs else f"among rows {piece.start} to {piece.stop - 1}, "
                    raise CorruptModelError(f"{self.name}: {among}{error}") from error
                if self.raw is not None:
                    self.raw.release()

    def _quantised(self, piece: slice) -> torch.Tensor:
        """Return the bytes of some outputs, [outputs, bytes per output], converted if they are stored otherwise."""
        assert self.raw is not None
        rows = self.raw.rows[piece]
        if self.format != self.raw.type.name:
            rows = convert(rows, self.raw.type, GGMLType[self.format], num_threads=kernels.num_threads())
        return torch.from_numpy(rows)


RowRanges = Sequence[slice]
"""Ranges of a matrix's rows."""


def _of_rows(stored: torch.Tensor, kept: RowRanges) -> torch.Tensor:
    return stored[kept[0]] if len(kept) == 1 else torch.cat([stored[piece] for piece in kept])


class PackingReader(WeightReader):
    """Packs each matrix as it is read, so that loading needs memory for only one more matrix.

    Args:
        share: which outputs of each matrix to read.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype, quantised: bool, share: Share | None = None
    ) -> None:
        super().__init__(config, weights, dtype, torch.device("cpu"), make_linear)
        self._quantised = quantised
        self._share = share or Share(config)
        self._converted: Counter[tuple[str, str]] = Counter()  # stored bytes by stored and loaded type

    def finish(self) -> None:
        """Log which types were converted to others, and how much larger they have become."""
        for (stored, loaded), nbytes in sorted(self._converted.items()):
            if stored not in GGMLType.__members__:
                logger.info("weights in %s are multiplied as %s, %.0f MB", stored, loaded, nbytes / 1e6)
                continue
            sizes = [gguf.GGML_QUANT_SIZES[GGMLType[name]] for name in (stored, loaded)]
            (stored_values, stored_bytes), (loaded_values, loaded_bytes) = sizes
            larger = loaded_bytes / loaded_values / (stored_bytes / stored_values) - 1
            logger.info(
                "%.0f MB of weights in %s are multiplied as %s, which takes %.0f %% more memory",
                nbytes / 1e6,
                stored,
                loaded,
                100 * larger,
            )

    def embedding_and_head(self) -> tuple[torch.Tensor | PackedWeight, Linear]:
        config = self._config
        shape = (config.vocab_size, config.hidden_size)
        name = f"{config.names.hf('embedding')}.weight"
        if config.tie_word_embeddings:
            # One copy serves both, because rows are looked up in the packed head.
            tied = self._pack([name], [shape[0]], shape[1], self._kept([shape[0]], "outputs"))
            return tied.parts[0].weight, self._count(tied)
        head = self.linear([config.names.hf("head")], [shape[0]], shape[1], bias=config.head_bias)
        (kept,) = self._kept([shape[0]], "outputs")
        if self._stored(name, *shape):
            return self._count(self._pack([name], [shape[0]], shape[1], [kept])).parts[0].weight, head
        embedding = self.get(name, *shape)
        embedding = embedding if self._share.count == 1 else _of_rows(embedding, kept).clone()
        self.nbytes += embedding.nbytes
        return embedding, head

    def keep(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        packed = PackedWeight.empty(self._float_format, *weight.shape)
        packed.put(weight.contiguous(), 0)
        return self._count(SideBySide([_Part(packed.compact(), bias)]))

    def linear(
        self, names: list[str], out_features: list[int], in_features: int, *, bias: bool, split: Split = "outputs"
    ) -> Linear:
        kept = self._kept(out_features, split)
        packed = self._pack([f"{name}.weight" for name in names], out_features, in_features, kept)
        if bias:
            biases = self._biases(names, out_features, kept)
            first = 0
            for part in packed.parts:
                part.bias = biases[first : first + part.weight.outputs].clone()
                first += part.weight.outputs
        columns = self._share.begins(out_features[0]) if split == "outputs" and self._share.count > 1 else None
        return self._count(SideBySide(packed.parts, columns))

    def sinks(self, layer: int) -> torch.Tensor | None:
        sinks = super().sinks(layer)
        return sinks if sinks is None or self._share.count == 1 else sinks[self._share.query_heads].clone()

    def _kept(self, out_features: list[int], split: Split) -> list[RowRanges]:
        """Return the rows to read of each of the matrices of one product."""
        if split == "heads" and self._share.count > 1:
            rows = self._share.head_rows
            if len(out_features) == len(rows):
                return [[piece] for piece in rows]
            starts = (0, self._config.num_heads * self._config.head_dim, 0)
            starts = (*starts[:2], starts[1] + self._config.num_kv_heads * self._config.head_dim)
            return [[slice(first + piece.start, first + piece.stop) for first, piece in zip(starts, rows, strict=True)]]
        if split == "outputs":
            return [[self._share.outputs(total)] for total in out_features]
        return [[slice(0, total)] for total in out_features]

    def _biases(self, names: list[str], out_features: list[int], kept: list[RowRanges]) -> torch.Tensor:
        named = zip(names, out_features, kept, strict=True)
        return torch.cat([_of_rows(self.get(f"{name}.bias", total), rows) for name, total, rows in named])

    def fused_gate_up(self, names: list[str], rows: int, hidden: int, *, bias: bool) -> Linear:
        inner = rows * len(names) // 2
        share = self._share.outputs(inner)
        # One matrix of gates, then one of ups; or one that holds both.
        kept: list[RowRanges] = [[share], [share]]
        if len(names) == 1:
            kept = [[share, slice(inner + share.start, inner + share.stop)]]
        named = zip(names, kept, strict=True)
        matrices = [self._matrix(f"{name}.weight", rows, hidden).of_rows(pieces) for name, pieces in named]
        if len({matrix.format for matrix in matrices}) > 1:
            # One product cannot combine different formats.
            quantised = all(matrix.raw is not None for matrix in matrices)
            matrices = [replace(m, format="Q8_0") if quantised else self._floats(m) for m in matrices]
        weight = PackedWeight.empty(matrices[0].format, sum(matrix.outputs for matrix in matrices), hidden)
        firsts = [[0, TILE]] if len(names) == 1 else [[0], [TILE]]
        for matrix, first_outputs in zip(matrices, firsts, strict=True):
            matrix.pack_into(weight, *first_outputs, step=2)
        both = None
        if bias:
            biases = self._biases(names, [rows] * len(names), kept)
            both = biases.view(2, -1, TILE).transpose(0, 1).flatten()
        columns = self._share.begins(inner) if self._share.count > 1 else None
        return self._count(_Interleaved([_Part(weight.compact(), both)], columns))

    def _pack(self, names: list[str], out_features: list[int], in_features: int, kept: list[RowRanges]) -> SideBySide:
        """Pack each run of matrices of one format into one."""
        named = zip(names, out_features, kept, strict=True)
        matrices = [self._matrix(name, total, in_features).of_rows(rows) for name, total, rows in named]
        parts: list[_Part] = []
        for format, run in groupby(matrices, key=attrgetter("format")):
            together = list(run)
            weight, first = PackedWeight.empty(format, sum(matrix.outputs for matrix in together), in_features), 0
            for matrix in together:
                matrix.pack_into(weight, first)
                first += matrix.outputs
            parts.append(_Part(weight.compact(), None))
        return SideBySide(parts)

    def _count(self, linear: _L) -> _L:
        self.nbytes += linear.nbytes
        return linear

    def _matrix(self, name: str, outputs: int, inputs: int) -> _Matrix:
        matrix = _Matrix(name, self._float_format, outputs, None, partial(self.get, name, outputs, inputs))
        if (raw := self._stored(name, outputs, inputs)) is None:
            return matrix
        format = kernel_type(raw.type).name
        if (stored := raw.origin or raw.type.name) != format:
            self._converted[stored, format] += raw.rows.nbytes
        return replace(matrix, format=format, raw=raw)

    def _floats(self, matrix: _Matrix) -> _Matrix:
        return replace(matrix, format=self._float_format, raw=None)

    @property
    def _float_format(self) -> WeightFormat:
        return kernels.FLOAT_FORMATS[self._dtype]

    def _stored(self, name: str, rows: int, inputs: int) -> RawTensor | None:
        """Return a matrix that stays quantised; None if it is stored as floats, or shall be dequantised."""
        raw = self._weights.raw(name) if self._quantised and self._weights.has(name) else None
        if raw is None or inputs % 32:
            return None
        self.check_shape(name, raw.shape, (rows, inputs))
        return raw

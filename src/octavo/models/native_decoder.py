"""The decoder that computes a whole step in one call of the C++ library, with quantised weights used as they are.

Where the step's cache or backend is not the library's, the same packed weights serve the Python decoder's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from octavo import kernels
from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.native import NativeAttention
from octavo.checkpoint.model_config import ModelConfig
from octavo.kernels import PackedWeight, WeightFormat
from octavo.models.base import CausalLM, LaterRows
from octavo.models.decoder import LlamaDecoder, WeightReader, Weights
from octavo.models.linear import Linear, LinearFactory, make_linear
from octavo.models.ops import LayerOps
from octavo.models.weights import RawTensor
from octavo.storage.arena import FloatKV
from octavo.storage.coded_kv import CodedKV
from octavo.storage.layer_kv import LayerKV

if TYPE_CHECKING:
    from octavo import _native

_TILE = 16  # outputs and dimensions to a vector
_MAX_HEAD_DIM = 256
_KEPT_ROWS = 256  # of logits
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def make_decoder(
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantised: bool = False,
    ops: LayerOps | None = None,
) -> CausalLM:
    """The fastest decoder that runs `config` here.

    Args:
        quantised: multiply GGUF's Q4_0, Q4_1 and Q8_0 weights as they are, with activations in int8; float32
            dequantises them all the same.
        ops: row-wise steps that must be taken as they are; the Python decoder takes them.

    Raises:
        CorruptModelError, UnsupportedModelError: see `LlamaDecoder`.
    """
    if ops is None and NativeDecoder.supports(config, dtype, device):
        return NativeDecoder(config, weights, dtype=dtype, quantised=quantised and dtype is torch.bfloat16)
    return LlamaDecoder(config, weights, dtype=dtype, device=device, ops=ops)


class NativeDecoder(LlamaDecoder):
    """A Llama-family model on the CPU whose step is one call.

    A token's logits have the same bits whatever batch, chunk and number of threads they are computed with, unless
    `allow_rounding` was called.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, dtype: torch.dtype, quantised: bool = False) -> None:
        self._quantised = quantised
        super().__init__(config, weights, dtype=dtype)
        self._native = self._assemble()
        self._logits = torch.empty(_KEPT_ROWS, self.vocab_size)  # memory is taken as rows are used
        self._kv: Sequence[LayerKV] | None = None
        self._kv_supported = False

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
        """bfloat16 or float32 on the CPU, widths in whole vectors, heads of at most 256, SiLU or GELU's tanh form."""
        return (
            kernels.available()
            and device.type == "cpu"
            and dtype in kernels.FLOAT_FORMATS
            and config.value_dim % _TILE == 0
            and config.head_dim % _TILE == 0
            and max(config.head_dim, config.value_dim) <= _MAX_HEAD_DIM
            and config.intermediate_size % _TILE == 0
            and config.hidden_act in _ACTIVATIONS
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """See `CausalLM.forward`."""
        if not isinstance(attention, NativeAttention) or not self._bind(kv):
            return super().forward(token_ids, batch, kv, attention, logits_indices)
        return self._compute(token_ids, batch, logits_indices, len(logits_indices))

    def forward_in_part(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
        num_now: int,
        num_logits: int,
    ) -> tuple[torch.Tensor, LaterRows]:
        """See `CausalLM.forward_in_part`."""
        if not isinstance(attention, NativeAttention) or not self._bind(kv):
            return super().forward_in_part(token_ids, batch, kv, attention, logits_indices, num_now, num_logits)
        later = LaterRows(self._later_logits, self._later_hidden)
        return self._compute(token_ids, batch, logits_indices, num_now), later

    def _later_logits(self, first: int, last: int) -> torch.Tensor:
        logits = torch.empty(last - first, self.vocab_size)
        self._native.logits(first, logits)
        return logits

    def _later_hidden(self, first: int, last: int) -> torch.Tensor:
        hidden = torch.empty(last - first, self.config.hidden_size)
        self._native.hidden(first, hidden)
        return hidden

    def _compute(
        self, token_ids: torch.Tensor, batch: AttentionBatch, logits_indices: torch.Tensor, num_now: int
    ) -> torch.Tensor:
        """One step in one call; returns the logits of the first `num_now` rows, and the library keeps all."""
        cos, sin = self._rotary.tables(batch.max_context_len)
        logits = self._logits_rows(num_now)
        self._native.forward(
            token_ids,
            batch.positions,
            batch.query_start,
            batch.context_lens,
            batch.table_rows,
            [(group.block_tables, group.slot_mapping) for group in batch.groups],
            cos,
            sin,
            logits_indices,
            logits,
        )
        return logits

    def allow_rounding(self) -> None:
        """Let a step take the faster of two ways, within rounding, by how many rows come together. With AMX alone:

        products with quantised weights go in tiles from 56 rows on (Q8_0: 64), two to three times faster at hundreds;
        attention over a bf16 cache goes in tiles but for tokens that come alone, as in a decode.
        """
        self._native.set_exact(False)

    def _logits_rows(self, count: int) -> torch.Tensor:
        """float32 [count, vocab_size], in memory kept from call to call where it can be: fresh pages for 64 rows cost
        3 % of their step."""
        return self._logits[:count] if count <= _KEPT_ROWS else torch.empty(count, self.vocab_size)

    def _bind(self, kv: Sequence[LayerKV]) -> bool:
        """Let the library read and write `kv`; False where it cannot."""
        if kv is not self._kv:
            self._kv = kv
            self._kv_supported = all(map(NativeAttention.supports, kv))
            caches = [
                (*sides, layer.group, layer.sliding_window or 0)
                for layer in kv
                if (sides := self._sides(layer)) is not None
            ]
            self._kv_supported = self._kv_supported and len(caches) == len(kv)
            if self._kv_supported:
                self._native.set_caches(caches)
        return self._kv_supported

    def _sides(self, layer: LayerKV) -> tuple[Any, Any] | None:
        """A layer's keys and values as the library takes them; None where they are of another type than the model."""
        if isinstance(layer, CodedKV):
            return layer.keys.for_kernels, layer.values.for_kernels
        same = isinstance(layer, FloatKV) and layer.key.dtype is self.dtype
        return (layer.key, layer.value) if same and isinstance(layer, FloatKV) else None

    def _reader(self, weights: Weights, linear: LinearFactory = make_linear) -> WeightReader:
        return _PackingReader(self.config, weights, self.dtype, self._quantised)

    def _assemble(self) -> _native.Decoder:
        config = self.config
        native = kernels.make_decoder(
            self.dtype,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            num_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            key_dim=config.head_dim,
            value_dim=config.value_dim,
            eps=config.norm_eps,
            activation=config.hidden_act,
        )
        for layer in self._layers:
            norm = layer.qk_norm
            native.add_layer(
                layer.input_norm,
                layer.post_attention_norm,
                norm.query if norm else None,
                norm.key if norm else None,
                *(_parts(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)),
            )
        head = _parts(self._head)
        if isinstance(self._embedding, PackedWeight):
            native.set_ends(None, [_part(self._embedding, None)], self._final_norm, head)
        else:
            native.set_ends(self._embedding, [], self._final_norm, head)
        return native


_L = TypeVar("_L", bound=Linear)


@dataclass(slots=True)
class _Part:
    weight: PackedWeight
    bias: torch.Tensor | None


class _SideBySide(Linear):
    """Packed matrices over the same inputs, one for each run of equal formats: | Q4_0 q, k | Q8_0 v |."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts
        self.nbytes = sum(part.weight.nbytes + (0 if part.bias is None else part.bias.nbytes) for part in parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out, first = x.new_empty(x.shape[0], sum(part.weight.outputs for part in self.parts)), 0
        for part in self.parts:
            last = first + part.weight.outputs
            part.weight.linear(x, part.bias, out[:, first:last])
            first = last
        return out


class _Interleaved(_SideBySide):
    """Gate and up with outputs interleaved by 16, the layout of gated products; a call returns | gate | up |."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        sums = super().__call__(x)
        return sums.view(x.shape[0], sums.shape[1] // (2 * _TILE), 2, _TILE).transpose(1, 2).flatten(1)


def _part(weight: PackedWeight, bias: torch.Tensor | None) -> tuple[str, torch.Tensor, int, int, torch.Tensor | None]:
    return weight.format, weight.packed, weight.outputs, weight.inputs, bias


def _parts(linear: Linear) -> list[tuple[str, torch.Tensor, int, int, torch.Tensor | None]]:
    return [_part(part.weight, part.bias) for part in cast(_SideBySide, linear).parts]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of the checkpoint that is read when it is packed."""

    format: WeightFormat
    float_format: WeightFormat
    outputs: int
    raw: RawTensor | None
    get: Callable[[], torch.Tensor]

    def read(self) -> torch.Tensor:
        return self.get() if self.raw is None else torch.from_numpy(self.raw.rows)

    def dequantised(self) -> _Matrix:
        return replace(self, format=self.float_format, raw=None)


class _PackingReader(WeightReader):
    """Packs each matrix as it is read, so that loading needs one matrix more than running."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, quantised: bool) -> None:
        super().__init__(config, weights, dtype, torch.device("cpu"), make_linear)
        self._quantised = quantised

    def embedding_and_head(self) -> tuple[torch.Tensor | PackedWeight, Linear]:
        config = self._config
        shape = (config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            # One copy does both: rows are looked up in the packed head.
            tied = self._pack(["model.embed_tokens.weight"], [shape[0]], shape[1])
            return tied.parts[0].weight, self._count(tied)
        head = self.linear(["lm_head"], [shape[0]], shape[1], bias=False)
        if not self._stored("model.embed_tokens.weight", *shape):
            return self.tensor("model.embed_tokens.weight", *shape), head
        return self._count(self._pack(["model.embed_tokens.weight"], [shape[0]], shape[1])).parts[0].weight, head

    def linear(self, names: list[str], out_features: list[int], in_features: int, *, bias: bool) -> Linear:
        packed = self._pack([f"{name}.weight" for name in names], out_features, in_features)
        if bias:
            biases = torch.cat([self.get(f"{name}.bias", rows) for name, rows in zip(names, out_features, strict=True)])
            first = 0
            for part in packed.parts:
                part.bias = biases[first : first + part.weight.outputs].clone()
                first += part.weight.outputs
        return self._count(_SideBySide(packed.parts))

    def gate_up(self, names: list[str], inner: int, hidden: int, *, bias: bool) -> Linear:
        matrices = [self._matrix(f"{name}.weight", inner, hidden) for name in names]
        if len({matrix.format for matrix in matrices}) > 1:
            # Sums of different formats do not meet in one product's registers.
            matrices = [matrix.dequantised() for matrix in matrices]
        weight = PackedWeight.empty(matrices[0].format, 2 * inner, hidden)
        for index, matrix in enumerate(matrices):
            weight.put(matrix.read(), _TILE * index, 2)
        both = None
        if bias:
            biases = [self.get(f"{name}.bias", inner).view(-1, _TILE) for name in names]
            both = torch.stack(biases, dim=1).flatten()
        return self._count(_Interleaved([_Part(weight.compact(), both)]))

    def _pack(self, names: list[str], out_features: list[int], in_features: int) -> _SideBySide:
        """Pack each run of matrices of one format into one."""
        matrices = [self._matrix(name, rows, in_features) for name, rows in zip(names, out_features, strict=True)]
        parts: list[_Part] = []
        for format, run in groupby(matrices, key=attrgetter("format")):
            together = list(run)
            weight, first = PackedWeight.empty(format, sum(matrix.outputs for matrix in together), in_features), 0
            for matrix in together:
                weight.put(matrix.read(), first)
                first += matrix.outputs
            parts.append(_Part(weight.compact(), None))
        return _SideBySide(parts)

    def _count(self, linear: _L) -> _L:
        self.nbytes += linear.nbytes
        return linear

    def _matrix(self, name: str, outputs: int, inputs: int) -> _Matrix:
        raw = self._stored(name, outputs, inputs)
        floats = kernels.FLOAT_FORMATS[self._dtype]
        return _Matrix(raw.type.name if raw else floats, floats, outputs, raw, partial(self.get, name, outputs, inputs))

    def _stored(self, name: str, rows: int, inputs: int) -> RawTensor | None:
        """A quantised matrix in a format that the kernels support, or None if it must be dequantised."""
        raw = self._weights.raw(name) if self._quantised and self._weights.has(name) else None
        if raw is None or raw.type.name not in kernels.QUANTISED_FORMATS or inputs % 32:
            return None
        self.check_shape(name, raw.shape, (rows, inputs))
        return raw

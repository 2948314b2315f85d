"""A decoder that runs its program in one call of the C++ library, and uses quantised weights directly.

If the library does not support the step's cache or backend, the Python decoder's forward pass uses the same packed
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from octavo import kernels
from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.attention.native import NativeAttention
from octavo.checkpoint.model_config import NATIVE_ACTIVATIONS, ExpertsConfig, ModelConfig
from octavo.checkpoint.share import Share
from octavo.errors import ConfigError
from octavo.kernels import PackedWeight
from octavo.models.base import CausalLM, LaterRows
from octavo.models.decoder import Decoder
from octavo.models.linear import LinearFactory, make_linear
from octavo.models.ops import LayerOps, NormWeights
from octavo.models.packing import TILE, PackingReader, columns_of, native_part, native_parts
from octavo.models.program import (
    Activate,
    Add,
    Attend,
    KeepRows,
    Mix,
    Multiply,
    MultiplyHeads,
    Norm,
    Register,
    Scale,
    ScaleBySigmoid,
)
from octavo.models.weight_reader import WeightReader, Weights
from octavo.storage.arena import FloatKV
from octavo.storage.layer_kv import LayerKV, SideArguments
from octavo.storage.recent_kv import RecentKV

if TYPE_CHECKING:
    from octavo import _native

_KEPT_ROWS = 256  # rows of logits whose memory is reused


def make_decoder(
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantised: bool = False,
    ops: LayerOps | None = None,
    rank: Rank | None = None,
) -> CausalLM:
    """Return the fastest decoder that runs `config` here.

    Args:
        quantised: whether GGUF's weights stay quantised, with activations in int8 (`checkpoint/gguf_requantize.py`);
            with dtype float32 they are dequantised anyway.
        ops: row-wise operations that must be used, which selects the Python decoder.
        rank: this process, if the model is split among several.

    Raises:
        ConfigError: several ranks cannot run this model.
        CorruptModelError, UnsupportedModelError: see `Decoder`.
    """
    if ops is None and NativeDecoder.supports(config, dtype, device):
        quantised = quantised and dtype is torch.bfloat16
        return NativeDecoder(config, weights, dtype=dtype, quantised=quantised, rank=rank)
    if rank is not None:
        raise ConfigError(
            f"tensor_parallel_size is {rank.share.count}, but only the native decoder can be split among ranks, "
            f"and {config.architecture} in {dtype} does not run on it here"
        )
    return Decoder(config, weights, dtype=dtype, device=device, ops=ops)


class Rank(NamedTuple):
    """One of the processes that a model is split among: its share of the model, and the memory that all exchange."""

    share: Share
    ranks: _native.Ranks


class NativeDecoder(Decoder):
    """A model on the CPU, with one call per step.

    A token's logits are bitwise independent of the batch, the chunks and the number of threads, unless `allow_rounding`
    was called.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        quantised: bool = False,
        rank: Rank | None = None,
    ) -> None:
        self._quantised = quantised
        self._rank = rank
        self.share = Share(config) if rank is None else rank.share
        super().__init__(config, weights, dtype=dtype)
        heads = _length(self.share.kv_heads)
        self.kv_layers = tuple(replace(layer, num_kv_heads=heads) for layer in self.kv_layers)
        self._native = self._assemble()
        self._logits = torch.empty(_KEPT_ROWS, self.vocab_size)  # memory is only taken for rows that are used
        self._kv: Sequence[LayerKV] | None = None
        self._kv_supported = False

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this model is supported: bfloat16 or float32 on a CPU, and a supported shape.

        Widths must be multiples of 16, and heads at most `kernels.MAX_HEAD_DIM`.
        """
        return (
            kernels.available()
            and device.type == "cpu"
            and dtype in kernels.FLOAT_FORMATS
            and config.value_dim % TILE == 0
            and config.head_dim % TILE == 0
            and max(config.head_dim, config.value_dim) <= kernels.MAX_HEAD_DIM
            and all(width % TILE == 0 for width in inner_widths(config))
            and config.hidden_act in NATIVE_ACTIVATIONS
        )

    def forward_in_part(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
        num_now: int,
    ) -> tuple[torch.Tensor, LaterRows]:
        """See `CausalLM.forward_in_part`."""
        if not isinstance(attention, NativeAttention) or not self._bind(kv):
            return super().forward_in_part(token_ids, batch, kv, attention, logits_indices, num_now)
        later = LaterRows(self._later_logits, self._later_hidden)
        return self._compute(token_ids, batch, logits_indices, num_now), later

    def follow(self, kv: Sequence[LayerKV], device: torch.Tensor, host: torch.Tensor) -> None:
        """Compute this rank's share of what rank 0 does, until it stops.

        Args:
            device, host: uint8 [blocks, block_bytes], the memory of the cache `kv` and of swapped blocks.
        """
        if not self._bind(kv):
            raise ConfigError("only the native kernels can be split among ranks, and they do not read this KV cache")
        self._native.follow(device, host)

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
        """Compute a step in one call; returns the logits of the first `num_now` rows; the library keeps all rows."""
        logits, sinks, sparse, measured = self._logits_rows(num_now), batch.sinks, batch.sparse, batch.measured
        kept = [group.context_lens for group in batch.groups]
        tables, rows, sink_rows = self._rotations.of_step(batch)
        self._native.forward(
            token_ids,
            rows,
            batch.query_start,
            batch.context_lens,
            batch.table_rows,
            [(group.block_tables, group.slot_mapping) for group in batch.groups],
            tables,
            logits_indices,
            logits,
            None if sinks is None else sinks.budgets,
            sink_rows,
            1 if sinks is None else sinks.num_tokens,
            None if sparse is None else (sparse.num_read, sparse.num_recent, sparse.completed),
            kept if any(lengths is not None for lengths in kept) else [],
            None if measured is None else (measured.begins, measured.mass),
        )
        return logits

    def allow_rounding(self) -> None:
        """Let steps use faster algorithms whose rounding depends on the number of rows. This has an effect only with
        AMX:

        products with quantised weights use tiles from 32 rows on, two to three times faster at hundreds of rows;
        attention over a bf16 cache uses tiles, except for single tokens, as in a decode.
        """
        self._native.set_exact(False)

    def _logits_rows(self, count: int) -> torch.Tensor:
        """Return float32 [count, vocab_size], in reused memory if possible, because fresh pages for 64 rows take 3 % of
        a step."""
        return self._logits[:count] if count <= _KEPT_ROWS else torch.empty(count, self.vocab_size)

    def _bind(self, kv: Sequence[LayerKV]) -> bool:
        """Pass `kv` to the library; returns False if it does not support it."""
        if kv is not self._kv:
            self._kv = kv
            same_type = all(layer.key.dtype is self.dtype for layer in kv if isinstance(layer, FloatKV))
            self._kv_supported = same_type and all(map(NativeAttention.supports, kv))
            if self._kv_supported:
                self._native.set_caches(
                    [
                        (
                            *layer.for_kernels,
                            layer.group,
                            layer.sliding_window or 0,
                            self._copies(layer),
                            getattr(layer, "bounds", None),
                        )
                        for layer in kv
                    ]
                )
        return self._kv_supported

    @staticmethod
    def _copies(layer: LayerKV) -> tuple[SideArguments, SideArguments, int, int, int] | None:
        if not isinstance(layer, RecentKV):
            return None
        kept = layer.kept
        return *layer.copies.for_kernels, layer.copies.group, kept.sink_blocks, kept.recent_blocks

    def _reader(self, weights: Weights, linear: LinearFactory = make_linear) -> WeightReader:
        return PackingReader(self.config, weights, self.dtype, self._quantised, self.share)

    def _assemble(self) -> _native.Decoder:
        """Write the program into the library."""
        config = self.config
        native = kernels.make_decoder(
            self.dtype,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            num_heads=_length(self.share.query_heads),
            kv_heads=_length(self.share.kv_heads),
            key_dim=config.head_dim,
            value_dim=config.value_dim,
            attention_scale=self._scale,
            attention_softcap=config.attention_softcap or 0.0,
            logits_scale=config.logits_scale,
            logits_softcap=config.logits_softcap or 0.0,
        )
        if self._rank is not None:
            group = config.num_heads // config.num_kv_heads
            native.set_ranks(self._rank.ranks, self.share.begins(config.vocab_size), group)
        rotations = list(self._rotations)
        ungathered = ""  # the register of which this rank has computed its columns
        for instruction in self._program:
            if ungathered and not isinstance(instruction, Activate):
                native.gather(ungathered)
                ungathered = ""
            match instruction:
                case Norm(source, target, None, added):
                    native.norm(source, target, None, added, 0, config.hidden_size)
                case Norm(source, target, NormWeights() as weights, added, first):
                    native.norm(source, target, _norm_arguments(weights), added, first, len(weights.weight))
                case Add(target, source):
                    native.add(target, source)
                case Scale(place, factor):
                    native.scale(place, torch.tensor(factor, dtype=self.dtype).item())
                case Multiply(linear, source, target, gate):
                    columns = columns_of(linear)
                    native.multiply(native_parts(linear), source, target, gate or "", columns)
                    ungathered = target if columns else ""
                case MultiplyHeads(heads, source, target, kept, latent):
                    native.multiply_heads([native_parts(head)[0] for head in heads], source, target, kept, latent)
                case Activate(place, activation, parameters):
                    native.activate(place, activation, parameters)
                case Attend(_, rope, qk_norm, sinks):
                    norms = (qk_norm.query, qk_norm.key) if qk_norm else ()
                    query_norm, key_norm = map(_norm_arguments, norms) if norms else (None, None)
                    first = qk_norm is not None and qk_norm.rotates_first
                    columns = self.share.attended if self._rank else None
                    rotation = -1 if rope is None else rotations.index(rope)
                    native.attend(rotation, query_norm, key_norm, first, sinks, columns)
                    ungathered = Register.ATTENDED if columns else ""
                case ScaleBySigmoid(linear, source, place):
                    native.scale_by_sigmoid(native_parts(linear), source, place)
                case Mix(router, bias, experts, choice, source, target, gate):
                    gate_up, down = ([native_parts(expert[i])[0] for expert in experts] for i in (0, 1))
                    inner, columns = map(columns_of, experts[0])
                    native.mix(
                        native_parts(router), bias, _choice(choice), gate_up, down, source, target, gate, inner, columns
                    )
                    ungathered = target if columns else ""
                case KeepRows(place):
                    native.keep_rows(place)
        head = native_parts(self._head, torch.float32)  # logits are float32, and so are the biases added to them
        if isinstance(self._embedding, PackedWeight):
            native.set_ends(None, [native_part(self._embedding, None)], head)
        else:
            native.set_ends(self._embedding, [], head)
        return native


def inner_widths(config: ModelConfig) -> tuple[int, ...]:
    """Return the widths between the products of an MLP: its own, or those of the experts and of the shared one."""
    if config.experts is None:
        return (config.intermediate_size,)
    return config.experts.intermediate_size, config.experts.shared_intermediate_size


def _length(heads: slice) -> int:
    return int(heads.stop - heads.start)


def _choice(experts: ExpertsConfig) -> tuple[int, bool, bool, bool, float, int, int]:
    sigmoid = experts.scoring == "sigmoid"
    grouped = (experts.groups, experts.active_groups)
    return experts.active, experts.normalised, sigmoid, experts.corrected, experts.scale, *grouped


def _norm_arguments(norm: NormWeights) -> tuple[torch.Tensor, torch.Tensor | None, float, bool]:
    return norm.weight, norm.bias, norm.eps, norm.centred

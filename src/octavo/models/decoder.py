"""A decoder of any family that `checkpoint/families.py` describes, computed with torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn import functional
from tqdm import tqdm

from octavo.attention.base import AttentionBackend, AttentionBatch
from octavo.checkpoint.model_config import ModelConfig
from octavo.errors import UnsupportedModelError
from octavo.kernels import PackedWeight
from octavo.kvcache.spec import LayerKVSpec
from octavo.models.base import CausalLM, LaterRows
from octavo.models.linear import LinearFactory, make_linear
from octavo.models.ops import ACTIVATIONS, GATES, LEARNT_ACTIVATIONS, Heads, LayerOps, NormWeights
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
    make_program,
)
from octavo.models.rotary import RotaryTables, Rotation
from octavo.models.weight_reader import WeightReader, Weights
from octavo.storage.layer_kv import LayerKV

# Seconds of loading before a progress bar is shown; most models are loaded by then.
LOADING_BAR_DELAY = 1.0


class Decoder(CausalLM):
    """A model computed with torch by the program that `models/program.py` writes.

    Projections are fused: q, k and v into one product, gate and up into one.

    Args:
        weights: tensors under Hugging Face's names, such as "model.layers.0.self_attn.q_proj.weight".
        dtype: dtype of weights and activations.
        ops: row-wise operations; by default the fastest that run here.
        linear: factory that determines how weight matrices are stored.

    Raises:
        CorruptModelError: a tensor is missing, or its shape differs from the configuration.
        UnsupportedModelError: the activation function is not implemented.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ops: LayerOps | None = None,
        linear: LinearFactory = make_linear,
    ) -> None:
        if config.hidden_act not in (*ACTIVATIONS, *GATES, *LEARNT_ACTIVATIONS):
            raise UnsupportedModelError(
                f"{config.architecture}: activation {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}"
            )
        self.config = config
        self.architecture = config.architecture
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.dtype = dtype
        self.device = torch.device(device)
        latent = config.latent is not None and self.device.type == "cpu"  # no kernel for GPUs reads them
        self.kv_layers = tuple(
            LayerKVSpec(config.num_kv_heads, config.head_dim, config.value_dim, window, latent=latent)
            for window in config.layer_windows
        )
        if latent:
            self.budget_refusal = "the cache holds latents, with which budgets have not been compared"
        self._ops = ops or _fastest_ops(self.device)
        self._heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim)
        self._scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self._rotations = RotaryTables(config.layer_ropes, self.device, config.max_position_embeddings)
        reader = self._reader(weights, linear)
        self._embedding, self._head = reader.embedding_and_head()
        self._program = tuple(make_program(config, reader, loading_bar(config.num_layers)))
        reader.finish()
        self.weight_bytes = reader.nbytes

    def _reader(self, weights: Weights, linear: LinearFactory) -> WeightReader:
        """Return the reader from which `__init__` takes its matrices."""
        return WeightReader(self.config, weights, self.dtype, self.device, linear)

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
        hidden = self._hidden(token_ids, batch, kv, attention, logits_indices)
        later = LaterRows(
            logits=lambda first, last: self._apply_head(hidden[first:last]),
            hidden=lambda first, last: hidden[first:last].float(),
        )
        return self._apply_head(hidden[:num_now]), later

    def reserve_positions(self, count: int) -> None:
        """Compute the rotary tables for `count` positions now, so that no step up to there reallocates them."""
        self._rotations.reserve(count)

    def _apply_head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden).float()
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        if cap := self.config.logits_softcap:
            logits = (logits / cap).tanh() * cap
        return logits

    def _hidden(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Return the input of the head, [rows, hidden_size]."""
        ops, registers = self._ops, {Register.RESIDUAL: self._embed(token_ids)}
        tables, rows, sink_rows = self._rotations.of_step(batch)
        rotations = {rope: Rotation(*table, rows) for rope, table in zip(self._rotations, tables, strict=True)}
        for instruction in self._program:
            match instruction:
                case Norm(source, target, weights, Register() as added, _):
                    registers[target], registers[source] = ops.add_norm(registers[added], registers[source], weights)
                    registers[target] = registers[target].to(self.dtype)
                case Norm(source, target, weights, None, 0) if _is_of_rows(weights, registers[source]):
                    registers[target] = ops.norm(registers[source], weights).to(self.dtype)
                case Norm(source, _, NormWeights() as weights, None, first):
                    columns = registers[source][:, first : first + len(weights.weight)]
                    columns.copy_(ops.norm(columns, weights))
                case Add(target, source):
                    registers[target] = registers[target] + registers[source]
                case Scale(place, factor):
                    registers[place] = registers[place] * torch.tensor(factor, dtype=self.dtype)
                case Multiply(linear, source, target, None):
                    registers[target] = linear(registers[source])
                    if source is Register.INNER:
                        del registers[source]
                case Multiply(linear, source, target, str() as gate):
                    registers[target] = ops.gate(linear(registers[source]), gate)
                case MultiplyHeads():
                    registers[instruction.target] = _multiply_heads(instruction, registers)
                case Activate(place, activation, parameters):
                    registers[place] = ops.activate(registers[place], activation, parameters)
                case Attend():
                    rotation = rotations[instruction.rope] if instruction.rope else Rotation.none(batch.positions)
                    cache = kv[instruction.layer]
                    sink_query = None
                    if sink_rows is not None and cache.sliding_window is None:
                        turned = Rotation(rotation.cos, rotation.sin, sink_rows) if instruction.rope else rotation
                        qkv, norm = registers[Register.QKV], instruction.qk_norm
                        sink_query = ops.rotate_queries(qkv, self._heads, norm, turned)
                    query = ops.rotate_and_store(
                        registers[Register.QKV], self._heads, instruction.qk_norm, rotation, cache, batch, attention
                    )
                    attended = attention.attend(
                        cache,
                        query,
                        batch,
                        scale=self._scale,
                        softcap=self.config.attention_softcap,
                        sinks=instruction.sinks,
                        sink_query=sink_query,
                    )
                    registers[Register.ATTENDED] = attended.flatten(1)
                    del registers[Register.QKV], query, sink_query, attended  # frees memory that the next products need
                case ScaleBySigmoid(linear, source, place):
                    registers[place] = registers[place] * linear(registers[source]).float().sigmoid().to(self.dtype)
                case Mix():
                    registers[instruction.target] = self._mix(instruction, registers[instruction.source])
                case KeepRows(place):
                    registers[place] = registers[place][logits_indices]
        return registers[Register.HIDDEN]

    def _mix(self, mix: Mix, x: torch.Tensor) -> torch.Tensor:
        """Return each row's experts' outputs, weighted and summed in float32."""
        weights, chosen = self._ops.choose_experts(mix.router(x).float(), mix.bias, mix.choice)
        outputs = x.new_empty(len(x), mix.choice.active, x.shape[1])
        for expert in sorted(set(chosen.flatten().tolist())):
            gate_up, down = mix.experts[expert]
            rows, places = torch.where(chosen == expert)
            outputs[rows, places] = down(self._ops.gate(gate_up(x[rows]), mix.gate))
        return (outputs.float() * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the first residual, see `Register`."""
        dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        if isinstance(self._embedding, PackedWeight):
            return self._embedding.rows(token_ids, dtype)
        return functional.embedding(token_ids, self._embedding).to(dtype)


def _is_of_rows(norm: NormWeights | None, x: torch.Tensor) -> bool:
    """Whether a norm is of all columns of x."""
    return norm is None or len(norm.weight) == x.shape[1]


def _multiply_heads(product: MultiplyHeads, registers: Mapping[Register, torch.Tensor]) -> torch.Tensor:
    parts: list[torch.Tensor] = []
    source = registers[product.source]
    for linear, head in zip(product.heads, source.chunk(len(product.heads), dim=1), strict=True):
        parts += [head[:, : product.kept], linear(head[:, product.kept :].contiguous())]
    if product.latent is not None:
        latent = registers[product.latent]
        parts += [latent, latent[:, product.kept :]]
    return torch.cat(parts, dim=1)


def _fastest_ops(device: torch.device) -> LayerOps:
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from octavo.models.triton_ops import TritonLayerOps

        return TritonLayerOps()
    return LayerOps()


def loading_bar(num_layers: int) -> Iterable[int]:
    """Iterate over 0 .. num_layers, with a progress bar on a terminal's standard error if loading takes a while."""
    bar: Iterable[int] = tqdm(
        range(num_layers),
        desc="Loading weights",
        unit=" layers",
        delay=LOADING_BAR_DELAY,
        disable=None,
        leave=False,
        dynamic_ncols=True,
    )
    return bar

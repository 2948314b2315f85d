"""The layers of a decoder as a program: the one place that says in which order norms, attention and MLP are computed.

`make_program` writes it from a model's description. `models/decoder.py` runs it with torch, and `csrc/decoder.cpp` in
one call; both work on buffers of activations, [tokens, width].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from octavo.checkpoint.model_config import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig
from octavo.models.linear import Linear
from octavo.models.ops import NormWeights, QKNorm
from octavo.models.weight_reader import WeightReader


class Register(StrEnum):
    """A buffer of activations. The program begins with the embeddings in RESIDUAL and ends with the head's input in
    HIDDEN.

    RESIDUAL is in float32 on CPUs, the others in the model's dtype: what rounding takes from RESIDUAL is lost to all
    later layers. Only norms read it.
    """

    RESIDUAL = "residual"
    HIDDEN = "hidden"
    BRANCH = "branch"
    QKV = "qkv"
    ATTENDED = "attended"
    INNER = "inner"


@dataclass(frozen=True, slots=True)
class Norm:
    """target = norm(source), or source itself without weights; source += added before.

    Of some columns only, in place, if `first` is given.
    """

    source: Register
    target: Register
    weights: NormWeights | None
    added: Register | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class Add:
    """target += source."""

    target: Register
    source: Register


@dataclass(frozen=True, slots=True)
class Scale:
    """place *= factor, which is rounded to the dtype of activations."""

    place: Register
    factor: float


@dataclass(frozen=True, slots=True)
class Multiply:
    """target = linear(source), or activation(gates) * ups if `gate` names an activation."""

    linear: Linear
    source: Register
    target: Register
    gate: str | None = None


@dataclass(frozen=True, slots=True)
class MultiplyHeads:
    """target = | of each head of source, its first `kept` columns, then its own linear of the others | latent |.

    `latent` names a register that is appended twice: as a key, and without its first `kept` columns as a value.
    """

    heads: list[Linear]
    source: Register
    target: Register
    kept: int = 0
    latent: Register | None = None


@dataclass(frozen=True, slots=True)
class Activate:
    """place = activation(place), with what it has learnt: | alpha_p, alpha_n, beta | of xIELU."""

    place: Register
    activation: str
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Attend:
    """ATTENDED = attention of the queries in QKV, whose keys and values are stored in the blocks of this layer."""

    layer: int
    rope: RopeConfig | None
    qk_norm: QKNorm | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ScaleBySigmoid:
    """place *= sigmoid(linear(source)), which has one column."""

    linear: Linear
    source: Register
    place: Register


@dataclass(frozen=True, slots=True)
class Mix:
    """target = weighted sum of the experts that each row of source uses, see `ExpertsConfig`.

    `experts` are the products | gate | up | and down of each. INNER is void after it. `bias` float32 [experts] is added
    to the router's scores or, if it is the correction of `ExpertsConfig`, to what only the choice looks at.
    """

    router: Linear
    bias: torch.Tensor | None
    experts: list[tuple[Linear, Linear]]
    choice: ExpertsConfig
    source: Register
    target: Register
    gate: str


@dataclass(frozen=True, slots=True)
class KeepRows:
    """From here on, `place` holds only the rows that become logits, and QKV nothing."""

    place: Register


Instruction = Norm | Add | Scale | Multiply | MultiplyHeads | Activate | Attend | ScaleBySigmoid | Mix | KeepRows


def make_program(config: ModelConfig, reader: WeightReader, layers: Iterable[int]) -> Iterator[Instruction]:
    """Yield the instructions of `layers` and the final norm, reading the weights of each as it is reached."""
    if config.embedding_scale != 1.0:
        yield Scale(Register.RESIDUAL, config.embedding_scale)
    writer = _Writer(config, reader)
    for layer in layers:
        yield from writer.layer(layer)
    yield writer.norm_of_residual("final_norm", None)


class _Writer:
    """Writes layers. What a layer has computed in HIDDEN is added to the residual by the next norm of the residual."""

    def __init__(self, config: ModelConfig, reader: WeightReader) -> None:
        self._config = config
        self._reader = reader
        self._pending: Register | None = None
        self._from_latent: list[Linear] = []  # of the layer whose attention was written last, each head's values

    def layer(self, layer: int) -> Iterator[Instruction]:
        description = self._config.layer
        yield self.norm_of_residual("attention_norm", layer)
        yield from self._attention(layer)
        last = layer + 1 == self._config.num_layers
        if last:
            # All keys and values are stored by now.
            yield KeepRows(Register.RESIDUAL)
            yield KeepRows(Register.ATTENDED)
        if description.parallel:
            if last and description.parallel == "one norm":
                yield KeepRows(Register.HIDDEN)
            yield from self._output(layer, Register.BRANCH)
            if description.parallel == "two norms":
                yield self.norm_of_residual("mlp_norm", layer)
            yield Add(Register.RESIDUAL, Register.BRANCH)
        else:
            yield from self._output(layer, Register.HIDDEN)
            yield self.norm_of_residual("mlp_norm", layer)
        yield from self._mlp(layer)

    def norm_of_residual(self, part: str, layer: int | None) -> Instruction:
        """Return a norm of the residual, to which it first adds what has been computed since the last one."""
        added, self._pending = self._pending, None
        weights = self._reader.norm(part, layer) if layer is None or self._config.layer.norms_before else None
        return Norm(Register.RESIDUAL, Register.HIDDEN, weights, added)

    def _attention(self, layer: int) -> Iterator[Instruction]:
        config, reader = self._config, self._reader
        if config.latent:
            yield from self._latent_attention(config.latent, layer)
            return
        yield Multiply(reader.qkv(layer), Register.HIDDEN, Register.QKV)
        widths = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        qk_norm = None
        if config.layer.qk_norm == "head":
            query, key = (reader.norm(part, layer, config.head_dim) for part in ("q_norm", "k_norm"))
            qk_norm = QKNorm(query, key, config.layer.rotates_first)
        elif config.layer.qk_norm == "projection":
            yield Norm(Register.QKV, Register.QKV, reader.norm("q_norm", layer, widths[0]))
            yield Norm(Register.QKV, Register.QKV, reader.norm("k_norm", layer, widths[1]), first=widths[0])
        yield Attend(layer, config.layer_ropes[layer], qk_norm, reader.sinks(layer))

    def _latent_attention(self, latent: LatentConfig, layer: int) -> Iterator[Instruction]:
        """Attend to latents, with queries that are projected to them."""
        reader, query_source = self._reader, Register.HIDDEN
        if latent.query_rank:
            yield Multiply(reader.latent_query(layer), Register.HIDDEN, Register.BRANCH)
            yield Norm(Register.BRANCH, Register.BRANCH, reader.norm("q_a_norm", layer, latent.query_rank))
            query_source = Register.BRANCH
        yield Multiply(reader.queries(layer), query_source, Register.INNER)
        yield Multiply(reader.latent(layer), Register.HIDDEN, Register.BRANCH)
        norm = reader.norm("kv_a_norm", layer, latent.rank)
        yield Norm(Register.BRANCH, Register.BRANCH, norm, first=latent.rotary_dim)
        to_latent, self._from_latent = reader.latent_heads(layer)
        yield MultiplyHeads(to_latent, Register.INNER, Register.QKV, latent.rotary_dim, Register.BRANCH)
        yield Attend(layer, self._config.layer_ropes[layer], None, None)

    def _output(self, layer: int, target: Register) -> Iterator[Instruction]:
        source = Register.ATTENDED
        if self._config.latent:
            yield MultiplyHeads(self._from_latent, source, Register.INNER)
            source = Register.INNER
        yield Multiply(self._reader.output(layer), source, target)
        yield from self._finish("attention_post_norm", layer, target)

    def _mlp(self, layer: int) -> Iterator[Instruction]:
        config, reader = self._config, self._reader
        if config.experts and config.has_experts(layer):
            yield from self._experts(config.experts, layer)
            yield from self._finish("mlp_post_norm", layer, Register.HIDDEN)
            return
        if config.layer.gated:
            yield Multiply(reader.gate_up(layer), Register.HIDDEN, Register.INNER, config.hidden_act)
        else:
            yield Multiply(reader.up(layer), Register.HIDDEN, Register.INNER)
            yield Activate(Register.INNER, config.hidden_act, reader.activation_parameters(layer))
        yield Multiply(reader.down(layer), Register.INNER, Register.HIDDEN)
        yield from self._finish("mlp_post_norm", layer, Register.HIDDEN)

    def _experts(self, experts: ExpertsConfig, layer: int) -> Iterator[Instruction]:
        activation, reader = self._config.hidden_act, self._reader
        if experts.shared_intermediate_size:
            gate_up, down = reader.shared_expert(layer)
            yield Multiply(gate_up, Register.HIDDEN, Register.INNER, activation)
            yield Multiply(down, Register.INNER, Register.BRANCH)
        if experts.shared_gate:
            yield ScaleBySigmoid(reader.shared_expert_gate(layer), Register.HIDDEN, Register.BRANCH)
        router, mixture = reader.router(layer), reader.experts(layer)
        bias = reader.router_bias(layer)
        yield Mix(router, bias, mixture, experts, Register.HIDDEN, Register.HIDDEN, activation)
        if experts.shared_intermediate_size:
            yield Add(Register.HIDDEN, Register.BRANCH)

    def _finish(self, norm: str, layer: int, place: Register) -> Iterator[Instruction]:
        """Norm and scale what is to be added to the residual."""
        if self._config.layer.norms_after:
            yield Norm(place, place, self._reader.norm(norm, layer))
        if self._config.residual_scale != 1.0:
            yield Scale(place, self._config.residual_scale)
        if place is Register.HIDDEN:
            self._pending = place

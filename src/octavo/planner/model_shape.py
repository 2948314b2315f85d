"""A model's architecture as far as its memory depends on it: keys and values per layer, parameters, activation widths.

Native families are counted exactly, from their ModelConfig; of multimodal ones, the text model is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.checkpoint.config_fields import ConfigFields
from octavo.checkpoint.families import NATIVE_ARCHITECTURES
from octavo.checkpoint.kv_cache_scheme import only_kv_cache_scheme
from octavo.checkpoint.model_config import LatentConfig, ModelConfig
from octavo.checkpoint.share import kv_heads_of, query_heads_of
from octavo.checkpoint.text_models import text_architecture
from octavo.errors import UnsupportedModelError
from octavo.kvcache.formats import kv_dtype
from octavo.kvcache.spec import LayerKVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameter counts, grouped by how tensor parallelism divides them.

    Attributes:
        embedding: the token embedding, vocab_size × hidden_size; divided by rows of the vocabulary.
        head: a separate language-model head, divided likewise; 0 if it is tied to the embedding.
        kv_projections: everything with a row per dimension of a KV head; divided with the heads.
        divided: every other matrix that is divided.
        whole: norms, routers, latent projections, output biases; replicated on each device.
    """

    embedding: int
    head: int
    kv_projections: int
    divided: int
    whole: int

    @property
    def total(self) -> int:
        """The number of parameters; a tied head counts once."""
        return self.embedding + self.head + self.kv_projections + self.divided + self.whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of a mixture of which each token uses some; experts that all tokens share are not among them.

    Attributes:
        parameters: of all experts of all layers; they are among the `divided` ones of the `ParameterCount`.
        num_experts: in a layer.
        num_used: by a token, in a layer.
    """

    parameters: int
    num_experts: int
    num_used: int

    def share_unused(self, num_tokens: float) -> float:
        """Return the expected share of experts that none of so many tokens uses, if each token draws its own evenly."""
        return float((1 - self.num_used / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of one model that memory depends on, or of the part of it that one device holds.

    Attributes:
        config: the whole model.
        num_heads: query heads.
        kv_layers: what the KV cache stores for each layer.
        attention_width: elements per token alive at once during attention: q, k, v, the rotated q and the output.
        mlp_width: elements per token alive at once in the MLP: gate, up and their product, for all experts of a token.
        packed_bytes: size of a GGUF file's weights once loaded on a CPU, where they stay quantised; None for other
            checkpoints.
        experts: those that not all tokens use; None without a mixture of experts.
        published_weights: the checkpoint's own name of its weights' quantisation; None if there is none.
        notes: remarks on anything that a reader might expect to be counted differently.
    """

    name: str
    config: ModelConfig
    num_heads: int
    kv_layers: tuple[LayerKVSpec, ...]
    parameters: ParameterCount
    attention_width: int
    mlp_width: int
    packed_bytes: int | None = None
    experts: RoutedExperts | None = None
    published_weights: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_kv_heads(self) -> int:
        return self.kv_layers[0].num_kv_heads

    @property
    def active_parameters(self) -> float:
        """The number of parameters that one token is multiplied with, the embedding included."""
        unused = 0.0 if self.experts is None else self.experts.parameters * self.experts.share_unused(1)
        return self.parameters.total - unused

    def kv_dtype(self, option: str, dtype: str) -> str:
        """Return the cache's dtype for a `kv_cache_dtype` option; `dtype` is that of activations.

        Raises:
            ConfigError: see `formats.kv_dtype`.
        """
        return kv_dtype(option, self.config.kv_cache_dtype or dtype, len(self.kv_layers))


def model_shape(name: str, config: ModelConfig, raw: Mapping[str, Any] | None = None) -> ModelShape:
    """Return the shape of a model.

    Args:
        raw: its `config.json`; not needed for native families.

    Raises:
        UnsupportedModelError: the calculator has no rules for this family.
        CorruptModelError: `raw` lacks a size, which the message names.
    """
    fields = ConfigFields({**(raw or {}), **((raw or {}).get("text_config") or {})}, name)
    architecture = text_architecture(config.architecture, fields.get("model_type"))
    if architecture not in NATIVE_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name}: the calculator cannot count {architecture}; it knows {', '.join(NATIVE_ARCHITECTURES)}"
        )
    notes = [] if architecture == config.architecture else ["the text model alone, without the vision tower"]
    counter = _Counter(config, fields)
    quantization, published = fields.content.get("quantization_config"), None
    if quantization and not only_kv_cache_scheme(quantization):
        published = str(quantization.get("quant_method"))
    if config.latent is not None:
        notes.append(
            f"latent attention: the cache holds keys of {config.head_dim} dimensions that all {config.num_heads} heads "
            f"share; the last {config.value_dim} of these are also the values, which codecs store apart"
        )
    return ModelShape(
        name=name,
        config=config,
        num_heads=config.num_heads,
        kv_layers=_kv_layers(config),
        parameters=counter.parameters(),
        attention_width=counter.attention_width(),
        mlp_width=_mlp_width(config),
        experts=counter.experts(),
        published_weights=published,
        notes=tuple(notes),
    )


def shape_of_checkpoint(name: str, config: ModelConfig, num_parameters: int) -> ModelShape:
    """Return the shape of a model of any architecture, from the number of parameters in its files.

    All of them are assumed to be matrices that can be divided; the layers' keys and values are taken from `config`.
    """
    kv = config.num_kv_heads * (config.head_dim + config.value_dim)
    embedding = config.vocab_size * config.hidden_size
    return ModelShape(
        name=name,
        config=config,
        num_heads=config.num_heads,
        kv_layers=_kv_layers(config),
        parameters=ParameterCount(
            embedding=embedding, head=0, kv_projections=0, divided=max(0, num_parameters - embedding), whole=0
        ),
        attention_width=config.num_heads * (2 * config.head_dim + config.value_dim) + kv,
        mlp_width=_mlp_width(config),
        experts=_routed_experts(config, config.num_layers),
        notes=(f"{config.architecture}: parameters counted from the files, keys and values from the configuration",),
    )


def layers_of_rank(layers: Sequence[LayerKVSpec], rank: int, count: int) -> tuple[LayerKVSpec, ...]:
    """Return what one of `count` ranks (or devices) stores of each layer; none stores more than the last."""
    heads = [kv_heads_of(layer.num_kv_heads, rank, count) for layer in layers]
    return tuple(replace(layer, num_kv_heads=own.stop - own.start) for layer, own in zip(layers, heads, strict=True))


def even_groups(shape: ModelShape) -> list[int]:
    """Return the numbers of devices that can share a model evenly, as most engines want it."""
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def divide(shape: ModelShape, num_devices: int) -> ModelShape:
    """Return the largest part of a model on one of `num_devices` (Shoeybi et al. 2019, Megatron-LM, section 3).

    Heads are divided as `checkpoint/share.py` draws it, evenly or not.

    Raises:
        UnsupportedModelError: there are more devices than query heads.
    """
    if num_devices == 1:
        return shape
    kv_heads, heads = shape.num_kv_heads, shape.num_heads
    if num_devices > heads:
        raise UnsupportedModelError(f"{shape.name} has {heads} heads, so {num_devices} devices cannot share it")
    kv_layers = layers_of_rank(shape.kv_layers, num_devices - 1, num_devices)
    query = query_heads_of(heads, kv_heads, num_devices - 1, num_devices)
    own_heads = query.stop - query.start
    count, experts = shape.parameters, shape.experts
    return replace(
        shape,
        num_heads=own_heads,
        kv_layers=kv_layers,
        parameters=ParameterCount(
            embedding=-(-count.embedding // num_devices),
            head=-(-count.head // num_devices),
            kv_projections=count.kv_projections * kv_layers[0].num_kv_heads // kv_heads,
            divided=-(-count.divided // num_devices),
            whole=count.whole,
        ),
        attention_width=-(-shape.attention_width * own_heads // heads),
        mlp_width=-(-shape.mlp_width // num_devices),
        experts=experts and replace(experts, parameters=-(-experts.parameters // num_devices)),
    )


class _Counter:
    """Counts one model's parts."""

    def __init__(self, config: ModelConfig, fields: ConfigFields) -> None:
        self._config = config
        self._fields = fields

    def parameters(self) -> ParameterCount:
        config = self._config
        hidden, layers = config.hidden_size, config.num_layers
        embedding = config.vocab_size * hidden
        kv, divided, whole = self._latent_attention(config.latent) if config.latent else self._attention()
        mlp_divided, mlp_whole = self._mlps()
        return ParameterCount(
            embedding=embedding,
            head=0 if config.tie_word_embeddings else embedding + config.vocab_size * int(config.head_bias),
            kv_projections=layers * kv,
            divided=layers * divided + mlp_divided,
            whole=layers * whole + (layers * config.layer.num_norms + 1) * self._norm(hidden) + mlp_whole,
        )

    def attention_width(self) -> int:
        config = self._config
        query = config.num_heads * config.head_dim
        attended = config.num_heads * config.value_dim
        return 2 * query + config.num_kv_heads * (config.head_dim + config.value_dim) + attended

    def experts(self) -> RoutedExperts | None:
        return _routed_experts(self._config, self._num_sparse_layers())

    def _norm(self, width: int) -> int:
        """Return the parameters of a norm."""
        return width * (int(self._config.layer.norm_weights) + int(self._config.layer.norm_bias))

    def _attention(self) -> tuple[int, int, int]:
        """Return one layer's KV projections, other divided parameters, and whole parameters."""
        config, hidden = self._config, self._config.hidden_size
        bias = int(config.qkv_bias)
        kv = config.num_kv_heads * (config.head_dim + config.value_dim) * (hidden + bias)
        query = config.num_heads * config.head_dim * (hidden + bias)
        normalised = {"head": 2, "projection": config.num_heads + config.num_kv_heads, "none": 0}[config.layer.qk_norm]
        whole = self._norm(normalised * config.head_dim) + hidden * int(config.output_bias)
        whole += config.num_heads if config.layer.sinks else 0
        return kv, query + config.attended_width * hidden, whole

    def _latent_attention(self, latent: LatentConfig) -> tuple[int, int, int]:
        """Return the same for latent attention, whose projections are divided by query heads."""
        config, hidden = self._config, self._config.hidden_size
        query_head, width = latent.rotary_dim + latent.plain_dim, latent.rank + latent.rotary_dim
        divided = config.num_heads * query_head * (latent.query_rank or hidden)
        divided += config.num_heads * (latent.plain_dim + latent.value_dim) * latent.rank
        biases = (width + latent.query_rank) * int(config.qkv_bias) + hidden * int(config.output_bias)
        whole = hidden * (width + latent.query_rank) + latent.rank + latent.query_rank + biases
        return 0, divided + config.attended_width * hidden, whole

    def _mlps(self) -> tuple[int, int]:
        """Return the divided and the whole parameters of all layers' MLPs."""
        config, hidden = self._config, self._config.hidden_size
        sparse = self._num_sparse_layers()
        first = config.intermediate_size * (2 if config.layer.gated else 1)  # outputs of the first product
        dense_bias, whole = (first, hidden) if config.mlp_bias else (0, 0)
        divided = (config.num_layers - sparse) * (hidden * (first + config.intermediate_size) + dense_bias)
        whole += 3 * int(config.hidden_act == "xielu")
        whole *= config.num_layers - sparse
        if sparse and (experts := config.experts):
            inner = experts.count * experts.intermediate_size + experts.shared_intermediate_size
            divided += sparse * 3 * hidden * inner
            whole += sparse * hidden * (experts.count + int(experts.shared_gate))
            if experts.bias:
                divided += sparse * experts.count * 2 * experts.intermediate_size
                whole += sparse * experts.count * (hidden + 1)
            whole += sparse * experts.count * int(experts.corrected)
        return divided, whole

    def _num_sparse_layers(self) -> int:
        """Return the number of layers whose MLP is a mixture of experts."""
        step = self._fields.size("decoder_sparse_step", 1)
        dense = self._fields.content.get("mlp_only_layers") or ()
        layers = range(self._config.num_layers)
        return sum(self._config.has_experts(i) and (i + 1) % step == 0 and i not in dense for i in layers)


def _mlp_width(config: ModelConfig) -> int:
    """Return `ModelShape.mlp_width`. The outputs of all experts of a token are alive at once too."""
    if (experts := config.experts) is None:
        return 3 * config.intermediate_size
    inner = experts.active * experts.intermediate_size + experts.shared_intermediate_size
    return max(3 * config.intermediate_size, 3 * inner, inner + experts.active * config.hidden_size)


def _routed_experts(config: ModelConfig, num_layers: int) -> RoutedExperts | None:
    if (experts := config.experts) is None or num_layers == 0:
        return None
    parameters = num_layers * experts.count * 3 * config.hidden_size * experts.intermediate_size
    return RoutedExperts(parameters=parameters, num_experts=experts.count, num_used=experts.active)


def _kv_layers(config: ModelConfig) -> tuple[LayerKVSpec, ...]:
    sizes = config.num_kv_heads, config.head_dim, config.value_dim
    latent = config.latent is not None
    return tuple(LayerKVSpec(*sizes, window, latent=latent) for window in config.layer_windows)

"""Model architectures, independent of any file format and of torch.

The loader fills it from a Hugging Face `config.json` or from GGUF metadata; the decoder, the KV cache and the
calculator read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from octavo.checkpoint.tensor_names import TensorNames
from octavo.errors import UnsupportedModelError

NATIVE_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
NATIVE_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "xielu", "clamped_swiglu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDescription:
    """The layout of a layer: norms, attention and MLP. The defaults are Llama's.

    Attributes:
        norm: "rms" rounds a normalised row before its weights multiply it; "rms_once" after, with float32 weights;
            "layer" is LayerNorm, rounded once.
        norm_offset: added to the weights of a checkpoint's norms, which may be their difference from one.
        norm_weights, norm_bias: whether norms have weights, and whether they have a bias ("layer" only).
        norms_before, norms_after: whether attention and MLP each have a norm of their input, and one of their output
            before it is added to the residual.
        parallel: attention and MLP read the same residual, and both are added to it; if it is "one norm", they share
            the norm of it, if "two norms", each has its own.
        qk_norm: "head": each head of queries and keys is normalised before it rotates; "projection": all heads at once.
        rotates_first: whether a "head" is normalised after it has rotated (Hunyuan).
        sinks: whether each head has a learnt logit that its softmax adds to those of the tokens (gpt-oss).
        gated: the MLP is down(activation(gate) * up); if not, down(activation(up)).
    """

    norm: Literal["rms", "rms_once", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_weights: bool = True
    norm_bias: bool = False
    norms_before: bool = True
    norms_after: bool = False
    parallel: Literal["one norm", "two norms"] | None = None
    qk_norm: Literal["head", "projection", "none"] = "none"
    rotates_first: bool = False
    sinks: bool = False
    gated: bool = True

    @property
    def num_norms(self) -> int:
        """Norms over the hidden size in a layer."""
        return (1 if self.parallel == "one norm" else 2) * (int(self.norms_before) + int(self.norms_after))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts, which layers have instead of their MLP.

    Attributes:
        count: the experts of a layer.
        active: how many of them each token uses: those with the highest router scores.
        intermediate_size: of one expert.
        bias: whether router and experts have biases.
        scoring: what becomes of the router's scores: their "softmax", or each one's "sigmoid".
        corrected: whether the choice, but not the weights, adds a learnt bias to the scores after `scoring`.
        normalised: experts are weighted by their shares of the scores of those used, so that weights add up to one; if
            not, by their scores.
        scale: what the weights are multiplied by.
        groups, active_groups: experts are divided into as many groups, of which each token uses some: those with the
            highest score, or with the highest sum of two if `corrected` (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        shared_intermediate_size: of the expert that every token uses besides; 0: there is none.
        shared_gate: whether the shared expert's output is scaled by the sigmoid of a projection.
        dense_layers: the first layers, which have an MLP nonetheless.
    """

    count: int
    active: int
    intermediate_size: int
    bias: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.count % self.groups or not 1 <= self.active_groups <= self.groups:
            raise UnsupportedModelError(
                f"cannot route a token to {self.active_groups} of {self.groups} groups of {self.count} experts"
            )
        if not 1 <= self.active <= self.count // self.groups * self.active_groups:
            raise UnsupportedModelError(
                f"cannot route a token to {self.active} of {self.count // self.groups * self.active_groups} experts"
            )
        if self.corrected and self.groups > 1 and self.count < 2 * self.groups:
            raise UnsupportedModelError(f"{self.count} experts in {self.groups} groups are fewer than two in each")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Keys and values that are projected from one latent vector per token (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    The cache holds what they are projected from: the latent, and the part of the key that is rotated and that all heads
    share. Both projections are done to queries and outputs instead ("absorbed"), so attention has one KV head:

        key      | rotated: rotary_dim | latent: rank |         head_dim of `ModelConfig`
        value                          | latent: rank |         value_dim of `ModelConfig`

    A cache of floats stores the key alone, of which the value is a part.

    Attributes:
        rank: dimensions of the latent.
        rotary_dim, plain_dim: the parts of a query head that rotate and that do not.
        value_dim: of a head's output, projected from the weighted sum of latents.
        query_rank: dimensions of a latent for queries; 0: they are projected from the hidden state.
        mscale: YaRN's scale of queries and of keys.
    """

    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    query_rank: int = 0
    mscale: float = 1.0

    @property
    def key_dim(self) -> int:
        """The number of dimensions of a key in the cache."""
        return self.rotary_dim + self.rank

    @property
    def expanded_dim(self) -> int:
        """The number of dimensions of a head's key and value, which a cache without latents holds."""
        return self.rotary_dim + self.plain_dim + self.value_dim

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return float((self.rotary_dim + self.plain_dim) ** -0.5 * self.mscale * self.mscale)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling beyond the trained context.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: leading dimensions of each head that are rotated (all of them in the Llama family).
        kind: "default", "linear", "llama3" (Llama 3.1's piecewise scaling), "yarn" (Peng et al. 2023) or
            "longrope".
        beta_fast, beta_slow, truncate: of "yarn": rotations within the original context above which frequencies stay,
            and below which they are divided by `factor`; whether what lies between begins and ends at whole dimensions.
        attention_factor: what cosines and sines are multiplied by.
        frequency_factors: per-frequency divisors, of "longrope" (LongRoPE, Ding et al. 2024) and as Llama 3 GGUF files
            carry them (`rope_freqs`); overrides `kind`.
    """

    theta: float = 10000.0
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in NATIVE_ROPE_KINDS:
            raise UnsupportedModelError(f"RoPE scaling {self.kind!r} is not supported ({', '.join(NATIVE_ROPE_KINDS)})")


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """Return what cosines and sines are multiplied by in a context `factor` times as long (Ding et al. 2024)."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position)) if factor > 1 else 1.0


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return what cosines and sines are multiplied by in a context `factor` times as long (Peng et al. 2023, 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only architecture.

    Attributes:
        architecture: the Hugging Face class name, such as "LlamaForCausalLM".
        num_heads, num_kv_heads: query heads and key/value heads (GQA: num_kv_heads < num_heads; MQA: 1).
        head_dim: dimensions of a query and key head; value_dim those of a value head.
        layer_windows: for each layer the sliding window in tokens (a query sees itself and window - 1 tokens
            before it), or None for full attention.
        layer_ropes: for each layer its rotary embedding, or None for none; `rope` in every layer if not given.
        attention_scale: what scores are multiplied by; head_dim ** -0.5 if None.
        attention_softcap, logits_softcap: x -> cap * tanh(x / cap) of scores and of logits; None: none.
        embedding_scale, residual_scale, logits_scale: factors of embeddings, of what attention and MLP add to the
            residual, and of logits.
        experts: the mixture of experts that layers have instead of an MLP; None: they have an MLP.
        latent: how keys and values are projected from the latent that the cache holds; None: the cache holds them.
            Where it is set, it decides `num_kv_heads`, `head_dim`, `value_dim` and `attention_scale`.
        rotary_interleaved: the checkpoint's rows of q and k are ordered for interleaved rotation.
        qkv_by_head: the checkpoint's rows of a fused projection are ordered by KV head, | q q k v | q q k v | ...
        dtype: the checkpoint's own floating type: "float32", "float16" or "bfloat16".
        eos_token_ids: every id that ends a generation (from `generation_config.json` too, where there is one).
        kv_cache_dtype: the codec of keys and values that the checkpoint asks for (`kv_cache_scheme`); None: none.
        transformers_reason: why the native decoder cannot run it and transformers must; None: it runs natively.
            Where it is set, `rope` is not filled and `layer_windows` only as far as the configuration spells it out.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tie_word_embeddings: bool = False
    layer: LayerDescription = field(default_factory=LayerDescription)
    names: TensorNames = field(default_factory=TensorNames)
    layer_windows: tuple[int | None, ...] = ()
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    rotary_interleaved: bool = False
    qkv_by_head: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    kv_cache_dtype: str | None = None
    transformers_reason: str | None = None

    def __post_init__(self) -> None:
        if (latent := self.latent) is not None:
            object.__setattr__(self, "num_kv_heads", 1)
            object.__setattr__(self, "head_dim", latent.key_dim)
            object.__setattr__(self, "value_dim", latent.rank)
            object.__setattr__(self, "attention_scale", latent.attention_scale)
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if not self.layer_ropes:
            object.__setattr__(self, "layer_ropes", (self.rope,) * self.num_layers)
        if {len(self.layer_windows), len(self.layer_ropes)} != {self.num_layers}:
            raise UnsupportedModelError(
                f"{self.architecture}: {len(self.layer_windows)} layer types for {self.num_layers} layers"
            )
        if self.num_kv_heads <= 0 or self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.architecture}: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts instead of an MLP."""
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def attended_width(self) -> int:
        """The number of inputs of the projection to the residual: the outputs of all heads."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.value_dim)

    @property
    def runs_natively(self) -> bool:
        """Whether the native decoder runs it; if not, `transformers_reason` says why."""
        return self.transformers_reason is None

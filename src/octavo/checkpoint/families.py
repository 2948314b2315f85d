"""The families that the native decoder runs: a row each.

A row says how the layers are built, what the checkpoints call their tensors, and how to read the configuration.
Everything that runs a model reads the resulting `ModelConfig` and knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from octavo.checkpoint.model_config import LayerDescription
from octavo.checkpoint.tensor_names import TensorNames


class Scalar(NamedTuple):
    """A number of a family's own: its keys in `config.json` and in GGUF's metadata, the power to which it is raised,
    and the number where `config.json` has no such key."""

    hf_key: str
    gguf_key: str = ""
    power: float = 1.0
    default: float | None = None


class Experts(NamedTuple):
    """A family's mixture of experts.

    Attributes:
        width: the key of an expert's intermediate size in `config.json`.
        default_*: what a configuration means that does not mention a size.
        normalised: see `ExpertsConfig`; None if `norm_topk_prob` decides it, and in GGUF files `gguf_normalised`.
        bias: whether router and experts have biases.
        shared_width: the key of the shared expert's intermediate size, if there is one; it has a gate.
        scoring, corrected: see `ExpertsConfig`.
        deepseek: whether the configuration states groups, a factor of the weights, shared experts of the same width
            without a gate, and dense layers, under DeepSeek's keys.
    """

    width: str
    default_count: int
    default_active: int
    normalised: bool | None = True
    gguf_normalised: bool = True
    bias: bool = False
    shared_width: str = ""
    default_width: int | None = None
    default_shared_width: int | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    deepseek: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeArchitecture:
    """An architecture that the native decoder runs.

    Attributes:
        model_type, gguf_name: what `config.json` and GGUF's `general.architecture` call it.
        biased: the projections that carry a bias whatever the configuration says ("qkv", "mlp" or none).
        bias_option: the projections of attention to which `attention_bias` or `use_bias` gives one.
        mlp_bias_option: the key that gives the MLP's projections one; None: they have none.
        rotary_interleaved: the files whose rows of q and k are ordered for interleaved rotation: "gguf", "both" kinds,
            or "none".
        qkv_by_head: see `ModelConfig`; of Hugging Face's files.
        windowed: "always" (every layer, by `sliding_window`), "by_layer" (Qwen's rules), "never", or a number n: all
            but every n-th layer, unless the configuration has `layer_types`.
        unrotated: layers without rotary embedding: "listed" (`no_rope_layers`, or every fourth) or "full_attention".
        partial_rotary: the part of a head that rotates if `partial_rotary_factor` says nothing else; None: all of it,
            and the factor is not one of this family's.
        latent: whether keys and values are projected from a latent, see `LatentConfig`.
        experts: the mixture of experts in each layer, if there is one.
        activation: of the MLP, whatever the configuration says; see `NATIVE_ACTIVATIONS`.
        yarn_truncates: see `RopeConfig.truncate`; of GGUF files, which do not say it.
        scalars: fields of `ModelConfig` that the configuration sets by numbers of the family's own.
        local_rope_theta: base of the frequencies in windowed layers, if they have their own.
        scales_embedding: whether embeddings are multiplied by the root of their width.
        head_dim_scaled_layers: in GGUF files, the number of layers of the one model whose attention is scaled by
            hidden_size / num_heads instead of head_dim.
        defaults: what `config.json` means where it does not mention a key, if not what Llama's means.
    """

    model_type: str
    gguf_name: str
    layer: LayerDescription = field(default_factory=LayerDescription)
    names: TensorNames = field(default_factory=TensorNames)
    biased: Literal["qkv", "mlp", "none"] = "none"
    bias_option: Literal["qkv", "all", "none"] = "none"
    mlp_bias_option: str | None = None
    rotary_interleaved: Literal["gguf", "both", "none"] = "none"
    qkv_by_head: bool = False
    windowed: Literal["always", "by_layer", "never"] | int = "never"
    unrotated: Literal["listed", "full_attention", "none"] = "none"
    partial_rotary: float | None = None
    latent: bool = False
    experts: Experts | None = None
    activation: str | None = None
    yarn_truncates: bool = True
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    local_rope_theta: float | None = None
    scales_embedding: bool = False
    head_dim_scaled_layers: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


# Mixtures of experts that call their parts as Mixtral does.
_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.*.w1",
    "expert_up": "block_sparse_moe.experts.*.w3",
    "expert_down": "block_sparse_moe.experts.*.w2",
}
_GRANITE_MOE_NAMES = {
    "router": "block_sparse_moe.router.layer",
    "expert_gate": "block_sparse_moe.input_linear[*,:half]",
    "expert_up": "block_sparse_moe.input_linear[*,half:]",
    "expert_down": "block_sparse_moe.output_linear[*]",
}
_DEEPSEEK_NAMES = {f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_GRANITE_SCALARS = {
    "attention_scale": Scalar("attention_multiplier", "attention.scale", default=1.0),
    "embedding_scale": Scalar("embedding_multiplier", "embedding_scale"),
    "residual_scale": Scalar("residual_multiplier", "residual_scale"),
    "logits_scale": Scalar("logits_scaling", "logit_scale", power=-1.0),
}
_GEMMA_NAMES = TensorNames({"mlp_norm": "pre_feedforward_layernorm"})
_LATENT_NAMES = TensorNames(_DEEPSEEK_NAMES, fused=frozenset(("kv_b",)))
_SIGMOID_EXPERTS = Experts(
    "moe_intermediate_size", 256, 8, None, default_width=2048, scoring="sigmoid", corrected=True, deepseek=True
)
_DEEPSEEK_V3 = NativeArchitecture(
    model_type="deepseek_v3",
    gguf_name="deepseek2",
    names=_LATENT_NAMES,
    bias_option="all",
    rotary_interleaved="both",
    latent=True,
    experts=_SIGMOID_EXPERTS,
    defaults={"bos_token_id": 0, "eos_token_id": 1},
)

NATIVE_ARCHITECTURES: Mapping[str, NativeArchitecture] = {
    "LlamaForCausalLM": NativeArchitecture(
        model_type="llama",
        gguf_name="llama",
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="gguf",
        defaults={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "MistralForCausalLM": NativeArchitecture(
        model_type="mistral",
        gguf_name="llama",
        rotary_interleaved="gguf",
        windowed="always",
        defaults={"num_attention_heads": 32, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "Qwen2ForCausalLM": NativeArchitecture(
        model_type="qwen2", gguf_name="qwen2", biased="qkv", windowed="by_layer", defaults={"num_key_value_heads": 32}
    ),
    "Qwen3ForCausalLM": NativeArchitecture(
        model_type="qwen3",
        gguf_name="qwen3",
        layer=LayerDescription(qk_norm="head"),
        bias_option="all",
        windowed="by_layer",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    "Gemma2ForCausalLM": NativeArchitecture(
        model_type="gemma2",
        gguf_name="gemma2",
        layer=LayerDescription(norm="rms_once", norm_offset=1.0, norms_after=True),
        names=_GEMMA_NAMES,
        bias_option="all",
        windowed=2,
        scalars={
            "attention_scale": Scalar("query_pre_attn_scalar", power=-0.5, default=256),
            "attention_softcap": Scalar("attn_logit_softcapping", "attn_logit_softcapping", default=50.0),
            "logits_softcap": Scalar("final_logit_softcapping", "final_logit_softcapping", default=30.0),
        },
        scales_embedding=True,
        head_dim_scaled_layers=46,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "Gemma3ForCausalLM": NativeArchitecture(
        model_type="gemma3_text",
        gguf_name="gemma3",
        layer=LayerDescription(norm="rms_once", norm_offset=1.0, norms_after=True, qk_norm="head"),
        names=_GEMMA_NAMES,
        bias_option="all",
        windowed=6,
        scalars={
            "attention_scale": Scalar("query_pre_attn_scalar", power=-0.5, default=256),
            "attention_softcap": Scalar("attn_logit_softcapping", "attn_logit_softcapping"),
            "logits_softcap": Scalar("final_logit_softcapping", "final_logit_softcapping"),
        },
        local_rope_theta=10000.0,
        scales_embedding=True,
        head_dim_scaled_layers=62,
        defaults={
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "Olmo2ForCausalLM": NativeArchitecture(
        model_type="olmo2",
        gguf_name="olmo2",
        layer=LayerDescription(norm="rms_once", norms_before=False, norms_after=True, qk_norm="projection"),
        bias_option="all",
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "Phi3ForCausalLM": NativeArchitecture(
        model_type="phi3",
        gguf_name="phi3",
        names=TensorNames(fused=frozenset(("qkv", "gate_up"))),
        windowed="always",
        partial_rotary=1.0,
        defaults={"sliding_window": None, "bos_token_id": 1, "eos_token_id": 32000, "rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": NativeArchitecture(
        model_type="granite",
        gguf_name="granite",
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="gguf",
        scalars=_GRANITE_SCALARS,
        defaults={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "SmolLM3ForCausalLM": NativeArchitecture(
        model_type="smollm3",
        gguf_name="smollm3",
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="gguf",
        windowed="by_layer",
        unrotated="listed",
        defaults={
            "rope_theta": 2e6,
            "num_key_value_heads": 4,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "tie_word_embeddings": True,
        },
    ),
    "Glm4ForCausalLM": NativeArchitecture(
        model_type="glm4",
        gguf_name="glm4",
        layer=LayerDescription(norms_after=True),
        names=TensorNames(
            {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
            fused=frozenset(("gate_up",)),
        ),
        bias_option="qkv",
        rotary_interleaved="both",
        partial_rotary=0.5,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-07},
    ),
    "Cohere2ForCausalLM": NativeArchitecture(
        model_type="cohere2",
        gguf_name="cohere2",
        layer=LayerDescription(norm="layer", parallel="one norm"),
        bias_option="all",
        rotary_interleaved="both",
        windowed=4,
        unrotated="full_attention",
        scalars={"logits_scale": Scalar("logit_scale", "logit_scale", default=0.0625)},
        defaults={"bos_token_id": 5, "eos_token_id": 255001, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
    "Starcoder2ForCausalLM": NativeArchitecture(
        model_type="starcoder2",
        gguf_name="starcoder2",
        layer=LayerDescription(norm="layer", norm_bias=True, gated=False),
        names=TensorNames({"up": "mlp.c_fc", "down": "mlp.c_proj"}),
        bias_option="all",
        mlp_bias_option="use_bias",
        windowed="always",
        defaults={
            "sliding_window": None,
            "num_key_value_heads": 2,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "GPTNeoXForCausalLM": NativeArchitecture(
        model_type="gpt_neox",
        gguf_name="gptneox",
        layer=LayerDescription(norm="layer", norm_bias=True, parallel="two norms", gated=False),
        names=TensorNames(
            {
                "embedding": "gpt_neox.embed_in",
                "final_norm": "gpt_neox.final_layer_norm",
                "head": "embed_out",
                "qkv": "attention.query_key_value",
                "output": "attention.dense",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
            fused=frozenset(("qkv",)),
            layers="gpt_neox.layers",
        ),
        biased="mlp",
        bias_option="all",
        qkv_by_head=True,
        partial_rotary=0.25,
        defaults={
            "bos_token_id": 0,
            "eos_token_id": 2,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
        },
    ),
    "MixtralForCausalLM": NativeArchitecture(
        model_type="mixtral",
        gguf_name="llama",
        names=TensorNames(_MIXTRAL_NAMES),
        rotary_interleaved="gguf",
        windowed="always",
        experts=Experts("intermediate_size", 8, 2),
        defaults={
            "sliding_window": None,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-5,
        },
    ),
    "Qwen2MoeForCausalLM": NativeArchitecture(
        model_type="qwen2_moe",
        gguf_name="qwen2moe",
        bias_option="qkv",
        windowed="by_layer",
        experts=Experts(
            "moe_intermediate_size", 60, 4, None, False, False, "shared_expert_intermediate_size", 1408, 5632
        ),
        defaults={"num_key_value_heads": 16, "attention_bias": True},
    ),
    "Qwen3MoeForCausalLM": NativeArchitecture(
        model_type="qwen3_moe",
        gguf_name="qwen3moe",
        layer=LayerDescription(qk_norm="head"),
        bias_option="all",
        windowed="always",
        experts=Experts("moe_intermediate_size", 128, 8, None, default_width=768),
        defaults={"sliding_window": None, "num_key_value_heads": 4},
    ),
    "OlmoeForCausalLM": NativeArchitecture(
        model_type="olmoe",
        gguf_name="olmoe",
        layer=LayerDescription(qk_norm="projection"),
        bias_option="all",
        experts=Experts("intermediate_size", 64, 8, None, False),
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "GptOssForCausalLM": NativeArchitecture(
        model_type="gpt_oss",
        gguf_name="gpt-oss",
        layer=LayerDescription(sinks=True),
        names=TensorNames(
            {
                "router": "mlp.router",
                "expert_gate": "mlp.experts.gate_up_proj[*,::2]",
                "expert_up": "mlp.experts.gate_up_proj[*,1::2]",
                "expert_down": "mlp.experts.down_proj[*]",
            }
        ),
        bias_option="all",
        windowed=2,
        experts=Experts("intermediate_size", 128, 4, bias=True),
        activation="clamped_swiglu",
        yarn_truncates=False,
        defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True},
    ),
    "GraniteMoeForCausalLM": NativeArchitecture(
        model_type="granitemoe",
        gguf_name="granitemoe",
        names=TensorNames(_GRANITE_MOE_NAMES),
        bias_option="all",
        rotary_interleaved="gguf",
        experts=Experts("intermediate_size", 8, 2),
        scalars=_GRANITE_SCALARS,
        defaults={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "DeepseekV2ForCausalLM": NativeArchitecture(
        model_type="deepseek_v2",
        gguf_name="deepseek2",
        names=_LATENT_NAMES,
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="both",
        latent=True,
        experts=Experts("moe_intermediate_size", 64, 6, False, False, default_width=1407, deepseek=True),
        defaults={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeForCausalLM": NativeArchitecture(
        model_type="glm4_moe",
        gguf_name="glm4moe",
        layer=LayerDescription(qk_norm="head"),
        names=TensorNames(_DEEPSEEK_NAMES),
        bias_option="qkv",
        partial_rotary=0.5,
        experts=_SIGMOID_EXPERTS._replace(default_count=128, default_width=1408),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        experts=_SIGMOID_EXPERTS._replace(default_count=64, default_active=4, default_width=1536),
        defaults={"rms_norm_eps": 1e-5},
    ),
}


# Models that read images too, around a text model, which they do not change where a prompt is text.
_WRAPPERS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in ("Gemma3", "InternVL", "Llava", "LlavaOnevision", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
)
# The families of their text models, by what `model_type` calls these.
_TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "Qwen2ForCausalLM"),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), "Qwen3ForCausalLM"),
}
# The same for GGUF files, which hold the text model alone.
GGUF_TEXT_MODELS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3"}


def text_architecture(architecture: str, model_type: object) -> str:
    """Return the architecture of the text model in one that also reads images, by its `model_type`; any other is its
    own."""
    return _TEXT_MODELS.get(str(model_type), architecture) if architecture in _WRAPPERS else architecture


def family_name(architecture: str) -> str:
    """Return the short name of an architecture: 'LlamaForCausalLM' -> 'llama'."""
    native = NATIVE_ARCHITECTURES.get(architecture)
    return architecture.removesuffix("ForCausalLM").lower() if native is None else native.model_type

"""The families that the native decoder runs: a row each.

A row says how the layers are built, what the checkpoints call their tensors, and how to read the configuration.
Everything that runs a model reads the resulting `ModelConfig` and knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.checkpoint.model_config import LayerDescription
from octavo.checkpoint.native_architecture import Experts, NativeArchitecture, Scalar
from octavo.checkpoint.tensor_names import TensorNames

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
_HUNYUAN_NAMES = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
_GRANITE_SCALARS = {
    "attention_scale": Scalar("attention_multiplier", "attention.scale", default=1.0),
    "embedding_scale": Scalar("embedding_multiplier", "embedding_scale"),
    "residual_scale": Scalar("residual_multiplier", "residual_scale"),
    "logits_scale": Scalar("logits_scaling", "logit_scale", power=-1.0),
}
_GEMMA_NAMES = TensorNames({"mlp_norm": "pre_feedforward_layernorm"})
_GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_LATENT_NAMES = TensorNames(_DEEPSEEK_NAMES, fused=frozenset(("kv_b",)))
_SIGMOID_EXPERTS = Experts("moe_intermediate_size", None, scoring="sigmoid", corrected=True, deepseek=True)
_DEEPSEEK_V3 = NativeArchitecture(
    model_type="deepseek_v3",
    gguf_name="deepseek2",
    names=_LATENT_NAMES,
    bias_option="all",
    rotary_interleaved="both",
    latent=True,
    experts=_SIGMOID_EXPERTS,
    defaults={
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
)
_OLMO2 = NativeArchitecture(
    model_type="olmo2",
    gguf_name="olmo2",
    layer=LayerDescription(norm="rms_once", norms_before=False, norms_after=True, qk_norm="projection"),
    bias_option="all",
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
)
_GRANITE = NativeArchitecture(
    model_type="granite",
    gguf_name="granite",
    bias_option="all",
    mlp_bias_option="mlp_bias",
    rotary_interleaved="gguf",
    unrotated="unstated",
    scalars=_GRANITE_SCALARS,
    defaults={"bos_token_id": 1, "eos_token_id": 2, "position_embedding_type": "rope"},
)
_GLM4 = NativeArchitecture(
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
)
_COHERE2 = NativeArchitecture(
    model_type="cohere2",
    gguf_name="cohere2",
    layer=LayerDescription(norm="layer", parallel="one norm"),
    bias_option="all",
    rotary_interleaved="both",
    windowed=4,
    unrotated="full_attention",
    scalars={"logits_scale": Scalar("logit_scale", "logit_scale", default=0.0625)},
    defaults={"bos_token_id": 5, "eos_token_id": 255001, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
)
_GLM4_MOE = NativeArchitecture(
    model_type="glm4_moe",
    gguf_name="glm4moe",
    layer=LayerDescription(qk_norm="head"),
    names=TensorNames(_DEEPSEEK_NAMES),
    bias_option="qkv",
    partial_rotary=0.5,
    experts=_SIGMOID_EXPERTS,
    defaults={
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
)
_HUNYUAN = NativeArchitecture(
    model_type="hunyuan_v1_dense",
    gguf_name="hunyuan-dense",
    layer=LayerDescription(qk_norm="head", rotates_first=True),
    names=TensorNames(_HUNYUAN_NAMES),
    bias_option="all",
    defaults={"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5},
)
_ERNIE = NativeArchitecture(
    model_type="ernie4_5",
    gguf_name="ernie4_5",
    bias_option="all",
    mlp_bias_option="use_bias",
    rotary_interleaved="both",
    defaults={
        "rope_theta": 500000.0,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
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
    "Ministral3ForCausalLM": NativeArchitecture(
        model_type="ministral3",
        gguf_name="mistral3",
        rotary_interleaved="gguf",
        windowed="always",
        defaults={
            "sliding_window": None,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-5,
        },
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
    "GemmaForCausalLM": NativeArchitecture(
        model_type="gemma",
        gguf_name="gemma",
        layer=LayerDescription(norm="rms_once", norm_offset=1.0),
        bias_option="all",
        activation="gelu_pytorch_tanh",  # configurations that say "gelu" mean its tanh form
        scales_embedding=True,
        defaults=_GEMMA_DEFAULTS,
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
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 4},
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
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(_OLMO2, model_type="olmo3", windowed=4, local_rope_theta=500000.0),
    "Phi3ForCausalLM": NativeArchitecture(
        model_type="phi3",
        gguf_name="phi3",
        names=TensorNames(fused=frozenset(("qkv", "gate_up"))),
        windowed="always",
        partial_rotary=1.0,
        defaults={"sliding_window": None, "bos_token_id": 1, "eos_token_id": 32000, "rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": replace(
        _GRANITE,
        model_type="granitemoehybrid",
        names=TensorNames(
            {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}, fused=frozenset(("gate_up",))
        ),
        mlp_width="shared_intermediate_size",
        mlp_bias_option=None,
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
    "Ernie4_5ForCausalLM": _ERNIE,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HeliumForCausalLM": NativeArchitecture(
        model_type="helium",
        gguf_name=None,
        layer=LayerDescription(norm="rms_once"),
        bias_option="qkv",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="both",
        defaults={
            "rope_theta": 100000.0,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-8,
        },
    ),
    "SeedOssForCausalLM": NativeArchitecture(
        model_type="seed_oss",
        gguf_name="seed_oss",
        bias_option="qkv",
        mlp_bias_option="mlp_bias",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "attention_bias": True,
        },
    ),
    "Exaone4ForCausalLM": NativeArchitecture(
        model_type="exaone4",
        gguf_name="exaone4",
        layer=LayerDescription(norms_before=False, norms_after=True, qk_norm="head"),
        windowed=4,
        unrotated="full_if_windowed",
        defaults={"num_key_value_heads": 32, "bos_token_id": 0, "eos_token_id": 2, "rms_norm_eps": 1e-5},
    ),
    "ArceeForCausalLM": NativeArchitecture(
        model_type="arcee",
        gguf_name="arcee",
        layer=LayerDescription(gated=False),
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="gguf",
        defaults={"bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    "ApertusForCausalLM": NativeArchitecture(
        model_type="apertus",
        gguf_name=None,
        layer=LayerDescription(qk_norm="head", gated=False),
        names=TensorNames({"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}),
        bias_option="all",
        defaults={
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
        },
    ),
    "NemotronForCausalLM": NativeArchitecture(
        model_type="nemotron",
        gguf_name="nemotron",
        layer=LayerDescription(norm="layer", norm_offset=1.0, norm_bias=True, gated=False),
        bias_option="all",
        mlp_bias_option="mlp_bias",
        partial_rotary=0.5,
        defaults={"bos_token_id": 2, "eos_token_id": 3, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    "StableLmForCausalLM": NativeArchitecture(
        model_type="stablelm",
        gguf_name="stablelm",
        layer=LayerDescription(norm="layer", norm_bias=True, parallel="one norm"),
        bias_option="qkv",
        partial_rotary=0.25,
        defaults={
            "num_key_value_heads": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "rms_norm_eps": 1e-5,
            "use_parallel_residual": False,
        },
    ),
    "Glm4ForCausalLM": _GLM4,
    "GlmForCausalLM": replace(
        _GLM4,
        model_type="glm",
        gguf_name="chatglm",
        layer=LayerDescription(),
        names=TensorNames(fused=frozenset(("gate_up",))),
        defaults={**_GLM4.defaults, "attention_bias": True, "eos_token_id": [151329, 151336, 151338]},
    ),
    "CohereForCausalLM": replace(
        _COHERE2,
        model_type="cohere",
        gguf_name="command-r",
        windowed="never",
        unrotated="none",
        defaults={**_COHERE2.defaults, "rope_theta": 500000.0},
    ),
    "Cohere2ForCausalLM": _COHERE2,
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
            "use_bias": True,
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
        experts=Experts("intermediate_size"),
        defaults={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rms_norm_eps": 1e-5,
        },
    ),
    "MiniMaxM2ForCausalLM": NativeArchitecture(
        model_type="minimax_m2",
        gguf_name="minimax-m2",
        layer=LayerDescription(qk_norm="projection"),
        names=TensorNames(_MIXTRAL_NAMES | {"router_correction": "block_sparse_moe.e_score_correction"}),
        partial_rotary=1.0,
        experts=Experts("intermediate_size", scoring="sigmoid", corrected=True),
        defaults={
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
        },
    ),
    "Qwen2MoeForCausalLM": NativeArchitecture(
        model_type="qwen2_moe",
        gguf_name="qwen2moe",
        bias_option="qkv",
        windowed="by_layer",
        experts=Experts("moe_intermediate_size", None, False, shared_width="shared_expert_intermediate_size"),
        defaults={
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_key_value_heads": 16,
            "attention_bias": True,
        },
    ),
    "Qwen3MoeForCausalLM": NativeArchitecture(
        model_type="qwen3_moe",
        gguf_name="qwen3moe",
        layer=LayerDescription(qk_norm="head"),
        bias_option="all",
        windowed="always",
        experts=Experts("moe_intermediate_size", None),
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "sliding_window": None,
            "num_key_value_heads": 4,
        },
    ),
    "HunYuanMoEV1ForCausalLM": replace(
        _HUNYUAN,
        model_type="hunyuan_v1_moe",
        gguf_name="hunyuan-moe",
        names=TensorNames(
            {
                **_HUNYUAN_NAMES,
                "router": "mlp.gate.wg",
                **{f"shared_{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
            }
        ),
        experts=Experts("intermediate_size", deepseek=True),
        defaults={**_HUNYUAN.defaults, "num_experts": 1, "num_experts_per_tok": 1},
    ),
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
        model_type="ernie4_5_moe",
        gguf_name="ernie4_5-moe",
        names=TensorNames(_DEEPSEEK_NAMES | {"router_correction": "mlp.moe_statics.e_score_correction[0]"}),
        experts=Experts("moe_intermediate_size", corrected=True, deepseek=True),
        defaults={
            **{key: value for key, value in _ERNIE.defaults.items() if key != "head_dim"},
            "num_key_value_heads": 4,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "OlmoeForCausalLM": NativeArchitecture(
        model_type="olmoe",
        gguf_name="olmoe",
        layer=LayerDescription(qk_norm="projection"),
        bias_option="all",
        experts=Experts("intermediate_size", None, False),
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
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
        experts=Experts("intermediate_size", bias=True),
        activation="clamped_swiglu",
        yarn_truncates=False,
        defaults={
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
        },
    ),
    "GraniteMoeForCausalLM": NativeArchitecture(
        model_type="granitemoe",
        gguf_name="granitemoe",
        names=TensorNames(_GRANITE_MOE_NAMES),
        bias_option="all",
        rotary_interleaved="gguf",
        experts=Experts("intermediate_size"),
        scalars=_GRANITE_SCALARS,
        defaults={"num_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "DeepseekV2ForCausalLM": NativeArchitecture(
        model_type="deepseek_v2",
        gguf_name="deepseek2",
        names=_LATENT_NAMES,
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="both",
        latent=True,
        experts=Experts("moe_intermediate_size", False, False, deepseek=True),
        defaults={
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1407,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "Dots1ForCausalLM": replace(
        _GLM4_MOE,
        model_type="dots1",
        gguf_name="dots1",
        bias_option="all",
        windowed="by_layer",
        partial_rotary=None,
        defaults={
            "num_key_value_heads": 32,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "max_window_layers": 62,
        },
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        defaults={
            **_DEEPSEEK_V3.defaults,
            "num_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "rms_norm_eps": 1e-5,
        },
    ),
}


# Models that read images too, around a text model, which they do not change where a prompt is text.
_WRAPPERS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        "Gemma3",
        "InternVL",
        "Llava",
        "LlavaOnevision",
        "Mistral3",
        "Qwen2VL",
        "Qwen2_5_VL",
        "Qwen3VL",
        "Qwen3VLMoe",
    )
)
# The families of their text models, by what `model_type` calls these.
_TEXT_MODELS = {
    **{
        native.model_type: name
        for name, native in NATIVE_ARCHITECTURES.items()
        # The model around it does not scale logits, as some families do.
        if native.names.layers == "model.layers" and not any(scalar.startswith("logits") for scalar in native.scalars)
    },
    "gemma3_text": "Gemma3ForCausalLM",
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "Qwen2ForCausalLM"),
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
# What differs in their checkpoints, by the same `model_type`.
_TEXT_CHECKPOINTS = {
    "qwen3_vl_moe_text": replace(
        NATIVE_ARCHITECTURES["Qwen3MoeForCausalLM"],
        names=TensorNames(
            {
                "expert_gate": "mlp.experts.gate_up_proj[*,:half]",
                "expert_up": "mlp.experts.gate_up_proj[*,half:]",
                "expert_down": "mlp.experts.down_proj[*]",
            }
        ),
        experts=Experts("moe_intermediate_size"),
        defaults={
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "sliding_window": None,
            "num_key_value_heads": 16,
            "rope_theta": 500000.0,
        },
    ),
}
# The same for GGUF files, which hold the text model alone, and for hybrid models that have attention in all layers.
GGUF_TEXT_MODELS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe", "granitehybrid": "granite"}


def text_architecture(architecture: str, model_type: object) -> str:
    """Return the architecture of the text model in one that also reads images, by its `model_type`; any other is its
    own."""
    return _TEXT_MODELS.get(str(model_type), architecture) if architecture in _WRAPPERS else architecture


def native_architecture(architecture: str, model_type: object) -> NativeArchitecture | None:
    """Return the row of an architecture, or of the text model in one that also reads images; None if there is none."""
    own = _TEXT_CHECKPOINTS.get(str(model_type))
    return own or NATIVE_ARCHITECTURES.get(text_architecture(architecture, model_type))


def family_name(architecture: str) -> str:
    """Return the short name of an architecture: 'LlamaForCausalLM' -> 'llama'."""
    native = NATIVE_ARCHITECTURES.get(architecture)
    return architecture.removesuffix("ForCausalLM").lower() if native is None else native.model_type

"""The families that the native decoder runs: a row each.

A row says how the layers are built, what the checkpoints call their tensors, and how to read the configuration.
Everything that runs a model reads the resulting `ModelConfig` and knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from octavo.checkpoint.model_config import LayerDescription
from octavo.checkpoint.native_architecture import Experts, NativeArchitecture, Scalar, config_defaults
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
# The gates and ups of all experts of a layer in one tensor, and their downs in another.
STACKED_EXPERTS = {
    "expert_gate": "mlp.experts.gate_up_proj[*,:half]",
    "expert_up": "mlp.experts.gate_up_proj[*,half:]",
    "expert_down": "mlp.experts.down_proj[*]",
}
_DEEPSEEK_NAMES = {f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_HUNYUAN_NAMES = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
_GRANITE_SCALARS = {
    "attention_scale": Scalar("attention_multiplier", "attention.scale", default=1.0),
    "embedding_scale": Scalar("embedding_multiplier", "embedding_scale"),
    "residual_scale": Scalar("residual_multiplier", "residual_scale"),
    "logits_scale": Scalar("logits_scaling", "logit_scale", power=-1.0),
}
_MINICPM_SCALARS = {
    "embedding_scale": Scalar("scale_emb", "embedding_scale", default=12.0, gguf_default=True),
    "residual_scale": Scalar(
        "scale_depth", "residual_scale", default=1.4, times=("num_hidden_layers", -0.5), gguf_default=True
    ),
    "logits_scale": Scalar(
        "dim_model_base", "logit_scale", default=256.0, times=("hidden_size", -1.0), gguf_power=-1.0, gguf_default=True
    ),
}
_GEMMA_NAMES = TensorNames({"mlp_norm": "pre_feedforward_layernorm"})
_GEMMA_DEFAULTS = config_defaults(ids=(2, 1), head_dim=256, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)
_LATENT_NAMES = TensorNames(_DEEPSEEK_NAMES, fused={"kv_b"})
_SIGMOID_EXPERTS = Experts("moe_intermediate_size", None, scoring="sigmoid", corrected=True, deepseek=True)
_DEEPSEEK_V3 = NativeArchitecture(
    "deepseek_v3",
    "deepseek2",
    names=_LATENT_NAMES,
    bias_option="all",
    rotary_interleaved="both",
    latent=True,
    experts=_SIGMOID_EXPERTS,
    defaults=config_defaults(ids=(0, 1), experts=(256, 8, 2048)),
)
_LLAMA = NativeArchitecture(
    "llama",
    "llama",
    bias_option="all",
    mlp_bias_option="mlp_bias",
    rotary_interleaved="gguf",
    defaults=config_defaults(ids=(1, 2)),
)
_OLMO2 = NativeArchitecture(
    "olmo2",
    "olmo2",
    layer=LayerDescription(norm="rms_once", norms_before=False, norms_after=True, qk_norm="projection"),
    bias_option="all",
    defaults=config_defaults(eps=1e-5, eos_token_id=50279),
)
_GRANITE = NativeArchitecture(
    "granite",
    "granite",
    bias_option="all",
    mlp_bias_option="mlp_bias",
    rotary_interleaved="gguf",
    unrotated="unstated",
    scalars=_GRANITE_SCALARS,
    defaults=config_defaults(ids=(1, 2), position_embedding_type="rope"),
)
_GLM4 = NativeArchitecture(
    "glm4",
    "glm4",
    layer=LayerDescription(norms_after=True),
    names=TensorNames(
        {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
        fused={"gate_up"},
    ),
    bias_option="qkv",
    rotary_interleaved="both",
    partial_rotary=0.5,
    defaults=config_defaults(eps=1.5625e-07, kv_heads=2, head_dim=128),
)
_COHERE2 = NativeArchitecture(
    "cohere2",
    "cohere2",
    layer=LayerDescription(norm="layer", parallel="one norm"),
    bias_option="all",
    rotary_interleaved="both",
    windowed=4,
    unrotated="full_attention",
    scalars={"logits_scale": Scalar("logit_scale", "logit_scale", default=0.0625)},
    defaults=config_defaults(ids=(5, 255001), eps=1e-5, tie_word_embeddings=True),
)
_GLM4_MOE = NativeArchitecture(
    "glm4_moe",
    "glm4moe",
    layer=LayerDescription(qk_norm="head"),
    names=TensorNames(_DEEPSEEK_NAMES),
    bias_option="qkv",
    partial_rotary=0.5,
    experts=_SIGMOID_EXPERTS,
    defaults=config_defaults(eps=1e-5, kv_heads=8, experts=(128, 8, 1408)),
)
_BAILING = NativeArchitecture(
    "bailing_moe",
    "bailingmoe",
    names=TensorNames(
        {
            **_DEEPSEEK_NAMES,
            "embedding": "model.word_embeddings",
            "qkv": "attention.query_key_value",
            "output": "attention.dense",
        },
        fused={"qkv"},
    ),
    bias_option="qkv",
    rotary_interleaved="gguf",
    experts=Experts("moe_intermediate_size", None, deepseek=True),
    defaults=config_defaults(eps=1e-5, norm_topk_prob=True),
)
_HUNYUAN = NativeArchitecture(
    "hunyuan_v1_dense",
    "hunyuan-dense",
    layer=LayerDescription(qk_norm="head", rotates_first=True),
    names=TensorNames(_HUNYUAN_NAMES),
    bias_option="all",
    defaults=config_defaults(ids=(1, 2), eps=1e-5),
)
_ERNIE = NativeArchitecture(
    "ernie4_5",
    "ernie4_5",
    bias_option="all",
    mlp_bias_option="use_bias",
    rotary_interleaved="both",
    defaults=config_defaults(ids=(1, 2), eps=1e-5, kv_heads=2, head_dim=128, rope_theta=5e5, tie_word_embeddings=True),
)

NATIVE_ARCHITECTURES: Mapping[str, NativeArchitecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": NativeArchitecture(
        "mistral",
        "llama",
        rotary_interleaved="gguf",
        windowed="always",
        defaults=config_defaults(ids=(1, 2), kv_heads=8, num_attention_heads=32),
    ),
    "Ministral3ForCausalLM": NativeArchitecture(
        "ministral3",
        "mistral3",
        rotary_interleaved="gguf",
        windowed="always",
        defaults=config_defaults(ids=(1, 2), eps=1e-5, kv_heads=8, head_dim=128, sliding_window=None),
    ),
    "Qwen2ForCausalLM": NativeArchitecture(
        "qwen2", "qwen2", biased="qkv", windowed="by_layer", defaults=config_defaults(kv_heads=32)
    ),
    "Qwen3ForCausalLM": NativeArchitecture(
        "qwen3",
        "qwen3",
        layer=LayerDescription(qk_norm="head"),
        bias_option="all",
        windowed="by_layer",
        defaults=config_defaults(kv_heads=32, head_dim=128),
    ),
    "GemmaForCausalLM": NativeArchitecture(
        "gemma",
        "gemma",
        layer=LayerDescription(norm="rms_once", norm_offset=1.0),
        bias_option="all",
        activation="gelu_pytorch_tanh",  # configurations that say "gelu" mean its tanh form
        scales_embedding=True,
        defaults=_GEMMA_DEFAULTS,
    ),
    "Gemma2ForCausalLM": NativeArchitecture(
        "gemma2",
        "gemma2",
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
        defaults=config_defaults(_GEMMA_DEFAULTS, kv_heads=4),
    ),
    "Gemma3ForCausalLM": NativeArchitecture(
        "gemma3_text",
        "gemma3",
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
        defaults=config_defaults(
            _GEMMA_DEFAULTS,
            kv_heads=4,
            vocab_size=262208,
            max_position_embeddings=131072,
            rope_theta=1e6,
            num_attention_heads=8,
        ),
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "InternLM2ForCausalLM": NativeArchitecture(
        "internlm2",
        "internlm2",
        names=TensorNames(
            {
                "embedding": "model.tok_embeddings",
                "head": "output",
                "attention_norm": "attention_norm",
                "mlp_norm": "ffn_norm",
                "qkv": "attention.wqkv",
                "output": "attention.wo",
                "gate": "feed_forward.w1",
                "up": "feed_forward.w3",
                "down": "feed_forward.w2",
            },
            fused={"qkv"},
        ),
        bias_option="all",
        rotary_interleaved="gguf",
        qkv_by_head=True,
        defaults=config_defaults(ids=(1, 2)),
    ),
    "InternLM3ForCausalLM": replace(
        _LLAMA,
        model_type="internlm3",
        defaults=config_defaults(ids=(1, 2), eps=1e-5, kv_heads=2, head_dim=128),
    ),
    "MiniCPMForCausalLM": NativeArchitecture(
        "minicpm",
        "minicpm",
        bias_option="all",
        rotary_interleaved="gguf",
        scalars=_MINICPM_SCALARS,
        defaults=config_defaults(ids=(1, 2), eps=1e-5, tie_word_embeddings=True),
    ),
    "MiniCPM3ForCausalLM": NativeArchitecture(
        "minicpm3",
        "minicpm3",
        names=_LATENT_NAMES,
        bias_option="all",
        latent=True,
        scalars=_MINICPM_SCALARS,
        defaults=config_defaults(
            ids=(1, 2),
            eps=1e-5,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            q_lora_rank=768,
            kv_lora_rank=256,
            tie_word_embeddings=True,
        ),
    ),
    "ExaoneForCausalLM": NativeArchitecture(
        "exaone",
        "exaone",
        names=TensorNames(
            {
                "embedding": "transformer.wte",
                "final_norm": "transformer.ln_f",
                "attention_norm": "ln_1",
                "mlp_norm": "ln_2",
                **{part: f"attn.attention.{part}_proj" for part in "qkv"},
                "output": "attn.attention.out_proj",
                "gate": "mlp.c_fc_0",
                "up": "mlp.c_fc_1",
                "down": "mlp.c_proj",
            },
            layers="transformer.h",
        ),
        defaults=config_defaults(ids=(0, 2), eps=1e-5),
    ),
    "XverseForCausalLM": NativeArchitecture(
        "xverse", "xverse", rotary_interleaved="gguf", defaults=config_defaults(ids=(2, 3))
    ),
    "PanguEmbeddedForCausalLM": NativeArchitecture(
        "PanguEmbedded", "pangu-embedded", bias_option="all", defaults=config_defaults(ids=(1, 45892), eps=1e-5)
    ),
    "OrionForCausalLM": NativeArchitecture(
        "orion",
        "orion",
        layer=LayerDescription(norm="layer", norm_bias=True),
        defaults=config_defaults(ids=(1, 2), eps=1e-5),
    ),
    "Olmo3ForCausalLM": replace(_OLMO2, model_type="olmo3", windowed=4, local_rope_theta=500000.0),
    "OlmoForCausalLM": NativeArchitecture(
        "olmo",
        "olmo",
        layer=LayerDescription(norm="layer", norm_weights=False),
        bias_option="all",
        rotary_interleaved="gguf",
        defaults=config_defaults(eps=1e-5, eos_token_id=50279),
    ),
    "PhiForCausalLM": NativeArchitecture(
        "phi",
        "phi2",
        layer=LayerDescription(norm="layer", norm_bias=True, parallel="one norm", gated=False),
        names=TensorNames(
            {"final_norm": "model.final_layernorm", "output": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}
        ),
        biased="mlp",
        bias_option="all",
        head_bias=True,
        partial_rotary=0.5,
        defaults=config_defaults(ids=(1, 2), eps=1e-5, hidden_act="gelu_pytorch_tanh", attention_bias=True),
    ),
    "Phi3ForCausalLM": NativeArchitecture(
        "phi3",
        "phi3",
        names=TensorNames(fused={"qkv", "gate_up"}),
        windowed="always",
        partial_rotary=1.0,
        defaults=config_defaults(ids=(1, 32000), eps=1e-5, sliding_window=None),
    ),
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": replace(
        _GRANITE,
        model_type="granitemoehybrid",
        names=TensorNames(
            {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}, fused={"gate_up"}
        ),
        mlp_width="shared_intermediate_size",
        mlp_bias_option=None,
        defaults=config_defaults(ids=(1, 2)),
    ),
    "SmolLM3ForCausalLM": NativeArchitecture(
        "smollm3",
        "smollm3",
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="gguf",
        windowed="by_layer",
        unrotated="listed",
        defaults=config_defaults(ids=(128000, 128001), kv_heads=4, rope_theta=2e6, tie_word_embeddings=True),
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HeliumForCausalLM": NativeArchitecture(
        "helium",
        None,
        layer=LayerDescription(norm="rms_once"),
        bias_option="qkv",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="both",
        defaults=config_defaults(ids=(1, 2), eps=1e-8, kv_heads=20, head_dim=128, rope_theta=100000.0),
    ),
    "SeedOssForCausalLM": NativeArchitecture(
        "seed_oss",
        "seed_oss",
        bias_option="qkv",
        mlp_bias_option="mlp_bias",
        defaults=config_defaults(ids=(0, 2), kv_heads=8, head_dim=128, attention_bias=True),
    ),
    "Exaone4ForCausalLM": NativeArchitecture(
        "exaone4",
        "exaone4",
        layer=LayerDescription(norms_before=False, norms_after=True, qk_norm="head"),
        windowed=4,
        unrotated="full_if_windowed",
        defaults=config_defaults(ids=(0, 2), eps=1e-5, kv_heads=32),
    ),
    "ArceeForCausalLM": NativeArchitecture(
        "arcee",
        "arcee",
        layer=LayerDescription(gated=False),
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="gguf",
        defaults=config_defaults(ids=(128000, 128001), eps=1e-5, hidden_act="relu2"),
    ),
    "ApertusForCausalLM": NativeArchitecture(
        "apertus",
        "apertus",
        layer=LayerDescription(qk_norm="head", gated=False),
        names=TensorNames({"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}),
        bias_option="all",
        defaults=config_defaults(
            ids=(1, 2),
            eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            hidden_act="xielu",
        ),
    ),
    "Jais2ForCausalLM": NativeArchitecture(
        "jais2",
        "jais2",
        layer=LayerDescription(norm="layer", norm_bias=True, gated=False),
        bias_option="all",
        mlp_bias_option="mlp_bias",
        defaults=config_defaults(ids=(0, 150024), eps=1e-5, hidden_act="relu2", attention_bias=True, mlp_bias=True),
    ),
    "NemotronForCausalLM": NativeArchitecture(
        "nemotron",
        "nemotron",
        layer=LayerDescription(norm="layer", norm_offset=1.0, norm_bias=True, gated=False),
        bias_option="all",
        mlp_bias_option="mlp_bias",
        partial_rotary=0.5,
        defaults=config_defaults(ids=(2, 3), eps=1e-5, hidden_act="relu2"),
    ),
    "StableLmForCausalLM": NativeArchitecture(
        "stablelm",
        "stablelm",
        layer=LayerDescription(norm="layer", norm_bias=True, parallel="one norm"),
        bias_option="qkv",
        partial_rotary=0.25,
        defaults=config_defaults(ids=(0, 0), eps=1e-5, kv_heads=32, use_parallel_residual=False),
    ),
    "Glm4ForCausalLM": _GLM4,
    "GlmForCausalLM": replace(
        _GLM4,
        model_type="glm",
        gguf_name="chatglm",
        layer=LayerDescription(),
        names=TensorNames(fused={"gate_up"}),
        defaults=config_defaults(_GLM4.defaults, attention_bias=True, eos_token_id=[151329, 151336, 151338]),
    ),
    "CohereForCausalLM": replace(
        _COHERE2,
        model_type="cohere",
        gguf_name="command-r",
        windowed="never",
        unrotated="none",
        defaults=config_defaults(_COHERE2.defaults, rope_theta=500000.0),
    ),
    "Cohere2ForCausalLM": _COHERE2,
    "Starcoder2ForCausalLM": NativeArchitecture(
        "starcoder2",
        "starcoder2",
        layer=LayerDescription(norm="layer", norm_bias=True, gated=False),
        names=TensorNames({"up": "mlp.c_fc", "down": "mlp.c_proj"}),
        bias_option="all",
        mlp_bias_option="use_bias",
        windowed="always",
        defaults=config_defaults(
            ids=(50256, 50256),
            eps=1e-5,
            kv_heads=2,
            sliding_window=None,
            use_bias=True,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        ),
    ),
    "GPTNeoXForCausalLM": NativeArchitecture(
        "gpt_neox",
        "gptneox",
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
            fused={"qkv"},
            layers="gpt_neox.layers",
        ),
        biased="mlp",
        bias_option="all",
        qkv_by_head=True,
        partial_rotary=0.25,
        defaults=config_defaults(ids=(0, 2), eps=1e-5, hidden_act="gelu", attention_bias=True),
    ),
    "FalconForCausalLM": NativeArchitecture(
        "falcon",
        "falcon",
        layer=LayerDescription(norm="layer", norm_bias=True, parallel="one norm", gated=False),
        names=TensorNames(
            {
                "embedding": "transformer.word_embeddings",
                "final_norm": "transformer.ln_f",
                "qkv": "self_attention.query_key_value",
                "output": "self_attention.dense",
                "up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h",
            },
            fused={"qkv"},
            layers="transformer.h",
        ),
        bias_option="all",
        mlp_bias_option="mlp_bias",
        qkv_by_head=True,
        defaults=config_defaults(ids=(11, 11), eps=1e-5, hidden_act="gelu", multi_query=True, tie_word_embeddings=True),
    ),
    "GPTJForCausalLM": NativeArchitecture(
        "gptj",
        None,
        layer=LayerDescription(norm="layer", norm_bias=True, parallel="one norm", gated=False),
        names=TensorNames(
            {
                "embedding": "transformer.wte",
                "final_norm": "transformer.ln_f",
                "attention_norm": "ln_1",
                **{part: f"attn.{part}_proj" for part in "qkv"},
                "output": "attn.out_proj",
                "up": "mlp.fc_in",
                "down": "mlp.fc_out",
            },
            layers="transformer.h",
        ),
        biased="mlp",
        head_bias=True,
        rotary_interleaved="both",
        partial_rotary=1.0,
        defaults=config_defaults(ids=(50256, 50256), eps=1e-5, hidden_act="gelu_pytorch_tanh", rotary_dim=64),
    ),
    "MixtralForCausalLM": NativeArchitecture(
        "mixtral",
        "llama",
        names=TensorNames(_MIXTRAL_NAMES),
        rotary_interleaved="gguf",
        windowed="always",
        experts=Experts("intermediate_size"),
        defaults=config_defaults(ids=(1, 2), eps=1e-5, kv_heads=8, experts=(8, 2), sliding_window=None, rope_theta=1e6),
    ),
    "MiniMaxM2ForCausalLM": NativeArchitecture(
        "minimax_m2",
        "minimax-m2",
        layer=LayerDescription(qk_norm="projection"),
        names=TensorNames(_MIXTRAL_NAMES | {"router_correction": "block_sparse_moe.e_score_correction"}),
        partial_rotary=1.0,
        experts=Experts("intermediate_size", scoring="sigmoid", corrected=True),
        defaults=config_defaults(ids=(200034, 200020), kv_heads=8, head_dim=128, experts=(256, 8), rope_theta=5e6),
    ),
    "Qwen2MoeForCausalLM": NativeArchitecture(
        "qwen2_moe",
        "qwen2moe",
        bias_option="qkv",
        windowed="by_layer",
        experts=Experts("moe_intermediate_size", None, False, shared_width="shared_expert_intermediate_size"),
        defaults=config_defaults(
            kv_heads=16,
            experts=(60, 4, 1408),
            shared_expert_intermediate_size=5632,
            attention_bias=True,
        ),
    ),
    "Qwen3MoeForCausalLM": NativeArchitecture(
        "qwen3_moe",
        "qwen3moe",
        layer=LayerDescription(qk_norm="head"),
        bias_option="all",
        windowed="always",
        experts=Experts("moe_intermediate_size", None),
        defaults=config_defaults(kv_heads=4, experts=(128, 8, 768), sliding_window=None),
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
        defaults=config_defaults(_HUNYUAN.defaults, experts=(1, 1)),
    ),
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
        model_type="ernie4_5_moe",
        gguf_name="ernie4_5-moe",
        names=TensorNames(_DEEPSEEK_NAMES | {"router_correction": "mlp.moe_statics.e_score_correction[0]"}),
        experts=Experts("moe_intermediate_size", corrected=True, deepseek=True),
        defaults=config_defaults(
            {key: value for key, value in _ERNIE.defaults.items() if key != "head_dim"},
            kv_heads=4,
            experts=(64, 6, 1536),
            n_shared_experts=2,
            first_k_dense_replace=1,
        ),
    ),
    "OlmoeForCausalLM": NativeArchitecture(
        "olmoe",
        "olmoe",
        layer=LayerDescription(qk_norm="projection"),
        bias_option="all",
        experts=Experts("intermediate_size", None, False),
        defaults=config_defaults(eps=1e-5, experts=(64, 8), eos_token_id=50279),
    ),
    "FlexOlmoForCausalLM": replace(
        _OLMO2,
        model_type="flex_olmo",
        gguf_name=None,
        experts=Experts("intermediate_size", None),
        defaults=config_defaults(experts=(7, 5), eos_token_id=100257, rope_theta=5e5),
    ),
    "GptOssForCausalLM": NativeArchitecture(
        "gpt_oss",
        "gpt-oss",
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
        defaults=config_defaults(eps=1e-5, kv_heads=8, head_dim=64, experts=(128, 4), attention_bias=True),
    ),
    "GraniteMoeForCausalLM": NativeArchitecture(
        "granitemoe",
        "granitemoe",
        names=TensorNames(_GRANITE_MOE_NAMES),
        bias_option="all",
        rotary_interleaved="gguf",
        experts=Experts("intermediate_size"),
        scalars=_GRANITE_SCALARS,
        defaults=config_defaults(ids=(1, 2), experts=(8, 2)),
    ),
    "DeepseekV2ForCausalLM": NativeArchitecture(
        "deepseek_v2",
        "deepseek2",
        names=_LATENT_NAMES,
        bias_option="all",
        mlp_bias_option="mlp_bias",
        rotary_interleaved="both",
        latent=True,
        experts=Experts("moe_intermediate_size", False, False, deepseek=True),
        defaults=config_defaults(ids=(1, 2), experts=(64, 6, 1407)),
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Mistral4ForCausalLM": replace(
        _DEEPSEEK_V3,
        model_type="mistral4",
        gguf_name="mistral4",
        names=TensorNames(_DEEPSEEK_NAMES | STACKED_EXPERTS, fused={"kv_b"}),
        experts=Experts("moe_intermediate_size", None, deepseek=True),
        defaults=config_defaults(
            ids=(1, 2),
            experts=(128, 4, 2048),
            kv_lora_rank=256,
            q_lora_rank=1024,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    ),
    "BailingMoeForCausalLM": _BAILING,
    "BailingMoeV2ForCausalLM": replace(
        _BAILING,
        model_type="bailing_moe_v2",
        gguf_name="bailingmoe2",
        layer=LayerDescription(qk_norm="head"),
        names=TensorNames(
            {
                **_BAILING.names.changed,
                "q_norm": "attention.query_layernorm",
                "k_norm": "attention.key_layernorm",
                "router_correction": "mlp.gate.expert",
            },
            fused={"qkv"},
        ),
        rotary_interleaved="none",
        partial_rotary=0.5,
        experts=_SIGMOID_EXPERTS,
    ),
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "Dots1ForCausalLM": replace(
        _GLM4_MOE,
        model_type="dots1",
        gguf_name="dots1",
        bias_option="all",
        windowed="by_layer",
        partial_rotary=None,
        defaults=config_defaults(kv_heads=32, norm_topk_prob=False, use_sliding_window=True, max_window_layers=62),
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        defaults=config_defaults(_DEEPSEEK_V3.defaults, eps=1e-5, experts=(64, 4, 1536)),
    ),
}


def family_name(architecture: str) -> str:
    """Return the short name of an architecture: 'LlamaForCausalLM' -> 'llama'."""
    native = NATIVE_ARCHITECTURES.get(architecture)
    return architecture.removesuffix("ForCausalLM").lower() if native is None else native.model_type

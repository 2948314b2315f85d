"""Every family from the files that people have: a Hugging Face folder and a GGUF file give transformers' logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import kernels
from octavo.attention.native import NativeAttention
from octavo.attention.reference import ReferenceAttention
from octavo.checkpoint import text_models
from octavo.checkpoint.families import NATIVE_ARCHITECTURES
from octavo.checkpoint.model_source import ModelSource, load_model_config, resolve_model
from octavo.models.decoder import Decoder
from octavo.models.loader import open_weights
from octavo.models.native_decoder import NativeDecoder, make_decoder
from tests.models.paged import assert_same_logits, paged_logits, random_sequences, whole_logits
from tests.models.tiny import make_model, make_wrapper, write_gguf, write_relative

# DeepSeek's latent attention, and experts in all layers but the first.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_TEMPERED = _YARN | {"original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}  # queries are scaled beyond
_LATENT_KEYS: dict[str, Any] = {
    "deepseek2.attention.kv_lora_rank": 32,
    "deepseek2.rope.dimension_count": 16,
    "deepseek2.expert_count": 6,
    "deepseek2.expert_used_count": 3,
    "deepseek2.leading_dense_block_count": 1,
}
_SIGMOID_KEYS: dict[str, Any] = {
    "deepseek2.attention.q_lora_rank": 48,
    "deepseek2.attention.key_length_mla": 32,
    "deepseek2.attention.value_length_mla": 32,
    "deepseek2.expert_gating_func": 2,
    "deepseek2.expert_weights_norm": True,
}

# Fields of the family's configuration, and what llama.cpp's converter writes of them under GGUF's keys; None where it
# writes no GGUF files.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "Llama": ({}, {}),
    "Mistral": ({"sliding_window": 9}, {"llama.attention.sliding_window": 9}),
    "Ministral3": (
        {"head_dim": 32, "rope_parameters": _TEMPERED},
        {"mistral3.attention.temperature_scale": 0.1, "mistral3.rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "Qwen2": ({}, {}),
    "Qwen3": ({"head_dim": 32}, {}),
    "Gemma": ({"head_dim": 32, "initializer_range": 0.2}, {}),
    "Gemma2": (
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7},
        {
            "gemma2.attention.sliding_window": 7,
            "gemma2.attn_logit_softcapping": 50.0,
            "gemma2.final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3": (
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7, "num_hidden_layers": 7},
        {"gemma3.attention.sliding_window": 7},
    ),
    "Olmo2": ({}, {}),
    "Olmo3": (
        {
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "rope_parameters": {
                "full_attention": _YARN | {"attention_factor": 1.1386294361119891},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {"olmo2.attention.sliding_window": 7, "olmo2.rope.freq_base_swa": 10000.0},
    ),
    "Olmo": ({}, {}),
    "Phi": ({"initializer_range": 0.8}, {"phi2.rope.dimension_count": 8}),
    "Phi3": ({"pad_token_id": 0}, {}),
    "Falcon": ({"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}, {}),
    "GPTJ": ({"rotary_dim": 8, "n_inner": 96, "num_key_value_heads": 4, "initializer_range": 0.8}, None),
    "Granite": (
        {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        {
            "granite.attention.scale": 0.3,
            "granite.embedding_scale": 3.0,
            "granite.residual_scale": 0.5,
            "granite.logit_scale": 4.0,
        },
    ),
    "GraniteMoeHybrid": (
        {
            "attention_multiplier": 0.3,
            "logits_scaling": 4.0,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["attention", "attention"],
            "mamba_n_heads": 4,
        },
        {"granite.attention.scale": 0.3, "granite.logit_scale": 4.0, "granite.rope.scaling.finetuned": False},
    ),
    "MiniCPM3": (
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "initializer_range": 0.1,
        },
        {
            "minicpm3.attention.key_length": 32,
            "minicpm3.attention.value_length": 32,
            "minicpm3.attention.kv_lora_rank": 32,
            "minicpm3.attention.q_lora_rank": 48,
            "minicpm3.rope.dimension_count": 16,
        },
    ),
    "SmolLM3": ({"num_hidden_layers": 5}, {}),
    "Ernie4_5": ({"head_dim": 32}, {}),
    "HunYuanDenseV1": (
        {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
        },
        {"hunyuan-dense.rope.freq_base": 10000.0 * 50.0 ** (32 / 30)},
    ),
    "Helium": ({"head_dim": 16, "attention_bias": True}, None),
    "SeedOss": ({"head_dim": 32}, {}),
    "Exaone4": ({"sliding_window": 7, "num_hidden_layers": 5}, {"exaone4.attention.sliding_window": 7}),
    "Arcee": ({}, {}),
    "Jais2": ({}, {}),
    "Apertus": ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, {}),
    "Nemotron": ({}, {"nemotron.rope.dimension_count": 8}),
    "StableLm": (
        {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
        {"stablelm.rope.dimension_count": 8, "stablelm.use_parallel_residual": False},
    ),
    "Glm": ({"head_dim": 16}, {"chatglm.rope.dimension_count": 8}),
    "Glm4": ({"head_dim": 16, "attention_bias": True}, {"glm4.rope.dimension_count": 8}),
    "Cohere": ({}, {"command-r.logit_scale": 0.0625}),
    "Cohere2": (
        {"sliding_window": 7, "num_hidden_layers": 5},
        {"cohere2.attention.sliding_window": 7, "cohere2.logit_scale": 0.0625},
    ),
    "GPTNeoX": (
        {"num_key_value_heads": 4, "initializer_range": 0.8},
        {"gptneox.rope.dimension_count": 4, "gptneox.use_parallel_residual": True},
    ),
    "Mixtral": ({"num_local_experts": 6}, {"llama.expert_count": 6, "llama.expert_used_count": 2}),
    "MiniMaxM2": (
        {"num_local_experts": 12, "head_dim": 32, "partial_rotary_factor": 0.5},
        {
            "minimax-m2.expert_count": 12,
            "minimax-m2.expert_used_count": 8,
            "minimax-m2.expert_gating_func": 2,
            "minimax-m2.rope.dimension_count": 16,
        },
    ),
    "Qwen2Moe": (
        {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        {"qwen2moe.expert_count": 6, "qwen2moe.expert_used_count": 4},
    ),
    "Qwen3Moe": (
        {"num_experts": 12, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
        {"qwen3moe.expert_count": 12, "qwen3moe.expert_used_count": 8},
    ),
    "HunYuanMoEV1": (
        {"head_dim": 32, "num_experts": 6, "moe_topk": 3},
        {"hunyuan-moe.expert_count": 6, "hunyuan-moe.expert_used_count": 3},
    ),
    "Ernie4_5_Moe": (
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "initializer_range": 0.2,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
        },
        {
            "ernie4_5-moe.expert_count": 6,
            "ernie4_5-moe.expert_used_count": 3,
            "ernie4_5-moe.leading_dense_block_count": 1,
        },
    ),
    "Olmoe": ({"num_experts": 12}, {"olmoe.expert_count": 12, "olmoe.expert_used_count": 8}),
    "FlexOlmo": ({"num_experts": 6, "num_experts_per_tok": 3}, None),
    "GptOss": (
        {"num_local_experts": 6, "head_dim": 16, "sliding_window": 7, "num_hidden_layers": 3, "initializer_range": 0.2},
        {
            "gpt-oss.attention.sliding_window": 7,
            "gpt-oss.expert_count": 6,
            "gpt-oss.expert_used_count": 4,
        },
    ),
    "GraniteMoe": (
        {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 4.0, "num_local_experts": 6},
        {
            "granitemoe.attention.scale": 0.3,
            "granitemoe.residual_scale": 0.5,
            "granitemoe.logit_scale": 4.0,
            "granitemoe.expert_count": 6,
            "granitemoe.expert_used_count": 2,
        },
    ),
    "DeepseekV2": (
        _LATENT | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.0},
        _LATENT_KEYS
        | {
            "deepseek2.attention.key_length": 32,
            "deepseek2.attention.value_length": 32,
            "deepseek2.expert_group_count": 3,
            "deepseek2.expert_group_used_count": 2,
            "deepseek2.expert_weights_scale": 2.0,
            "deepseek2.expert_weights_norm": False,
        },
    ),
    "DeepseekV3": (
        _LATENT | {"q_lora_rank": 48, "n_group": 3, "topk_group": 2, "rope_parameters": _YARN},
        _LATENT_KEYS
        | _SIGMOID_KEYS
        | {
            "deepseek2.expert_group_count": 3,
            "deepseek2.expert_group_used_count": 2,
            "deepseek2.expert_weights_scale": 2.5,
            "deepseek2.rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "Mistral4": (
        _LATENT | {"q_lora_rank": 48, "rope_parameters": _TEMPERED},
        {
            **{key.replace("deepseek2", "mistral4"): value for key, value in (_LATENT_KEYS | _SIGMOID_KEYS).items()},
            "mistral4.expert_gating_func": 1,
            "mistral4.rope.scaling.yarn_log_multiplier": 0.1,
            "mistral4.attention.temperature_scale": 0.1,
        },
    ),
    "Glm4MoeLite": (
        _LATENT | {"q_lora_rank": 48, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        _LATENT_KEYS | _SIGMOID_KEYS | {"deepseek2.expert_weights_scale": 1.8},
    ),
    "Glm4Moe": (
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
        {
            "glm4moe.expert_count": 6,
            "glm4moe.expert_used_count": 3,
            "glm4moe.expert_gating_func": 2,
            "glm4moe.expert_weights_norm": True,
            "glm4moe.leading_dense_block_count": 1,
            "glm4moe.block_count": 3,
            "glm4moe.nextn_predict_layers": 1,
            "glm4moe.rope.dimension_count": 8,
        },
    ),
    "Dots1": (
        {
            "num_key_value_heads": 4,  # llama.cpp loads no others
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        {
            "dots1.expert_count": 6,
            "dots1.expert_used_count": 3,
            "dots1.expert_gating_func": 2,
            "dots1.expert_weights_norm": True,
            "dots1.expert_weights_scale": 2.5,
            "dots1.leading_dense_block_count": 1,
        },
    ),
    "Starcoder2": ({"sliding_window": 9}, {"starcoder2.attention.sliding_window": 9}),
}
# Families that transformers has no class of: the family whose layers they have, fields of its configuration, and what
# llama.cpp's converter writes of them.
RELATIVES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "InternLM2": ("Llama", {}, {}),
    "InternLM3": ("Llama", {"head_dim": 32}, {}),
    "MiniCPM": (
        "Granite",
        {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 64 / 256,
            "tie_word_embeddings": True,
        },
        {"minicpm.embedding_scale": 12.0, "minicpm.residual_scale": 1.4 / 2**0.5, "minicpm.logit_scale": 64 / 256},
    ),
    "Exaone": ("Llama", {}, {}),
    "Xverse": ("Llama", {}, {}),
    "PanguEmbedded": ("Llama", {"attention_bias": True}, {}),
    "Orion": ("StableLm", {"use_parallel_residual": False, "partial_rotary_factor": 1.0}, {}),
    "BailingMoe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 0,
            "tie_word_embeddings": False,
        },
        {"bailingmoe.expert_count": 6, "bailingmoe.expert_used_count": 3, "bailingmoe.expert_weights_norm": True},
    ),
    "BailingMoeV2": (
        "Glm4Moe",
        FAMILIES["Glm4Moe"][0] | {"attention_bias": False, "n_group": 3, "topk_group": 2},
        {key.replace("glm4moe", "bailingmoe2"): value for key, value in (FAMILIES["Glm4Moe"][1] or {}).items()}
        | {"bailingmoe2.expert_group_count": 3, "bailingmoe2.expert_group_used_count": 2},
    ),
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 64,
}
_THREE_POSITIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HALF_ROTATED = _THREE_POSITIONS | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_GLM_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 64}
_AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "hidden_size": 32}
# Models that also read images or sound: fields of their text models' configurations, and of those of their encoders.
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {"head_dim": 32, "sliding_window": 7, "num_hidden_layers": 7},
        _VISION | {"model_type": "siglip_vision_model"},
    ),
    "Glm4v": ({"head_dim": 16, "rope_parameters": _HALF_ROTATED}, _GLM_VISION),
    "Glm46V": (
        {"model_type": "glm4v_text", "head_dim": 16, "rope_parameters": _HALF_ROTATED},
        _GLM_VISION | {"model_type": "glm4v_vision"},
    ),
    "Glm4vMoe": (
        {
            "head_dim": 16,
            "rope_parameters": _HALF_ROTATED,
            "initializer_range": 0.2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
        },
        _GLM_VISION,
    ),
    "GotOcr2": ({"model_type": "qwen2"}, {}),
    "Idefics3": ({"model_type": "llama"}, _VISION),
    "LightOnOcr": ({"model_type": "qwen3", "head_dim": 32}, _VISION | {"model_type": "pixtral"}),
    "LlavaNext": ({"model_type": "mistral", "sliding_window": 9}, _VISION | {"model_type": "clip_vision_model"}),
    "LlavaNextVideo": ({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "Ovis2": ({"model_type": "qwen2"}, _VISION),
    "SmolVLM": ({"model_type": "llama"}, _VISION),
    "Voxtral": ({"model_type": "llama"}, _AUDIO),
    "VipLlava": ({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "InternVL": (
        {"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 12, "moe_intermediate_size": 32},
        _VISION | {"model_type": "internvl_vision"},
    ),
    "Llava": ({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model"}),
    "LlavaOnevision": ({"model_type": "qwen2"}, _VISION | {"model_type": "siglip_vision_model"}),
    "Mistral3": ({"model_type": "mistral", "sliding_window": 9}, _VISION | {"model_type": "pixtral"}),
    "Qwen2Audio": ({"model_type": "qwen2"}, _AUDIO),
    "Qwen2VL": (
        {"rope_parameters": _THREE_POSITIONS},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 4},
    ),
    "Qwen2_5_VL": ({"rope_parameters": _THREE_POSITIONS}, _QWEN_VISION),
    "Qwen3VL": (
        {"head_dim": 16, "rope_parameters": _THREE_POSITIONS},
        _QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "Qwen3VLMoe": (
        {"num_experts": 12, "moe_intermediate_size": 48, "head_dim": 16, "rope_parameters": _THREE_POSITIONS},
        _QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
}
# What people know the models of a family as, where it is not the family's name.
KNOWN_AS = {
    "Llama": "Llama 2 and 3, SmolLM2",
    "Gemma": "Gemma",
    "Gemma2": "Gemma 2",
    "Gemma3": "Gemma 3 (text)",
    "Olmo2": "OLMo 2",
    "Olmo3": "OLMo 3",
    "Olmo": "OLMo 1",
    "Phi": "Phi-1 and 2",
    "Phi3": "Phi-3 and 4",
    "GPTJ": "GPT-J",
    "Ministral3": "Ministral 3",
    "Granite": "Granite 3 (dense)",
    "GraniteMoeHybrid": "Granite 4 (attention alone, dense)",
    "Glm": "GLM 4 9B (2024)",
    "InternLM2": "InternLM 2 and 2.5",
    "InternLM3": "InternLM 3",
    "Exaone": "EXAONE 3 and 3.5",
    "Xverse": "XVERSE",
    "PanguEmbedded": "openPangu Embedded",
    "BailingMoe": "Ling and Ring 1 (mixtures of experts)",
    "BailingMoeV2": "Ling and Ring 2 (mixtures of experts)",
    "Jais2": "Jais 2",
    "MiniCPM": "MiniCPM 1, 2 and 4",
    "MiniCPM3": "MiniCPM 3",
    "FlexOlmo": "FlexOLMo",
    "Mistral4": "Mistral 4",
    "Glm4": "GLM 4",
    "Ernie4_5": "ERNIE 4.5 (dense)",
    "Ernie4_5_Moe": "ERNIE 4.5 (mixtures of experts)",
    "HunYuanDenseV1": "Hunyuan (dense)",
    "HunYuanMoEV1": "Hunyuan (mixtures of experts)",
    "SeedOss": "Seed-OSS",
    "Exaone4": "EXAONE 4",
    "Arcee": "Arcee AFM",
    "Nemotron": "Nemotron 4, Minitron",
    "StableLm": "StableLM",
    "Dots1": "dots.llm1",
    "MiniMaxM2": "MiniMax M2",
    "Cohere": "Command R, Aya",
    "Glm4Moe": "GLM 4.5 and 4.6",
    "Glm4MoeLite": "GLM 4.7 Flash",
    "DeepseekV2": "DeepSeek V2",
    "DeepseekV3": "DeepSeek V3 and R1",
    "GptOss": "gpt-oss",
    "GraniteMoe": "Granite 3 (mixtures of experts)",
    "Olmoe": "OLMoE",
    "Qwen2Moe": "Qwen2-MoE (shared expert)",
    "Qwen3Moe": "Qwen3-MoE",
    "Cohere2": "Command R7B (Cohere 2)",
    "GPTNeoX": "GPT-NeoX, Pythia",
    "Starcoder2": "StarCoder 2",
}
# Published models that are compared too, and where.
PUBLISHED = {
    "Llama": "SmolLM2 135M ([generation](../../tests/engine/test_transformers_generate.py))",
    "Gemma3": "Gemma 3 270M ([logits, tokens](../../tests/models/test_gemma_file.py))",
}
DOCUMENTED = Path(__file__).parents[2] / "docs" / "serve" / "models.md"


def table() -> str:
    """The table of docs/serve/models.md: `python -m tests.models.test_families` writes it anew."""
    lines = [
        "| family | Hugging Face folder | GGUF | CPU | GPU | compared beyond random weights |",
        "|---|---|---|---|---|---|",
    ]
    for family in sorted((*FAMILIES, *RELATIVES), key=lambda family: KNOWN_AS.get(family, family).lower()):
        native = NATIVE_ARCHITECTURES[f"{family}ForCausalLM"]
        gpu = "Triton" if native.layer.norm == "rms" and not native.layer.rotates_first else "Triton, norms in torch"
        gpu = "through transformers" if native.experts else gpu
        cells = [
            KNOWN_AS.get(family, family),
            f"`{family}ForCausalLM`",
            f"`{native.gguf_name}`" if native.gguf_name else "",
            "C++",
            gpu,
        ]
        lines.append("| " + " | ".join([*cells, PUBLISHED.get(family, "")]) + " |")
    return "\n".join(lines) + "\n"


def test_every_family_is_here_and_in_the_documentation() -> None:
    assert {f"{family}ForCausalLM" for family in (*FAMILIES, *RELATIVES)} == set(NATIVE_ARCHITECTURES)
    assert {f"{name}ForConditionalGeneration" for name in WRAPPERS} == text_models.WRAPPERS
    assert table() in DOCUMENTED.read_text()


@pytest.mark.parametrize("kind", ["folder", pytest.param("gguf", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_transformers_logits_in_the_library_and_in_torch(family: str, kind: str, tmp_path: Path) -> None:
    fields, keys = FAMILIES[family]
    if kind == "gguf" and keys is None:
        pytest.skip("no GGUF files of its own")
    model = make_model(family, **fields)
    if kind == "folder":
        model.save_pretrained(tmp_path / "model")
    else:
        write_gguf(tmp_path / "model", model, keys=keys)
    _assert_transformers_logits(resolve_model(str(tmp_path / "model")), model)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("family", RELATIVES)
def test_a_family_without_a_class_has_the_logits_of_one_with_its_layers(family: str, kind: str, tmp_path: Path) -> None:
    other, fields, keys = RELATIVES[family]
    model, native = make_model(other, **fields), NATIVE_ARCHITECTURES[f"{family}ForCausalLM"]
    if native.experts and not native.experts.corrected:
        for name, tensor in model.named_parameters():
            if name.endswith("correction_bias"):
                torch.nn.init.zeros_(tensor)
    if kind == "folder":
        write_relative(tmp_path / "model", model, family)
    else:
        write_gguf(tmp_path / "model", model, architecture=native.gguf_name, keys=keys)
    _assert_native_logits(tmp_path / "model", model)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_falcon_of_7b_has_one_norm_a_layer_and_one_kv_head(kind: str, tmp_path: Path) -> None:
    model = make_model("Falcon", num_key_value_heads=1, ffn_hidden_size=96)
    if kind == "folder":
        model.save_pretrained(tmp_path / "model")
    else:
        write_gguf(tmp_path / "model", model)
    _assert_native_logits(tmp_path / "model", model)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("max_len", [32, 256])
def test_longrope_takes_the_factors_of_the_longest_sequence(max_len: int, kind: str, tmp_path: Path) -> None:
    factors = {"short": [1.0 + i / 8 for i in range(6)], "long": [4.0 + i for i in range(6)]}
    scaling = {f"{kind}_factor": values for kind, values in factors.items()}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "factor": 4.0, **scaling}
    fields = {"pad_token_id": 0, "original_max_position_embeddings": 64}
    model = make_model("Phi3", rope_parameters=rope | {"original_max_position_embeddings": 64}, **fields)
    if kind == "folder":
        model.save_pretrained(tmp_path / "model")
    else:
        keys = {
            "phi3.rope.dimension_count": 12,
            "phi3.rope.scaling.original_context_length": 64,
            "phi3.rope.scaling.attn_factor": model.model.rotary_emb.attention_scaling,
        }
        tensors = {f"rope_factors_{kind}.weight": np.array(values, np.float32) for kind, values in factors.items()}
        write_gguf(tmp_path / "model", model, keys=keys, tensors=tensors)
    if max_len == 256:  # transformers takes the long factors where a batch is longer, and so for all its sequences
        rotary = model.model.rotary_emb
        rotary.inv_freq, rotary.rope_type = _frequencies(factors["long"]), "default"
    _assert_transformers_logits(replace(resolve_model(str(tmp_path / "model")), max_len=max_len), model)


@pytest.mark.parametrize("max_len", [32, 40])
def test_dynamic_rope_takes_the_base_of_the_longest_sequence(max_len: int, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make_model("Llama", max_position_embeddings=32, rope_parameters=rope)
    model.save_pretrained(tmp_path / "model")
    _assert_native_logits(tmp_path / "model", model, lengths=[max_len])


def _frequencies(factors: list[float]) -> torch.Tensor:
    return 1 / (torch.tensor(factors) * 10000.0 ** (torch.arange(0, 12, 2) / 12))


def _assert_transformers_logits(source: ModelSource, model: Any) -> None:
    config = load_model_config(source)
    assert config.runs_natively
    weights = open_weights(source, config)
    sequences = random_sequences(config.vocab_size, [40, 5, 23])
    expected = whole_logits(model, sequences)
    in_torch = Decoder(config, weights, dtype=torch.float32)
    assert_same_logits(paged_logits(in_torch, sequences), expected)
    if kernels.available():
        ours = make_decoder(config, weights, dtype=torch.float32, device=torch.device("cpu"))
        assert isinstance(ours, NativeDecoder)
        assert_same_logits(paged_logits(ours, sequences, attention=NativeAttention()), expected)
        # The same weights through the library's packed products, but not its steps.
        assert_same_logits(paged_logits(ours, sequences, attention=ReferenceAttention()), expected)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_model_of_one_that_reads_images_runs_natively(name: str, tmp_path: Path) -> None:
    text, vision = WRAPPERS[name]
    model = make_wrapper(name, text, vision)
    model.save_pretrained(tmp_path)
    _assert_native_logits(tmp_path, model)


def _assert_native_logits(folder: Path, model: Any, lengths: Sequence[int] = (40, 5)) -> None:
    source = replace(resolve_model(str(folder)), max_len=max(lengths))
    config = load_model_config(source)
    assert config.runs_natively
    ours = make_decoder(config, open_weights(source, config), dtype=torch.float32, device=torch.device("cpu"))
    sequences = random_sequences(config.vocab_size, lengths)
    logits = paged_logits(ours, sequences, attention=NativeAttention() if kernels.available() else None)
    assert_same_logits(logits, whole_logits(model, sequences))


def test_experts_are_read_as_published_folders_have_them(tmp_path: Path) -> None:
    """Inputs first; transformers saves Qwen3-VL-MoE with outputs first, and reads both."""
    model = make_wrapper("Qwen3VLMoe", *WRAPPERS["Qwen3VLMoe"])
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    _assert_native_logits(tmp_path, model)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("Qwen2", "qwen2vl"), ("Qwen3", "qwen3vl"), ("Qwen3Moe", "qwen3vlmoe"), ("Granite", "granitehybrid")],
)
def test_a_gguf_file_of_a_text_model_has_the_logits_of_its_family(
    family: str, architecture: str, tmp_path: Path
) -> None:
    fields, keys = FAMILIES[family]
    model = make_model(family, **fields)
    keys = {f"{architecture}.{key.partition('.')[2]}": value for key, value in (keys or {}).items()}
    write_gguf(tmp_path / "model.gguf", model, architecture=architecture, keys=keys)
    source = resolve_model(str(tmp_path / "model.gguf"))
    config = load_model_config(source)
    sequences = random_sequences(config.vocab_size, [23, 5])
    ours = Decoder(config, open_weights(source, config), dtype=torch.float32)
    assert_same_logits(paged_logits(ours, sequences), whole_logits(model, sequences))


@pytest.mark.skipif(not kernels.available(), reason="C++ kernels not compiled")
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *(("Qwen2Moe", kind) for kind in ("F32", "Q8_0", "Q4_0", "Q5_K")),
        *(("DeepseekV3", kind) for kind in ("F32", "Q8_0")),
        ("GptOss", "MXFP4"),
    ],
)
def test_a_mixtures_rows_have_the_same_bits_alone_and_in_a_batch(
    family: str, quantization: str, tmp_path: Path
) -> None:
    fields, keys = FAMILIES[family]
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    if family == "DeepseekV3":  # widths that divide into blocks of 32
        wide = {"q_lora_rank": 64, "qk_nope_head_dim": 32}
        keys = (keys or {}) | {"deepseek2.attention.q_lora_rank": 64, "deepseek2.attention.key_length_mla": 48}
    model = make_model(family, **{**fields, **(wide if family != "GptOss" else {}), "initializer_range": 0.1})
    write_gguf(tmp_path / "model.gguf", model, quantization=quantization, keys=keys)
    source = resolve_model(str(tmp_path / "model.gguf"))
    config = load_model_config(source)
    weights = open_weights(source, config)
    ours = make_decoder(config, weights, dtype=torch.bfloat16, device=torch.device("cpu"), quantised=True)
    sequences = random_sequences(config.vocab_size, [30, 5, 23])
    threads = kernels.num_threads()
    attention = NativeAttention()
    together = paged_logits(ours, sequences, attention=attention, dtype="bfloat16", longest_chunk=25)
    kernels.set_num_threads(1)
    try:
        for sequence, logits in zip(sequences, together, strict=True):
            (alone,) = paged_logits(ours, [sequence], attention=attention, dtype="bfloat16", longest_chunk=3)
            assert torch.equal(alone, logits)
    finally:
        kernels.set_num_threads(threads)
    if quantization != "Q5_K":  # whose blocks are random
        exact = paged_logits(Decoder(config, weights, dtype=torch.float32), sequences)
        similar = torch.cosine_similarity(torch.cat(together), torch.cat(exact))
        assert similar.median() > 0.99


if __name__ == "__main__":
    text = DOCUMENTED.read_text()
    before, after = text.split("| family |")[0], text.split("|\n\n", 1)[1]
    DOCUMENTED.write_text(f"{before}{table()}\n{after}")

"""The families of the text models in models that also read images or sound, which change nothing where a prompt is
text."""

from __future__ import annotations

from dataclasses import replace

from octavo.checkpoint.families import NATIVE_ARCHITECTURES, STACKED_EXPERTS
from octavo.checkpoint.model_config import LayerDescription
from octavo.checkpoint.native_architecture import Experts, NativeArchitecture, config_defaults
from octavo.checkpoint.tensor_names import TensorNames

WRAPPERS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Gemma3", "Glm46V", "Glm4v", "Glm4vMoe", "GotOcr2", "Idefics3", "InternVL", "LightOnOcr", "Llava"),
        *("LlavaNext", "LlavaNextVideo", "LlavaOnevision", "Mistral3", "Ovis2", "Qwen2Audio", "Qwen2VL", "Qwen2_5_VL"),
        *("Qwen3VL", "Qwen3VLMoe", "SmolVLM", "VipLlava", "Voxtral"),
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
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
# What differs in their checkpoints, by the same `model_type`.
_TEXT_CHECKPOINTS = {
    "glm4v_text": replace(
        NATIVE_ARCHITECTURES["Glm4ForCausalLM"],
        partial_rotary=1.0,
        defaults=config_defaults(eps=1e-5, kv_heads=2, attention_bias=True),
    ),
    "glm4v_moe_text": replace(
        NATIVE_ARCHITECTURES["Glm4MoeForCausalLM"],
        layer=LayerDescription(),
        defaults=config_defaults(
            NATIVE_ARCHITECTURES["Glm4MoeForCausalLM"].defaults, first_k_dense_replace=1, attention_bias=True
        ),
    ),
    "qwen3_vl_moe_text": replace(
        NATIVE_ARCHITECTURES["Qwen3MoeForCausalLM"],
        names=TensorNames(STACKED_EXPERTS),
        experts=Experts("moe_intermediate_size"),
        defaults=config_defaults(kv_heads=16, experts=(60, 4, 1408), sliding_window=None, rope_theta=500000.0),
    ),
}
# The same by GGUF's names, whose files hold the text model alone, and hybrid models that have attention in all layers.
GGUF_TEXT_MODELS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe", "granitehybrid": "granite"}


def text_architecture(architecture: str, model_type: object) -> str:
    """Return the architecture of the text model in one that also reads images, by its `model_type`; any other is its
    own."""
    return _TEXT_MODELS.get(str(model_type), architecture) if architecture in WRAPPERS else architecture


def native_architecture(architecture: str, model_type: object) -> NativeArchitecture | None:
    """Return the row of an architecture, or of the text model in one that also reads images; None if there is none."""
    own = _TEXT_CHECKPOINTS.get(str(model_type))
    return own or NATIVE_ARCHITECTURES.get(text_architecture(architecture, model_type))

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from octavo.checkpoint.families import NATIVE_ARCHITECTURES
from octavo.checkpoint.hf_config import hf_model_config
from octavo.checkpoint.model_config import ExpertsConfig, LayerDescription, ModelConfig, RopeConfig
from octavo.checkpoint.share import kv_heads_of, query_heads_of
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.loader import expected_shapes
from octavo.models.transformers_bridge import TransformersModel
from octavo.planner.known_models import KNOWN_MODELS
from octavo.planner.model_shape import divide, even_groups, model_shape
from octavo.planner.sources import find_shape
from tests.models.tiny import make_model, write_gguf, write_hf_model

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    **EXPERTS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 3},
    "Qwen3Moe": {"num_experts": 6, "head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": [3], **EXPERTS},
    "Gemma2": {"head_dim": 16, "sliding_window": 32},
    "Gemma3": {"head_dim": 16, "sliding_window": 32, "num_hidden_layers": 7},
    "DeepseekV2": {"q_lora_rank": None, **LATENT},
    "DeepseekV3": {"q_lora_rank": 20, **LATENT},
}


def transformers_model(family: str) -> Any:
    config_class = transformers.Gemma3TextConfig if family == "Gemma3" else getattr(transformers, f"{family}Config")
    config = config_class(**{**SIZES, **FAMILIES[family]})
    config.architectures = [f"{family}ForCausalLM"]
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_counted_as_transformers_builds_it(family: str, tmp_path: Path) -> None:
    model = transformers_model(family)
    raw = model.config.to_dict() | {"tie_word_embeddings": model.config.tie_word_embeddings}
    shape = model_shape("tiny", hf_model_config(raw, tmp_path / "config.json"), raw)
    balance = [tensor for name, tensor in model.named_buffers() if name.endswith("correction_bias")]
    assert shape.parameters.total == model.num_parameters() + sum(tensor.numel() for tensor in balance)
    routed = sum(tensor.numel() for name, tensor in model.named_parameters() if ".experts." in name)
    assert (shape.experts.parameters if shape.experts else 0) == routed
    if shape.experts:
        assert shape.experts.num_used == model.config.num_experts_per_tok


@pytest.mark.parametrize("family", [family for family in FAMILIES if "Deepseek" not in family])
def test_layers_store_what_a_probe_of_the_model_finds(family: str, tmp_path: Path) -> None:
    model = transformers_model(family)
    raw = model.config.to_dict()
    shape = model_shape("tiny", hf_model_config(raw, tmp_path / "config.json"), raw)
    assert shape.kv_layers == TransformersModel(model).kv_layers


def test_of_a_multimodal_model_the_text_model_is_counted(tmp_path: Path) -> None:
    text = transformers_model("Gemma3").config.to_dict()
    alone = model_shape("tiny", hf_model_config(text, tmp_path / "config.json"), text)
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**text, "architectures": None}}
    shape = model_shape("tiny", hf_model_config(raw, tmp_path / "config.json"), raw)
    assert (shape.parameters, shape.kv_layers) == (alone.parameters, alone.kv_layers)
    assert shape.config.architecture == "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize(("family", "every"), [("Gemma2", 2), ("Gemma3", 6)])
def test_windows_follow_the_familys_rule_where_layer_types_are_not_listed(
    family: str, every: int, tmp_path: Path
) -> None:
    raw = transformers_model(family).config.to_dict()
    listed = model_shape("tiny", hf_model_config(raw, tmp_path / "config.json"), raw).kv_layers
    del raw["layer_types"]
    assert model_shape("tiny", hf_model_config(raw, tmp_path / "config.json"), raw).kv_layers == listed
    assert next(i + 1 for i, layer in enumerate(listed) if layer.sliding_window is None) == every


@given(
    architecture=st.sampled_from(sorted(NATIVE_ARCHITECTURES)),
    kv_heads=st.integers(1, 4),
    share=st.integers(1, 4),
    sizes=st.tuples(*[st.integers(1, 40)] * 6),
    flags=st.tuples(*[st.booleans()] * 8),
    experts=st.none()
    | st.builds(
        ExpertsConfig,
        count=st.integers(2, 5),
        active=st.just(2),
        intermediate_size=st.integers(1, 40),
        bias=st.booleans(),
        shared_intermediate_size=st.sampled_from((0, 12)),
    ),
)
def test_native_families_are_counted_as_the_loader_expects_them(
    architecture: str,
    kv_heads: int,
    share: int,
    sizes: tuple[int, int, int, int, int, int],
    flags: tuple[bool, ...],
    experts: ExpertsConfig | None,
) -> None:
    vocab, hidden, inner, layers, head_dim, value_dim = sizes
    qkv_bias, output_bias, mlp_bias, qk_norm, tied, gated, biased_norms, head_bias = flags
    norms: dict[str, Any] = {"norm": "layer", "norm_weights": qkv_bias, "norm_bias": True} if biased_norms else {}
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=kv_heads * share,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        max_position_embeddings=64,
        rope=RopeConfig(rotary_dim=head_dim),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        experts=experts,
        hidden_act="silu" if gated else "xielu",
        head_bias=head_bias,
        layer=LayerDescription(qk_norm="head" if qk_norm else "none", sinks=qk_norm, gated=gated, **norms),
        tie_word_embeddings=tied,
    )
    elements = 0
    for shape in expected_shapes(config).values():
        size = 1
        for dim in shape:
            size *= dim
        elements += size
    assert model_shape("tiny", config).parameters.total == elements


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen2.5-7b", "gemma-3-1b", "deepseek-v2", "mixtral-8x7b"])
def test_devices_together_hold_at_least_the_whole_model_and_each_no_more_than_it(name: str) -> None:
    shape = find_shape(name)
    for devices in even_groups(shape):
        part = divide(shape, devices)
        assert part.parameters.total <= shape.parameters.total <= devices * part.parameters.total
        assert part.num_kv_heads == max(1, shape.num_kv_heads // devices)


def test_kv_heads_are_divided_and_kept_by_several_devices_where_there_are_fewer_of_them() -> None:
    shape = find_shape("llama-3.1-70b")
    assert divide(shape, 4).num_kv_heads == 2
    assert divide(shape, 8).num_kv_heads == divide(shape, 16).num_kv_heads == 1
    assert divide(shape, 16).parameters.kv_projections == divide(shape, 8).parameters.kv_projections


@pytest.mark.parametrize(("name", "devices"), [("smollm2-135m", 2), ("qwen2.5-7b", 3), ("qwen2.5-7b", 8)])
def test_an_uneven_division_gives_the_share_of_the_rank_that_has_most(name: str, devices: int) -> None:
    shape = find_shape(name)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    own = [kv_heads_of(kv_heads, rank, devices) for rank in range(devices)]
    query = [query_heads_of(heads, kv_heads, rank, devices) for rank in range(devices)]
    part = divide(shape, devices)
    assert part.num_kv_heads == max(each.stop - each.start for each in own)
    assert part.num_heads == max(each.stop - each.start for each in query)
    assert shape.parameters.total <= devices * part.parameters.total


def test_a_folder_needs_its_config_json_alone(tmp_path: Path) -> None:
    write_hf_model(tmp_path, "Qwen2")
    whole = find_shape(str(tmp_path)).parameters
    (tmp_path / "model.safetensors").unlink()
    assert find_shape(str(tmp_path)).parameters == whole


def test_a_gguf_file_counts_as_the_folder_it_was_made_from(tmp_path: Path) -> None:
    model = make_model("Llama")
    write_gguf(tmp_path / "tiny.gguf", model, quantization="Q8_0")
    shape = find_shape(str(tmp_path / "tiny.gguf"))
    assert shape.parameters.total == model.num_parameters()
    assert shape.num_kv_heads == 2


def test_another_architecture_is_counted_from_its_files(tmp_path: Path) -> None:
    config = transformers.PersimmonConfig(**SIZES)
    model = transformers.PersimmonForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert find_shape(str(tmp_path)).parameters.total == model.num_parameters()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"PersimmonForCausalLM.*safetensors"):
        find_shape(str(tmp_path))


def test_a_configuration_without_a_size_is_named(tmp_path: Path) -> None:
    row = {key: value for key, value in KNOWN_MODELS["deepseek-v2"].items() if key != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(row))
    with pytest.raises(CorruptModelError, match="hidden_size"):
        find_shape(str(tmp_path))


def test_a_model_unlike_all_known_names_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match="well-known model; give a folder"):
        find_shape("no such/thing at all")

"""What config.json declares, read as transformers reads it; and how a model is found by its name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from octavo.checkpoint import hub, model_source
from octavo.checkpoint.hf_config import read_hf_config
from octavo.checkpoint.model_config import NATIVE_ACTIVATIONS, ModelConfig, RopeConfig
from octavo.checkpoint.model_source import ModelFormat, load_model_config, resolve_model
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.models.ops import ACTIVATIONS, GATES, LEARNT_ACTIVATIONS
from tests.models import tiny

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def read(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_hf_config(folder)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_configuration_that_transformers_saved_is_read_as_transformers_means_it(family: str, tmp_path: Path) -> None:
    model = tiny.make_model(family)
    model.config.architectures = [f"{family}ForCausalLM"]
    model.config.save_pretrained(tmp_path)
    config, theirs = load_model_config(tmp_path), model.config
    assert config.architecture == f"{family}ForCausalLM"
    assert config.runs_natively
    assert config.vocab_size == theirs.vocab_size
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == model.model.layers[0].self_attn.head_dim
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.qkv_bias == (model.model.layers[0].self_attn.q_proj.bias is not None)
    assert config.output_bias == (model.model.layers[0].self_attn.o_proj.bias is not None)
    assert (config.layer.qk_norm == "head") == hasattr(model.model.layers[0].self_attn, "q_norm")
    assert config.eos_token_ids == {2}
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3_SCALING}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING}},
    ],
    ids=["rope_scaling", "type", "rope_parameters"],
)
def test_llama3_scaling_is_read_in_every_spelling(spelling: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | spelling).rope == RopeConfig(
        theta=500000.0, rotary_dim=16, kind="llama3", factor=8.0, original_max_position=128
    )


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mixtral", "SmolLM3"])
def test_a_theta_that_is_not_stated_is_the_default_of_the_familys_class(family: str, tmp_path: Path) -> None:
    theirs = tiny.make_model(family).config.rope_parameters
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 8}
    config = read(tmp_path, LLAMA | sizes | {"architectures": [f"{family}ForCausalLM"]})
    assert config.rope.theta == theirs.get("full_attention", theirs)["rope_theta"]


def test_longrope_chooses_frequencies_by_the_longest_sequence(tmp_path: Path) -> None:
    long, short = [2.0] * 8, [1.5] * 8
    scaling = {"type": "su", "long_factor": long, "short_factor": short}
    phi = LLAMA | {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 128}
    read(tmp_path, phi | {"rope_scaling": scaling})
    ropes = {max_len: read_hf_config(tmp_path, max_len=max_len).rope for max_len in (None, 129, 128)}
    assert {max_len: rope.frequency_factors for max_len, rope in ropes.items()} == {
        None: tuple(long),
        129: tuple(long),
        128: tuple(short),
    }
    assert {rope.attention_factor for rope in ropes.values()} == {math.sqrt(1 + math.log(4) / math.log(128))}
    with pytest.raises(CorruptModelError, match="needs a list of numbers long_factor"):
        read(tmp_path, phi | {"rope_scaling": {**scaling, "long_factor": 2}})


def test_sizes_that_a_text_model_does_not_state_are_its_classes(tmp_path: Path) -> None:
    """As published with Gemma 3 4B."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(tmp_path, {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    theirs = transformers.Gemma3TextConfig(**text)
    assert config.runs_natively
    assert (config.vocab_size, config.num_heads) == (theirs.vocab_size, theirs.num_attention_heads)
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.tie_word_embeddings
    windowed, full = config.layer_ropes[4], config.layer_ropes[5]
    assert windowed
    assert full
    assert (windowed.theta, windowed.kind) == (1e4, "default")
    assert (full.theta, full.kind, full.factor) == (1e6, "linear", 8.0)


def test_the_three_positions_of_an_image_are_one_position_in_text(tmp_path: Path) -> None:
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
    scaled = read(tmp_path, qwen | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}})
    assert scaled == read(tmp_path, qwen)
    assert scaled.runs_natively


def test_linear_scaling_keeps_its_factor(tmp_path: Path) -> None:
    rope = read(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.5}}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.5, 10000.0)


def test_a_scaling_without_its_factor_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="'linear' needs a number factor"):
        read(tmp_path, LLAMA | {"rope_scaling": {"type": "linear"}})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_scaling": {"type": "proportional", "factor": 4.0}}, "proportional"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"architectures": ["PhimoeForCausalLM"]}, "PhimoeForCausalLM"),
    ],
)
def test_what_the_native_decoder_cannot_run_goes_through_transformers_and_says_why(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = read(tmp_path, LLAMA | change)
    assert not config.runs_natively
    assert config.transformers_reason is not None
    assert reason in config.transformers_reason


def test_every_activation_called_native_has_an_implementation() -> None:
    assert set(NATIVE_ACTIVATIONS) <= {*ACTIVATIONS, *GATES, *LEARNT_ACTIVATIONS}


def test_llama_biases_are_read_apart(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA | {"attention_bias": True})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, False)
    config = read(tmp_path, LLAMA | {"mlp_bias": True})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, True)


@pytest.mark.parametrize(
    ("stated", "window"), [({"sliding_window": 7}, 7), ({"sliding_window": None}, None), ({}, 4096)]
)
def test_mistral_windows_every_layer_or_none(stated: dict[str, Any], window: int | None, tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert read(tmp_path, mistral | stated).layer_windows == (window,) * 4


def test_a_llama_ignores_a_window_it_states(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {"sliding_window": 7}).layer_windows == (None,) * 4


@given(
    family=st.sampled_from(["Qwen2", "Qwen3"]),
    use=st.booleans(),
    window=st.sampled_from([None, 8, 16]),
    first=st.integers(0, 6),
    layer_types=st.none() | st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=4, max_size=4),
)
def test_qwen_windows_the_layers_that_transformers_windows(
    family: str,
    use: bool,
    window: int | None,
    first: int,
    layer_types: list[str] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    stated = {"use_sliding_window": use, "sliding_window": window, "max_window_layers": first}
    if layer_types is not None:
        stated["layer_types"] = layer_types  # type: ignore[assignment]
    theirs = getattr(transformers, f"{family}Config")(num_hidden_layers=4, **stated)
    expected = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    config = LLAMA | {"architectures": [f"{family}ForCausalLM"], "num_key_value_heads": 2} | stated
    assert read(tmp_path_factory.mktemp("qwen"), config).layer_windows == expected


def test_qwen3_takes_an_explicit_head_dim(tmp_path: Path) -> None:
    qwen3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
    assert read(tmp_path, qwen3 | {"head_dim": 32}).head_dim == 32
    assert read(tmp_path, qwen3).head_dim == 128


def test_every_id_that_ends_a_text_is_collected(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA | {"eos_token_id": [7, 8]}, generation_config={"eos_token_id": [8, 9]})
    assert config.eos_token_ids == {7, 8, 9}


def test_a_configuration_that_names_no_eos_means_its_class_default_unless_generation_does(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA).eos_token_ids == {2}
    assert read(tmp_path, LLAMA, generation_config={"eos_token_id": 9}).eos_token_ids == {9}


@pytest.mark.parametrize(("key", "name"), [("dtype", "float16"), ("torch_dtype", "float32")])
def test_the_dtype_is_read_in_both_spellings(key: str, name: str, tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | {key: name}).dtype == name


def test_an_unstated_dtype_is_that_of_the_first_tensor(tmp_path: Path) -> None:
    tiny.write_hf_model(tmp_path, "Llama")
    stated = json.loads((tmp_path / "config.json").read_text())
    del stated["dtype"]
    assert read(tmp_path, stated).dtype == "float32"


def test_older_names_of_sizes_are_understood(tmp_path: Path) -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 99}
    config = read(tmp_path, gpt2 | {"vocab_size": 10, "n_inner": None})
    assert (config.hidden_size, config.num_layers, config.num_kv_heads, config.head_dim) == (48, 3, 6, 8)
    assert (config.max_position_embeddings, config.intermediate_size) == (99, 192)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_size_is_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match=key):
        read(tmp_path, {k: v for k, v in LLAMA.items() if k != key})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers must be at most 10000, got 2147483648"),
        ({"max_position_embeddings": 2**63}, "max_position_embeddings must be at most"),
        ({"architectures": 7}, "architectures must be a list of names, got 7"),
        ({"architectures": [None]}, "architectures must be a list of names"),
        ({"hidden_act": None}, "hidden_act must be the name of a function, got None"),
        ({"hidden_act": 0}, "hidden_act must be the name of a function, got 0"),
        ({"text_config": 5}, "wrong type"),
        ({"rms_norm_eps": None}, "wrong type"),
        ({"rms_norm_eps": "small"}, "wrong type"),
        ({"rope_theta": []}, "wrong type"),
        ({"quantization_config": [1]}, "quantization_config must be an object"),
        ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0}, "out of range"),
    ],
)
def test_a_field_of_the_wrong_type_or_out_of_range_is_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CorruptModelError, match=message):
        read(tmp_path, LLAMA | change)


def test_a_configuration_that_is_no_json_is_corrupt(tmp_path: Path) -> None:
    for text in ('{"hidden_size": ', '{"a":' * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CorruptModelError, match="not valid JSON"):
            read_hf_config(tmp_path)


@pytest.mark.parametrize("change", [{"is_encoder_decoder": True}, {"architectures": ["BertForMaskedLM"]}])
def test_a_model_that_is_not_a_decoder_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="decoder"):
        read(tmp_path, LLAMA | change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (
            "octavo.checkpoint.model_source, octavo.text.tokenizer, octavo.checkpoint.gguf_config",
            {"torch", "transformers"},
        ),
        ("octavo.checkpoint.model_source, octavo.text.tokenizer, octavo.models.loader", {"gguf", "transformers"}),
        ("octavo.planner.sources, octavo.simulator.simulation", {"torch", "gguf"}),
    ],
)
def test_what_takes_long_to_import_is_imported_only_where_it_is_needed(modules: str, unwanted: set[str]) -> None:
    code = f"import sys, {modules}; print(*sorted({unwanted} & set(sys.modules)))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == ""


def test_a_folder_and_a_gguf_file_are_found_by_their_paths(tmp_path: Path) -> None:
    read(tmp_path, LLAMA)
    assert resolve_model(str(tmp_path)).format is ModelFormat.HUGGINGFACE
    model = tmp_path / "file" / "model.gguf"
    model.parent.mkdir()
    tiny.write_gguf(model, tiny.make_model("Llama"))
    assert resolve_model(str(model)).format is ModelFormat.GGUF
    assert resolve_model(str(model.parent)).path == model


def test_a_folder_with_several_gguf_files_asks_for_one_of_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"name one: .*a\.gguf.*b\.gguf"):
        resolve_model(str(tmp_path))


def test_an_adapters_folder_says_what_to_do_with_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(UnsupportedModelError, match=r"adapter \(LoRA\) for org/base.*merge_and_unload"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"intermediate_size": [64, 96]}, "intermediate_size differs between layers"),
        ({"architectures": ["MambaForCausalLM"], "num_attention_heads": None}, "has no num_attention_heads"),
        ({"architectures": ["NemotronHForCausalLM"], "num_hidden_layers": None}, "has no num_hidden_layers"),
    ],
)
def test_whole_checkpoints_that_cannot_be_run_are_not_called_corrupt(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        read(tmp_path, LLAMA | change)


def test_a_null_gives_way_to_another_name_of_the_same_field(tmp_path: Path) -> None:
    cohere = {"architectures": ["Cohere2ForCausalLM"], "rms_norm_eps": None, "layer_norm_eps": 1e-3}
    assert read(tmp_path, LLAMA | cohere).norm_eps == 1e-3


def test_a_window_of_zero_is_none_and_equal_sizes_may_be_listed_by_layer(tmp_path: Path) -> None:
    moe = {"architectures": ["Qwen2MoeForCausalLM"], "sliding_window": 0, "intermediate_size": [96, 96]}
    moe |= {"num_key_value_heads": 2}
    config = read(tmp_path, LLAMA | moe | {"text_config": None})
    assert set(config.layer_windows) == {None}
    assert config.intermediate_size == 96


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither a config\.json nor a GGUF"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "models/a/b", "model.gguf", "org/model.gguf", "~/model"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError, match="there is no file or folder"):
        resolve_model(name)


def test_a_hub_id_that_cannot_be_fetched_says_what_else_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFoundError) as error:
        resolve_model("org/model")
    for part in ("org/model", "no connection", "local folder", ".gguf", "HF_HUB_CACHE", "smollm2"):
        assert part in str(error.value)


def test_a_hub_id_in_the_cache_is_its_snapshot_folder_which_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").touch()
    asked = []

    def download(hub_id: str, **_: Any) -> str:
        asked.append(hub_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(model_source, "download", cache(hub.download.__wrapped__))
    for _ in range(2):
        source = resolve_model("org/model")
        assert (source.name, source.path) == ("org/model", tmp_path)
    assert asked == ["org/model"]

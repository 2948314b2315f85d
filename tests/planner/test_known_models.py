from __future__ import annotations

from pathlib import Path

import pytest

from octavo.checkpoint.hf_config import hf_model_config
from octavo.planner.known_models import KNOWN_MODELS, known_config, nearest_names
from octavo.planner.model_shape import ModelShape, model_shape
from octavo.planner.sources import find_shape

# What the hub reports for the published safetensors; DeepSeek-V3's without its multi-token prediction module and the
# scales of its FP8 weights.
PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}


def known_shape(name: str) -> ModelShape:
    row = KNOWN_MODELS[name]
    return model_shape(name, hf_model_config(row, Path(name) / "config.json"), row)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items())
def test_a_row_counts_to_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert known_shape(name).parameters.total == parameters


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_every_row_is_a_model_found_by_its_own_name(name: str) -> None:
    shape = find_shape(name)
    assert shape.name == name
    assert len(shape.kv_layers) == shape.config.num_layers


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("llama3.1:70b", "llama-3.1-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
    ],
)
def test_hub_ids_and_other_spellings_are_understood(called: str, name: str) -> None:
    found = known_config(called)
    assert found is not None
    assert found[0] == name


def test_a_version_that_is_not_the_models_is_not_guessed() -> None:
    assert known_config("llama-3.4-70b") is None


def test_the_nearest_names_come_first() -> None:
    assert nearest_names("lama-3.1-70")[0] == "llama-3.1-70b"
    assert nearest_names("owner/Qwen2.5-14")[0] == "qwen2.5-14b"
    assert nearest_names("zzzzzz") == []


@pytest.mark.parametrize(
    ("name", "full", "sliding", "window"),
    [("mistral-7b-v0.1", 0, 32, 4096), ("gemma-2-9b", 21, 21, 4096), ("gemma-3-27b", 10, 52, 1024)],
)
def test_windows_are_those_of_the_family(name: str, full: int, sliding: int, window: int) -> None:
    windows = [layer.sliding_window for layer in known_shape(name).kv_layers]
    assert (windows.count(None), windows.count(window)) == (full, sliding)

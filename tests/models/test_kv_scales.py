"""Scales of calibrated codecs come from the checkpoint or the first tokens, and a scale of 1.0 is announced."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.model_source import model_fingerprint, resolve_model
from octavo.errors import ConfigError, CorruptModelError
from octavo.models.kv_scale_file import Origin, default_scales_path, write_scales
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM


def with_scales(source: Path, folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    """The model with more tensors, as llm-compressor writes them beside the weights."""
    shutil.copytree(source, folder)
    save_file({**load_file(folder / "model.safetensors"), **scales}, folder / "model.safetensors", {"format": "pt"})
    return folder


def both_layers(key: float, value: float) -> dict[str, torch.Tensor]:
    names = {"k_scale": key, "v_scale": value}
    return {f"model.layers.{i}.self_attn.{n}": torch.tensor([x]) for i in range(2) for n, x in names.items()}


def test_the_checkpoints_scales_reach_the_cache_and_tell_its_blocks_apart(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = set()
    for i, scales in enumerate((both_layers(0.25, 0.5), both_layers(0.25, 0.75))):
        core = make_llm(with_scales(tiny_llama, tmp_path / str(i), scales), kv_cache_dtype="fp8").core
        (layer, _) = core.runner.arena.coded_layers
        assert (layer.keys.scale[0].item(), layer.values.scale[0].item()) == (0.25, 0.5 + 0.25 * i)
        roots.add(bytes(core.scheduler.kv.prefix_cache.full_blocks(list(range(16)), "").keys))
    assert len(roots) == 2
    assert "NOT CALIBRATED" not in caplog.text


def test_a_default_scale_of_one_is_announced(
    make_llm: MakeLLM, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_llm(tiny_llama, kv_cache_dtype="fp8_e5m2")
        assert "THE KV CACHE IS NOT CALIBRATED" in caplog.text
        caplog.clear()
        make_llm(tiny_llama, kv_cache_dtype="int8")
        make_llm(tiny_llama, kv_cache_dtype="fp8_e5m2", calculate_kv_scales=True)
        assert "CALIBRATED" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.self_attn.v_scale": torch.tensor([0.0])}, "not positive"),
        ({"model.layers.1.self_attn.v_scale": torch.ones(7)}, "7 numbers"),
        ({"model.layers.1.self_attn.v_scale": None}, "no v_scale of layer 1"),
        ({"model.layers.1.self_attn.v_scale": torch.tensor([1e30])}, r"v_scale \[1.*e\+30\] of layer 1"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor([1e-30])}, r"k_scale \[1.*e-30\] of layer 0"),
    ],
)
def test_scales_that_cannot_be_are_refused(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path, change: dict, message: str
) -> None:
    scales = {name: x for name, x in {**both_layers(1.0, 1.0), **change}.items() if x is not None}
    with pytest.raises(CorruptModelError, match=message):
        make_llm(with_scales(tiny_llama, tmp_path / "bad", scales), kv_cache_dtype="fp8")


@pytest.mark.parametrize("codec", ["fp8_e4m3", "nvfp4"])
def test_the_first_tokens_choose_scales_that_hold_from_then_on(make_llm: MakeLLM, tiny_llama: Path, codec: str) -> None:
    llm = make_llm(tiny_llama, kv_cache_dtype=codec, calculate_kv_scales=True)
    layers = llm.core.runner.arena.coded_layers
    assert all(layer.finds_scales for layer in layers)
    prompt, params = {"prompt_token_ids": list(range(5, 40))}, SamplingParams(max_tokens=6, temperature=0)
    (first,) = llm.generate(prompt, params, use_tqdm=False)
    chosen = [layer.keys.scale.clone() for layer in layers]
    assert all(bool((scale != 1).all()) for scale in chosen)
    (again,) = llm.generate(prompt, params, use_tqdm=False)
    assert again.num_cached_tokens
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert all(torch.equal(a, layer.keys.scale) for a, layer in zip(chosen, layers, strict=True))


def calibrated(model: str, folder: Path, dtype: str, change: Any = None) -> Path:
    """A file of scales for the tiny model, as `octavo calibrate` writes it."""
    source = resolve_model(model)
    scales = {i: {"k": torch.tensor([0.25, 0.5]), "v": torch.tensor([0.125, 0.75])} for i in range(2)}
    if change is not None:
        change(scales)
    path = folder / f"{dtype}.toml"
    write_scales(path, source, dtype, scales, Origin("max", "a text", 99))
    return path


def test_scales_of_a_file_reach_the_cache_and_tell_its_blocks_apart(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = set()
    with caplog.at_level(logging.INFO):
        for value in (0.75, 0.5):
            file = calibrated(
                str(tiny_llama), tmp_path, "fp8_e4m3", lambda scales, v=value: scales[1]["v"].copy_(torch.tensor(v))
            )
            core = make_llm(tiny_llama, kv_cache_dtype="fp8", kv_scales=str(file)).core
            last = core.runner.arena.coded_layers[-1]
            assert (last.keys.scale.tolist(), last.values.scale.tolist()) == ([0.25, 0.5], [value, value])
            roots.add(bytes(core.scheduler.kv.prefix_cache.full_blocks(list(range(16)), "").keys))
    assert len(roots) == 2
    assert f"from {file} (max over 99 tokens of a text)" in caplog.text
    assert "NOT CALIBRATED" not in caplog.text


def test_scales_beside_the_model_are_found_and_are_no_part_of_its_fingerprint(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    before = model_fingerprint(folder)
    path = default_scales_path(resolve_model(str(folder)), "fp8_e5m2")
    assert path == folder / "kv_scales-fp8_e5m2.toml"
    calibrated(str(folder), tmp_path, "fp8_e5m2").rename(path)
    assert model_fingerprint(folder) == before
    core = make_llm(folder, kv_cache_dtype="fp8_e5m2").core
    assert core.runner.arena.coded_layers[0].values.scale.tolist() == [0.125, 0.75]
    other = make_llm(folder, kv_cache_dtype="fp8_e4m3").core
    assert other.runner.arena.coded_layers[0].values.scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        ("fp8_e5m2", None, "are for a KV cache in 'fp8_e5m2', but this one is in fp8_e4m3"),
        ("fp8_e4m3", lambda s: s.pop(1), "cover 1 layers, but this cache has 2"),
        ("fp8_e4m3", lambda s: s[1].update(v=torch.ones(3)), "v of layer 1 is 3 numbers, but there are 2 KV heads"),
        ("fp8_e4m3", lambda s: s[0].pop("k"), "k of layer 0 is nothing, but there are 2 KV heads"),
        ("fp8_e4m3", lambda s: s[0]["k"].copy_(torch.tensor(-1.0)), "contains -1.0, which is not a positive number"),
        (
            "fp8_e4m3",
            lambda s: s[0]["k"].copy_(torch.tensor(float("nan"))),
            "contains nan, which is not a positive",
        ),
    ],
)
def test_a_file_for_another_codec_or_shape_is_refused(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path, dtype: str, change: Any, message: str
) -> None:
    file = calibrated(str(tiny_llama), tmp_path, dtype, change)
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_llm(tiny_llama, kv_cache_dtype="fp8", kv_scales=str(file))


def test_a_file_for_another_model_is_refused(
    make_llm: MakeLLM, tiny_llama: Path, tiny_mistral: Path, tmp_path: Path
) -> None:
    file = calibrated(str(tiny_mistral), tmp_path, "fp8_e4m3")
    with pytest.raises(ConfigError, match=f"for another model: .* but {re.escape(str(tiny_llama))} has"):
        make_llm(tiny_llama, kv_cache_dtype="fp8", kv_scales=str(file))


def test_scales_for_a_codec_without_any_are_refused(make_llm: MakeLLM, tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="a KV cache in int8 has no scales that are chosen beforehand"):
        make_llm(tiny_llama, kv_cache_dtype="int8", kv_scales="scales.toml")
    with pytest.raises(ConfigError, match="kv_scales and calculate_kv_scales contradict each other"):
        make_llm(tiny_llama, kv_cache_dtype="fp8", kv_scales="scales.toml", calculate_kv_scales=True)

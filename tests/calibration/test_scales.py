"""Each way to choose scales does what it says, and what is written is what a server serves with."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from octavo import cli
from octavo.calibration.scales import choose
from octavo.storage.codec import CODECS
from tests.conftest import MakeLLM

CODEC = CODECS["fp8_e4m3"][0]


def numbers(heads: int = 2) -> torch.Tensor:
    x = torch.randn(200, heads, 16, generator=torch.Generator().manual_seed(1))
    x[7, 0, 3] = 900.0  # one outlier in head 0
    return x


def error(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (CODEC.decode(CODEC.encode(x, scale), 16, scale) - x).square().sum((0, 2))


def test_the_maximum_cuts_nothing_off() -> None:
    scale = choose(CODEC, numbers(), "max")
    assert scale[0].item() == pytest.approx(900 / 448)
    assert CODEC.decode(CODEC.encode(numbers(), scale), 16, scale)[7, 0, 3].item() == pytest.approx(900)


def test_a_percentile_leaves_the_outlier_out() -> None:
    scale = choose(CODEC, numbers(), "percentile", 99.9)
    assert scale[0] < 5 / 448
    assert torch.equal(choose(CODEC, numbers(), "percentile", 100.0), choose(CODEC, numbers(), "max"))


def test_the_least_squared_error_is_no_worse_than_the_maximum_nor_any_percentile_of_its_grid() -> None:
    x = numbers()
    best = error(x, choose(CODEC, x, "mse"))
    for part in (1.0, 0.5, 0.25):
        assert bool((best <= error(x, choose(CODEC, x, "max") * part) + 1e-6).all())


def test_a_head_of_zeros_gets_a_scale_that_divides() -> None:
    x = numbers()
    x[:, 1] = 0.0
    for method in ("max", "percentile", "mse"):
        assert choose(CODEC, x, method)[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mistral"])
def test_what_calibrate_writes_is_found_beside_the_model_and_reaches_the_cache(
    make_llm: MakeLLM,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    model: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(request.getfixturevalue(model), folder)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    argv = ["calibrate", str(folder), "--data", str(text), "--windows", "2", "--window", "40", "--json"]
    small = ["--num-threads", "1", "--dtype", "float32"]
    assert cli.main([*argv, *small, "--method", "max", "--kv-cache-dtype", "fp8"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["file"] == str(folder / "kv_scales-fp8_e4m3.toml")
    assert answer["tokens"] == 80
    assert 0 < answer["errors"]["k"] < 0.05
    with caplog.at_level(logging.INFO):
        core = make_llm(folder, kv_cache_dtype="fp8").core
    assert f"from {answer['file']} (max over 80 tokens of {text})" in caplog.text
    scale = core.runner.arena.coded_layers[0].keys.scale
    assert bool((scale < 1).all() and (scale > 0).all())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-cache-dtype", "int8"], "a KV cache in int8 needs no scales; those that do are fp8_e4m3"),
        (["--data", "/none.txt"], "cannot read the text /none.txt"),
        (["--percentile", "0"], "percentile must be above 0"),
        (["--search", "--kv-cache-dtype", "int8"], "instead of --kv-cache-dtype"),
        (["--search", "--bits", "3"], "3 bits a number are fewer than the 4 of int4"),
        (["--search", "--candidates", "int8,fp8_e4m3"], "not 'fp8_e4m3'"),
        (["--search", "--exchanges", "-1"], "exchanges must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_calibrated_says_why(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.setattr("octavo.calibration.text.english", lambda: "The quick brown fox jumps. " * 40)
    small = ["--num-threads", "1", "--dtype", "float32", "--window", "40", "--windows", "1"]
    assert cli.main(["calibrate", str(tiny_llama), *small, *argv]) == 1
    assert message in capsys.readouterr().err

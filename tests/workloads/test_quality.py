"""`octavo quality`: the unquantised cache loses nothing against itself, codecs lose what they lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import cli
from octavo.planner.model_shape import ModelShape
from octavo.workloads import budget_quality, quality
from tests.models.tiny import write_hf_model

ARGUMENTS = ["--windows", "2", "--window", "80", "--needle-lengths", "20", "--dtype", "float32", "--num-threads", "1"]


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "english", lambda: "The quick brown fox jumps over the lazy dog. " * 12)
    monkeypatch.setattr(quality, "GREEDY_TOKENS", 6)


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["quality", *ARGUMENTS, *argv, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_each_codec_is_compared_with_the_unquantised_cache(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codecs = ("--codecs", "float32,int8,int4", "--max-model-len", "256", "--plot", str(tmp_path / "p.png"))
    code, answer = ask(capsys, str(tiny_llama), *codecs)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    plain, same, int8, int4 = answer["codecs"]
    assert code == 0
    assert (plain["kv_cache_dtype"], plain["ppl_increase"], plain["kl"], plain["top1"]) == ("float32", 0.0, 0.0, 1.0)
    assert {**plain} == {**same}
    assert plain["diverges_at"] == 6
    assert 0 <= int8["kl"] <= int4["kl"] < 1
    assert plain["bytes_per_token"] > int8["bytes_per_token"] > int4["bytes_per_token"]
    assert plain["perplexity"] > 1


@pytest.mark.slow
def test_a_table_of_codecs_by_layer_is_compared_too(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (table := tmp_path / "mine.toml").write_text('keys = "int8"\nvalues = ["int8", "int4"]')
    code, answer = ask(capsys, str(tiny_llama), "--codecs", f"k8v4,{table}", "--max-model-len", "256")
    plain, uniform, mine = answer["codecs"]
    assert (code, mine["kv_cache_dtype"]) == (0, "mine.toml")
    assert plain["bytes_per_token"] > mine["bytes_per_token"] > uniform["bytes_per_token"]


def test_a_limit_on_the_increase_of_perplexity_is_the_exit_code(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (str(tiny_llama), "--kv-cache-dtype", "int8", "--max-model-len", "256")
    assert ask(capsys, *small, "--max-ppl-increase", "-1")[0] == 1
    assert ask(capsys, *small, "--max-ppl-increase", "0.5")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sinks", "bounded", "sparse_read"])
def test_a_budget_is_compared_with_everything_kept(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_quality, "english", lambda: "The quick brown fox jumps over the lazy dog. " * 60)
    write_hf_model(tmp_path, "Llama", tokenizer=True, num_hidden_layers=3)
    budget = f'{{"mode": "{mode}", "tokens": 48}}'
    lengths = ("--needle-lengths", "20,400", "--plot", str(tmp_path / "p.png"))
    code, answer = ask(capsys, str(tmp_path), "--kv-budget", budget, *lengths)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    everything, kept = answer["budgets"]
    assert (code, everything["budget"], kept["budget"]) == (0, None, budget)
    assert everything["perplexity_within"] == pytest.approx(kept["perplexity_within"], rel=1e-5)
    assert everything["perplexity_after"] != kept["perplexity_after"]
    # Untrained, it knows no answer; and unless it evicts, there is none beyond its context.
    beyond = 0.0 if mode == "sinks" else None
    assert [one["needle"] for one in answer["budgets"]] == [{"20": 0.0, "400": None}, {"20": 0.0, "400": beyond}]
    assert (kept["questions"], kept["sums"]) == ([0.0, 0.0, 0.0], 0.0)


def test_no_codec_to_compare_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quality", "smollm2"]) == 1
    assert "name the codecs to compare" in capsys.readouterr().err


def test_scales_are_for_the_codecs_that_have_any(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unquantised cache that they are compared with refused them."""
    scales, text = tmp_path / "scales.toml", tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 12)
    small = ["--windows", "1", "--window", "40", "--num-threads", "1", "--dtype", "float32"]
    assert cli.main(["calibrate", str(tiny_llama), "--data", str(text), "--output", str(scales), *small]) == 0
    given = ("--codecs", "int8,fp8_e4m3", "--kv-scales", str(scales), "--max-model-len", "256")
    code, answer = ask(capsys, str(tiny_llama), *given)
    assert (code, [row["kv_cache_dtype"] for row in answer["codecs"]]) == (0, ["float32", "int8", "fp8_e4m3"])


def test_a_checkpoint_with_a_scheme_is_compared_with_its_own_type(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` is what the checkpoint names: the codec was compared with itself."""
    monkeypatch.setattr(ModelShape, "kv_dtype", lambda self, option, own: "int8" if option == "auto" else option)
    _, answer = ask(capsys, str(tiny_llama), "--codecs", "int8", "--max-model-len", "256")
    assert [row["kv_cache_dtype"] for row in answer["codecs"]] == ["float32", "int8"]
    assert answer["codecs"][1]["kl"] > 0

"""The search spends its bits where they are missed most, and what it writes is served."""

from __future__ import annotations

import json
import tomllib
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from octavo import cli
from octavo.calibration.search import Probe, search
from octavo.kvcache.formats import layer_formats
from octavo.kvcache.spec import LayerKVSpec
from octavo.workloads.forward_text import Loss
from tests.conftest import MakeLLM

LAYERS = [LayerKVSpec(2, 64, 64)] * 4
COSTS = ({"k8v4": 0.1, "int4": 5.0}, {"k8v4": 0.3, "int4": 0.5}, {"k8v4": 2.0, "int4": 2.2}, {"k8v4": 0.4, "int4": 0.6})


class Additive:
    """A model whose losses add up, unless the given layers are in int4 together."""

    def __init__(self, together: tuple[int, int] | None = None) -> None:
        self.together = together

    def loss(self, dtype: str) -> Loss:
        names = [format.name for format in layer_formats(dtype, len(LAYERS))]
        kl = sum(cost.get(name, 0.0) for cost, name in zip(COSTS, names, strict=True))
        if self.together is not None and all(names[index] == "int4" for index in self.together):
            kl *= 0.5
        return Loss(kl, kl, 1.0)


def best_of_all(bits: float) -> float:
    """By trying every table."""
    size = {"int8": 8, "k8v4": 6, "int4": 4}
    return min(
        sum(cost.get(name, 0.0) for cost, name in zip(COSTS, names, strict=True))
        for names in product(size, repeat=len(LAYERS))
        if sum(size[name] for name in names) / len(LAYERS) <= bits
    )


@pytest.mark.parametrize("bits", [4.0, 5.0, 6.0, 6.9, 8.0])
def test_the_table_is_the_best_there_is_where_losses_add_up(bits: float) -> None:
    probe = cast(Probe, Additive())
    found = search(probe, LAYERS, ["int4", "int8"], bits, decide=probe, exchanges=0)
    assert found.loss.kl == pytest.approx(best_of_all(bits)) == pytest.approx(found.predicted)
    assert found.bits <= bits
    points = [point for point, _ in found.frontier]
    assert points == sorted(points)
    assert found.frontier[-1][1] == found.dtype


def test_an_exchange_that_measures_better_is_taken() -> None:
    probe = cast(Probe, Additive(together=(1, 3)))
    predicted = search(probe, LAYERS, ["int8", "int4"], 6.0, decide=probe, exchanges=0)
    measured = search(probe, LAYERS, ["int8", "int4"], 6.0, decide=probe, exchanges=60)
    assert measured.loss.kl < predicted.loss.kl
    assert measured.bits == predicted.bits == 6.0


class Uneven(Additive):
    """Other text, on which only tables of one codec lose little."""

    def loss(self, dtype: str) -> Loss:
        names = {format.name for format in layer_formats(dtype, len(LAYERS))}
        return Loss(float(len(names)), 1.0, 1.0)


def test_a_uniform_codec_that_loses_less_on_other_text_is_preferred_to_the_searchs_table() -> None:
    probe, other = cast(Probe, Additive()), cast(Probe, Uneven())
    assert len(set(search(probe, LAYERS, ["int8", "int4"], 6.0, decide=probe).formats)) > 1
    found = search(probe, LAYERS, ["int8", "int4"], 6.0, decide=other)
    assert found.dtype == "k8v4"
    assert found.loss.kl == Additive().loss("k8v4").kl
    assert found.finalists["k8v4"].kl < min(loss.kl for name, loss in found.finalists.items() if "," in name)


def test_the_table_that_is_written_is_served_and_says_what_was_measured(
    make_llm: MakeLLM, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "table.toml"
    text.write_text("The quick brown fox jumps over the lazy dog, and so on. " * 20)
    argv = ["calibrate", str(tiny_llama), "--data", str(text), "--windows", "1", "--window", "40", "--search"]
    small = ["--num-threads", "1", "--dtype", "float32", "--exchanges", "2", "--output", str(file), "--json"]
    assert cli.main([*argv, *small]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["bits"] == 6.0
    assert answer["same_bytes"] == ["k8v4"]
    # Beside the candidates' own, the nearest of the others that is no smaller.
    assert [row["kv_cache_dtype"] for row in answer["codecs"]][-2] == "fp8_e4m3"
    core = make_llm(tiny_llama, kv_cache_dtype=str(file)).core
    assert core.runner.arena.spec.bytes_per_token == answer["codecs"][-1]["bytes_per_token"]
    measured = tomllib.loads(file.read_text())["measured"]
    assert len(measured["added_kl_in_int4"]) == len(measured["added_kl_in_k8v4"]) == 2
    assert measured["table"]["bytes_per_token"] == measured["bytes_per_token"] < measured["int8"]["bytes_per_token"]

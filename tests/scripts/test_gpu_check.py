"""The one command for a GPU machine runs here too, interpreted, so that it does not run there for the first time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.attention.triton_device import ON_GPU, needs_triton

pytestmark = [*needs_triton, pytest.mark.skipif(ON_GPU, reason="is itself run there")]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_interpreted_it_runs_tests_and_benchmark_and_writes_what_it_found(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    argv = ["gpu_check.py", "--interpret", "--json", str(file), "--tests", "tests/storage/test_block_copy.py"]
    monkeypatch.setattr("sys.argv", argv)
    assert script.main() == 0
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["tests"] == {"passed": 1, "failed": 0, "skipped": 0, "failures": []}
    assert report["left_out"] == []
    assert [row["name"] for row in report["attention"]] == ["decode 2 x 300", "prefill 20"]
    assert all(row["seconds"] > 0 for kind in ("kernels", "decode", "transformers") for row in report[kind])
    assert {"rms_norm", "copy blocks", "decode int4", "draw all"} <= {row["name"] for row in report["kernels"]}
    assert [row["num_seqs"] for row in report["decode"]] == [1, 2]
    assert [row["num_seqs"] for row in report["transformers"]] == [1]
    assert "the numbers say nothing of a GPU" in capsys.readouterr().out
    assert report["seconds"] < 480


def test_without_a_gpu_it_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    assert script.main() == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_what_fails_or_has_no_time_is_named_and_the_rest_goes_on(script: ModuleType) -> None:
    report: dict[str, Any] = {"left_out": [], "rows": [1]}

    def fails() -> dict[str, Any]:
        raise ValueError("too large")

    script.guarded(report, "one", script.Clock(float("inf")), 1, fails)
    script.guarded(report, "two", script.Clock(0.0), 1, fails)
    script.guarded(report, "three", script.Clock(float("inf")), 1, lambda: {"rows": [2], "limit": 3})
    assert report["left_out"] == ["one (ValueError: too large)", "two (no time)"]
    assert (report["rows"], report["limit"]) == ([1, 2], 3)


def test_a_part_that_ends_its_process_says_how(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(code: str, seconds: float = 30) -> dict[str, Any]:
        return script.in_a_process([sys.executable, "-S", "-c", code], seconds)

    assert run("print('a table'); print('{\"rows\": []}')") == {"rows": []}
    assert capsys.readouterr().out == "a table\n"
    with pytest.raises(RuntimeError, match="ended with 1: illegal address"):
        run("raise SystemExit('illegal address')")
    with pytest.raises(RuntimeError, match="not done after 0 s"):
        run("import time; time.sleep(9)", 0.1)


def test_a_file_of_tests_that_is_not_done_in_time_is_a_failure_of_its_own(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "TESTS_S", 0.0)  # a second each
    report = script.run_tests(["tests/engine/test_core.py"])
    assert report == {
        "passed": 0, "failed": 1, "skipped": 0, "failures": ["tests/engine/test_core.py: not done after 1 s"],
    }  # fmt: skip


def test_the_tests_it_runs_are_there(script: ModuleType) -> None:
    assert all((ROOT / path).is_file() for path in script.TESTS)

"""The one command for a GPU machine runs here too, interpreted, so that it does not run there for the first time."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.attention.triton_device import ON_GPU, needs_triton

pytestmark = [pytest.mark.integration, *needs_triton, pytest.mark.skipif(ON_GPU, reason="is itself run there")]

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
    tests = report["tests"]
    assert (tests["passed"], tests["failed"], tests["skipped"], tests["failures"]) == (2, 0, 0, [])
    assert report["is_complete"]
    assert report["left_out"] == []
    assert [row["name"] for row in report["attention"]] == ["decode 2 x 300", "decode 1 x 600, 1 x 20", "prefill 20"]
    assert all(row["seconds"] > 0 for kind in ("kernels", "decode", "transformers") for row in report[kind])
    assert {"rms_norm", "copy blocks", "decode int4", "draw all"} <= {row["name"] for row in report["kernels"]}
    assert [row["num_seqs"] for row in report["decode"]] == [1, 2]
    assert [(row["function"], row["num_seqs"]) for row in report["transformers"]] == [
        ("generate", 1),
        ("generate_batch", 32),
    ]
    assert "the numbers say nothing of a GPU" in capsys.readouterr().out
    assert report["seconds"] > 0


def test_without_a_gpu_it_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    assert script.main() == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.fixture
def report(script: ModuleType, tmp_path: Path) -> Any:
    return script.Report(tmp_path / "gpu.json", 0.0, {"left_out": []})


def test_what_fails_or_has_no_time_is_named_and_the_rows_before_it_are_kept(
    script: ModuleType, report: Any, tmp_path: Path
) -> None:
    def rows(fails: bool) -> Iterator[dict[str, Any]]:
        yield {"rows": [1]}
        if fails:
            raise ValueError("too large")
        yield {"rows": [2], "limit": 3}

    script.guarded(report, "one", script.Clock(float("inf")), 1, lambda: rows(True))
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == [1]
    script.guarded(report, "two", script.Clock(0.0), 1, lambda: rows(True))
    script.guarded(report, "three", script.Clock(float("inf")), 1, lambda: rows(False))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["left_out"] == ["one (ValueError: too large)", "two (no time)"]
    assert (found["rows"], found["limit"]) == ([1, 1, 2], 3)


def test_a_process_that_fails_or_hangs_is_ended_and_what_it_said_before_is_there(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(code: str, seconds: float = 120, silent_s: float = 120) -> tuple[list[str], str]:
        lines: list[str] = []
        try:
            lines.extend(script.lines_of([sys.executable, "-S", "-c", code], seconds, silent_s))
        except RuntimeError as error:
            return lines, str(error)
        return lines, ""

    assert run("print('a table'); print('a row')") == (["a table", "a row"], "")
    row = "print('@row {\"rows\": []}')"
    assert list(script.rows_of([sys.executable, "-S", "-c", f"print('a table'); {row}"], 120)) == [{"rows": []}]
    assert capsys.readouterr().out == "a table\n"
    assert run("raise SystemExit('illegal address')")[1] == "ended with 1: illegal address"
    assert run("import os; os.abort()")[1] == "ended with -6: "
    begun = "import time; print('begun', end='', flush=True); time.sleep(600)"
    for silent_s in (1.4, 30.4):  # on a busy machine it may not begin in the shorter time
        lines, error = run(begun, 120, silent_s)
        if lines:
            break
    assert (lines, error) == (["begun"], f"silent for {silent_s:.0f} s")
    assert run(begun, 0.0) == ([], "not done after 0 s")


FAILING = """
import os, pytest
def test_good(): pass
def test_bad(): assert 1 + 1 == 3
@pytest.mark.parametrize("how", ["in a row", "b"])
def test_dies(how):
    if how == "b": os.abort()
def test_last(): pass
"""


def test_after_a_test_that_fails_or_ends_its_process_the_others_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_failing.py"
    file.write_text(FAILING)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    found = script.run_file(file.name, script.Clock(time.perf_counter() + 600))
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 2, 0)
    bad, dies = found["failures"]
    assert bad == "test_failing.py::test_bad: assert (1 + 1) == 3"
    assert dies.startswith("test_failing.py::test_dies[b]: ended with -6")


def test_the_tests_it_runs_are_there(script: ModuleType) -> None:
    assert all((ROOT / path).is_file() for path in script.TESTS)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.workloads import machine_limits
from tests.commands.conftest import OctavoCommand
from tests.models.tiny import make_model, write_gguf

SMALL = ["--seconds", 0, "--num-threads", 1]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"DRAM_BYTES": 2 << 20, "CACHE_BYTES": 1 << 20, "PRODUCT_SIZE": 64}.items():
        monkeypatch.setattr(machine_limits, name, size)


def test_limits_are_reported_with_their_units_and_what_reached_them(octavo_command: OctavoCommand) -> None:
    code, out, _ = octavo_command("bench", "cpu", *SMALL, "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    units = {limit["name"]: limit["unit"] for limit in result["limits"]}
    assert units == {
        "read from DRAM": "GB/s",
        "read from cache": "GB/s",
        "bfloat16 product": "GFLOP/s",
        "float32 product": "GFLOP/s",
    }
    for limit in result["limits"]:
        assert limit["value"] > 0
        assert limit["how"]
        assert limit["best"] >= limit["value"]


def test_without_json_there_is_a_table(octavo_command: OctavoCommand) -> None:
    code, out, _ = octavo_command("bench", "cpu", *SMALL)
    assert code == 0
    assert "read from DRAM" in out


def test_models_are_measured_beside_the_limits_and_llamacpp(
    octavo_command: OctavoCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_kernels: None
) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_model("Llama"))
    (program := tmp_path / "llama-bench").write_text(
        """#!/bin/sh
echo '[{"n_gen": 0, "avg_ts": 1000.0}, {"n_gen": 32, "avg_ts": 12.5}]'"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code, out, _ = octavo_command("bench", "cpu", tmp_path / "tiny.gguf", *SMALL, "--json")
    assert code == 0
    (score,) = json.loads(out.splitlines()[-1])["models"]
    assert (score["llamacpp_decode_tokens_s"], score["llamacpp_prompt_tokens_s"]) == (12.5, 1000.0)
    assert score["streams_tokens_s"] > score["decode_tokens_s"] > 0
    assert score["prompt_gop_s"] > 0
    code, out, _ = octavo_command("bench", "cpu", tmp_path / "tiny.gguf", *SMALL)
    assert "(llama.cpp 1,000" in out


@pytest.mark.parametrize(
    ("threads", "error"),
    [
        (0, "num_threads must be between 1 and 1024, got 0"),
        (1025, "num_threads must be between 1 and 1024, got 1025"),
        ("x", "must be an integer, got 'x'"),
    ],
)
def test_bad_numbers_of_threads_are_refused(octavo_command: OctavoCommand, threads: Any, error: str) -> None:
    code, _, err = octavo_command("bench", "cpu", "--num-threads", threads)
    assert code
    assert error in err

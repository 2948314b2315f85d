"""The Triton kernels compile for a GPU, and fit one. Needs no GPU, and a process in which triton does not interpret."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


def test_the_attention_kernels_compile_for_hopper_fit_its_shared_memory_and_spill_nothing() -> None:
    # All kernels take ten seconds: CI compiles them in a step of its own.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "scripts/compile_kernels.py", "--quick", "--only", "one", "--json"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["wrong"] == []
    kernels = {row["kernel"]: row for row in report["kernels"]}
    assert set(kernels) == {"_attend_split", "_join_splits", "_attend_chunk", "_copy"}
    assert [row for row in report["kernels"] if row["spilled"] or row["shared"] > 232_448] == []
    for kernel in (kernels["_attend_split"], kernels["_attend_chunk"]):
        assert kernel["tensor_cores"]
        assert kernel["fetches_ahead"], "each tile waits for its own fetch"


def test_where_triton_interprets_nothing_is_compiled() -> None:
    from tests.attention.triton_device import ON_GPU

    if ON_GPU:
        pytest.skip("needs the interpreter")
    from benchmarks.gpu.compile import compile_all

    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        next(iter(compile_all([("nothing", lambda: None)])))

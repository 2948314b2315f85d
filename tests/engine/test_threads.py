"""How many threads the kernels have, and which CPUs, while an engine loads its model and runs it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams, kernels
from octavo.config import ALLOWED_CPUS
from octavo.engine import model_loading, runner_builder
from octavo.errors import ConfigError
from octavo.planner.machine import FollowedCores, UsableCores, bind_threads
from tests.conftest import MakeLLM

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled"),
    pytest.mark.usefixtures("restore_kernels"),
]
with_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two CPUs"
)


def counting_threads(function: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """`function`, which notes at each call how many threads the kernels have."""

    def counted(*args: Any, **options: Any) -> Any:
        seen.append(kernels.num_threads())
        return function(*args, **options)

    return counted


def test_a_model_is_loaded_in_as_many_threads_as_the_engine_is_given(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(model_loading, "_load", counting_threads(model_loading._load, seen))
    kernels.set_num_threads(7)
    make_llm(tiny_llama, num_threads=2)
    assert seen == [2]


def test_each_engine_of_a_process_keeps_its_number_of_threads(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    one, other = make_llm(tiny_llama, num_threads=3), make_llm(tiny_llama, num_threads=2)
    for llm, threads in ((one, 3), (other, 2), (one, 3)):
        seen: list[int] = []
        with monkeypatch.context() as patch:
            step = llm.core.runner.model.forward_in_part
            patch.setattr(llm.core.runner.model, "forward_in_part", counting_threads(step, seen))
            llm.generate(["Once"], params)
        assert set(seen) == {threads}


def test_an_engine_without_a_number_of_threads_follows_the_limits(
    make_llm: MakeLLM, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    cpus = [frozenset(range(3))]
    read = lambda: UsableCores(cpus[0], len(cpus[0]), None)  # noqa: E731
    monkeypatch.setattr(runner_builder, "FollowedCores", lambda _: FollowedCores(read, lambda: now[0]))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    llm, params = make_llm(tiny_llama, num_threads=None), SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate(["Once"], params)
    assert kernels.num_threads() == 3
    cpus[0], now[0] = frozenset({1}), 10.0
    llm.generate(["Once"], params)
    assert kernels.num_threads() == 1


@with_affinity
def test_an_engine_with_a_cpu_list_runs_on_those_cpus_and_says_so(
    make_llm: MakeLLM, tiny_llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    caplog.set_level(logging.INFO)
    last = max(ALLOWED_CPUS)
    try:
        llm = make_llm(tiny_llama, num_threads=None, cpu_list=str(last))
        llm.generate(["Once"], SamplingParams(max_tokens=2, ignore_eos=True))
        assert kernels.num_threads() == 1
        tasks = [int(task) for task in os.listdir("/proc/self/task")]
        assert all(os.sched_getaffinity(task) == {last} for task in tasks)
        assert f"running on the CPUs of --cpu-list: {last}" in caplog.text
        assert "1 CPU on 1 core," in caplog.text
        assert "computing with 1 rank of 1 thread" in caplog.text
        llm.close()
        assert os.sched_getaffinity(0) == ALLOWED_CPUS
        with pytest.raises(ConfigError):
            make_llm(tiny_llama, cpu_list=str(last), num_blocks=None, kv_cache_memory="1KiB")
        assert os.sched_getaffinity(0) == ALLOWED_CPUS, "the engine was not built"
    finally:
        bind_threads(ALLOWED_CPUS)


# Prints the CPUs that may be used, and those of each thread, the pool's among them. A thread that the pool moves to
# another core has that core alone for a moment, so the threads are read until all have the same.
CPUS_OF_THREADS = """
import os, sys, time
from octavo.config import ALLOWED_CPUS

if sys.argv[1:]:
    os.sched_setaffinity(0, {int(sys.argv[1])})
import torch
from octavo import kernels

kernels.set_num_threads(3)
kernels.PackedWeight.pack(torch.ones(1024, 512)).linear(torch.ones(8, 512))
for _ in range(600):
    threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
    if all(cpus == threads[0] for cpus in threads):
        break
    time.sleep(0.1)
assert len(threads) >= 3, threads
print([sorted(ALLOWED_CPUS), *threads])
"""


def cpus_of_threads(*arguments: str, **environment: str) -> tuple[list[int], list[list[int]]]:
    command = [sys.executable, "-c", CPUS_OF_THREADS, *arguments]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    # Torch's own threads are bound, so there are none.
    environment = {**outside, "OMP_NUM_THREADS": "1", **environment}
    allowed, *threads = json.loads(subprocess.check_output(command, env=environment, timeout=600))
    return allowed, threads


@pytest.mark.slow
@with_affinity
def test_threads_do_not_share_the_one_cpu_that_openmp_binds_the_first_to() -> None:
    allowed, threads = cpus_of_threads(OMP_PROC_BIND="true")
    assert len(allowed) >= 2
    assert all(cpus == allowed for cpus in threads)


@pytest.mark.slow
@with_affinity
def test_an_affinity_that_the_program_sets_itself_stays() -> None:
    own = min(os.sched_getaffinity(0))
    _, threads = cpus_of_threads(str(own))
    assert all(cpus == [own] for cpus in threads)

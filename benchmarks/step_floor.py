"""Measure how much equal steps differ, and how much of that is the machine's, the process's and the clients'.

    python benchmarks/step_floor.py         # a minute; the machine must be idle

    memory    one thread adds up 64 MB, again and again: no engine, no other thread
    products  two threads multiply matrices that stay in the processor's caches
    engine    decode steps of 8 streams in a process of their own, without clients
    server    the same steps of `octavo serve`, with a client that reads the 8 streams

Each value is compared with the median of the 12 before and the 12 after it, which holds slow changes of the machine and
growing contexts. For the engine, the steps without page faults, involuntary context switches and garbage collections
are also listed.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo import LLM, SamplingParams
from octavo.bench import report
from octavo.bench.processor_time import ProcessorTime
from octavo.bench.server_process import running_server
from octavo.bench.serving import Target
from octavo.bench.workload import END_TOKEN_ID, BenchRequest, random_token_ids
from octavo.scheduler.plan_log import RecordedStep, read_plans
from octavo.simulator.calibration import run_load, warm_up

MODEL = "smollm2"
ENGINE = {"num_blocks": 2049, "max_model_len": 2048, "max_num_seqs": 64}
ROWS, TOKENS, PROMPT = 8, 1000, 24
NEIGHBOURS = 12


def spread(seconds: Sequence[float]) -> list[float]:
    """How far each value lies from the median of its neighbours, relative to it."""
    found = []
    for i, value in enumerate(seconds):
        around = [*seconds[max(0, i - NEIGHBOURS) : i], *seconds[i + 1 : i + 1 + NEIGHBOURS]]
        found.append(value / statistics.median(around) - 1)
    return found


def timed(work: Callable[[], Any], seconds: float) -> list[float]:
    work()
    found, ends_at = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < ends_at:
        work()
        found.append(time.perf_counter() - began)
    return found


def decodes(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    return [step for step in steps if len(step.lengths) == ROWS and sum(step.lengths) == ROWS]


class Watcher:
    """Notes at each of an engine's steps what could have held it up: page faults, context switches, collections."""

    def __init__(self, core: Any) -> None:
        self.counts: list[tuple[int, int, int]] = []
        self._collections = 0
        self._step = core.step
        core.step = self
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, _: Any) -> None:
        self._collections += phase == "start"

    def __call__(self) -> Any:
        before, collections = resource.getrusage(resource.RUSAGE_SELF), self._collections
        outputs = self._step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        faults, switches = after.ru_minflt - before.ru_minflt, after.ru_nivcsw - before.ru_nivcsw
        self.counts.append((faults, switches, self._collections - collections))
        return outputs


def engine_steps(plans: Path) -> tuple[list[float], list[tuple[int, int, int]]]:
    """Return the seconds of decode steps without a server, and what could have held them up."""
    rng = random.Random(0)
    prompts: Any = [{"prompt_token_ids": random_token_ids(rng, PROMPT)} for _ in range(ROWS)]
    with LLM(MODEL, record_plans=str(plans), **ENGINE) as llm:
        params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0)
        llm.generate(prompts, params, use_tqdm=False)
        began, watcher = time.perf_counter(), Watcher(llm.core)
        llm.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0), use_tqdm=False)
    steps = [step for step in read_plans(plans) if step.at >= began]
    kept = [i for i, step in enumerate(steps) if step in decodes([step])]
    return [steps[i].seconds for i in kept], [watcher.counts[i] for i in kept]


def server_steps(plans: Path) -> list[float]:
    """Return the seconds of the same steps of a server whose client reads the streams."""
    rng = random.Random(0)
    argv = [MODEL, *(f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items())]
    with running_server([*argv, f"--record-plans={plans}"]) as server:
        target = Target(server.base_url, MODEL)
        warm_up(target, ENGINE["max_model_len"], END_TOKEN_ID)
        began = time.perf_counter()
        requests = [BenchRequest(random_token_ids(rng, PROMPT), TOKENS) for _ in range(ROWS)]
        run_load(target, requests, [0.0] * ROWS)
    return [step.seconds for step in decodes([step for step in read_plans(plans) if step.at >= began])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each of the first two rows")
    arguments = parser.parse_args()
    processors = ProcessorTime()
    table: list[tuple[str, list[float], list[float]]] = []
    memory, small = np.ones(1 << 23), torch.randn(384, 384)
    for name, work in (("memory", lambda: memory.sum()), ("products", lambda: [small @ small for _ in range(8)])):
        seconds = timed(work, arguments.seconds)
        table.append((name, seconds, spread(seconds)))
    with tempfile.TemporaryDirectory() as folder:
        seconds, counts = engine_steps(Path(folder) / "engine")
        table.append(("engine", seconds, spread(seconds)))
        for index, kind in enumerate(("page faults", "involuntary switches", "collections")):
            kept = [i for i, count in enumerate(counts) if not count[index]]
            table.append((f"engine, steps without {kind}", [seconds[i] for i in kept], [table[2][2][i] for i in kept]))
        seconds = server_steps(Path(folder) / "server")
        table.append(("server", seconds, spread(seconds)))
    machine, shares = report.machine(), processors.shares()
    print(f"`python benchmarks/step_floor.py`, {machine['cores']} cores of {machine['cpu']}; {MODEL}.", end="")
    print(f" Others used {shares.others:.1%} of the processors, the host {shares.stolen:.1%}.\n" if shares else "\n")
    print("| | number | median, ms | mean distance from its neighbours | 5 % to 95 % |\n|---|---|---|---|---|")
    for name, seconds, distances in table:
        if not seconds:
            print(f"| {name} | 0 | | | |")
            continue
        low, high = np.percentile(distances, [5, 95])
        mean, median = statistics.fmean(map(abs, distances)), 1e3 * statistics.median(seconds)
        print(
            f"| {name} | {len(seconds)} | {median:.2f} | {100 * mean:.1f} % | {100 * low:+.0f} to {100 * high:+.0f} % |"
        )


if __name__ == "__main__":
    main()

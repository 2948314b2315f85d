"""Measure the cost of a runner in a separate process, compared with one in the engine's process.

    python benchmarks/executors.py        about 30 seconds

Two engines with SmolLM2 (GGUF), one with `--executor process`, alternate: some steps of one, then as many of the other.
Apart from the result of a plan, the engine needs nothing from the runner, so both do the same work; the difference is
pickling, the pipe, and the other process waking up. Writes executors.md in the folder of this
machine's results.
"""

from __future__ import annotations

import argparse
import pickle
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import this_machine
from octavo import LLM
from octavo.engine.core import EngineCore
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import StepPlan, StepResult

OPTIONS = {"max_model_len": 4096, "kv_cache_memory": "512MiB", "enable_prefix_caching": False}
ROUNDS = 3
# Decoding streams, and steps per round.
DECODING = ((1, 40), (16, 20), (64, 10))
PROMPT_TOKENS = 2000
_WARM = 5
_random = random.Random(1)


@dataclass(frozen=True)
class Row:
    """One scenario: the seconds of each step with either executor, and the size of what goes through the pipe."""

    what: str
    here: list[float]
    apart: list[float]
    plan: int
    result: int
    pickling: float

    def __str__(self) -> str:
        here, apart = statistics.median(self.here) * 1e3, statistics.median(self.apart) * 1e3
        return (
            f"| {self.what} | {here:.2f} | {apart:.2f} | {(apart - here) * 1e3:+.0f} ({apart / here - 1:+.1%}) "
            f"| {self.pickling * 1e6:.0f} | {self.plan:,} / {self.result:,} |"
        )


def prompt(num_tokens: int) -> list[int]:
    return [_random.randrange(300, 40_000) for _ in range(num_tokens)]


def start(core: EngineCore, streams: int) -> None:
    """Add streams that decode from the next step on."""
    params = SamplingParams(max_tokens=2000, ignore_eos=True, temperature=0.0)
    for _ in range(streams):
        core.add(core.make_request(prompt(16), params))
    for _ in range(_WARM):
        core.step()
    assert core.scheduler.num_running == streams


def stop(core: EngineCore) -> None:
    for request_id in core.scheduler.request_ids:
        core.abort(request_id)


def timed(core: EngineCore, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        started = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def through_the_pipe(core: EngineCore, step: Callable[[], object]) -> tuple[int, int, float]:
    """The bytes of one step's plan and result, and the seconds of pickling and unpickling both."""
    seen: list[tuple[StepPlan, StepResult]] = []
    execute = core.runner.execute

    def watched(plan: StepPlan) -> StepResult:
        result = execute(plan)
        seen.append((plan, result))
        return result

    core.runner.execute = watched  # type: ignore[method-assign]
    try:
        step()
    finally:
        core.runner.execute = execute  # type: ignore[method-assign]
    plan, result = seen[0]
    started = time.perf_counter()
    packed = pickle.dumps(plan), pickle.dumps((plan.step, result, None))
    for one in packed:
        pickle.loads(one)
    return len(packed[0]), len(packed[1]), time.perf_counter() - started


def decoding(here: EngineCore, apart: EngineCore, streams: int, count: int) -> Row:
    for core in (here, apart):
        start(core, streams)
    seconds: dict[int, list[float]] = {id(here): [], id(apart): []}
    for turn in range(ROUNDS):
        for core in (here, apart) if turn % 2 == 0 else (apart, here):
            core.step()  # warm-up: the processor's cache holds the other's weights
            seconds[id(core)] += timed(core, count)
    sizes = through_the_pipe(here, here.step)
    for core in (here, apart):
        stop(core)
    return Row(f"decoding, {streams} streams", seconds[id(here)], seconds[id(apart)], *sizes)


def prefilling(here: EngineCore, apart: EngineCore) -> Row:
    """Measure steps that each compute a whole prompt of 2,000 tokens."""

    def compute(core: EngineCore) -> list[float]:
        core.add(core.make_request(prompt(PROMPT_TOKENS), SamplingParams(max_tokens=1, ignore_eos=True)))
        seconds = timed(core, 1)
        assert not core.has_work
        return seconds

    seconds: dict[int, list[float]] = {id(here): [], id(apart): []}
    for turn in range(ROUNDS + 1):
        for core in (here, apart) if turn % 2 == 0 else (apart, here):
            took = compute(core)
            seconds[id(core)] += took if turn else []
    sizes = through_the_pipe(here, lambda: compute(here))
    return Row(f"a prompt of {PROMPT_TOKENS:,} tokens", seconds[id(here)], seconds[id(apart)], *sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=this_machine.output_file, default=str(this_machine.results_folder() / "executors.md")
    )
    args = parser.parse_args()
    with LLM(**OPTIONS) as first, LLM(executor="process", **OPTIONS) as second:
        here, apart = first.core, second.core
        rows = []
        decodings = [partial(decoding, here, apart, *scenario) for scenario in DECODING]
        for measure in (*decodings, partial(prefilling, here, apart)):
            rows.append(measure())
            print(rows[-1], flush=True)
    args.out.write_text(HEAD.format(machine=this_machine.name()) + "\n".join(map(str, rows)) + "\n")


HEAD = """# A runner in the engine's process, and in one of its own

`python benchmarks/executors.py` on {machine}: SmolLM2-135M (GGUF),
both engines taking turns in one run. Median milliseconds of a step, planning and outputs included. With `--executor
process` the runner is at the other end of a pipe, which costs pickling and waking up another process. The default costs
none of that: its runner is handed the plan itself.

| step | engine's process, ms | its own, ms | difference, µs | pickling and unpickling, µs | plan / result, bytes |
|---|---:|---:|---:|---:|---:|
"""

if __name__ == "__main__":
    main()

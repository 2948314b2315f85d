"""Measure what tiers cost where nothing is found in them, with a control: engines without tiers against each other.

    python benchmarks/tier_overhead.py [--demotion on_second_use] [--seconds 150] [--out benchmarks/results]

Three engines of one model serve unique prompts in turn: one with host memory, disk and Redis below its KV cache, all of
them full, and two without. A round is A-on-B-B-on-A, on-A-B-B-A-on or A-B-on-on-B-A, so that a machine that becomes
slower or faster does so for all three. From each round come two ratios of throughput: on to the mean of A and B and, as
a control, A to B. How far the control is from 100 %, and how wide its interval, says what the measurement can tell.

Memory lies differently in each engine, which alone may make one faster than another: after every few rounds all three
are made anew. Intervals are 95 %, from a bootstrap over these sets of rounds and the rounds in them. The time between
the model's steps, in which an engine does all that tiers add to its own thread, is given as well: it does not depend on
where memory lies. `--out` adds the rounds to those of earlier calls in tier_overhead.json, so that a long measurement
can be taken in pieces.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.workload import random_token_ids
from octavo.scheduler.plan import StepPlan, StepResult
from redis_process import redis_url

ORDERS = ["AOBBOA", "OABBAO", "ABOOBA"]
POOL = {"num_blocks": 600, "max_num_seqs": 8}
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 400, 16
ROUNDS_PER_SET = 3
GOAL = 0.99
WALL, PROCESSOR, BETWEEN = range(3)

Round = dict[str, list[float]]
"""For each engine, `A`, `B` and `O` (on), seconds of its two turns together: wall clock, processor, between steps."""


def tier_options(folder: str, redis: str | None) -> dict[str, Any]:
    disk = {"kv_disk": folder, "kv_disk_size": "512MiB"}
    remote = {} if redis is None else {"kv_remote": redis}
    return {"kv_host_memory": "256MiB", "swap_space": 0, **disk, **remote}


class Load:
    """Unique prompts, all at once."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._in_steps = 0.0

    def watch(self, llm: LLM) -> LLM:
        """Time the steps of an engine's model from now on."""
        execute = llm.core.runner.execute

        def timed(plan: StepPlan) -> StepResult:
            began = time.perf_counter()
            try:
                return execute(plan)
            finally:
                self._in_steps += time.perf_counter() - began

        llm.core.runner.execute = timed  # type: ignore[method-assign]
        return llm

    def seconds(self, llm: LLM) -> tuple[float, float, float]:
        """Serve the next prompts; returns the seconds of wall clock, processor, and between the model's steps."""
        prompts = [{"prompt_token_ids": random_token_ids(self._rng, PROMPT_TOKENS)} for _ in range(PROMPTS)]
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        self._in_steps = 0.0
        began, processor = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall, processor = time.perf_counter() - began, time.process_time() - processor
        if any(output.num_cached_tokens for output in outputs):
            raise SystemExit("a prompt that was to be new was found in the cache")
        return wall, processor, wall - self._in_steps


def fill(model: str, tiers: dict[str, Any], load: Load) -> None:
    """Write to disk and Redis what they can hold, twice."""
    with LLM(model, **POOL, **tiers, kv_demotion="all") as llm:
        blocks_per_turn = PROMPTS * PROMPT_TOKENS // llm.core.scheduler.kv.spec.block_size
        for _ in range(math.ceil(2 * (512 << 20) / llm.core.scheduler.kv.spec.block_bytes / blocks_per_turn)):
            load.seconds(llm)


def one_set(model: str, on: dict[str, Any], load: Load, first: int) -> list[Round]:
    """Make the three engines, and run some rounds."""
    with ExitStack() as stack:
        makers: list[tuple[str, dict[str, Any]]] = [("A", {}), ("B", {}), ("O", on)]
        random.Random(first).shuffle(makers)
        engines = {name: load.watch(stack.enter_context(LLM(model, **POOL, **options))) for name, options in makers}
        for llm in engines.values():
            # Until the device's pool and host memory are full.
            for _ in range(4):
                load.seconds(llm)
        rounds: list[Round] = []
        for number in range(first, first + ROUNDS_PER_SET):
            taken: Round = {name: [0.0, 0.0, 0.0] for name in engines}
            for name in ORDERS[number % len(ORDERS)]:
                taken[name] = [a + b for a, b in zip(taken[name], load.seconds(engines[name]), strict=True)]
            rounds.append(taken)
    return rounds


def measure(model: str, demotion: str, seconds: float, seed: int) -> list[list[Round]]:
    """Return sets of rounds, as many as begin within `seconds`."""
    load, sets = Load(seed), []
    until = time.monotonic() + seconds
    with (
        tempfile.TemporaryDirectory(prefix="octavo-disk-") as folder,
        redis_url("512mb") as redis,
    ):
        tiers = tier_options(folder, redis)
        fill(model, tiers, load)
        while not sets or time.monotonic() < until:
            sets.append(one_set(model, {**tiers, "kv_demotion": demotion}, load, ROUNDS_PER_SET * len(sets)))
            print(f"set {len(sets)}: " + "; ".join(_line(each) for each in sets[-1]), flush=True)
    return sets


def _line(each: Round) -> str:
    return ", ".join(
        f"{name} {wall:.2f} s ({processor:.2f}, {between:.3f})"
        for name, (wall, processor, between) in sorted(each.items())
    )


def wall_on(each: Round) -> float:
    return _off(each, WALL) / each["O"][WALL]


def wall_control(each: Round) -> float:
    return each["B"][WALL] / each["A"][WALL]


def processor_on(each: Round) -> float:
    return _off(each, PROCESSOR) / each["O"][PROCESSOR]


def processor_control(each: Round) -> float:
    return each["B"][PROCESSOR] / each["A"][PROCESSOR]


def between_on(each: Round) -> float:
    """Throughput if only the time between steps were different."""
    return 1 / (1 + (each["O"][BETWEEN] - _off(each, BETWEEN)) / _off(each, WALL))


def between_control(each: Round) -> float:
    return 1 / (1 + (each["A"][BETWEEN] - each["B"][BETWEEN]) / each["B"][WALL])


def _off(each: Round, which: int) -> float:
    return (each["A"][which] + each["B"][which]) / 2


RATIOS = {
    "wall clock": (wall_on, wall_control),
    "processor time of the process": (processor_on, processor_control),
    "time between the model's steps alone": (between_on, between_control),
}


def estimate(sets: Sequence[Sequence[Round]], ratio: Callable[[Round], float]) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios and its 95 % interval."""
    rng = random.Random(0)
    values = [[ratio(each) for each in rounds] for rounds in sets]

    def middle(groups: Sequence[Sequence[float]]) -> float:
        return statistics.median(value for group in groups for value in group)

    drawn = sorted(
        middle([rng.choices(group, k=len(group)) for group in rng.choices(values, k=len(values))]) for _ in range(4000)
    )
    return middle(values), drawn[100], drawn[-101]


def table(known: dict[str, list[list[Round]]], machine: str) -> str:
    lines = [
        "# What tiers cost where nothing is found in them",
        "",
        f"`python benchmarks/tier_overhead.py`, SmolLM2-135M, {machine}. {PROMPTS} unique prompts of {PROMPT_TOKENS} "
        f"tokens at once, {ANSWER_TOKENS} tokens out; host memory, disk and Redis, all full, on the same cores. "
        "Throughput with tiers against that of two engines without, and of these against each other (control); medians "
        f"of the rounds and their 95 % intervals, by bootstrap. Goal: {GOAL:.0%} with `on_second_use`, the default.",
        "",
        "| `--kv-demotion` | rounds (sets) | by | on against off | control: off against off |",
        "|---|---:|---|---:|---:|",
    ]
    for demotion, sets in known.items():
        for clock, ratios in RATIOS.items():
            cells = " | ".join("{:.1%} ({:.1%} to {:.1%})".format(*estimate(sets, ratio)) for ratio in ratios)
            lines.append(f"| `{demotion}` | {sum(map(len, sets))} ({len(sets)}) | {clock} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demotion", choices=["on_second_use", "on_evict", "all"], default="on_second_use")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default="2 cores of an AMD EPYC (Zen 5, AVX-512 BF16), KVM")
    parser.add_argument("--out", type=Path, help="folder for tier_overhead.md and .json")
    arguments = parser.parse_args()
    sets = measure(arguments.model, arguments.demotion, arguments.seconds, arguments.seed)
    known = {arguments.demotion: sets}
    if arguments.out:
        file = arguments.out / "tier_overhead.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        known[arguments.demotion] = known.get(arguments.demotion, []) + sets
        file.write_text(json.dumps(known) + "\n")
    text = table(known, arguments.machine)
    print(text)
    if arguments.out:
        (arguments.out / "tier_overhead.md").write_text(text)


if __name__ == "__main__":
    main()

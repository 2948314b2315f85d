"""Measure what tiers cost where nothing is found in them, with a control: without tiers against the same once more.

    python -m benchmarks.tier_overhead [--demotion on_second_use] [--seconds 150] [--out benchmarks/results/amd_zen5]

An engine with host memory, disk and Redis below its KV cache, all of them full, serves unique prompts in turns. Between
these its tiers are detached and attached: two engines would differ by how memory happens to lie in each, which alone
makes one up to 3 % faster than the other. A round has two turns each of A (off), B (off) and O (on): A-O-B-B-O-A,
O-A-B-B-A-O or A-B-O-O-B-A, so that a machine that becomes slower or faster does so for all three. From each round come
two ratios of throughput: on to the mean of A and B and, as a control, A to B. How far the control is from 100 %, and
how wide its interval, says what the measurement can tell.

Intervals are 95 %, from a bootstrap over the rounds. The time between the model's steps, in which an engine's thread
does all that tiers add to its own work, is given as well. `--out` adds the rounds to those of earlier calls in
tier_overhead.json, so that a long measurement can be taken in pieces.
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
from typing import Any

from benchmarks import this_machine
from octavo import LLM, SamplingParams
from octavo.kvcache.block import BlockId
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.workloads.workload import random_token_ids
from tests.redis_server import redis_server

ORDERS = ["AOBBOA", "OABBAO", "ABOOBA"]
POOL = {"num_blocks": 600, "max_num_seqs": 8}
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 400, 16
GOAL = 0.99
WALL, PROCESSOR, BETWEEN = range(3)

Round = dict[str, list[float]]
"""For each of `A`, `B` (off) and `O` (on), seconds of its two turns together: wall clock, processor, between steps."""


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


class Switch:
    """Detaches an engine's tiers, and attaches them again."""

    def __init__(self, llm: LLM) -> None:
        self._scheduler = llm.core.scheduler
        self._hierarchy = hierarchy = self._scheduler.kv.hierarchy
        self._used_again = hierarchy._used_again
        fetching, host = self._scheduler.fetching, hierarchy._host_of_prefixes
        self._on: tuple[Any, ...] = (fetching, hierarchy._demotes, self._used_again, host)
        self._off: tuple[Any, ...] = (None, "never", None, None)
        self._published = hierarchy.published

    def turn(self, *, on: bool) -> None:
        hierarchy = self._hierarchy
        self._scheduler.fetching, hierarchy._demotes, hierarchy._used_again, hierarchy._host_of_prefixes = (
            self._on if on else self._off
        )
        hierarchy.published = self._published if on else self._unmark  # type: ignore[method-assign]

    def _unmark(self, block_ids: Sequence[BlockId]) -> None:
        """Leave no block marked as used twice because the one that lay in its place was."""
        if self._used_again is not None:
            for block_id in block_ids:
                self._used_again[block_id] = 0


def measure(model: str, demotion: str, seconds: float, seed: int) -> list[Round]:
    """Return as many rounds as begin within `seconds`."""
    load = Load(seed)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="octavo-disk-") as folder, redis_server("512mb") as redis:
        tiers = tier_options(folder, redis.url)
        fill(model, tiers, load)
        with LLM(model, **POOL, **tiers, kv_demotion=demotion) as llm:
            load.watch(llm)
            switch = Switch(llm)
            for _ in range(6):  # until the device's pool and, with `all`, host memory are full
                load.seconds(llm)
            until = time.monotonic() + seconds
            while not rounds or time.monotonic() < until:
                taken: Round = {name: [0.0, 0.0, 0.0] for name in "ABO"}
                for name in ORDERS[len(rounds) % len(ORDERS)]:
                    switch.turn(on=name == "O")
                    taken[name] = [a + b for a, b in zip(taken[name], load.seconds(llm), strict=True)]
                rounds.append(taken)
                print(_line(taken), flush=True)
    return rounds


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


def estimate(rounds: Sequence[Round], ratio: Callable[[Round], float]) -> tuple[float, float, float]:
    """Return the median of the rounds' ratios and its 95 % interval."""
    rng, values = random.Random(0), [ratio(each) for each in rounds]
    drawn = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(4000))
    return statistics.median(values), drawn[100], drawn[-101]


def table(known: dict[str, list[Round]]) -> str:
    lines = [
        "# What tiers cost where nothing is found in them",
        "",
        f"`python -m benchmarks.tier_overhead`, SmolLM2-135M, {this_machine.name()}. {PROMPTS} unique prompts of "
        f"{PROMPT_TOKENS} tokens at once, {ANSWER_TOKENS} tokens out; host memory, disk and Redis, all full, on the "
        "same cores. "
        "Throughput of one engine with its tiers attached against that with them detached, and of the latter against "
        f"the same once more (control); medians of the rounds and their 95 % intervals, by bootstrap. Goal: {GOAL:.0%} "
        "with `on_second_use`, the default.",
        "",
        "| `--kv-demotion` | rounds | by | on against off | control: off against off |",
        "|---|---:|---|---:|---:|",
    ]
    for demotion, rounds in known.items():
        for clock, ratios in RATIOS.items():
            cells = " | ".join("{:.1%} ({:.1%} to {:.1%})".format(*estimate(rounds, ratio)) for ratio in ratios)
            lines.append(f"| `{demotion}` | {len(rounds)} | {clock} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demotion", choices=["on_second_use", "all"], default="on_second_use")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for tier_overhead.md and .json")
    arguments = parser.parse_args()
    rounds = measure(arguments.model, arguments.demotion, arguments.seconds, arguments.seed)
    known = {arguments.demotion: rounds}
    if arguments.out:
        file = arguments.out / "tier_overhead.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        known[arguments.demotion] = known.get(arguments.demotion, []) + rounds
        file.write_text(json.dumps(known) + "\n")
    text = table(known)
    print(text)
    if arguments.out:
        (arguments.out / "tier_overhead.md").write_text(text)


if __name__ == "__main__":
    main()

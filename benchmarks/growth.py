"""How the engine's own work grows with streams, waiters and lengths: `python -m benchmarks.growth`, about two minutes.

Each row is one scenario at the size at which it used to be slow; growth.md in `benchmarks/results/`
shows what they took before and take now. To run only some rows, name them: `python -m benchmarks.growth step full`.
Prints one JSON object on the last line of standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import logging
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from benchmarks.stand_in import BLOCK, VOCAB, BatchOnly, make_core, make_inputs, make_kv, make_scheduler
from octavo.checkpoint.model_source import resolve_model
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.core import EngineCore
from octavo.engine.outputs import OutputKind
from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.request import PinRequest, Request, RequestContext, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.server.interpreter_settings import SWITCH_SECONDS, settle_garbage_collection
from octavo.text.tokenizer import Tokenizer

MILLION = 1_000_000

Figures = dict[str, float]
_ids = itertools.count()


def make_request(tokens: list[int], pins: tuple[PinRequest, ...] = (), **params: Any) -> Request:
    sampling = SamplingParams(**{"ignore_eos": True, **params})
    return Request(RequestId(f"r{next(_ids)}"), tokens, sampling, pins=pins)


def play(plan: StepPlan) -> StepResult:
    """The result of a runner that always draws token 7."""
    return StepResult((7,) * plan.num_draws)


def step(scheduler: Scheduler) -> tuple[float, float]:
    """Run one step without a model; returns the seconds of planning it and of processing its result."""
    started = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    if not plan:
        return planned - started, 0.0
    result = play(plan)
    resumed = time.perf_counter()
    scheduler.update(plan, result)
    return planned - started, time.perf_counter() - resumed


class Elsewhere:
    """A runner whose model computes for a millisecond without holding the interpreter's lock."""

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(0.001)
        return play(plan)

    def watch(self, on_failure: Callable[[], None]) -> None:
        return

    def failure(self) -> str:
        return ""

    def close(self) -> None:
        return


@contextmanager
def as_in_a_server() -> Iterator[None]:
    """Collect garbage as `octavo serve` does, with existing objects frozen."""
    thresholds = gc.get_threshold()
    settle_garbage_collection()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def ms(seconds: float) -> float:
    return seconds * 1e3


def python_of_a_step() -> Figures:
    """The time of a step on the engine's thread, and of its outputs on the event loop; also with stop strings."""
    tokenizer = Tokenizer.from_source(resolve_model("smollm2"))
    found = {}
    for streams, stop, is_ahead in (
        (64, (), False),
        (256, (), False),
        (256, (), True),
        (1000, (), False),
        (1000, ("no such string",), False),
    ):
        runner = BatchOnly(streams, 512)
        core = make_core(streams * 64, runner, seqs=streams, budget=16_384, tokenizer=tokenizer, plans_ahead=is_ahead)
        for i in range(streams):
            params = SamplingParams(max_tokens=500, ignore_eos=True, stop=stop)
            core.add(core.inputs.make([i % 40_000 + 300] * (20 + i % BLOCK), params), kind=OutputKind.DELTA)
        with as_in_a_server():
            for _ in range(5):
                core.step()
            seconds, outputs = [], []
            for _ in range(64):
                started = time.perf_counter()
                news = core.advance()
                seconds.append(time.perf_counter() - started - runner.drawing)
                started = time.perf_counter()
                core.outputs.process(news)
                outputs.append(time.perf_counter() - started)
        who = f"{streams} streams{' with stop strings' if stop else ''}{' planned ahead' if is_ahead else ''}"
        found[f"Python of a step besides model and sampler, {who}"] = ms(statistics.median(seconds))
        found[f"its outputs, off the engine's thread, {who}"] = ms(statistics.median(outputs))
    return found


def admission() -> Figures:
    """The time of one attempt to admit a head that does not fit, with nothing remembered of it, at three sizes."""

    def attempt(running: int) -> float:
        scheduler = make_scheduler(make_kv(running * 32), seqs=2 * running, budget=16_384)
        for i in range(running):
            scheduler.add(make_request([i] * 50, max_tokens=2000))
        while scheduler.num_running < running:
            step(scheduler)
        head = make_request([7] * ((scheduler.kv.pool.num_available + 1) * BLOCK), max_tokens=1)
        scheduler.add(head)
        attempts: list[float] = []
        part: Any = scheduler._composer._admission
        admit = part.admit

        def timed(*arguments: Any) -> int:
            started = time.perf_counter()
            admitted: int = admit(*arguments)
            attempts.append(time.perf_counter() - started)
            return admitted

        part.admit = timed
        for _ in range(41):
            head.sequences[0].state.refusal = None
            step(scheduler)
        assert scheduler.num_running == running
        assert len(attempts) >= 41
        return statistics.median(attempts)

    with as_in_a_server():
        return {f"an attempt to admit what does not fit, {n:,} running": ms(attempt(n)) for n in (175, 700, 1400)}


def full_cache() -> Figures:
    """The time to plan a step of 2,048 prompt tokens that evicts 128 blocks, and to process its result.

    Two prompts in three are new, the third is one of those before it, so that evicted blocks come back too.
    """
    kv = make_kv(8193)
    scheduler = make_scheduler(kv, seqs=8, budget=2048)
    rng, prompts = random.Random(0), list[list[int]]()
    seconds: list[float] = []
    with as_in_a_server():
        while len(seconds) < 200:
            is_new = len(prompts) % 3 or len(prompts) < 32
            prompts.append([rng.randrange(VOCAB) for _ in range(8192)] if is_new else prompts[-30])
            scheduler.add(make_request(prompts[-1], max_tokens=1))
            while scheduler.has_work:
                before = kv.evicted.count
                took = sum(step(scheduler))
                if kv.evicted.count - before == 128:
                    seconds.append(took)
    what = "a full cache: a step that evicts 128 blocks and publishes as many"
    return {f"{what}, median": ms(statistics.median(seconds)), f"{what}, longest": ms(max(seconds))}


class _Holds(NamedTuple):
    """The longest times, in seconds, that a request took in one go.

    Attributes:
        gap: between two iterations of the event loop, with what other threads and the operating system added.
        loop: of the event loop's thread in one iteration, CPU time.
        engine: of the engine's thread in one step or one addition, CPU time.
    """

    gap: float
    loop: float
    engine: float


def holds_of_a_long_request(prompt: list[int]) -> tuple[_Holds, Scheduler]:
    longest = 0.0

    class Watched(EngineCore):
        def queue(self, request: Request) -> None:
            nonlocal longest
            started = time.thread_time()
            super().queue(request)
            longest = max(longest, time.thread_time() - started)

        def advance(self) -> Any:
            nonlocal longest
            started = time.thread_time()
            news = super().advance()
            longest = max(longest, time.thread_time() - started)
            return news

    scheduler = make_scheduler(make_kv(70_000), seqs=8)
    core = Watched(make_inputs(scheduler, None), Elsewhere())  # type: ignore[arg-type]
    pins = (PinRequest(MILLION // 2, 60.0), PinRequest(MILLION, 60.0))
    gaps: list[float] = []
    loop: list[float] = []

    async def serve() -> None:
        engine = AsyncEngine(core, "m")
        await engine.start()
        busy = True

        async def beat() -> None:
            while busy:
                started, worked = time.perf_counter(), time.thread_time()
                await asyncio.sleep(0.0005)
                gaps.append(time.perf_counter() - started)
                loop.append(time.thread_time() - worked)

        beating = asyncio.create_task(beat())
        await asyncio.sleep(0.05)
        gaps.clear()
        loop.clear()
        context = RequestContext(pins=pins)
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True), context):
            pass
        busy = False
        await beating
        await engine.shutdown(0)

    with as_in_a_server(), switching_as_a_server_does():
        asyncio.run(serve())
    return _Holds(max(gaps), max(loop), longest), scheduler


def long_request() -> Figures:
    """The longest time that one request of a million tokens blocks the event loop and the engine's thread."""
    prompt = [i % 40_000 for i in range(MILLION)]
    holds = []
    for _ in range(3):
        found, scheduler = holds_of_a_long_request(prompt)
        holds.append(found)
    gaps = sorted(found.gap for found in holds)
    kv = scheduler.kv
    request = make_request(prompt, max_tokens=1)
    kv.match(request.sequences[0])  # hashes it, as admission would have done
    kv.forget(request.sequences[0])
    started = time.perf_counter()
    kv.pin(request, PinRequest(MILLION, 60.0))
    pinning = time.perf_counter() - started
    again = make_request(prompt, max_tokens=1)
    kv.match(again.sequences[0])
    started = time.perf_counter()
    kv.match(again.sequences[0])
    matching = time.perf_counter() - started
    scheduler.add(again)
    admitting: list[float] = []
    while again.num_cached_tokens is None:
        started = time.perf_counter()
        scheduler.schedule()
        admitting.append(time.perf_counter() - started)
    assert again.num_cached_tokens == MILLION - BLOCK
    started = time.perf_counter()
    scheduler.end_request(again.request_id)
    ending = time.perf_counter() - started
    return {
        "a request of 1 M tokens: longest gap of the event loop, median of 3": ms(gaps[1]),
        "a request of 1 M tokens: longest gap of the event loop, worst of 3": ms(gaps[2]),
        "a request of 1 M tokens: longest hold of the event loop, CPU time": ms(max(found.loop for found in holds)),
        "a request of 1 M tokens: longest hold of the engine's thread, CPU time": ms(
            max(found.engine for found in holds)
        ),
        "a request of 1 M tokens: a pin mark": ms(pinning),
        "a request of 1 M tokens: finding it all cached": ms(matching),
        "a request of 1 M tokens, all cached: longest step until it runs": ms(max(admitting)),
        "a request of 1 M tokens, all cached: steps until it runs (steps)": len(admitting),
        "a request of 1 M tokens: ending it": ms(ending),
    }


@contextmanager
def switching_as_a_server_does() -> Iterator[None]:
    """Use the interval at which a server's threads switch."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def bytes_per_block() -> Figures:
    """The memory of a full pool's bookkeeping per block, by tracemalloc, including what evictions add."""
    num_blocks = 40_000
    found = {}
    for eviction in EVICTION_POLICIES:
        gc.collect()
        tracemalloc.start()
        kv = make_kv(num_blocks + 1, eviction_policy=eviction)
        scheduler = make_scheduler(kv, seqs=8, budget=1 << 20)
        for k in range(36):
            tokens = [k, *((i * 31 + k) % 50_000 for i in range(num_blocks * BLOCK // 32 - 1))]
            scheduler.add(make_request(tokens, max_tokens=1))
            while scheduler.has_work:
                step(scheduler)
            del tokens
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert kv.pool.num_cached >= num_blocks - 2
        found[f"bookkeeping per published block, {eviction} (bytes)"] = taken / num_blocks
    return found


ROWS: dict[str, Callable[[], Figures]] = {
    "step": python_of_a_step,
    "admission": admission,
    "full": full_cache,
    "long": long_request,
    "bytes": bytes_per_block,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"only these: {', '.join(ROWS)}")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    logging.disable(logging.WARNING)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    figures: Figures = {}
    for name, measure in ROWS.items():
        if arguments.rows and name not in arguments.rows:
            continue
        started = time.perf_counter()
        found = measure()
        figures.update(found)
        for what, value in found.items():
            unit = "" if what.endswith(")") else " ms"
            print(f"{what:64} {value:10.3f}{unit}", flush=True)
        print(f"    ({name}: {time.perf_counter() - started:.0f} s)", file=sys.stderr, flush=True)
    print(json.dumps({what: round(value, 4) for what, value in figures.items()}))


if __name__ == "__main__":
    main()

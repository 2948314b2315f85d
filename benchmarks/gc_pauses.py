"""How long Python's garbage collector holds a server up, at many blocks: `python benchmarks/gc_pauses.py [BLOCKS]`.

Fills the pool with published blocks through the scheduler, as prompts would, then serves on; `gc.callbacks` times every
collection, in processor seconds. Once with Python's own settings, once with the server's (`server/memory.py`).
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

from octavo.config import EngineConfig
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import SampleResult, StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.server.memory import settle_garbage_collection

BLOCK_SIZE = 16
PROMPT_BLOCKS = 256


def serve(scheduler: Scheduler, first: int, num_requests: int) -> None:
    """Prompts that share nothing, four at a time, two tokens each."""
    for i in range(first, first + num_requests):
        prompt = [(i * 7919 + j * 31) % 50_000 for j in range(PROMPT_BLOCKS * BLOCK_SIZE)]
        scheduler.add(Request(RequestId(f"r{i}"), prompt, SamplingParams(max_tokens=2)))
        while len(scheduler.request_ids) >= 4:
            step(scheduler)
    while scheduler.has_work:
        step(scheduler)


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult.of(SampleResult(7) for _ in range(plan.num_draws)))


def longest_pause(num_blocks: int, settled: bool) -> tuple[float, int]:
    """In seconds, and how many collections there were."""
    spec = KVCacheSpec.build((LayerKVSpec(1, 8, 8),), BLOCK_SIZE, "float32")
    config = EngineConfig(max_num_batched_tokens=8192)
    scheduler = assemble_scheduler(config, assemble_cache(config, spec, num_blocks), 1 << 20)
    if settled:
        settle_garbage_collection()
    pauses: list[float] = []
    began = 0.0

    def watch(phase: str, _: dict[str, Any]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            pauses.append(time.thread_time() - began)

    gc.callbacks.append(watch)
    try:
        # Once full, and a quarter evicted again.
        serve(scheduler, 0, num_blocks * 5 // 4 // PROMPT_BLOCKS)
    finally:
        gc.callbacks.remove(watch)
    return max(pauses, default=0.0), len(pauses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("num_blocks", nargs="?", type=int, default=200_000)
    num_blocks = parser.parse_args().num_blocks
    for settled in (False, True):
        seconds, count = longest_pause(num_blocks, settled)
        name = "the server's settings" if settled else "Python's settings"
        print(f"{num_blocks:,} blocks, {name}: longest of {count} collections {seconds * 1e3:.1f} ms")


if __name__ == "__main__":
    main()

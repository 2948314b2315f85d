"""Shared by the benchmarks that kill and damage stores: the kill, the command line and the table."""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks import this_machine
from octavo import LLM
from octavo.tiers.base import Reason
from octavo.tiers.store import Store
from tests.campaigns.tiny_models import WRONG_ANSWERS, TinyModel

WRONG_BLOCKS = "wrong blocks given"
# Share of all cycles in which an engine is killed rather than just a store.
SHARE_KILLED_SERVING = 0.25

Work = Callable[[random.Random], Iterator[object]]
"""What a process does until it is killed; it yields after each piece of work."""


def kill_one(
    models: Sequence[TinyModel],
    open_store: Callable[[TinyModel], Store],
    open_engine: Callable[[TinyModel], LLM],
    rng: random.Random,
    totals: Counter[str],
) -> None:
    """Kill a process while it stores blocks of a model, or while its engine serves and stores."""
    model = rng.choice(models)
    if rng.random() < SHARE_KILLED_SERVING:
        work = _serving(model, partial(open_engine, model))
    else:
        work = _storing(model, partial(open_store, model))
    totals[_kill_at_work(work, rng)] += 1


def _storing(model: TinyModel, open_store: Callable[[], Store]) -> Work:
    """Store randomly drawn blocks, one after the other."""

    def work(rng: random.Random) -> Iterator[object]:
        store = open_store()
        while True:
            label, content = rng.choice(model.blocks)
            yield store.put(label, memoryview(content)).wait()

    return work


def _serving(model: TinyModel, open_engine: Callable[[], LLM]) -> Work:
    """Serve randomly drawn requests, whose blocks are stored meanwhile."""

    def work(rng: random.Random) -> Iterator[object]:
        llm = open_engine()
        while True:
            model.serve(llm, rng, Counter())
            yield None

    return work


def _kill_at_work(work: Work, rng: random.Random) -> str:
    """Fork a process that works until it is killed with SIGKILL; returns how it ended.

    It dies within 20 ms of the first piece of work or, in one case out of five, of its start, often before it has
    opened the store.
    """
    seed, at_once = rng.randrange(2**32), rng.random() < 0.2
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        try:
            for done, _ in enumerate(work(random.Random(seed))):
                if not done:
                    os.write(begins, b"!")
        finally:
            os._exit(1)
    os.close(begins)
    with open(begun, "rb") as pipe:
        if not at_once:
            pipe.read(1)
        time.sleep(rng.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return "killed" if os.WIFSIGNALED(status) else "ended by itself"


def count_blocks(
    model: TinyModel, outcomes: Sequence[Reason | None], buffers: Sequence[bytearray], totals: Counter[str]
) -> None:
    """Compare what was loaded of all blocks of a model with what was stored, and count why the others were not."""
    for (_, content), reason, buffer in zip(model.blocks, outcomes, buffers, strict=True):
        if reason is None:
            totals["right blocks" if buffer == content else WRONG_BLOCKS] += 1
        else:
            totals[f"miss: {reason.value}"] += 1


@contextmanager
def tiny_models(*seeds: int) -> Iterator[list[TinyModel]]:
    """Create models with these seeds, in a folder that is removed at the end."""
    # tqdm's own lock is shared with forked processes: one that is killed while it holds it would block all others.
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0
    with tempfile.TemporaryDirectory(prefix="octavo-models-") as folder:
        yield [TinyModel(Path(folder) / str(seed), seed) for seed in seeds]


def count_faults(title: str, doc: str, run: Callable[[int, int, float], Counter[str]]) -> None:
    """Run many cycles, print what happened, and end the process with 1 if a block or an answer was wrong.

    Args:
        doc: the script's docstring; its first line is the help text.
        run: takes the number of cycles, the seed and the share of cycles in which an engine serves afterwards, and
            returns how often each event happened.
    """
    script = Path(sys.argv[0])
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--served", type=float, default=0.5, help="share of cycles in which an engine serves afterwards"
    )
    parser.add_argument("--out", type=this_machine.output_folder, help=f"folder for {script.stem}.md")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # from stores that give up, which is counted as misses
    began = time.perf_counter()
    totals = run(options.cycles, options.seed, options.served)
    wrong = {name: totals.pop(name, 0) for name in (WRONG_BLOCKS, WRONG_ANSWERS)}
    lines = [
        f"# {title}",
        "",
        f"`python benchmarks/{script.name} --cycles {options.cycles} --seed {options.seed} "
        f"--served {options.served:g}`, "
        f"{time.perf_counter() - began:.0f} s. After each cycle every block was read again and compared with what was "
        f"stored. In {options.served:.0%} of them an engine that found the store so answered three requests: their "
        "tokens were compared with those of the same requests computed cold.",
        "",
        "| what | times |",
        "|---|---:|",
        *(f"| {what} | {count:,} |" for what, count in [*sorted(totals.items()), *wrong.items()]),
    ]
    print("\n".join(lines))
    if options.out:
        (options.out / f"{script.stem}.md").write_text("\n".join(lines) + "\n")
    raise SystemExit(int(any(wrong.values())))


def count_misses(llm: LLM, totals: Counter[str]) -> None:
    """Count why the stores of an engine did not return or accept blocks."""
    assert llm.core.tiers is not None
    for store in llm.core.tiers.stores:
        for reason, count in (store.counters.read.misses + store.counters.write.misses).items():
            totals[f"miss of an engine: {reason.value}"] += count
        for reason, count in store.counters.open_misses.items():
            totals[f"dropped when opened: {reason.value}"] += count

"""What the benchmarks of killed and damaged stores share: the kill, the command line and the table."""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from octavo.kvcache.label import Label
from octavo.tiers.store import Store


def kill_while_storing(
    open_store: Callable[[], Store], blocks: Sequence[tuple[Label, bytes]], rng: random.Random
) -> str:
    """Fork a process that stores blocks drawn at random until it is killed with SIGKILL; returns how it ended.

    It dies within 20 ms of its first block, or in one case of five of its start, as likely as not before it has opened
    the store.
    """
    seed, at_once = rng.randrange(2**32), rng.random() < 0.2
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        try:
            _store(open_store(), blocks, random.Random(seed), begins)
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


def _store(store: Store, blocks: Sequence[tuple[Label, bytes]], rng: random.Random, begins: int) -> NoReturn:
    """Store without end; the first block is told by a byte to the pipe."""
    is_first = True
    while True:
        label, content = rng.choice(blocks)
        store.put(label, memoryview(content)).wait()
        if is_first:
            os.write(begins, b"!")
            is_first = False


def count_faults(title: str, doc: str, run: Callable[[int, int], Counter[str]]) -> None:
    """Run many cycles, print what happened, and end the process with 1 if a wrong byte was given.

    Args:
        doc: of the script; its first line is its help.
        run: cycles and seed to what happened how often; wrong bytes under "WRONG".
    """
    script = Path(sys.argv[0])
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help=f"folder for {script.stem}.md")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # of stores that give up: it is counted as misses
    began = time.perf_counter()
    totals = run(options.cycles, options.seed)
    lines = [
        f"# {title}",
        "",
        f"`python benchmarks/{script.name} --cycles {options.cycles} --seed {options.seed}`, "
        f"{time.perf_counter() - began:.0f} s. Every block was read again after each cycle.",
        "",
        "| what | times |",
        "|---|---:|",
        *(f"| {what} | {count:,} |" for what, count in sorted(totals.items()) if what != "WRONG"),
        f"| wrong bytes given | {totals['WRONG']:,} |",
    ]
    print("\n".join(lines))
    if options.out:
        (options.out / f"{script.stem}.md").write_text("\n".join(lines) + "\n")
    raise SystemExit(int(totals["WRONG"] > 0))

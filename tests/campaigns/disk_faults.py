"""Kill, damage, restart, load: a disk store must never lead to a wrong token, whatever happens to it.

    python -m tests.campaigns.disk_faults [--cycles 10000] [--seed 0] [--out benchmarks/results]

Each cycle forks a process that stores blocks, or an engine that serves and stores, and kills it with SIGKILL at a
random moment. Then a bit may be flipped, a slab truncated, two slots or two headers swapped, a block half overwritten,
or the fingerprint or layout changed. A restart loads every block that was ever stored: each must be right to the last
byte, or a miss with a reason. In a share of the cycles, and in all in which reads or writes fail or the file system is
full or read-only, an engine follows: its answers must be those that it computes without a cache.
"""

from __future__ import annotations

import errno
import os
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from octavo import LLM
from octavo.tiers.base import LAYOUT_VERSION
from octavo.tiers.disk import DiskMedium
from octavo.tiers.header import HEADER_BYTES
from octavo.tiers.slabs import ALIGNMENT
from octavo.tiers.store import Store
from tests.campaigns.fault_cycles import (
    count_blocks,
    count_faults,
    count_misses,
    kill_one,
    tiny_models,
)
from tests.campaigns.tiny_models import BLOCK_BYTES, TinyModel

SLAB_BYTES = 256 << 10
SIZE = 1 << 20
DAMAGE = ["bit", "cut", "swap slots", "swap headers", "half a block", "layout", "fingerprint"]
# Which system calls fail, and with which error.
ERRORS = {
    "reads fail": (("preadv",), errno.EIO),
    "writes fail": (("pwrite",), errno.EIO),
    "no space": (("pwrite", "posix_fallocate"), errno.ENOSPC),
    "read-only": (("pwrite", "posix_fallocate"), errno.EROFS),
}
FAULTS = ["none", "none", *DAMAGE, *ERRORS]


def open_disk(folder: Path, model: TinyModel) -> DiskMedium:
    return DiskMedium(folder, SIZE, model.fingerprint, BLOCK_BYTES)


def open_engine(folder: Path, model: TinyModel) -> LLM:
    return model.engine(kv_disk=str(folder), kv_disk_size=SIZE)


def damage(folder: Path, fault: str, models: list[TinyModel], rng: random.Random) -> None:
    slabs = sorted(folder.glob("*/slab-*.kv"))
    if not slabs or fault not in DAMAGE:
        return
    slab = rng.choice(slabs)
    slot_bytes = -(-BLOCK_BYTES // ALIGNMENT) * ALIGNMENT
    size = slab.stat().st_size
    num_slots = (size - 2 * ALIGNMENT) // slot_bytes
    if num_slots < 1:  # a cut has left nothing to damage
        return
    first = size - num_slots * slot_bytes
    a, b = rng.randrange(num_slots), rng.randrange(num_slots)
    with slab.open("r+b") as file:
        if fault == "bit":
            at = rng.randrange(size) if rng.random() < 0.7 else ALIGNMENT + rng.randrange(num_slots * HEADER_BYTES)
            byte = _read(file.fileno(), at, 1)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << rng.randrange(8)]), at)
        elif fault == "cut":
            os.truncate(slab, rng.randrange(size))
        elif fault in ("swap slots", "swap headers"):
            start, width = (first, slot_bytes) if fault == "swap slots" else (ALIGNMENT, HEADER_BYTES)
            ours, theirs = (_read(file.fileno(), start + i * width, width) for i in (a, b))
            os.pwrite(file.fileno(), theirs, start + a * width)
            os.pwrite(file.fileno(), ours, start + b * width)
        elif fault == "half a block":
            os.pwrite(file.fileno(), rng.randbytes(BLOCK_BYTES // 2), first + a * slot_bytes)
        elif fault == "layout":
            place = 8 if rng.random() < 0.5 else ALIGNMENT + a * HEADER_BYTES + 8
            os.pwrite(file.fileno(), struct.pack("<I", LAYOUT_VERSION + 1), place)
    if fault == "fingerprint":
        folders = [folder / model.fingerprint.hex() for model in models]
        if all(f.is_dir() for f in folders):
            aside = folder / "aside"
            folders[0].rename(aside)
            folders[1].rename(folders[0])
            aside.rename(folders[1])


def _read(file: int, at: int, count: int) -> bytes:
    return os.pread(file, count, at)


@contextmanager
def trouble(fault: str, rng: random.Random) -> Iterator[None]:
    """Let half of the fault's system calls raise."""
    names, code = ERRORS.get(fault, ((), 0))
    with patch.dict(vars(os), {name: _failing(getattr(os, name), code, rng) for name in names}):
        yield


def _failing(call: Callable[..., Any], code: int, rng: random.Random) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        if rng.random() < 0.5:
            raise OSError(code, os.strerror(code))
        return call(*args)

    return fail


def cycle(folder: Path, models: list[TinyModel], rng: random.Random, served: float, totals: Counter[str]) -> None:
    kill_one(models, lambda m: Store(open_disk(folder, m)), partial(open_engine, folder), rng, totals)
    fault = rng.choice(FAULTS)
    totals[f"fault: {fault}"] += 1
    damage(folder, fault, models, rng)
    model = rng.choice(models)
    read_all(folder, model, totals)
    if fault not in ERRORS and rng.random() > served:
        return
    with open_engine(folder, model) as llm:
        with trouble(fault, rng):
            model.serve(llm, rng, totals)
        count_misses(llm, totals)


def read_all(folder: Path, model: TinyModel, totals: Counter[str]) -> None:
    """Load and check every block that was ever stored."""
    medium = open_disk(folder, model)
    for reason, count in medium.open_misses.items():
        totals[f"dropped when opened: {reason.value}"] += count
    buffers = [bytearray(BLOCK_BYTES) for _ in model.blocks]
    try:
        outcomes = [
            medium.read([label], [memoryview(buffer)])[0]
            for (label, _), buffer in zip(model.blocks, buffers, strict=True)
        ]
    finally:
        medium.close()
    count_blocks(model, outcomes, buffers, totals)


def run(cycles: int, seed: int, served: float) -> Counter[str]:
    """Run the cycles; returns counts of what happened."""
    rng, totals = random.Random(seed), Counter[str]()
    # Small slabs for engines as well, so that there are several.
    small = patch.dict(DiskMedium.__init__.__kwdefaults__, slab_bytes=SLAB_BYTES)
    with tiny_models(0, 1) as models, small, tempfile.TemporaryDirectory(prefix="octavo-disk-") as folder:
        for _ in range(cycles):
            cycle(Path(folder), models, rng, served, totals)
    return totals


if __name__ == "__main__":
    count_faults("Kills and damage to the disk store", __doc__, run)

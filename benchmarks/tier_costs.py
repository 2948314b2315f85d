"""Measure loads from the disk tier: their bandwidth, and verification's share of them.

    python -m benchmarks.tier_costs [--gib 2] [--rounds 5] [--dir FOLDER]

Loads, loads whose blocks are not verified (goal: 95 % of their time), and plain reads of the same files (goal: 80 % of
their bandwidth) take turns, and medians are given. Cold means that the system was told to drop the files from its cache
(POSIX_FADV_DONTNEED after a sync); caches below it, such as a hypervisor's, are left as they are.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import this_machine
from octavo.kvcache.hashing import Label
from octavo.tiers.disk import DiskMedium
from octavo.tiers.header import Header
from octavo.tiers.store import Store

# SmolLM2-135M in bfloat16: 30 layers, 3 heads of 64, 16 tokens.
BLOCK_BYTES = 30 * 2 * 3 * 64 * 2 * 16
FINGERPRINT = b"of a measurement"
THREADS = 2
PER_TRANSFER = 64
UNDER_WAY = 4
PIECE = 4 << 20


def label(number: int) -> Label:
    def key(n: int) -> bytes:
        return random.Random(n).randbytes(16)

    return Label(key(number), key(number - 1), number.to_bytes(4, "little") * 16)


def slabs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/slab-*.kv"))


def forget(folder: Path) -> None:
    """Tell the system to drop the slabs' pages, which must be on the disk for that."""
    for path in slabs(folder):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def in_threads(work: Callable[[int], None]) -> float:
    """Run `work(index)` in THREADS threads; returns the seconds until all are done."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


@contextmanager
def disk_of(arguments: argparse.Namespace) -> Iterator[tuple[Path, DiskMedium, list[Label]]]:
    """Create a store of random blocks."""
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="octavo-disk-") as name:
        folder, count = Path(name), int(arguments.gib * 2**30) // BLOCK_BYTES
        medium = DiskMedium(folder, int(arguments.gib * 2**30) + (512 << 20), FINGERPRINT, BLOCK_BYTES)
        labels = [label(number) for number in range(count)]
        content = bytearray(random.Random(0).randbytes(BLOCK_BYTES))
        for number, each in enumerate(labels):
            content[:8] = number.to_bytes(8, "little")
            if (reason := medium.write(each, memoryview(content), "")) is not None:
                raise SystemExit(f"the store is not filled: {reason}")
        yield folder, medium, labels


class Loads:
    """Loads everything in transfers of 64 blocks, as requests do, four at a time."""

    def __init__(self, store: Store, labels: Sequence[Label]) -> None:
        self._store, self._labels = store, labels
        self._memory = [[bytearray(BLOCK_BYTES) for _ in range(PER_TRANSFER)] for _ in range(UNDER_WAY)]

    def seconds(self) -> float:
        began = time.perf_counter()
        under_way: list[Any] = []
        for index, start in enumerate(range(0, len(self._labels), PER_TRANSFER)):
            if len(under_way) == UNDER_WAY:
                self._await(under_way.pop(0))
            labels = self._labels[start : start + PER_TRANSFER]
            rows = [memoryview(row) for row in self._memory[index % UNDER_WAY][: len(labels)]]
            under_way.append(self._store.get(labels, rows, 60.0))
        for transfer in under_way:
            self._await(transfer)
        return time.perf_counter() - began

    def _await(self, transfer: Any) -> None:
        if not transfer.wait(60.0) or any(transfer.outcomes):
            raise SystemExit(f"a load failed: {transfer.outcomes}")


def read_plainly(folder: Path, index: int) -> None:
    piece = memoryview(bytearray(PIECE))
    for path in slabs(folder)[index::THREADS]:
        file = os.open(path, os.O_RDONLY)
        at = 0
        while count := os.preadv(file, [piece], at):
            at += count
        os.close(file)


def measure(arguments: argparse.Namespace) -> tuple[int, dict[str, float]]:
    """Return the bytes of all blocks, and the median bytes per second of each kind of read."""
    found: dict[str, list[float]] = {"verified": [], "not verified": [], "plain reads": []}
    with disk_of(arguments) as (folder, medium, labels):
        store = Store(medium, num_threads=THREADS)
        loads, num_bytes = Loads(store, labels), len(labels) * BLOCK_BYTES
        size = sum(path.stat().st_size for path in slabs(folder))
        for _ in range(arguments.rounds):
            forget(folder)
            found["verified"].append(num_bytes / loads.seconds())
            forget(folder)
            with mock.patch.object(Header, "proves", return_value=True):
                found["not verified"].append(num_bytes / loads.seconds())
            forget(folder)
            found["plain reads"].append(size / in_threads(partial(read_plainly, folder)))
        store.close()
    return num_bytes, {name: statistics.median(rates) for name, rates in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="of blocks to load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="the disk to measure; default: the system's temporary folder")
    arguments = parser.parse_args()
    num_bytes, rates = measure(arguments)
    print(
        f"{this_machine.name()}; {num_bytes / 2**30:.1f} GiB in blocks of {BLOCK_BYTES:,} bytes, {THREADS} threads, "
        f"{arguments.rounds} rounds"
    )
    print(", ".join(f"{name} {rate / 1e6:,.0f} MB/s" for name, rate in rates.items()))
    print(f"verification's share of a load: {1 - rates['verified'] / rates['not verified']:.1%} (goal: under 5 %)")
    print(f"loads against plain reads: {rates['verified'] / rates['plain reads']:.1%} (goal: 80 % or more)")


if __name__ == "__main__":
    main()

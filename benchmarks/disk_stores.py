"""Compare the slab store with a file for each block, SQLite, LMDB and RocksDB, for the same blocks on the same disk.

    pip install lmdb rocksdict
    python benchmarks/disk_stores.py [--blocks 1000] [--rounds 3] [--dir .] [--out benchmarks/results]

One thread stores blocks of SmolLM2-135M, one after the other, reads all in random order with the system's cache
dropped, reads them again from that cache, and then replaces half of them, as a cache that is full does all the time.
All verify what they read by the same header and checksum. None waits for the disk (no fsync), and each is opened anew
before it is read. Rounds alternate; medians of the throughputs, and the 99th percentile of all operations, are printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import this_machine
from octavo.kvcache.label import Label
from octavo.tiers.base import Reason
from octavo.tiers.disk import DiskMedium
from octavo.tiers.files import BlockFiles
from octavo.tiers.header import HEADER_BYTES, make_header, prove
from octavo.tiers.slabs import SlabLayout

BLOCK_BYTES = 30 * 2 * 3 * 64 * 2 * 16
FINGERPRINT = b"of a measurement"
PHASES = ("store", "read, cold", "read, cached", "replace half")


class _Values:
    """Verifies the values of a key-value store, each a header followed by the payload."""

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        self.put(label.key, make_header(FINGERPRINT, label, payload) + payload)
        return None

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        return [self._take(label, buffer) for label, buffer in zip(labels, buffers, strict=True)]

    def _take(self, label: Label, buffer: memoryview) -> Reason | None:
        value = self.get(label.key)
        if value is None:
            return Reason.ABSENT
        view = memoryview(value)
        buffer[:] = view[HEADER_BYTES:]
        return prove(bytes(view[:HEADER_BYTES]), FINGERPRINT, label, buffer)

    def put(self, key: bytes, value: bytes) -> None: ...
    def get(self, key: bytes) -> Any: ...
    def remove(self, key: bytes) -> None: ...
    def close(self) -> None: ...


class Sqlite(_Values):
    """A table of blobs, with a write-ahead log and without syncs."""

    def __init__(self, folder: Path) -> None:
        self._base = sqlite3.connect(folder / "blocks.db", isolation_level=None)
        for pragma in ("page_size=16384", "journal_mode=WAL", "synchronous=OFF", "mmap_size=8589934592"):
            self._base.execute(f"PRAGMA {pragma}")
        self._base.execute("CREATE TABLE IF NOT EXISTS blocks (key BLOB PRIMARY KEY, value BLOB)")

    def put(self, key: bytes, value: bytes) -> None:
        self._base.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?)", (key, value))

    def get(self, key: bytes) -> Any:
        row = self._base.execute("SELECT value FROM blocks WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def remove(self, key: bytes) -> None:
        self._base.execute("DELETE FROM blocks WHERE key = ?", (key,))

    def close(self) -> None:
        self._base.close()


class Lmdb(_Values):
    """A memory-mapped B+ tree, without syncs."""

    def __init__(self, folder: Path) -> None:
        lmdb: Any = importlib.import_module("lmdb")
        self._base = lmdb.open(str(folder), map_size=8 << 30, sync=False, metasync=False, writemap=True, map_async=True)

    def put(self, key: bytes, value: bytes) -> None:
        with self._base.begin(write=True) as transaction:
            transaction.put(key, value)

    def get(self, key: bytes) -> Any:
        with self._base.begin() as transaction:
            return transaction.get(key)

    def remove(self, key: bytes) -> None:
        with self._base.begin(write=True) as transaction:
            transaction.delete(key)

    def close(self) -> None:
        self._base.close()


class RocksDb(_Values):
    """A log-structured merge tree with large values in files of their own, without a write-ahead log or compression."""

    def __init__(self, folder: Path) -> None:
        rocks: Any = importlib.import_module("rocksdict")
        options = rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(rocks.DBCompressionType.none())
        options.set_enable_blob_files(True)
        options.set_enable_blob_gc(True)
        self._base = rocks.Rdict(str(folder), options)
        writing = rocks.WriteOptions()
        writing.disable_wal = True
        self._base.set_write_options(writing)

    def put(self, key: bytes, value: bytes) -> None:
        self._base[key] = value

    def get(self, key: bytes) -> Any:
        return self._base.get(key)

    def remove(self, key: bytes) -> None:
        del self._base[key]

    def close(self) -> None:
        self._base.close()


def slabs(num_blocks: int) -> Callable[[Path], Any]:
    """Return the slab store with as many slots, so that what is replaced is evicted."""
    size = SlabLayout(BLOCK_BYTES, num_blocks).slab_bytes
    return lambda folder: DiskMedium(folder, size, FINGERPRINT, BLOCK_BYTES, slab_bytes=size)


def label(number: int) -> Label:
    def key(n: int) -> bytes:
        return random.Random(n).randbytes(16)

    return Label(key(number), key(number - 1), number.to_bytes(4, "little") * 16)


def timed(action: Callable[[], list[Reason | None] | Reason | None]) -> float:
    began = time.perf_counter()
    outcome = action()
    seconds = time.perf_counter() - began
    if outcome not in (None, [None]):
        raise SystemExit(f"an operation failed: {outcome}")
    return seconds


def forget(folder: Path) -> None:
    """Tell the system to drop the files' pages, which must be on the disk for that."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(open_medium: Callable[[Path], Any], folder: Path, num_blocks: int, seed: int) -> dict[str, list[float]]:
    """Return the seconds of each operation by phase, and the size of the files in MB at the end."""
    rng = random.Random(seed)
    content, buffer = bytearray(rng.randbytes(BLOCK_BYTES)), memoryview(bytearray(BLOCK_BYTES))
    labels = [label(number) for number in range(num_blocks + num_blocks // 2)]

    def store(number: int) -> Any:
        content[:8] = number.to_bytes(8, "little")
        return medium.write(labels[number], memoryview(content), "")

    def replace(number: int) -> Any:
        # The slab store evicts by itself once it is full.
        if isinstance(medium, _Values):
            medium.remove(labels[number - num_blocks].key)
        elif isinstance(medium, BlockFiles):
            medium._path(labels[number - num_blocks].key).unlink()
        return store(number)

    shuffled = rng.sample(labels[:num_blocks], num_blocks)
    seconds: dict[str, list[float]] = {}
    medium = open_medium(folder)
    seconds["store"] = [timed(lambda n=n: store(n)) for n in range(num_blocks)]  # type: ignore[misc]
    medium.close()
    forget(folder)
    medium = open_medium(folder)
    for phase in ("read, cold", "read, cached"):
        seconds[phase] = [timed(lambda each=each: medium.read([each], [buffer])) for each in shuffled]  # type: ignore[misc]
    seconds["replace half"] = [timed(lambda n=n: replace(n)) for n in range(num_blocks, len(labels))]  # type: ignore[misc]
    medium.close()
    seconds["size"] = [sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) / 1e6]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="folder on the disk to measure; default: the system's for temporary files")
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for disk_stores.md")
    options = parser.parse_args()
    media: dict[str, Callable[[Path], Any]] = {
        "slabs": slabs(options.blocks),
        "a file for each block": lambda folder: BlockFiles(folder, FINGERPRINT),
        "SQLite": Sqlite,
        "LMDB": Lmdb,
        "RocksDB": RocksDb,
    }
    rounds: dict[str, list[dict[str, list[float]]]] = {name: [] for name in media}
    for number in range(options.rounds):
        for name in list(media)[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory(dir=options.dir, prefix="octavo-stores-") as folder:
                rounds[name].append(measure(media[name], Path(folder), options.blocks, number))
    lines = [
        "# Stores of blocks on disk",
        "",
        f"`python benchmarks/disk_stores.py --blocks {options.blocks} --rounds {options.rounds}` at "
        f"{subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True).stdout.strip()}: "
        f"blocks of {BLOCK_BYTES:,} bytes, one thread, nothing is synced, everything read is verified. "
        "MB/s, median of the rounds; in brackets the 99th percentile of an operation in ms, over all rounds.",
        "",
        f"| | {' | '.join(PHASES)} | size at the end, MB |",
        f"|---|{'---:|' * (len(PHASES) + 1)}",
    ]
    for name, measured in rounds.items():
        cells = []
        for phase in PHASES:
            speed = statistics.median(len(each[phase]) * BLOCK_BYTES / sum(each[phase]) / 1e6 for each in measured)
            slowest = statistics.quantiles([s for each in measured for s in each[phase]], n=100)[98]
            cells.append(f"{speed:,.0f} ({1000 * slowest:.2f})")
        size = statistics.median(each["size"][0] for each in measured)
        lines.append(f"| {name} | {' | '.join(cells)} | {size:,.0f} |")
    print("\n".join(lines))
    if options.out:
        (options.out / "disk_stores.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

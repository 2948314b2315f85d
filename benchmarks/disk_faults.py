"""Kill, damage, restart, load: a disk store must never give a wrong byte, whatever happened to it.

    python benchmarks/disk_faults.py [--cycles 10000] [--seed 0] [--out benchmarks/results]

Each cycle forks a process that stores blocks until it is killed with SIGKILL, at a moment drawn at random. Then perhaps
a bit is flipped, a slab cut, two slots or two headers swapped, a block half overwritten, or the fingerprint or layout
changed. A restart loads every block that was ever stored: each is right to the last byte, or a miss with a reason.
"""

from __future__ import annotations

import os
import random
import struct
import tempfile
from collections import Counter
from hashlib import blake2b
from pathlib import Path

from fault_cycles import count_faults, kill_while_storing
from octavo.kvcache.label import Label
from octavo.tiers.base import LAYOUT_VERSION, Reason
from octavo.tiers.disk import ALIGNMENT, DiskMedium
from octavo.tiers.header import HEADER_BYTES
from octavo.tiers.store import Store

BLOCK_BYTES = 20_000
SLAB_BYTES = 512 << 10
SIZE = 2 << 20
NUM_BLOCKS = 120
FINGERPRINTS = [b"model-one-------", b"model-two-------"]
FAULTS = ["none", "none", "bit", "cut", "swap slots", "swap headers", "half a block", "layout", "fingerprint"]


def label(number: int) -> Label:
    return Label(digest(number), digest(number - 1), number.to_bytes(4, "little") * 16)


def digest(number: int) -> bytes:
    return blake2b(struct.pack("<q", number), digest_size=16).digest()


def payload(fingerprint: bytes, number: int) -> bytes:
    """Of its own for each model: one model's block would be wrong for the other."""
    return random.Random(fingerprint + struct.pack("<q", number)).randbytes(BLOCK_BYTES)


def open_disk(folder: Path, fingerprint: bytes) -> DiskMedium:
    return DiskMedium(folder, SIZE, fingerprint, BLOCK_BYTES, slab_bytes=SLAB_BYTES)


def damage(folder: Path, fault: str, rng: random.Random) -> None:
    slabs = sorted(folder.glob("*/slab-*.kv"))
    if not slabs or fault == "none":
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
        folders = [folder / fingerprint.hex() for fingerprint in FINGERPRINTS]
        if all(f.is_dir() for f in folders):
            aside = folder / "aside"
            folders[0].rename(aside)
            folders[1].rename(folders[0])
            aside.rename(folders[1])


def _read(file: int, at: int, count: int) -> bytes:
    return os.pread(file, count, at)


def cycle(folder: Path, contents: dict[bytes, list[bytes]], rng: random.Random, totals: Counter[str]) -> None:
    fingerprint = rng.choice(FINGERPRINTS)
    blocks = [(label(number), content) for number, content in enumerate(contents[fingerprint])]
    totals[kill_while_storing(lambda: Store(open_disk(folder, fingerprint)), blocks, rng)] += 1
    fault = rng.choice(FAULTS)
    totals[f"fault: {fault}"] += 1
    damage(folder, fault, rng)
    fingerprint = rng.choice(FINGERPRINTS)
    medium = open_disk(folder, fingerprint)
    try:
        for number in range(NUM_BLOCKS):
            buffer = bytearray(BLOCK_BYTES)
            (reason,) = medium.read([label(number)], [memoryview(buffer)])
            if reason is None:
                totals["right" if buffer == contents[fingerprint][number] else "WRONG"] += 1
            else:
                totals[f"miss: {Reason(reason).value}"] += 1
    finally:
        medium.close()


def run(cycles: int, seed: int) -> Counter[str]:
    """Counts of what happened over so many cycles."""
    contents = {f: [payload(f, number) for number in range(NUM_BLOCKS)] for f in FINGERPRINTS}
    rng, totals = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="octavo-disk-") as folder:
        for _ in range(cycles):
            cycle(Path(folder), contents, rng, totals)
    return totals


if __name__ == "__main__":
    count_faults("Kills and damage to the disk store", __doc__, run)

"""Measure what tiers cost: four measurements, each a separate command of at most three minutes.

    python -m benchmarks.tier_costs verification      its share of a cold load (goal: under 5 %)
    python -m benchmarks.tier_costs bandwidth         loads against plain reads of the same disk (goal: 80 %)
    python -m benchmarks.tier_costs start             a start with a full store of 10 GiB (goal: at most 1 s more)
    python -m benchmarks.tier_costs restart           blocks that a clean restart restores (goal: 95 %)

`--out benchmarks/results` adds the figures to tier_costs.json, from which tier_costs.md is generated. Cold means that
the system was told to drop the files from its cache (POSIX_FADV_DONTNEED after a sync); caches below it, such as a
hypervisor's, are left as they are. What is compared alternates, and medians are given.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import this_machine
from octavo import LLM, SamplingParams
from octavo.engine.outputs import RequestOutput
from octavo.kvcache.hashing import Label
from octavo.tiers.disk import DiskMedium, _write_all
from octavo.tiers.header import Header
from octavo.tiers.slabs import model_folders, stored_blocks
from octavo.tiers.store import Store
from octavo.workloads.workload import random_token_ids

# SmolLM2-135M in bfloat16: 30 layers, 3 heads of 64, 16 tokens.
BLOCK_BYTES = 30 * 2 * 3 * 64 * 2 * 16
FINGERPRINT = b"of a measurement"
THREADS = 2
PER_TRANSFER = 64
UNDER_WAY = 4
PIECE = 4 << 20
FULL_STORE = 10 << 30


@dataclass(frozen=True)
class Figure:
    """A measurement, its goal, and how it was obtained."""

    name: str
    value: float
    unit: str
    goal: str
    reached: bool
    detail: str


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


def verification(arguments: argparse.Namespace) -> Figure:
    with disk_of(arguments) as (folder, medium, labels):
        store = Store(medium, num_threads=THREADS)
        loads, proven, trusted = Loads(store, labels), [], []
        for _ in range(arguments.rounds):
            forget(folder)
            proven.append(loads.seconds())
            forget(folder)
            with mock.patch.object(Header, "proves", return_value=True):
                trusted.append(loads.seconds())
        store.close()
    num_bytes = len(labels) * BLOCK_BYTES
    # The time that verification takes if nothing else is done.
    header, row = mock.Mock(), memoryview(bytearray(BLOCK_BYTES))
    header.packed, header.checksum = (lambda: b"\0" * 112), b""
    began = time.perf_counter()
    for _ in range(200):
        Header.proves(header, row)
    alone = (time.perf_counter() - began) / 200 / BLOCK_BYTES * num_bytes
    share = 1 - statistics.median(trusted) / statistics.median(proven)
    return Figure(
        "verification's share of a cold load",
        share,
        "%",
        "under 5 %",
        share < 0.05,
        f"{num_bytes / 2**30:.1f} GiB, {arguments.rounds} rounds: {statistics.median(proven):.2f} s proven, "
        f"{statistics.median(trusted):.2f} s not; the checksums alone, in one thread and in cache: {alone:.2f} s",
    )


def bandwidth(arguments: argparse.Namespace) -> Figure:
    with disk_of(arguments) as (folder, medium, labels):
        store = Store(medium, num_threads=THREADS)
        loads, loaded, read = Loads(store, labels), [], []

        def read_plainly(index: int) -> None:
            piece = memoryview(bytearray(PIECE))
            for path in slabs(folder)[index::THREADS]:
                file = os.open(path, os.O_RDONLY)
                at = 0
                while count := os.preadv(file, [piece], at):
                    at += count
                os.close(file)

        size = sum(path.stat().st_size for path in slabs(folder))
        for _ in range(arguments.rounds):
            forget(folder)
            read.append(size / in_threads(read_plainly))
            forget(folder)
            loaded.append(len(labels) * BLOCK_BYTES / loads.seconds())
        store.close()
    ours, theirs = statistics.median(loaded), statistics.median(read)
    return Figure(
        "loads against plain reads of the disk",
        ours / theirs,
        "%",
        "80 % or more",
        ours / theirs >= 0.8,
        f"{len(labels) * BLOCK_BYTES / 2**30:.1f} GiB, {arguments.rounds} rounds: loads {ours / 1e6:,.0f} MB/s, reads "
        f"of {PIECE >> 20} MiB in {THREADS} threads {theirs / 1e6:,.0f} MB/s",
    )


def start(arguments: argparse.Namespace) -> Figure:
    with ExitStack() as stack:
        empty, full = (
            stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.dir, prefix="octavo-disk-")) for _ in range(2)
        )
        options = {"model": arguments.model, "num_blocks": 300, "kv_disk_size": "10GiB"}

        def seconds(folder: str) -> float:
            forget(Path(folder))
            began = time.perf_counter()
            with LLM(**options, kv_disk=folder) as llm:
                taken = time.perf_counter() - began
                blocks[folder] = llm.core.tiers.stores[0].medium.num_blocks  # type: ignore[union-attr]
                sizes.append(llm.core.scheduler.kv.spec.block_bytes)
            return taken

        blocks: dict[str, int] = {}
        sizes: list[int] = []
        seconds(empty)
        seconds(full)
        fill(Path(full), sizes[0])
        pairs = [(seconds(empty), seconds(full)) for _ in range(arguments.rounds)]
        began = time.perf_counter()
        DiskMedium(Path(full), FULL_STORE, bytes.fromhex(model_folders(Path(full))[0].name), sizes[0]).close()
        alone = time.perf_counter() - began
    more = statistics.median(after - before for before, after in pairs)
    return Figure(
        "a start with a full store of 10 GiB takes longer by",
        more,
        "s",
        "1 s at most",
        more <= 1.0,
        f"{blocks[full]:,} blocks, {arguments.rounds} pairs: {statistics.median(b for b, _ in pairs):.2f} s with an "
        f"empty one, {statistics.median(a for _, a in pairs):.2f} s with the full one; opening it alone {alone:.2f} s",
    )


def fill(folder: Path, block_bytes: int) -> None:
    """Write the headers of a whole store; the payloads are holes in the files, and verify as zeros."""

    def write(file: int, payload: memoryview, at: int) -> None:
        if payload.nbytes < block_bytes:
            _write_all(file, payload, at)

    zeros, number = memoryview(bytes(block_bytes)), 0
    fingerprint = bytes.fromhex(model_folders(folder)[0].name)
    truncate = mock.patch("os.posix_fallocate", lambda file, start, size: os.ftruncate(file, start + size))
    with truncate, mock.patch("octavo.tiers.disk._write_all", write):
        medium = DiskMedium(folder, FULL_STORE, fingerprint, block_bytes)
        while not medium.num_evicted:
            medium.write(label(number), zeros, "")
            number += 1
        medium.close()


def restart(arguments: argparse.Namespace) -> Figure:
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": random_token_ids(rng, 1000)} for _ in range(arguments.prompts)]
    params = SamplingParams(max_tokens=1, temperature=0.0)

    def ask(llm: LLM) -> list[RequestOutput]:
        # All at once, many times what fits into host memory: each waits for its turn to be loaded.
        return llm.generate(prompts, params, use_tqdm=False)

    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="octavo-disk-") as name:
        options = {
            "model": arguments.model,
            "num_blocks": 400,
            "kv_disk": name,
            "kv_demotion": "all",
            "max_num_seqs": 4,
        }
        with LLM(**options) as llm:
            cold = ask(llm)
            size = llm.core.scheduler.kv.spec.block_size
            block_bytes = llm.core.scheduler.kv.spec.block_bytes
        folder = model_folders(Path(name))[0]
        stored = sum(good for _, good in stored_blocks(folder))
        medium = DiskMedium(Path(name), 20 << 30, bytes.fromhex(folder.name), block_bytes)
        known = medium.num_blocks
        medium.close()
        with LLM(**options) as llm:
            warm = ask(llm)
    restored = sum(output.cached_by_tier.get("disk", 0) for output in warm) // size
    possible = sum((len(prompt["prompt_token_ids"]) - 1) // size for prompt in prompts)
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(cold, warm, strict=True))
    share = restored / max(1, stored)
    return Figure(
        "blocks on disk that a clean restart restores",
        share,
        "%",
        "95 % or more",
        share >= 0.95,
        f"{possible} full blocks of {len(prompts)} prompts: {stored} were on disk and whole, {known} of them known at "
        f"the start, {restored} loaded for the same prompts; {same} of {len(prompts)} first tokens are the same",
    )


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], Figure]] = {
    "verification": verification,
    "bandwidth": bandwidth,
    "start": start,
    "restart": restart,
}


def text_of(figure: Figure) -> str:
    return f"{figure.value:.1%}" if figure.unit == "%" else f"{figure.value:.2f} {figure.unit}"


def table(figures: Sequence[Figure], machine: str) -> str:
    lines = [
        "# What tiers cost",
        "",
        f"`python -m benchmarks.tier_costs {{{','.join(MEASUREMENTS)}}}`, {machine}. SmolLM2-135M in bfloat16: blocks "
        f"of 16 tokens, {BLOCK_BYTES:,} bytes.",
        "",
        "| | measured | goal | |",
        "|---|---:|---:|---|",
    ]
    lines += [f"| {f.name} | {text_of(f)}{'' if f.reached else ' (missed)'} | {f.goal} | {f.detail} |" for f in figures]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=[*MEASUREMENTS])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--gib", type=float, default=2.0, help="of blocks to load, for verification and bandwidth")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=40, help="for restart")
    parser.add_argument("--dir", type=Path, help="the disk to measure; default: the system's temporary folder")
    parser.add_argument("--out", type=this_machine.output_folder, help="folder for tier_costs.md and .json")
    arguments = parser.parse_args()
    figure = MEASUREMENTS[arguments.measurement](arguments)
    print(f"{figure.name}: {text_of(figure)} ({figure.goal}). {figure.detail}")
    if arguments.out:
        file = arguments.out / "tier_costs.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        known[arguments.measurement] = asdict(figure)
        known = {name: known[name] for name in MEASUREMENTS if name in known}
        file.write_text(json.dumps(known, indent=1) + "\n")
        (arguments.out / "tier_costs.md").write_text(
            table([Figure(**each) for each in known.values()], this_machine.name())
        )
    print(json.dumps(asdict(figure)))


if __name__ == "__main__":
    main()

"""The hardware limits of this machine, as a yardstick for kernels and engines.

Reading is measured with the fastest of three ways to read one buffer completely: torch's sum, torch's matrix times
vector (both float32), and the library's packed bfloat16 product of one row. A buffer of `DRAM_BYTES` exceeds every
cache; one of `CACHE_BYTES` stays in the last two levels. Products are measured with square matrices; a multiply-add
counts as two operations. Each figure is that of the median call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from octavo import kernels
from octavo.planner.machine import default_num_threads
from octavo.workloads.timing import Call, Timing, interleaved, threads

DRAM_BYTES = 256 << 20
CACHE_BYTES = 4 << 20
PRODUCT_SIZE = 2048

_ROW = 1024  # elements of a row that a product reads; both buffers are whole rows


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit.

    Attributes:
        name: what was measured.
        value: the rate of the median call, in `unit`.
        best: the same of the best call.
        how: the fastest way to do it, which was used.
    """

    name: str
    threads: int
    unit: str
    value: float
    best: float
    how: str


def thread_counts(most: int | None = None) -> list[int]:
    """Return the thread counts to measure: 1, and `most` (by default all cores that this process may use)."""
    return sorted({1, most or default_num_threads()})


def measure_limits(counts: list[int], *, seconds: float = 0.5) -> Iterator[Limit]:
    """Measure every limit with each number of threads.

    Args:
        seconds: time spent on each way to measure a limit.
    """
    for count in counts:
        with threads(count):
            yield read_bandwidth("read from DRAM", DRAM_BYTES, count, seconds=seconds)
            yield read_bandwidth("read from cache", CACHE_BYTES, count, seconds=seconds)
            for dtype in (torch.bfloat16, torch.float32):
                yield _product(dtype, PRODUCT_SIZE, count, seconds)


def read_bandwidth(name: str, nbytes: int, count: int, *, seconds: float = 0.5) -> Limit:
    """Measure GB/s (1e9 bytes) of the fastest reader of a buffer of `nbytes`, with the current number of threads."""
    candidates = {reader: [call] for reader, call in _readers(nbytes).items()}
    timings = interleaved(candidates, seconds=seconds)
    how = min(timings, key=lambda reader: timings[reader].median)
    return _limit(name, count, "GB/s", nbytes / 1e9, timings[how], how)


def _readers(nbytes: int) -> dict[str, Call]:
    # Sixteen rows of floats are the 32 rows of bfloat16 that a panel of the packed product holds.
    rows = max(1, nbytes // (4 * _ROW * 16)) * 16
    floats = torch.ones(rows, _ROW)
    readers: dict[str, Call] = {
        "torch.sum": floats.view(-1).sum,
        "torch.mv": partial(torch.mv, floats, torch.ones(_ROW)),
    }
    if kernels.available():
        # The same memory as bfloat16; the values do not affect the time as long as none is subnormal.
        floats.view(torch.bfloat16).fill_(1.0)
        packed = kernels.PackedWeight("bfloat16", 2 * rows, _ROW, floats.view(-1).view(torch.uint8))
        x, out = torch.ones(1, _ROW, dtype=torch.bfloat16), torch.empty(1, packed.outputs, dtype=torch.bfloat16)
        readers["PackedWeight.linear"] = partial(packed.linear, x, None, out)
    return readers


def _product(dtype: torch.dtype, size: int, count: int, seconds: float) -> Limit:
    a, b = torch.randn(2, size, size).to(dtype)
    name = str(dtype).removeprefix("torch.")
    timings = interleaved({"matmul": [partial(torch.matmul, a, b)]}, seconds=seconds)
    return _limit(f"{name} product", count, "GFLOP/s", 2 * size**3 / 1e9, timings["matmul"], f"torch.matmul {size}³")


def _limit(name: str, count: int, unit: str, work: float, timing: Timing, how: str) -> Limit:
    return Limit(name, count, unit, round(work / timing.median, 2), round(work / timing.best, 2), how)

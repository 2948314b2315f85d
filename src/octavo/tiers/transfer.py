"""Transfers, which are the units of a store's work, and their totals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from octavo.kvcache.hashing import Label
from octavo.tiers.base import Reason


class Work(Enum):
    """What a transfer does with its blocks, the most urgent first."""

    ASK = "ask"  # whether they are there
    READ = "read"
    WRITE = "write"


class Transfer:
    """A question about blocks, or a read or write of them. `outcomes` has an entry for each block once it is `done`.

    The buffers belong to the store until then, however late that is. The bytes are accounted to `tenant`.
    """

    def __init__(
        self, work: Work, labels: Sequence[Label], buffers: Sequence[memoryview], deadline: float, tenant: str = ""
    ) -> None:
        self.work = work
        self.labels = labels
        self.buffers = buffers
        self.deadline = deadline
        self.tenant = tenant
        self.outcomes: list[Reason | None] = []
        self._done = threading.Event()
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Whether the transfer is over, so that the store does not touch the buffers any more."""
        return self._done.is_set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Cancel what has not been started; `done` follows soon, but not at once."""
        self._cancelled = True

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the transfer, and return whether it is done."""
        return self._done.wait(seconds)

    def finish(self) -> None:
        """Mark the transfer as done; called by the store."""
        self._done.set()


LATENCY_BOUNDS = (0.0005, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0)
"""Upper bounds, in seconds, of the latency buckets of transfers; a last bucket without bound follows."""


@dataclass(slots=True)
class WorkTotals:
    """Totals of reads or of writes since the start, in blocks unless noted."""

    blocks: int = 0
    bytes: int = 0
    by_tenant: Counter[str] = field(default_factory=Counter)  # bytes
    misses: Counter[Reason] = field(default_factory=Counter)  # of reads, including those of `ask`
    latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))  # transfers
    seconds: float = 0.0


class StoreCounters:
    """Totals since the start. Several threads update them, and any thread may read.

    Attributes:
        open_misses: blocks that an earlier process had stored.
    """

    def __init__(self, open_misses: Mapping[Reason, int]) -> None:
        self.read = WorkTotals()
        self.write = WorkTotals()
        self.open_misses = Counter(open_misses)
        self._lock = threading.Lock()

    def count(self, transfer: Transfer) -> None:
        """Count the outcomes of a transfer."""
        totals = self.write if transfer.work is Work.WRITE else self.read
        with self._lock:
            for buffer, reason in zip(transfer.buffers, transfer.outcomes, strict=True):
                if reason is not None:
                    totals.misses[reason] += 1
                elif transfer.work is not Work.ASK:
                    totals.blocks += 1
                    totals.bytes += buffer.nbytes
                    totals.by_tenant[transfer.tenant] += buffer.nbytes

    def time(self, work: Work, seconds: float) -> None:
        """Record how long the medium took for a read or a write."""
        totals = self.write if work is Work.WRITE else self.read
        with self._lock:
            totals.latency[sum(seconds > bound for bound in LATENCY_BOUNDS)] += 1
            totals.seconds += seconds

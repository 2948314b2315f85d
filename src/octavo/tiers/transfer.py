"""Transfers, which are the units of a store's work, and their totals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
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


class StoreCounters:
    """Totals since the start, in blocks unless noted. Several threads update them, and any thread may read."""

    def __init__(self, open_misses: Mapping[Reason, int]) -> None:
        self.loaded = 0
        self.stored = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.read_by_tenant = Counter[str]()  # bytes
        self.written_by_tenant = Counter[str]()  # bytes
        self.open_misses = Counter(open_misses)  # of blocks that an earlier process had stored
        self.read_misses = Counter[Reason]()  # including those of `ask`
        self.write_misses = Counter[Reason]()
        self.read_latency = [0] * (len(LATENCY_BOUNDS) + 1)  # transfers
        self.write_latency = [0] * (len(LATENCY_BOUNDS) + 1)
        self.read_seconds = 0.0  # of all transfers
        self.write_seconds = 0.0
        self._lock = threading.Lock()

    def count(self, transfer: Transfer) -> None:
        """Count the outcomes of a transfer."""
        wrote = transfer.work is Work.WRITE
        with self._lock:
            for buffer, reason in zip(transfer.buffers, transfer.outcomes, strict=True):
                if reason is not None:
                    (self.write_misses if wrote else self.read_misses)[reason] += 1
                elif wrote:
                    self.stored += 1
                    self.written_bytes += buffer.nbytes
                    self.written_by_tenant[transfer.tenant] += buffer.nbytes
                elif transfer.work is Work.READ:
                    self.loaded += 1
                    self.read_bytes += buffer.nbytes
                    self.read_by_tenant[transfer.tenant] += buffer.nbytes

    def time(self, work: Work, seconds: float) -> None:
        """Record how long the medium took for a read or a write."""
        place = sum(seconds > bound for bound in LATENCY_BOUNDS)
        with self._lock:
            if work is Work.WRITE:
                self.write_latency[place] += 1
                self.write_seconds += seconds
            else:
                self.read_latency[place] += 1
                self.read_seconds += seconds

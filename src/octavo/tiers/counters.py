"""Counters of a store's activity since its start."""

from __future__ import annotations

import threading
from collections import Counter

from octavo.tiers.base import Reason
from octavo.tiers.transfer import Transfer, Work

LATENCY_BOUNDS = (0.0005, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0)
"""Upper bounds, in seconds, of the latency buckets of transfers; a last bucket without bound follows."""


class StoreCounters:
    """Totals since the start, in blocks unless noted. Several threads update them, and any thread may read."""

    def __init__(self) -> None:
        self.loaded = 0
        self.stored = 0
        self.read_bytes = 0
        self.written_bytes = 0
        self.read_by_tenant = Counter[str]()  # bytes
        self.written_by_tenant = Counter[str]()  # bytes
        self.open_misses = Counter[Reason]()  # of blocks that an earlier process had stored
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

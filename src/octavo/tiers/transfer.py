"""Transfers, which are the units of a store's work, the queue from which its threads take them, and their totals."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from enum import Enum

from octavo.kvcache.hashing import Label
from octavo.tiers.base import Reason


class Work(Enum):
    """What a transfer does with its blocks."""

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


class TransferQueue:
    """The transfers that wait for a thread.

    Requests wait for questions and reads, but not for writes: questions go first, then reads, then writes, and at most
    `most_writers` threads write at a time. The bytes that wait to be written are bounded.

    Args:
        most_waiting: maximum number of waiting questions and reads.
        most_write_bytes: maximum number of bytes waiting to be written, but one block always may.
        most_writers: maximum number of threads that write at a time.

    Attributes:
        num_write_bytes: bytes that wait to be written.
    """

    def __init__(self, most_waiting: int, most_write_bytes: int, most_writers: int) -> None:
        self.num_write_bytes = 0
        self._most_waiting = most_waiting
        self._most_write_bytes = most_write_bytes
        self._most_writers = most_writers
        self._changed = threading.Condition()  # there is something to do, or a writer has finished
        self._questions: deque[Transfer] = deque()
        self._reads: deque[Transfer] = deque()
        self._writes: deque[Transfer] = deque()
        self._num_writers = 0
        self._ended = False

    def put(self, transfer: Transfer) -> Reason | None:
        """Queue a transfer; return the reason if it is refused."""
        with self._changed:
            if self._ended:
                return Reason.CLOSED
            if transfer.work is Work.WRITE:
                num_bytes = self.num_write_bytes + transfer.num_bytes
                if self._writes and num_bytes > self._most_write_bytes:
                    return Reason.BUSY
                self.num_write_bytes = num_bytes
                self._writes.append(transfer)
            elif len(self._questions) + len(self._reads) >= self._most_waiting:
                return Reason.BUSY
            else:
                (self._questions if transfer.work is Work.ASK else self._reads).append(transfer)
            self._changed.notify()
        return None

    def take(self) -> Transfer | None:
        """Wait for the next transfer and take it; None once the queue has ended."""
        with self._changed:
            while True:
                if self._questions:
                    return self._questions.popleft()
                if self._reads:
                    return self._reads.popleft()
                if self._writes and self._num_writers < self._most_writers:
                    transfer = self._writes.popleft()
                    self.num_write_bytes -= transfer.num_bytes
                    self._num_writers += 1
                    return transfer
                if self._ended and not self._writes:
                    return None
                self._changed.wait()

    def did(self, transfer: Transfer) -> None:
        """Report that a thread has finished a transfer that it took."""
        if transfer.work is Work.WRITE:
            with self._changed:
                self._num_writers -= 1
                # All, because threads that wait for the end of the queue must check whether it has come.
                self._changed.notify_all()

    def end(self) -> None:
        """Accept no more transfers; those that are waiting are still done."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


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

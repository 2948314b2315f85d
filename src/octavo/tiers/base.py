"""The contract of a store, where blocks live below host memory: keys to bytes, proven on every load.

A medium (files, slabs, Redis) moves the bytes of one block after another, and says why it could not. A `Store` makes it
asynchronous: threads of its own, deadlines, cancelling, and a breaker that closes a medium which only fails.

    engine's thread                          store's threads
      lookup(key) ───> MISS | HIT | HIT_PENDING
      get(labels, buffers, seconds) ──────>  medium.read, in pieces; each block's bytes are proven
      put(label, buffer) ─────────────────>  medium.write
      ask(labels, seconds) ───────────────>  medium.ask, where lookup cannot tell
      Transfer.done, .outcomes <───────────  None, or the reason of a miss

Somebody waits for questions and reads, and nobody for writes: questions go first, then reads, then writes, and where
there are several threads one of them never writes. The bytes that wait to be written are bounded; what is too much is
dropped, and counted as BUSY.

A buffer belongs to the store until its transfer is done, however late that is.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol, runtime_checkable

from octavo.kvcache.host_memory import Label

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1
"""Of what a block's bytes mean and of how it is proven: part of every key and header."""

MOST_WRITE_BYTES = 128 << 20

_PIECE = 16  # blocks of a transfer between two looks at its deadline
_SMOOTHING = 0.2
LATENCY_BOUNDS = (0.0005, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0)
"""Upper bounds, in seconds, of the buckets in which transfers are counted by how long they took; the last has none."""


class LookupResult(Enum):
    """What is known of a key without asking the medium."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit_pending"  # it is on its way there, or only the medium can tell


class Reason(StrEnum):
    """Why a block was not loaded or not stored. All of them are misses; a key is counted under one."""

    ABSENT = "absent"
    CHECKSUM = "checksum"  # bit flips, torn writes, swapped slots
    LABEL = "label"  # another key, parent, or other tokens under this key
    FINGERPRINT = "fingerprint"  # other weights, dtype, codec or block size
    LAYOUT = "layout"
    TRUNCATED = "truncated"
    FORGED = "forged"  # not signed with this server's secret
    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    LATE = "late"
    CANCELLED = "cancelled"
    CLOSED = "closed"
    BUSY = "busy"  # as much waits already as may: a write was dropped, a read refused


# Of these, so many in a row close a medium.
_FAULTS = {Reason.IO_ERROR, Reason.NO_SPACE}


class Medium(Protocol):
    """What blocks lie on. Called from several threads; may raise anything.

    Attributes:
        name: of the tier.
    """

    name: str

    def contains(self, key: bytes) -> bool | None:
        """Whether it has a key, without waiting for anything; None where only asking would tell."""

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        """Fill the buffers, and prove each; None for one that is what its label says, to the last bit."""

    def write(self, label: Label, payload: memoryview) -> Reason | None:
        """Keep a block; another may have to go for it."""

    def close(self) -> None:
        """Give up files and connections."""


@runtime_checkable
class DistantMedium(Protocol):
    """What a medium has besides where only asking tells what is there."""

    def ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        """Which blocks are there (None), and why others are not."""


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start; blocks, except where it says otherwise."""

    loaded: int = 0
    stored: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_misses: Counter[Reason] = field(default_factory=Counter)
    write_misses: Counter[Reason] = field(default_factory=Counter)
    read_latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))  # transfers
    write_latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    read_seconds: float = 0.0  # of all transfers
    write_seconds: float = 0.0
    closings: int = 0  # by the breaker


class Transfer:
    """Blocks on their way. `outcomes` has an entry for each once `done`."""

    def __init__(self, labels: Sequence[Label], buffers: Sequence[memoryview], deadline: float) -> None:
        self.labels = labels
        self.buffers = buffers
        self.deadline = deadline
        self.outcomes: list[Reason | None] = []
        self._done = threading.Event()
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Nobody touches the buffers any more."""
        return self._done.is_set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """What has not begun need not; `done` follows soon, but not at once."""
        self._cancelled = True

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is done by then."""
        return self._done.wait(seconds)

    def finish(self) -> None:
        """By its store: no more will happen."""
        self._done.set()


class Store:
    """A medium, made asynchronous.

    Args:
        num_threads: that read and write; all but one of them write at a time.
        most_waiting: questions and reads that may wait; beyond that they are refused as BUSY.
        most_write_bytes: that may wait to be written, but one block always may; beyond that they are dropped as BUSY.
        most_faults: in a row, after which the medium is left alone for `retry_seconds`.
        on_done: called in a store's thread after each transfer.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        num_threads: int = 2,
        most_waiting: int = 1024,
        most_write_bytes: int = MOST_WRITE_BYTES,
        most_faults: int = 8,
        retry_seconds: float = 30.0,
        on_done: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.medium = medium
        self.name = medium.name
        self.counters = StoreCounters()
        self.on_done = on_done
        self._most_waiting = most_waiting
        self._most_write_bytes = most_write_bytes
        self._most_writers = max(1, num_threads - 1)
        self._most_faults = most_faults
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # something to do, or a writer less
        self._questions: deque[Transfer] = deque()
        self._reads: deque[Transfer] = deque()
        self._writes: deque[Transfer] = deque()
        self._write_bytes = 0  # that wait
        self._num_writers = 0
        self._writing: set[bytes] = set()
        self._faults = 0
        self._closed_until = 0.0
        self._ended = False
        self._seconds_per_byte: float | None = None
        self._seconds_per_read: float | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"octavo-{self.name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the medium is used: it has not failed too often of late."""
        return not self._ended and self._clock() >= self._closed_until

    def lookup(self, key: bytes) -> LookupResult:
        """What is known of a key; waits for nothing."""
        if not self.is_open:
            return LookupResult.MISS
        with self._lock:
            if key in self._writing:
                return LookupResult.HIT_PENDING
        try:
            there = self.medium.contains(key)
        except Exception as error:
            self._fault(error)
            return LookupResult.MISS
        if there is None:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if there else LookupResult.MISS

    @property
    def must_ask(self) -> bool:
        """Whether only `ask` tells what is there."""
        return isinstance(self.medium, DistantMedium)

    def wants(self, key: bytes) -> bool:
        """Whether a block should be stored: it is not known to be there or on its way; waits for nothing."""
        found = self.lookup(key)
        if found is LookupResult.HIT_PENDING and self.must_ask:
            with self._lock:
                return key not in self._writing
        return self.is_open and found is LookupResult.MISS

    def ask(self, labels: Sequence[Label], seconds: float) -> Transfer:
        """Find out which blocks are there: their outcomes are None."""
        transfer = Transfer(labels, [memoryview(b"")] * len(labels), self._clock() + seconds)
        self._submit(self._ask, transfer)
        return transfer

    def expected_seconds(self, num_bytes: int) -> float | None:
        """How long a load takes, by what was measured; None where nothing was."""
        if self._seconds_per_byte is None or self._seconds_per_read is None:
            return None
        return self._seconds_per_read + num_bytes * self._seconds_per_byte

    def get(self, labels: Sequence[Label], buffers: Sequence[memoryview], seconds: float) -> Transfer:
        """Load blocks; what has not begun after so many seconds is LATE."""
        transfer = Transfer(labels, buffers, self._clock() + seconds)
        self._submit(self._read, transfer)
        return transfer

    def put(self, label: Label, payload: memoryview, seconds: float = 30.0) -> Transfer:
        """Store a block."""
        transfer = Transfer([label], [payload], self._clock() + seconds)
        with self._lock:
            self._writing.add(label.key)
        self._submit(self._write, transfer)
        return transfer

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._write_bytes

    def close(self, seconds: float = 10.0) -> None:
        """Finish what has been asked for, as far as there is time, and give up the medium."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        try:
            self.medium.close()
        except Exception:
            logger.exception("%s: closing it failed", self.name)

    def _submit(self, work: Callable[[Transfer], None], transfer: Transfer) -> None:
        with self._lock:
            refused = None
            if self._ended or self._clock() < self._closed_until:
                refused = Reason.CLOSED
            elif not self._queue(work, transfer):
                refused = Reason.BUSY
        if refused is not None:
            self._settle(work, transfer, [refused] * len(transfer.labels))

    def _queue(self, work: Callable[[Transfer], None], transfer: Transfer) -> bool:
        """Whether there is room for it to wait. The caller has the lock."""
        if work == self._write:
            num_bytes = self._write_bytes + transfer.num_bytes
            if self._writes and num_bytes > self._most_write_bytes:
                return False
            self._write_bytes = num_bytes
            self._writes.append(transfer)
        else:
            if len(self._questions) + len(self._reads) >= self._most_waiting:
                return False
            (self._questions if work == self._ask else self._reads).append(transfer)
        self._changed.notify()
        return True

    def _next(self) -> tuple[Callable[[Transfer], None], Transfer] | None:
        """What a thread is to do next, once there is something; None: nothing any more."""
        with self._changed:
            while True:
                if self._questions:
                    return self._ask, self._questions.popleft()
                if self._reads:
                    return self._read, self._reads.popleft()
                if self._writes and self._num_writers < self._most_writers:
                    transfer = self._writes.popleft()
                    self._write_bytes -= transfer.num_bytes
                    self._num_writers += 1
                    return self._write, transfer
                if self._ended and not self._writes:
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while (item := self._next()) is not None:
            work, transfer = item
            try:
                work(transfer)
            except BaseException as error:  # a store's thread must outlive whatever happens in it
                self._fault(error)
                missing = len(transfer.labels) - len(transfer.outcomes)
                self._settle(work, transfer, [_reason_of(error)] * missing)
            if work == self._write:
                with self._changed:
                    self._num_writers -= 1
                    # All: those that wait for the end look whether it has come.
                    self._changed.notify_all()

    def _read(self, transfer: Transfer) -> None:
        began = self._clock()
        outcomes: list[Reason | None] = []
        num_bytes = 0
        for start in range(0, len(transfer.labels), _PIECE):
            labels = transfer.labels[start : start + _PIECE]
            buffers = transfer.buffers[start : start + _PIECE]
            if (stopped := self._stopped(transfer)) is not None:
                outcomes += [stopped] * len(labels)
                continue
            try:
                found = self.medium.read(labels, buffers)
            except Exception as error:
                self._fault(error)
                found = [_reason_of(error)] * len(labels)
            else:
                self._judge(found)
            num_bytes += sum(buffer.nbytes for buffer, reason in zip(buffers, found, strict=True) if reason is None)
            outcomes += found
        if num_bytes:
            self._measure(self._clock() - began, num_bytes)
        self._note(False, self._clock() - began)
        self._settle(self._read, transfer, outcomes)

    def _ask(self, transfer: Transfer) -> None:
        medium = self.medium
        assert isinstance(medium, DistantMedium)
        if (stopped := self._stopped(transfer)) is not None:
            outcomes: list[Reason | None] = [stopped] * len(transfer.labels)
        else:
            try:
                outcomes = medium.ask(transfer.labels)
            except Exception as error:
                self._fault(error)
                outcomes = [_reason_of(error)] * len(transfer.labels)
            else:
                self._judge(outcomes)
        self._settle(self._ask, transfer, outcomes)

    def _write(self, transfer: Transfer) -> None:
        began = self._clock()
        reason = self._stopped(transfer)
        if reason is None:
            try:
                reason = self.medium.write(transfer.labels[0], transfer.buffers[0])
            except Exception as error:
                self._fault(error)
                reason = _reason_of(error)
            else:
                self._judge([reason])
            self._note(True, self._clock() - began)
        self._settle(self._write, transfer, [reason])

    def _stopped(self, transfer: Transfer) -> Reason | None:
        if transfer.cancelled:
            return Reason.CANCELLED
        if self._clock() > transfer.deadline:
            return Reason.LATE
        return None if self._clock() >= self._closed_until else Reason.CLOSED

    def _settle(self, work: Callable[[Transfer], None], transfer: Transfer, outcomes: Sequence[Reason | None]) -> None:
        counters, wrote = self.counters, work == self._write
        with self._lock:
            transfer.outcomes += outcomes
            for label, buffer, reason in zip(transfer.labels, transfer.buffers, transfer.outcomes, strict=True):
                if wrote:
                    self._writing.discard(label.key)
                if reason is not None:
                    (counters.write_misses if wrote else counters.read_misses)[reason] += 1
                elif wrote:
                    counters.stored += 1
                    counters.written_bytes += buffer.nbytes
                elif work == self._read:
                    counters.loaded += 1
                    counters.read_bytes += buffer.nbytes
        transfer.finish()
        self.on_done()

    def _judge(self, reasons: Sequence[Reason | None]) -> None:
        """Faults that a medium reports rather than raises."""
        if any(reason in _FAULTS for reason in reasons):
            self._fault(None)
        elif reasons:
            self._faults = 0

    def _fault(self, error: BaseException | None) -> None:
        with self._lock:
            self._faults += 1
            if self._faults < self._most_faults or self._clock() < self._closed_until:
                return
            self._faults = 0
            self._closed_until = self._clock() + self._retry_seconds
            self.counters.closings += 1
        logger.warning(
            "%s: failed %d times in a row (%s): it is not used for %.0f s, then tried again",
            self.name,
            self._most_faults,
            "see its counters" if error is None else f"{type(error).__name__}: {error}",
            self._retry_seconds,
        )

    def _measure(self, seconds: float, num_bytes: int) -> None:
        """What a load takes: a part for each, and a part for each byte; small ones tell of the first."""
        per_read = seconds if self._seconds_per_read is None else min(seconds, self._seconds_per_read * 1.05)
        per_byte = max(0.0, seconds - per_read) / num_bytes if self._seconds_per_byte is not None else 0.0
        self._seconds_per_read = per_read
        old = self._seconds_per_byte
        self._seconds_per_byte = per_byte if old is None else old + _SMOOTHING * (per_byte - old)

    def _note(self, wrote: bool, seconds: float) -> None:
        counters = self.counters
        place = sum(seconds > bound for bound in LATENCY_BOUNDS)
        with self._lock:
            (counters.write_latency if wrote else counters.read_latency)[place] += 1
            if wrote:
                counters.write_seconds += seconds
            else:
                counters.read_seconds += seconds


def _reason_of(error: BaseException) -> Reason:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Reason.NO_SPACE
    return Reason.IO_ERROR

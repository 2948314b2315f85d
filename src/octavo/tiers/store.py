"""A store: a medium with its own threads, deadlines, cancellation and circuit breakers."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from octavo.kvcache.hashing import Label
from octavo.tiers.base import Medium, Reason, StoreCounters, Transfer, Work
from octavo.tiers.speed import LoadSpeed

logger = logging.getLogger(__name__)

MOST_WRITE_BYTES = 128 << 20

PIECE = 16
"""Blocks of a transfer between two checks of its deadline."""

# Reasons that count as faults although the medium reports them instead of raising.
_FAULTS = {Reason.IO_ERROR, Reason.NO_SPACE, Reason.READ_ONLY}


class Store:
    """An asynchronous interface to a medium.

    Requests wait for questions and reads, but not for writes: questions go first, then reads, then writes.

    Faults of reads and questions close the store, those of writes stop writes only: a full or read-only disk is still
    read.

    Args:
        num_threads: number of threads; of several, all but one may write at a time.
        most_waiting: maximum number of waiting questions and reads; more are refused as BUSY.
        most_write_bytes: maximum number of bytes waiting to be written, but one block always may; more are dropped as
            BUSY.
        most_faults: number of consecutive faults after which the medium is not used for `retry_seconds`.
        clock: a monotonic clock, in seconds.

    Attributes:
        must_ask: whether only `ask` can tell which blocks are there.
        speed: how long loads took.
        on_done: called after each transfer, in a thread of the store or, if it was refused, in the caller's.
        num_write_bytes: bytes that wait to be written.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.medium = medium
        self.name = medium.name
        self.must_ask = medium.must_ask
        self.counters = StoreCounters(medium.open_misses)
        self.speed = LoadSpeed()
        self.on_done: Callable[[], None] = lambda: None
        self.num_write_bytes = 0
        self._most_waiting = most_waiting
        self._most_write_bytes = most_write_bytes
        self._most_writers = max(1, num_threads - 1)
        self._clock = clock
        self._reading = reading = Breaker(self.name, "reads", most_faults, retry_seconds, clock)
        self._writing = writing = Breaker(self.name, "writes", most_faults, retry_seconds, clock)
        self._breakers = {Work.ASK: reading, Work.READ: reading, Work.WRITE: writing}
        self._changed = threading.Condition()  # of all below: there is something to do, or a writer has finished
        self._queues = {work: deque[Transfer]() for work in Work}
        self._coming: set[bytes] = set()  # keys of requested writes
        self._num_writers = 0
        self._ended = False
        self._out_of_time = False
        self._num_working = num_threads
        self._threads = [
            threading.Thread(target=self._work, name=f"octavo-{self.name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Whether blocks may be read: the store is not closed, and no faults of reads in a row have stopped them."""
        return not self._ended and not self._reading.is_closed

    @property
    def is_writable(self) -> bool:
        """Whether blocks may be written: it is open, and no faults of writes in a row have stopped them."""
        return self.is_open and not self.medium.is_read_only and not self._writing.is_closed

    @property
    def num_closings(self) -> dict[Work, int]:
        """Number of times that consecutive faults have paused reads, and writes."""
        return {Work.READ: self._reading.num_closings, Work.WRITE: self._writing.num_closings}

    def lookup(self, key: bytes) -> bool | None:
        """Return whether a block is there, without waiting; None if it is being written, or only `ask` can tell."""
        if not self.is_open:
            return False
        return None if self._is_writing(key) else self._contains(key)

    def expected_seconds(self, labels: Sequence[Label], num_bytes: int) -> float | None:
        """Return the expected time of a load of these blocks; None if no load was measured yet."""
        own = self.medium.speed_of(labels[0].key)
        found = None if own is None else own.expected(num_bytes)
        return self.speed.expected(num_bytes) if found is None else found

    def wants(self, key: bytes) -> bool:
        """Return, without waiting, whether a block should be stored: it is not known to be there or being written."""
        return self.is_writable and not self._is_writing(key) and not self._contains(key)

    def ask(self, labels: Sequence[Label], seconds: float) -> Transfer:
        """Find out which blocks are there; the outcome is None for those that are."""
        return self._submit(Transfer(Work.ASK, labels, [memoryview(b"")] * len(labels), self._clock() + seconds))

    def get(self, labels: Sequence[Label], buffers: Sequence[memoryview], seconds: float, tenant: str = "") -> Transfer:
        """Load blocks for a tenant; those that have not been started after `seconds` are LATE."""
        return self._submit(Transfer(Work.READ, labels, buffers, self._clock() + seconds, tenant))

    def put(self, label: Label, payload: memoryview, tenant: str = "", seconds: float = 30.0) -> Transfer:
        """Store a block of a tenant; it is LATE if it has not been started after `seconds`."""
        return self._submit(Transfer(Work.WRITE, [label], [payload], self._clock() + seconds, tenant))

    def close(self, seconds: float = 10.0) -> None:
        """Finish the requested transfers within `seconds`; those not started by then end as CLOSED.

        The medium is closed by the last thread to end, so that none ever uses a closed one.
        """
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._out_of_time = True
            logger.warning("%s: closing without waiting for a transfer that takes over %g s", self.name, seconds)

    def _contains(self, key: bytes) -> bool | None:
        try:
            return self.medium.contains(key)
        except Exception as error:
            self._reading.fault(error)
            return False

    def _submit(self, transfer: Transfer) -> Transfer:
        with self._changed:
            if (refused := self._refusal(transfer)) is None:
                if transfer.work is Work.WRITE:
                    self.num_write_bytes += transfer.num_bytes
                    self._coming.add(transfer.labels[0].key)
                self._queues[transfer.work].append(transfer)
                self._changed.notify()
        if refused is not None:
            self._finish(transfer, [refused] * len(transfer.labels))
        return transfer

    def _refusal(self, transfer: Transfer) -> Reason | None:
        """Return why a transfer is not queued; None if it is."""
        if self._ended or self._is_stopped(transfer.work):
            return Reason.CLOSED
        if transfer.work is Work.WRITE:
            num_bytes = self.num_write_bytes + transfer.num_bytes
            is_full = bool(self._queues[Work.WRITE]) and num_bytes > self._most_write_bytes
        else:
            is_full = len(self._queues[Work.ASK]) + len(self._queues[Work.READ]) >= self._most_waiting
        return Reason.BUSY if is_full else None

    def _take(self) -> Transfer | None:
        """Wait for the next transfer and take it; None once the store is closed and nothing is left."""
        with self._changed:
            while True:
                for work, queue in self._queues.items():
                    if not queue or (work is Work.WRITE and self._num_writers == self._most_writers):
                        continue
                    transfer = queue.popleft()
                    if work is Work.WRITE:
                        self.num_write_bytes -= transfer.num_bytes
                        self._num_writers += 1
                    return transfer
                if self._ended and not self._queues[Work.WRITE]:
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while (transfer := self._take()) is not None:
            try:
                outcomes = self._carry_out(transfer)
            except BaseException as error:  # a store's thread must survive any exception
                self._breakers[transfer.work].fault(error)
                outcomes = [_reason_of(error)] * len(transfer.labels)
            self._finish(transfer, outcomes)
            if transfer.work is Work.WRITE:
                with self._changed:
                    self._num_writers -= 1
                    # All, because threads that wait for the end of the queue must check whether it has come.
                    self._changed.notify_all()
        with self._changed:
            self._num_working -= 1
            is_last = not self._num_working
        if is_last:
            try:
                self.medium.close()
            except Exception:
                logger.exception("%s: closing it failed", self.name)

    def _carry_out(self, transfer: Transfer) -> list[Reason | None]:
        """Ask, read or write in pieces, and return the outcome of each block."""
        began, outcomes, num_bytes = self._clock(), list[Reason | None](), 0
        own = self.medium.speed_of(transfer.labels[0].key) if transfer.work is Work.READ else None
        size = len(transfer.labels) if transfer.work is Work.ASK else PIECE
        for start in range(0, len(transfer.labels), max(1, size)):
            labels, buffers = transfer.labels[start : start + size], transfer.buffers[start : start + size]
            if (stopped := self._stopped(transfer)) is not None:
                outcomes += [stopped] * len(labels)
                continue
            found = self._tried(transfer, labels, buffers)
            num_bytes += sum(buffer.nbytes for buffer, reason in zip(buffers, found, strict=True) if reason is None)
            outcomes += found
        if transfer.work is not Work.ASK:
            seconds = self._clock() - began
            if transfer.work is Work.READ and num_bytes:
                self.speed.measure(seconds, num_bytes)
                if own is not None:
                    own.measure(seconds, num_bytes)
            self.counters.time(transfer.work, seconds)
        return outcomes

    def _tried(
        self, transfer: Transfer, labels: Sequence[Label], buffers: Sequence[memoryview]
    ) -> Sequence[Reason | None]:
        """Call the medium and return the outcomes of a piece; an exception becomes the reason of all its blocks."""
        try:
            if transfer.work is Work.ASK:
                outcomes = self.medium.ask(labels)
            elif transfer.work is Work.READ:
                outcomes = self.medium.read(labels, buffers)
            else:
                outcomes = [self.medium.write(labels[0], buffers[0], transfer.tenant)]
        except Exception as error:
            self._breakers[transfer.work].fault(error)
            return [_reason_of(error)] * len(labels)
        self._breakers[transfer.work].judge(outcomes)
        return outcomes

    def _stopped(self, transfer: Transfer) -> Reason | None:
        """Return why the rest of a transfer is skipped; None if it is not."""
        if transfer.cancelled:
            return Reason.CANCELLED
        if self._clock() > transfer.deadline:
            return Reason.LATE
        return Reason.CLOSED if self._out_of_time or self._is_stopped(transfer.work) else None

    def _is_stopped(self, work: Work) -> bool:
        return self._reading.is_closed or self._breakers[work].is_closed

    def _finish(self, transfer: Transfer, outcomes: Sequence[Reason | None]) -> None:
        transfer.outcomes += outcomes
        self.counters.count(transfer)
        if transfer.work is Work.WRITE:
            with self._changed:
                self._coming.discard(transfer.labels[0].key)
        transfer.finish()
        self.on_done()

    def _is_writing(self, key: bytes) -> bool:
        with self._changed:
            return key in self._coming


_REASONS = {errno.ENOSPC: Reason.NO_SPACE, errno.EDQUOT: Reason.NO_SPACE, errno.EROFS: Reason.READ_ONLY}


def _reason_of(error: BaseException) -> Reason:
    number = error.errno if isinstance(error, OSError) else None
    return Reason.IO_ERROR if number is None else _REASONS.get(number, Reason.IO_ERROR)


class Breaker:
    """Counts a medium's consecutive faults at one kind of work. Thread-safe.

    Args:
        name: name of the tier, for the log.
        work: what fails, in the plural, for the log.
        most_faults: number of consecutive faults after which that work is not tried for `retry_seconds`.
        clock: a monotonic clock, in seconds.

    Attributes:
        num_closings: how often that has happened.
    """

    def __init__(
        self, name: str, work: str, most_faults: int, retry_seconds: float, clock: Callable[[], float]
    ) -> None:
        self.num_closings = 0
        self._name = name
        self._work = work
        self._most_faults = most_faults
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0
        self._closed_until = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the work must not be tried at present."""
        return self._clock() < self._closed_until

    def judge(self, reasons: Sequence[Reason | None]) -> None:
        """Count the outcomes of a call that did not raise."""
        if not _FAULTS.isdisjoint(reasons):
            self.fault(None)
        elif reasons:
            self._faults = 0

    def fault(self, error: BaseException | None) -> None:
        """Count a failure; `error` is None if the medium reported faults without raising."""
        with self._lock:
            self._faults += 1
            if self._faults < self._most_faults or self.is_closed:
                return
            self._faults = 0
            self._closed_until = self._clock() + self._retry_seconds
            self.num_closings += 1
        logger.warning(
            "%s: %s failed %d times in a row (%s): pausing them for %.0f s",
            self._name,
            self._work,
            self._most_faults,
            "see its counters" if error is None else f"{type(error).__name__}: {error}",
            self._retry_seconds,
        )

"""A store: a medium with its own threads, deadlines, cancellation and circuit breakers."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from octavo.kvcache.hashing import Label
from octavo.tiers.base import LookupResult, Medium, Reason
from octavo.tiers.transfer import StoreCounters, Transfer, TransferQueue, Work

logger = logging.getLogger(__name__)

MOST_WRITE_BYTES = 128 << 20

PIECE = 16
"""Blocks of a transfer between two checks of its deadline."""

# Reasons that count as faults although the medium reports them instead of raising.
_FAULTS = {Reason.IO_ERROR, Reason.NO_SPACE, Reason.READ_ONLY}

# Weight of a load against the next one: the last ten or so count.
_WEIGHT_OF_PAST = 0.9
# A load counts as at most so many times the time that was expected, so that one that stood still does not count as
# many, and a store that has become slow is still known for it after a few loads.
_MOST_SURPRISE = 2.0
# Sizes that differ by less, relative to their mean, do not tell a constant from a time per byte.
_LEAST_SPREAD = 0.01


class Store:
    """An asynchronous interface to a medium.

    Faults of reads and questions close the store, those of writes stop writes only: what lies on a full or read-only
    disk is still found.

    Args:
        num_threads: number of threads; of several, all but one may write at a time.
        most_waiting: maximum number of waiting questions and reads; more are refused as BUSY.
        most_write_bytes: maximum number of bytes waiting to be written, but one block always may; more are dropped as
            BUSY.
        most_faults: number of consecutive faults after which the medium is not used for `retry_seconds`.
        clock: a monotonic clock, in seconds.

    Attributes:
        must_ask: whether only `ask` can tell which blocks are there.
        speed: how long loads took, from which it is decided whether computing would be faster.
        on_done: called after each transfer, in a thread of the store or, if it was refused, in the caller's.
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
        self.counters = StoreCounters()
        self.counters.open_misses.update(medium.open_misses)
        self.on_done: Callable[[], None] = lambda: None
        self._reading = Breaker(self.name, "reads", most_faults, retry_seconds, clock)
        self._writing = Breaker(self.name, "writes", most_faults, retry_seconds, clock)
        self._queue = TransferQueue(most_waiting, most_write_bytes, max(1, num_threads - 1))
        self.speed = LoadSpeed()
        self._clock = clock
        self._lock = threading.Lock()
        self._coming: set[bytes] = set()  # keys of requested writes
        self._ended = False
        self._out_of_time = False
        self._num_working = num_threads
        self._works = {Work.ASK: self._ask, Work.READ: self._read, Work.WRITE: self._write}
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
        return self.is_open and not self._writing.is_closed

    @property
    def num_closings(self) -> dict[Work, int]:
        """How often consecutive faults have stopped reads, and writes."""
        return {Work.READ: self._reading.num_closings, Work.WRITE: self._writing.num_closings}

    def lookup(self, key: bytes) -> LookupResult:
        """Return what is known about a key, without waiting."""
        if not self.is_open:
            return LookupResult.MISS
        if self._is_writing(key):
            return LookupResult.HIT_PENDING
        try:
            there = self.medium.contains(key)
        except Exception as error:
            self._reading.fault(error)
            return LookupResult.MISS
        if there is None:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if there else LookupResult.MISS

    def wants(self, key: bytes) -> bool:
        """Return, without waiting, whether a block should be stored: it is not known to be there or being written."""
        if not self.is_writable:
            return False
        found = self.lookup(key)
        if found is LookupResult.HIT_PENDING and self.must_ask:
            return not self._is_writing(key)
        return found is LookupResult.MISS

    def expected_seconds(self, num_bytes: int) -> float | None:
        """Return the expected time of a load in seconds, from earlier loads; None before the first."""
        return self.speed.expected(num_bytes)

    def ask(self, labels: Sequence[Label], seconds: float) -> Transfer:
        """Find out which blocks are there; the outcome is None for those that are."""
        return self._submit(Transfer(Work.ASK, labels, [memoryview(b"")] * len(labels), self._clock() + seconds))

    def get(self, labels: Sequence[Label], buffers: Sequence[memoryview], seconds: float, tenant: str = "") -> Transfer:
        """Load blocks for a tenant; those that have not been started after `seconds` are LATE."""
        return self._submit(Transfer(Work.READ, labels, buffers, self._clock() + seconds, tenant))

    def put(self, label: Label, payload: memoryview, tenant: str = "", seconds: float = 30.0) -> Transfer:
        """Store a block of a tenant; it is LATE if it has not been started after `seconds`."""
        with self._lock:
            self._coming.add(label.key)
        return self._submit(Transfer(Work.WRITE, [label], [payload], self._clock() + seconds, tenant))

    def close(self, seconds: float = 10.0) -> None:
        """Finish the requested transfers within `seconds`; those not started by then end as CLOSED.

        The medium is closed by the last thread to end, so that none ever uses a closed one.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._queue.end()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._out_of_time = True
            logger.warning("%s: closing without waiting for a transfer that takes over %g s", self.name, seconds)

    def _submit(self, transfer: Transfer) -> Transfer:
        refused = Reason.CLOSED if self._is_stopped(transfer.work) else self._queue.put(transfer)
        if refused is not None:
            self._finish(transfer, [refused] * len(transfer.labels))
        return transfer

    def _work(self) -> None:
        while (transfer := self._queue.take()) is not None:
            try:
                outcomes = self._works[transfer.work](transfer)
            except BaseException as error:  # a store's thread must survive any exception
                self._breaker(transfer.work).fault(error)
                outcomes = [_reason_of(error)] * len(transfer.labels)
            self._finish(transfer, outcomes)
            self._queue.did(transfer)
        with self._lock:
            self._num_working -= 1
            is_last = not self._num_working
        if is_last:
            self._close_medium()

    def _close_medium(self) -> None:
        try:
            self.medium.close()
        except Exception:
            logger.exception("%s: closing it failed", self.name)

    def _ask(self, transfer: Transfer) -> Sequence[Reason | None]:
        medium, labels = self.medium, transfer.labels
        if (stopped := self._stopped(transfer)) is not None:
            return [stopped] * len(labels)
        return self._tried(self._reading, len(labels), partial(medium.ask, labels))

    def _read(self, transfer: Transfer) -> Sequence[Reason | None]:
        began = self._clock()
        outcomes: list[Reason | None] = []
        num_bytes = 0
        for start in range(0, len(transfer.labels), PIECE):
            labels = transfer.labels[start : start + PIECE]
            buffers = transfer.buffers[start : start + PIECE]
            if (stopped := self._stopped(transfer)) is not None:
                outcomes += [stopped] * len(labels)
                continue
            found = self._tried(self._reading, len(labels), partial(self.medium.read, labels, buffers))
            num_bytes += sum(buffer.nbytes for buffer, reason in zip(buffers, found, strict=True) if reason is None)
            outcomes += found
        seconds = self._clock() - began
        if num_bytes:
            self.speed.measure(seconds, num_bytes)
        self.counters.time(Work.READ, seconds)
        return outcomes

    def _write(self, transfer: Transfer) -> Sequence[Reason | None]:
        if (stopped := self._stopped(transfer)) is not None:
            return [stopped]
        began = self._clock()
        label, payload = transfer.labels[0], transfer.buffers[0]
        outcomes = self._tried(self._writing, 1, lambda: [self.medium.write(label, payload, transfer.tenant)])
        self.counters.time(Work.WRITE, self._clock() - began)
        return outcomes

    def _stopped(self, transfer: Transfer) -> Reason | None:
        """Return why the rest of a transfer is not to be done; None if it is."""
        if transfer.cancelled:
            return Reason.CANCELLED
        if self._clock() > transfer.deadline:
            return Reason.LATE
        return Reason.CLOSED if self._out_of_time or self._is_stopped(transfer.work) else None

    def _is_stopped(self, work: Work) -> bool:
        return self._reading.is_closed or (work is Work.WRITE and self._writing.is_closed)

    def _breaker(self, work: Work) -> Breaker:
        return self._writing if work is Work.WRITE else self._reading

    def _tried(
        self, breaker: Breaker, count: int, act: Callable[[], Sequence[Reason | None]]
    ) -> Sequence[Reason | None]:
        """Call the medium and return the outcomes of `count` blocks; an exception becomes their reason."""
        try:
            outcomes = act()
        except Exception as error:
            breaker.fault(error)
            return [_reason_of(error)] * count
        breaker.judge(outcomes)
        return outcomes

    def _finish(self, transfer: Transfer, outcomes: Sequence[Reason | None]) -> None:
        transfer.outcomes += outcomes
        self.counters.count(transfer)
        if transfer.work is Work.WRITE:
            with self._lock:
                self._coming.difference_update(label.key for label in transfer.labels)
        transfer.finish()
        self.on_done()

    def _is_writing(self, key: bytes) -> bool:
        with self._lock:
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
            "%s: %s failed %d times in a row (%s): there are none for %.0f s, then they are tried again",
            self._name,
            self._work,
            self._most_faults,
            "see its counters" if error is None else f"{type(error).__name__}: {error}",
            self._retry_seconds,
        )


class LoadSpeed:
    """Models the time of a load as a constant plus a time per byte, by least squares. Thread-safe.

    Attributes:
        per_load: the constant in seconds; None before the first measurement.
        per_byte: seconds per byte; 0 as long as loads of one size cannot tell the two apart.
    """

    def __init__(self) -> None:
        self.per_load: float | None = None
        self.per_byte: float | None = None
        self._lock = threading.Lock()
        # Weighted sums over the loads: of 1, bytes, seconds, bytes × bytes and bytes × seconds.
        self._sums = [0.0] * 5

    def expected(self, num_bytes: int) -> float | None:
        """Return the expected time of a load in seconds; None before the first measurement."""
        if self.per_byte is None or self.per_load is None:
            return None
        return self.per_load + num_bytes * self.per_byte

    def measure(self, seconds: float, num_bytes: int) -> None:
        """Learn from one load."""
        with self._lock:
            if (expected := self.expected(num_bytes)) is not None:
                seconds = min(seconds, _MOST_SURPRISE * expected)
            news = (1.0, num_bytes, seconds, num_bytes * num_bytes, num_bytes * seconds)
            self._sums = [old * _WEIGHT_OF_PAST + new for old, new in zip(self._sums, news, strict=True)]
            self.per_load, self.per_byte = self._fitted()

    def _fitted(self) -> tuple[float, float]:
        """Return the constant and the time per byte, neither below 0, that fit the loads best."""
        count, size, time, sizes, times = self._sums
        spread = count * sizes - size * size
        if spread <= (_LEAST_SPREAD * size) ** 2:
            return time / count, 0.0
        per_byte = (count * times - size * time) / spread
        if per_byte <= 0.0:
            return time / count, 0.0
        if (per_load := (time - per_byte * size) / count) < 0.0:
            return 0.0, times / sizes
        return per_load, per_byte

"""A store: a medium with threads of its own, deadlines, cancelling, and a breaker that closes what only fails."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from octavo.kvcache.label import Label
from octavo.tiers.base import DistantMedium, LookupResult, Medium, Reason
from octavo.tiers.breaker import Breaker
from octavo.tiers.counters import StoreCounters
from octavo.tiers.speed import LoadSpeed
from octavo.tiers.transfer import Transfer, TransferQueue, Work

logger = logging.getLogger(__name__)

MOST_WRITE_BYTES = 128 << 20

_PIECE = 16  # blocks of a transfer between two looks at its deadline


class Store:
    """A medium, made asynchronous.

    Args:
        num_threads: that read and write; all but one of them write at a time.
        most_waiting: questions and reads that may wait; beyond that they are refused as BUSY.
        most_write_bytes: that may wait to be written, but one block always may; beyond that they are dropped as BUSY.
        most_faults: in a row, after which the medium is left alone for `retry_seconds`.

    Attributes:
        must_ask: whether only `ask` tells what is there.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.medium = medium
        self.name = medium.name
        self.must_ask = isinstance(medium, DistantMedium)
        self.counters = StoreCounters()
        self.on_done: Callable[[], None] = lambda: None
        self._breaker = Breaker(self.name, most_faults, retry_seconds, clock)
        self._queue = TransferQueue(most_waiting, most_write_bytes, max(1, num_threads - 1))
        self._speed = LoadSpeed()
        self._clock = clock
        self._lock = threading.Lock()
        self._writing: set[bytes] = set()
        self._ended = False
        self._works = {Work.ASK: self._ask, Work.READ: self._read, Work.WRITE: self._write}
        self._threads = [
            threading.Thread(target=self._work, name=f"octavo-{self.name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the medium is used: it has not failed too often of late."""
        return not self._ended and not self._breaker.is_closed

    @property
    def num_closings(self) -> int:
        """How often faults in a row have closed it."""
        return self._breaker.num_closings

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._queue.num_write_bytes

    def lookup(self, key: bytes) -> LookupResult:
        """What is known of a key; waits for nothing."""
        if not self.is_open:
            return LookupResult.MISS
        if self._is_writing(key):
            return LookupResult.HIT_PENDING
        try:
            there = self.medium.contains(key)
        except Exception as error:
            self._breaker.fault(error)
            return LookupResult.MISS
        if there is None:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if there else LookupResult.MISS

    def wants(self, key: bytes) -> bool:
        """Whether a block should be stored: it is not known to be there or on its way; waits for nothing."""
        found = self.lookup(key)
        if found is LookupResult.HIT_PENDING and self.must_ask:
            return not self._is_writing(key)
        return self.is_open and found is LookupResult.MISS

    def expected_seconds(self, num_bytes: int) -> float | None:
        """How long a load takes, by what was measured; None where nothing was."""
        return self._speed.expected(num_bytes)

    def ask(self, labels: Sequence[Label], seconds: float) -> Transfer:
        """Find out which blocks are there: their outcomes are None."""
        return self._submit(Transfer(Work.ASK, labels, [memoryview(b"")] * len(labels), self._clock() + seconds))

    def get(self, labels: Sequence[Label], buffers: Sequence[memoryview], seconds: float) -> Transfer:
        """Load blocks; what has not begun after so many seconds is LATE."""
        return self._submit(Transfer(Work.READ, labels, buffers, self._clock() + seconds))

    def put(self, label: Label, payload: memoryview, seconds: float = 30.0) -> Transfer:
        """Store a block."""
        with self._lock:
            self._writing.add(label.key)
        return self._submit(Transfer(Work.WRITE, [label], [payload], self._clock() + seconds))

    def close(self, seconds: float = 10.0) -> None:
        """Finish what has been asked for, as far as there is time, and give up the medium."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._queue.end()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        try:
            self.medium.close()
        except Exception:
            logger.exception("%s: closing it failed", self.name)

    def _submit(self, transfer: Transfer) -> Transfer:
        refused = Reason.CLOSED if self._breaker.is_closed else self._queue.put(transfer)
        if refused is not None:
            self._settle(transfer, [refused] * len(transfer.labels))
        return transfer

    def _work(self) -> None:
        while (transfer := self._queue.take()) is not None:
            try:
                outcomes = self._works[transfer.work](transfer)
            except BaseException as error:  # a store's thread must outlive whatever happens in it
                self._breaker.fault(error)
                outcomes = [_reason_of(error)] * len(transfer.labels)
            self._settle(transfer, outcomes)
            self._queue.did(transfer)

    def _ask(self, transfer: Transfer) -> Sequence[Reason | None]:
        medium, labels = self.medium, transfer.labels
        assert isinstance(medium, DistantMedium)
        if (stopped := self._stopped(transfer)) is not None:
            return [stopped] * len(labels)
        return self._tried(len(labels), partial(medium.ask, labels))

    def _read(self, transfer: Transfer) -> Sequence[Reason | None]:
        began = self._clock()
        outcomes: list[Reason | None] = []
        num_bytes = 0
        for start in range(0, len(transfer.labels), _PIECE):
            labels = transfer.labels[start : start + _PIECE]
            buffers = transfer.buffers[start : start + _PIECE]
            if (stopped := self._stopped(transfer)) is not None:
                outcomes += [stopped] * len(labels)
                continue
            found = self._tried(len(labels), partial(self.medium.read, labels, buffers))
            num_bytes += sum(buffer.nbytes for buffer, reason in zip(buffers, found, strict=True) if reason is None)
            outcomes += found
        seconds = self._clock() - began
        if num_bytes:
            self._speed.measure(seconds, num_bytes)
        self.counters.time(Work.READ, seconds)
        return outcomes

    def _write(self, transfer: Transfer) -> Sequence[Reason | None]:
        if (stopped := self._stopped(transfer)) is not None:
            return [stopped]
        began = self._clock()
        label, payload = transfer.labels[0], transfer.buffers[0]
        outcomes = self._tried(1, lambda: [self.medium.write(label, payload)])
        self.counters.time(Work.WRITE, self._clock() - began)
        return outcomes

    def _stopped(self, transfer: Transfer) -> Reason | None:
        """Why the rest of a transfer is not to be done."""
        if transfer.cancelled:
            return Reason.CANCELLED
        if self._clock() > transfer.deadline:
            return Reason.LATE
        return Reason.CLOSED if self._breaker.is_closed else None

    def _tried(self, count: int, act: Callable[[], Sequence[Reason | None]]) -> Sequence[Reason | None]:
        """What the medium says of so many blocks; whatever it raises is a reason."""
        try:
            outcomes = act()
        except Exception as error:
            self._breaker.fault(error)
            return [_reason_of(error)] * count
        self._breaker.judge(outcomes)
        return outcomes

    def _settle(self, transfer: Transfer, outcomes: Sequence[Reason | None]) -> None:
        transfer.outcomes += outcomes
        self.counters.count(transfer)
        if transfer.work is Work.WRITE:
            with self._lock:
                self._writing.difference_update(label.key for label in transfer.labels)
        transfer.finish()
        self.on_done()

    def _is_writing(self, key: bytes) -> bool:
        with self._lock:
            return key in self._writing


def _reason_of(error: BaseException) -> Reason:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Reason.NO_SPACE
    return Reason.IO_ERROR

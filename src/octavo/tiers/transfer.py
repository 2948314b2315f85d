"""What a store is asked to do, and the order in which its threads do it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from enum import Enum

from octavo.kvcache.label import Label
from octavo.tiers.base import Reason


class Work(Enum):
    """What is to be done with the blocks of a transfer."""

    ASK = "ask"  # whether they are there
    READ = "read"
    WRITE = "write"


class Transfer:
    """Blocks on their way. `outcomes` has an entry for each once `done`.

    A buffer belongs to the store until then, however late that is.
    """

    def __init__(self, work: Work, labels: Sequence[Label], buffers: Sequence[memoryview], deadline: float) -> None:
        self.work = work
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


class TransferQueue:
    """Transfers that wait for a thread.

    Somebody waits for questions and reads, and nobody for writes: questions go first, then reads, then writes, and of
    several threads one never writes. The bytes that wait to be written are bounded.

    Args:
        most_waiting: questions and reads.
        most_write_bytes: that may wait, but one block always may.
        most_writers: threads that write at a time.

    Attributes:
        num_write_bytes: that wait.
    """

    def __init__(self, most_waiting: int, most_write_bytes: int, most_writers: int) -> None:
        self.num_write_bytes = 0
        self._most_waiting = most_waiting
        self._most_write_bytes = most_write_bytes
        self._most_writers = most_writers
        self._changed = threading.Condition()  # something to do, or a writer less
        self._questions: deque[Transfer] = deque()
        self._reads: deque[Transfer] = deque()
        self._writes: deque[Transfer] = deque()
        self._num_writers = 0
        self._ended = False

    def put(self, transfer: Transfer) -> Reason | None:
        """Why a transfer may not wait here; None where it does."""
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
        """What a thread is to do next, once there is something; None: nothing any more."""
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
        """A thread has done what it took."""
        if transfer.work is Work.WRITE:
            with self._changed:
                self._num_writers -= 1
                # All: those that wait for the end look whether it has come.
                self._changed.notify_all()

    def end(self) -> None:
        """Take nothing more; what waits is still to be done."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

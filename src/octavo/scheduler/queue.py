"""The waiting queue: sequences in order of service, with O(log n) insertion and lazy removal."""

from __future__ import annotations

import heapq

from octavo.request import Sequence, SequenceStatus


class WaitingQueue:
    """Sequences without blocks, by priority, then arrival. A preempted one comes back to its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Sequence]] = []
        self._size = 0

    def push(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        heapq.heappush(self._heap, (seq.order, seq))
        self._size += 1

    def peek(self) -> Sequence | None:
        """The next in line, or None."""
        while self._heap and self._heap[0][1].status is not SequenceStatus.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take the next in line; raises IndexError on an empty queue."""
        if self.peek() is None:
            raise IndexError("pop from an empty waiting queue")
        self._size -= 1
        return heapq.heappop(self._heap)[1]

    def discard(self, seq: Sequence) -> None:
        """A waiting sequence ends: its status must already say so; the entry is dropped when it comes up."""
        self._size -= 1

    def __len__(self) -> int:
        return self._size

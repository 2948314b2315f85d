"""Waiting queues, which hold sequences without blocks and decide which is admitted next."""

from __future__ import annotations

import bisect
from itertools import islice
from typing import Protocol

from octavo.request import Sequence, SequenceStatus
from octavo.scheduler.keyed_heap import KeyedHeap


class WaitingQueue(Protocol):
    """Holds sequences without blocks, in an order of admission in which none waits for ever.

    Attributes:
        short_may_pass: whether the sequences with the least to compute may be admitted out of turn; otherwise, if the
            first does not fit, only the next ones in order of admission may.
    """

    short_may_pass: bool

    def push(self, seq: Sequence) -> None:
        """Add a new sequence, or one that was preempted."""

    def peek(self) -> Sequence | None:
        """Return the next sequence or None; the answer stays the same until a push, pop or discard."""

    def pop(self) -> Sequence:
        """Remove and return the next sequence; raises IndexError if the queue is empty."""

    def discard(self, seq: Sequence) -> None:
        """Remove a waiting sequence that ends, or is admitted out of turn."""

    def first(self, count: int) -> list[Sequence]:
        """Return the first `count` sequences in order of admission."""

    def __len__(self) -> int: ...


class ArrivalOrder:
    """Orders by priority, then arrival; a preempted sequence returns to its old place. O(log n) per operation."""

    def __init__(self, *, short_may_pass: bool = True) -> None:
        self.short_may_pass = short_may_pass
        self._heap = KeyedHeap(_order)

    def push(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        self._heap.push(seq)

    def peek(self) -> Sequence | None:
        return self._heap.peek()

    def pop(self) -> Sequence:
        seq = self._heap.peek()
        if seq is None:
            raise IndexError("pop from an empty waiting queue")
        self._heap.discard(seq)
        return seq

    def discard(self, seq: Sequence) -> None:
        self._heap.discard(seq)

    def first(self, count: int) -> list[Sequence]:
        return self._heap.smallest(count)

    def __len__(self) -> int:
        return len(self._heap)


class PrefixLengths(Protocol):
    """Looks up the lengths of cached prefixes of waiting sequences (`CachedPrefixes`)."""

    def num_tokens(self, seq: Sequence) -> int:
        """Return the length of the cached prefix of a sequence, in tokens."""


class LongestPrefixFirst:
    """Within a tenant, the longest cached prefix first, so that cached blocks are used before they are evicted.

    Between tenants, and between priorities, the order is that of arrival: the tenant whose line has the earliest first
    sequence is next, and within that line only sequences of the same priority overtake each other.

    Ageing: after `max_overtakes` sequences have overtaken the first of a line, the first is next. So a sequence with p
    others before it in its line is admitted after at most (p + 1) * (max_overtakes + 1) admissions from that line,
    whatever arrives behind it. A preempted sequence is never overtaken.

    Args:
        prefixes: lengths of cached prefixes.
        max_overtakes: how many sequences may overtake the first of a line.
        window: how many sequences of a line are compared per admission.
    """

    short_may_pass = True

    def __init__(self, prefixes: PrefixLengths, *, max_overtakes: int = 16, window: int = 16) -> None:
        self._prefixes = prefixes
        self._max_overtakes = max_overtakes
        self._window = window
        self._lines: dict[str, list[Sequence]] = {}  # by tenant, each in order of arrival, none empty
        self._overtakes: dict[str, int] = {}  # by tenant: how often the first of its line was overtaken
        self._next: Sequence | None = None
        self._size = 0

    def push(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        self._size += 1
        bisect.insort(self._lines.setdefault(seq.request.tenant, []), seq, key=_order)
        self._next = None

    def peek(self) -> Sequence | None:
        if self._next is None and self._lines:
            self._next = self._choose()
        return self._next

    def pop(self) -> Sequence:
        seq = self.peek()
        if seq is None:
            raise IndexError("pop from an empty waiting queue")
        tenant = seq.request.tenant
        first = self._lines[tenant][0]
        self._overtakes[tenant] = 0 if seq is first else self._overtakes.get(tenant, 0) + 1
        self._take_out(seq)
        return seq

    def discard(self, seq: Sequence) -> None:
        self._take_out(seq)

    def first(self, count: int) -> list[Sequence]:
        head = self.peek()
        lines = sorted(self._lines.values(), key=lambda line: line[0].order)
        behind = (seq for line in lines for seq in line if seq is not head)
        return [] if head is None else [head, *islice(behind, count - 1)]

    def __len__(self) -> int:
        return self._size

    def _choose(self) -> Sequence:
        line = min(self._lines.values(), key=lambda line: line[0].order)
        first = line[0]
        if first.num_preemptions or self._overtakes.get(first.request.tenant, 0) >= self._max_overtakes:
            return first
        priority = first.request.priority
        rivals = [seq for seq in line[: self._window] if seq.request.priority == priority]
        # max() keeps the earliest among equals.
        return first if len(rivals) == 1 else max(rivals, key=self._prefixes.num_tokens)

    def _take_out(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        line = self._lines[tenant]
        self._size -= 1
        seq.state.cached_prefix = None
        del line[bisect.bisect_left(line, seq.order, key=_order)]
        if not line:
            # Forget tenants with nothing waiting, because tenants come and go.
            del self._lines[tenant]
            self._overtakes.pop(tenant, None)
        self._next = None


def _order(seq: Sequence) -> tuple[int, float, int]:
    return seq.order

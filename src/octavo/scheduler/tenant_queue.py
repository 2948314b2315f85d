"""A queue with a waiting line for each tenant, and a policy that decides whose turn it is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, zip_longest

from octavo.request import Sequence
from octavo.scheduler.fairness import VirtualTokenCounter
from octavo.scheduler.queue import WaitingQueue


class TenantQueue:
    """Takes turns between tenants; within a tenant the order is that of its line.

    A client's `priority` orders only the requests of its own tenant.

    Args:
        turns: decides whose turn it is.
        make_line: creates an empty line for a tenant.
    """

    short_may_pass = False

    def __init__(self, turns: VirtualTokenCounter, make_line: Callable[[], WaitingQueue]) -> None:
        self.turns = turns
        self._make_line = make_line
        self._lines: dict[str, WaitingQueue] = {}  # none empty
        self._next: Sequence | None = None
        self._version = -1  # of the turns, when `_next` was chosen
        self._size = 0

    def push(self, seq: Sequence) -> None:
        request = seq.request
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._make_line()
            self.turns.arrive(request.tenant, request.weight, self._lines)
            self._lines[request.tenant] = line
        line.push(seq)
        self._size += 1
        self._version = -1

    def peek(self) -> Sequence | None:
        if self._version != self.turns.version:
            heads = self.heads()
            self._next = heads[self.turns.ranked(heads)[0]] if heads else None
            self._version = self.turns.version
        return self._next

    def pop(self) -> Sequence:
        seq = self.peek()
        if seq is None:
            raise IndexError("pop from an empty waiting queue")
        self._lines[seq.request.tenant].pop()
        self._left(seq)
        return seq

    def discard(self, seq: Sequence) -> None:
        self._lines[seq.request.tenant].discard(seq)
        self._left(seq)

    def first(self, count: int) -> list[Sequence]:
        """Return the first of each line in the order of turns, then the second of each, and so on."""
        lines = [self._lines[tenant].first(count) for tenant in self.turns.ranked(self.heads())[:count]]
        rows = chain.from_iterable(zip_longest(*lines))
        return [seq for seq in rows if seq is not None][:count]

    def __len__(self) -> int:
        return self._size

    def heads(self) -> dict[str, Sequence]:
        """Return the first sequence of each tenant's line."""
        heads = ((tenant, line.peek()) for tenant, line in self._lines.items())
        return {tenant: seq for tenant, seq in heads if seq is not None}

    def _left(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        if not len(self._lines[tenant]):
            del self._lines[tenant]
        self._size -= 1
        self._version = -1

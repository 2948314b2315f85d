"""A heap of sequences that supports removing arbitrary elements."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from octavo.request import Sequence, SequenceId

Key = tuple[Any, ...]

# With no more dead entries than this, rebuilding the heap is not worth it.
_FEW = 32


class KeyedHeap:
    """A priority queue of sequences: the one with the smallest key is first.

    A discarded sequence, with its request and prompt, is released at once. Only its entry, a few numbers, stays in the
    heap until it surfaces or the heap is rebuilt, which keeps dead entries below about half. push, pop, discard:
    amortised O(log n).

    Args:
        key: computes the key of a sequence when it is pushed; keys must be unique.
    """

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        self._key = key
        self._entries: list[tuple[Key, SequenceId]] = []
        self._live: dict[SequenceId, tuple[Key, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and seq.seq_id in self._live

    def push(self, seq: Sequence) -> None:
        """Add a sequence that is not in the heap."""
        key = self._key(seq)
        self._live[seq.seq_id] = (key, seq)
        heapq.heappush(self._entries, (key, seq.seq_id))

    def peek(self) -> Sequence | None:
        """Return the sequence with the smallest key, or None if the heap is empty."""
        while self._entries:
            key, seq_id = self._entries[0]
            live = self._live.get(seq_id)
            if live is not None and live[0] == key:
                return live[1]
            heapq.heappop(self._entries)
        return None

    def smallest(self, count: int) -> list[Sequence]:
        """Return the `count` sequences with the smallest keys, in order. O(count · log n)."""
        taken: list[tuple[Key, SequenceId]] = []
        found: list[Sequence] = []
        while len(found) < count and (seq := self.peek()) is not None:
            entry = heapq.heappop(self._entries)
            # A sequence pushed again with the same key has two entries: keep one.
            if not found or found[-1] is not seq:
                taken.append(entry)
                found.append(seq)
        for entry in taken:
            heapq.heappush(self._entries, entry)
        return found

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence; raises KeyError if it is not in the heap."""
        del self._live[seq.seq_id]
        if len(self._entries) > 2 * len(self._live) + _FEW:
            self._entries = [(key, seq_id) for seq_id, (key, _) in self._live.items()]
            heapq.heapify(self._entries)

"""A heap of sequences with removal of arbitrary elements."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from octavo.request import Sequence, SequenceId

Key = tuple[Any, ...]

# Dead entries that are not worth the trouble of rebuilding a heap.
_FEW = 32


class KeyedHeap:
    """Sequences, the one with the smallest key first.

    A discarded sequence is forgotten at once, with its request and its prompt. What stays behind is an entry of a few
    numbers, and more than half of the entries are never dead. push, pop, discard: O(log n), amortised.

    Args:
        key: of a sequence, as it is when it is pushed; unique among all.
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
        """Add a sequence that is not there yet."""
        key = self._key(seq)
        self._live[seq.seq_id] = (key, seq)
        heapq.heappush(self._entries, (key, seq.seq_id))

    def peek(self) -> Sequence | None:
        """The sequence with the smallest key, or None."""
        while self._entries:
            key, seq_id = self._entries[0]
            live = self._live.get(seq_id)
            if live is not None and live[0] == key:
                return live[1]
            heapq.heappop(self._entries)
        return None

    def smallest(self, count: int) -> list[Sequence]:
        """The `count` with the smallest keys, in order. O(count · log n)."""
        taken: list[tuple[Key, SequenceId]] = []
        found: list[Sequence] = []
        while len(found) < count and (seq := self.peek()) is not None:
            entry = heapq.heappop(self._entries)
            # The same sequence may have been pushed again with the same key: one entry for it is enough.
            if not found or found[-1] is not seq:
                taken.append(entry)
                found.append(seq)
        for entry in taken:
            heapq.heappush(self._entries, entry)
        return found

    def discard(self, seq: Sequence) -> None:
        """Take a sequence out; raises KeyError where it is not there."""
        del self._live[seq.seq_id]
        if len(self._entries) > 2 * len(self._live) + _FEW:
            self._entries = [(key, seq_id) for seq_id, (key, _) in self._live.items()]
            heapq.heapify(self._entries)

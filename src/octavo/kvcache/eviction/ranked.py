"""Policies that rank blocks by a number: first in first out, least frequently used, least important.

All keep one binary heap, from which entries of blocks that are held no more are dropped when they come up.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds

# Below this a heap is not worth cleaning.
MIN_HEAP = 64


_Entry = tuple[float, int, BlockId]  # rank, stamp, block


class RankedEviction(ABC):
    """Lowest rank first, and among equals the least recently used. A block's rank is fixed while it is held.

    `add`, `evict` and `restore` take O(log n); `remove` leaves a dead entry in the heap, in O(1), and the heap is
    rebuilt once more than half of it is dead.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._held: dict[BlockId, _Entry] = {}
        self._given: dict[BlockId, _Entry] = {}
        self._stamp = 0

    @abstractmethod
    def rank(self, block_id: BlockId) -> float:
        """The rank of a block that is about to be held."""

    def publish(self, block_id: BlockId, position: int, priority: int) -> None:
        return

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        return

    def add(self, block_id: BlockId) -> None:
        self._stamp += 1
        self._hold((self.rank(block_id), self._stamp, block_id))

    def remove(self, block_id: BlockId) -> None:
        del self._held[block_id]
        if len(self._heap) > 2 * len(self._held) + MIN_HEAP:
            self._heap = list(self._held.values())
            heapq.heapify(self._heap)

    def add_all(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            self.add(block_id)

    def remove_all(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            self.remove(block_id)

    def evict(self) -> BlockId:
        while self._heap:
            entry = heapq.heappop(self._heap)
            block_id = entry[2]
            # By identity: a block that left and came back has a newer entry.
            if self._held.get(block_id) is entry:
                del self._held[block_id]
                self._given[block_id] = entry
                return block_id
        raise KeyError("no block is held")

    def restore(self, block_id: BlockId) -> None:
        self._hold(self._given[block_id])

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._held

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._held)

    def _hold(self, entry: _Entry) -> None:
        self._held[entry[2]] = entry
        heapq.heappush(self._heap, entry)


class FifoEviction(RankedEviction):
    """First published, first evicted, however often it was used since."""

    def __init__(self) -> None:
        super().__init__()
        self._published: dict[BlockId, int] = {}
        self._count = 0

    def publish(self, block_id: BlockId, position: int, priority: int) -> None:
        self._count += 1
        self._published[block_id] = self._count

    def rank(self, block_id: BlockId) -> float:
        return self._published[block_id]


class LfuEviction(RankedEviction):
    """Least frequently used first: the fewest hits since it was published (in-cache LFU: eviction forgets).

    A hit takes a whole prefix, so a block is never used more often than those before it, and tails go first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[BlockId, int] = {}

    def publish(self, block_id: BlockId, position: int, priority: int) -> None:
        self._uses[block_id] = 1

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        uses = self._uses
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                uses[block_id] += 1

    def rank(self, block_id: BlockId) -> float:
        return self._uses[block_id]


class PriorityEviction(RankedEviction):
    """The least important first; among equals the least recently used.

    A block is as important as the most important request that computed or hit it since it was published. Nothing
    ages: an important block yields only when all that is cached is as important.
    """

    def __init__(self) -> None:
        super().__init__()
        self._priority: dict[BlockId, int] = {}

    def publish(self, block_id: BlockId, position: int, priority: int) -> None:
        self._priority[block_id] = priority

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        priorities = self._priority
        for block_id in block_ids:
            if block_id != NULL_BLOCK and priority < priorities[block_id]:
                priorities[block_id] = priority

    def rank(self, block_id: BlockId) -> float:
        return -self._priority[block_id]

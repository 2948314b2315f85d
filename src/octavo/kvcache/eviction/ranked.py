"""Policies that rank blocks by a number: first in first out, and least important first.

Each keeps a binary heap in flat arrays, with a few tens of bytes per block and no objects for the garbage collector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds
from octavo.kvcache.eviction.recency import SPARE

_ABSENT = -1
# If at least 1 / this of the heap is added or removed at once, it is sorted again: a sorted array is a heap.
_MANY = 8


class RankedEviction(ABC):
    """Evicts the lowest rank first, and among equals the least recently used. A block's rank is fixed while it is held.

        heap     [ 7 | 3 | 9 | … ]     held blocks, each before those at 2i + 1 and 2i + 2
        places   by block id           position in the heap, -1 if it is not held
        ranks    by block id           rank and stamp when it was last added
        stamps   by block id

    Adding or removing one block is O(log n), and many at once take no longer than sorting them.
    """

    def __init__(self) -> None:
        self._heap = array("i")
        self._places = array("i")
        self._ranks = array("d")
        self._stamps = array("q")
        self._stamp = 0

    def reserve(self, num_blocks: int) -> None:
        return

    @abstractmethod
    def rank(self, block_id: BlockId) -> float:
        """Return the rank of a block that is about to be held."""

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        return

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        return

    def add(self, block_id: BlockId) -> None:
        self._note(block_id)
        self.restore(block_id)

    def remove(self, block_id: BlockId) -> None:
        if block_id not in self:
            raise KeyError(block_id)
        self._take_out(self._places[block_id])

    def add_all(self, block_ids: BlockIds) -> None:
        if len(block_ids) * _MANY < len(self._heap):
            for block_id in block_ids.tolist():
                self.add(block_id)
            return
        for block_id in block_ids.tolist():
            self._note(block_id)
        self._rebuild(np.concatenate([np.array(self._heap, np.int32), block_ids.astype(np.int32)]))

    def remove_all(self, block_ids: BlockIds) -> None:
        if len(block_ids) * _MANY < len(self._heap):
            for block_id in block_ids.tolist():
                self.remove(block_id)
            return
        for block_id in block_ids.tolist():
            if block_id not in self:
                raise KeyError(block_id)
        places = np.frombuffer(self._places, np.int32)
        places[block_ids] = _ABSENT
        heap = np.array(self._heap, np.int32)
        kept = heap[places[heap] != _ABSENT]
        del places  # the array cannot grow while a view of it exists
        self._rebuild(kept)

    def evict(self) -> BlockId:
        if not self._heap:
            raise KeyError("no block is held")
        block_id = BlockId(self._heap[0])
        self._take_out(0)
        return block_id

    def evict_many(self, count: int) -> list[BlockId]:
        if count > len(self._heap):
            raise KeyError(f"{count} blocks requested, {len(self._heap)} held")
        return [self.evict() for _ in range(count)]

    def restore(self, block_id: BlockId) -> None:
        self._heap.append(block_id)
        self._rise(len(self._heap) - 1)

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, block_id: object) -> bool:
        return isinstance(block_id, int) and 0 <= block_id < len(self._places) and self._places[block_id] != _ABSENT

    def __iter__(self) -> Iterator[BlockId]:
        return map(BlockId, self._heap)

    def _note(self, block_id: BlockId) -> None:
        missing = block_id + 1 - len(self._places)
        if missing > 0:
            more = max(missing, len(self._places) // SPARE)
            self._places.extend(array("i", [_ABSENT]) * more)
            self._ranks.frombytes(bytes(8 * more))
            self._stamps.frombytes(bytes(8 * more))
        self._stamp += 1
        self._ranks[block_id], self._stamps[block_id] = self.rank(block_id), self._stamp

    def _rebuild(self, block_ids: BlockIds) -> None:
        """Make these blocks the heap."""
        ranks, stamps = np.frombuffer(self._ranks), np.frombuffer(self._stamps, np.int64)
        in_order = block_ids[np.lexsort((stamps[block_ids], ranks[block_ids]))].astype(np.int32)
        np.frombuffer(self._places, np.int32)[in_order] = np.arange(len(in_order), dtype=np.int32)
        self._heap = array("i", in_order.tobytes())

    def _take_out(self, place: int) -> None:
        heap = self._heap
        self._places[heap[place]] = _ABSENT
        last = heap.pop()
        if place < len(heap):
            heap[place] = last
            self._rise(self._sink(place))

    def _sink(self, place: int) -> int:
        """Move a block to the bottom, and the smaller child of each place up; returns the block's new place.

        The block was last in the heap and mostly belongs near the bottom, so one comparison per level suffices, as in
        `heapq`.
        """
        heap, places, ranks, stamps = self._heap, self._places, self._ranks, self._stamps
        block_id, end = heap[place], len(heap)
        while (child := 2 * place + 1) < end:
            if child + 1 < end:
                left, right = heap[child], heap[child + 1]
                if (ranks[right], stamps[right]) < (ranks[left], stamps[left]):
                    child += 1
            moved = heap[place] = heap[child]
            places[moved] = place
            place = child
        heap[place] = block_id
        return place

    def _rise(self, place: int) -> None:
        """Move a block up until its parent precedes it."""
        heap, places = self._heap, self._places
        block_id = heap[place]
        key = (self._ranks[block_id], self._stamps[block_id])
        while place:
            above = (place - 1) // 2
            parent = heap[above]
            if (self._ranks[parent], self._stamps[parent]) < key:
                break
            heap[place], places[parent] = parent, place
            place = above
        heap[place], places[block_id] = block_id, place


class BlockNumbers:
    """A number per block, 0 by default, in an array by block id."""

    __slots__ = ("_numbers",)

    def __init__(self, typecode: str = "q") -> None:
        self._numbers = array(typecode)

    def __getitem__(self, block_id: BlockId) -> int:
        return self._numbers[block_id]

    def __setitem__(self, block_id: BlockId, number: int) -> None:
        missing = block_id + 1 - len(self._numbers)
        if missing > 0:
            self._numbers.extend(array(self._numbers.typecode, [0]) * max(missing, len(self._numbers) // SPARE))
        self._numbers[block_id] = number


class FifoEviction(RankedEviction):
    """First published, first evicted, however often it was used since."""

    def __init__(self) -> None:
        super().__init__()
        self._published = BlockNumbers()
        self._count = 0

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        self._count += 1
        self._published[block_id] = self._count

    def rank(self, block_id: BlockId) -> float:
        return self._published[block_id]


class PriorityEviction(RankedEviction):
    """Evicts the least important block first, and among equals the least recently used.

    A block is as important as the most important request that computed or hit it since it was published. Nothing
    ages: an important block is evicted only if all other cached blocks are at least as important.
    """

    def __init__(self) -> None:
        super().__init__()
        self._priority = BlockNumbers()

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        self._priority[block_id] = priority

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        priorities = self._priority
        for block_id in block_ids:
            if block_id != NULL_BLOCK and priority < priorities[block_id]:
                priorities[block_id] = priority

    def rank(self, block_id: BlockId) -> float:
        return -self._priority[block_id]

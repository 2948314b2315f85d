"""The contract of eviction policies, and the three that rank blocks by what is known of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import cast

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds

SomeBlocks = Sequence[BlockId] | BlockIds
"""Distinct blocks: a list where they are few, and an array where they are many."""


def as_list(block_ids: SomeBlocks) -> Sequence[BlockId]:
    return cast(list[BlockId], block_ids.tolist()) if isinstance(block_ids, np.ndarray) else block_ids


class EvictionPolicy(ABC):
    """The order in which cached blocks are evicted.

    A policy holds exactly the cached blocks: those in the prefix cache that no sequence references. It is also notified
    about blocks that it does not hold, which it may ignore:

        publish ──> (active) ──add──> held ──evict──> gone, until its id is published again
                       ^  hit          │
                       └────remove─────┘

    Every operation is O(1) or amortised O(log n) per block, n being the number of held blocks.
    """

    def __init__(self) -> None:
        self._length = 0

    @abstractmethod
    def reserve(self, num_blocks: int) -> None:
        """Allocate for block ids below `num_blocks`; others must not be passed to the policy."""

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:  # noqa: B027
        """Note that an active block enters the prefix cache; what was known about this id is discarded.

        Args:
            priority: priority of the request that computed it; lower is more important.
            key: identifies its contents across evictions; may be empty.
        """

    def hit(self, block_ids: SomeBlocks, priority: int) -> None:  # noqa: B027
        """Note that a request of this priority found these blocks and holds them now."""

    @abstractmethod
    def add(self, block_ids: SomeBlocks) -> None:
        """Hold blocks that have lost their last reference, the first of them least recently used.

        A sequence adds its tail first.
        """

    @abstractmethod
    def remove(self, block_ids: SomeBlocks) -> None:
        """Stop holding blocks that are referenced again. Raises KeyError if one is not held."""

    def evict(self, count: int) -> list[BlockId]:
        """Choose, remove and return victims. Raises KeyError, and evicts none, if fewer are held."""
        if count > len(self):
            raise KeyError(f"{count} blocks requested, {len(self)} held")
        return self._evict(count)

    def __len__(self) -> int:
        return self._length

    @abstractmethod
    def __iter__(self) -> Iterator[BlockId]:
        """Iterate over the held blocks, once each."""

    @abstractmethod
    def _evict(self, count: int) -> list[BlockId]:
        """Remove and return that many victims; at least as many must be held."""


class LruEviction(EvictionPolicy):
    """Evicts the least recently used block first. Sequences free their tail before their head, so tails go first.

    The blocks form a ring in two arrays, 8 bytes per block. Its ends are joined by an entry at the arrays' end, which
    negative ids reach; the null block, which is never held, stands for "not held":

        -1 <─> oldest <─> … <─> newest <─> -1

    `AdaptiveEviction` has a second ring in the same arrays, joined by -2.
    """

    BYTES_PER_BLOCK = 8
    _NUM_RINGS = 1

    def __init__(self) -> None:
        super().__init__()
        ends = range(-self._NUM_RINGS, 0)
        self._next = array("i", ends)
        self._previous = array("i", ends)

    def reserve(self, num_blocks: int) -> None:
        ends = -self._NUM_RINGS
        if (missing := num_blocks - len(self._next) - ends) > 0:
            more = array("i", [NULL_BLOCK]) * missing
            self._next = self._next[:ends] + more + self._next[ends:]
            self._previous = self._previous[:ends] + more + self._previous[ends:]

    def add(self, block_ids: SomeBlocks) -> None:
        self._append(-1, block_ids)

    def remove(self, block_ids: SomeBlocks) -> None:
        following, preceding = self._next, self._previous
        if isinstance(block_ids, np.ndarray):
            self._remove_many(block_ids)
            return
        for block_id in block_ids:
            after = following[block_id]
            if after == NULL_BLOCK:
                raise KeyError(block_id)
            before = preceding[block_id]
            following[before], preceding[after] = after, before
            following[block_id] = NULL_BLOCK
            self._length -= 1

    def _evict(self, count: int) -> list[BlockId]:
        return self._take(-1, count)

    def __iter__(self) -> Iterator[BlockId]:
        for end in range(-1, -1 - self._NUM_RINGS, -1):
            yield from self._ring(end)

    def _ring(self, end: int) -> Iterator[BlockId]:
        """Iterate over one ring, from the oldest block."""
        block_id = self._next[end]
        while block_id != end:
            yield BlockId(block_id)
            block_id = self._next[block_id]

    def _append(self, end: int, block_ids: SomeBlocks) -> None:
        if not len(block_ids):
            return
        following, preceding = self._next, self._previous
        newest = preceding[end]
        if isinstance(block_ids, np.ndarray):
            run = block_ids.astype(np.intp, copy=False)  # as numpy would for each line below
            first, last = int(run[0]), int(run[-1])
            np.frombuffer(following, np.int32)[run[:-1]] = run[1:]
            np.frombuffer(preceding, np.int32)[run[1:]] = run[:-1]
            following[newest], preceding[first] = first, newest
            newest = last
        else:
            for block_id in block_ids:
                following[newest], preceding[block_id] = block_id, newest
                newest = block_id
        following[newest], preceding[end] = end, newest
        self._length += len(block_ids)

    def _take(self, end: int, most: int) -> list[BlockId]:
        """Remove and return the oldest blocks of a ring, at most so many."""
        following, block_id, taken = self._next, self._next[end], list[int]()
        while block_id != end and len(taken) < most:
            taken.append(block_id)
            after = following[block_id]
            following[block_id] = NULL_BLOCK
            block_id = after
        following[end], self._previous[block_id] = block_id, end
        self._length -= len(taken)
        return cast(list[BlockId], taken)

    def _remove_many(self, block_ids: BlockIds) -> None:
        if not block_ids.size:
            return
        # Blocks that one sequence released together are adjacent here, the tail first, so remove whole runs.
        run = np.ascontiguousarray(block_ids[::-1], np.intp)
        following = np.frombuffer(self._next, np.int32)
        behind = following.take(run)
        if (absent := behind == NULL_BLOCK).any():
            raise KeyError(int(run[absent.argmax()]))
        ends = np.append(np.flatnonzero(behind[:-1] != run[1:]), len(run) - 1)
        starts = np.append(0, ends[:-1] + 1)
        for first, last in zip(run.take(starts).tolist(), run.take(ends).tolist(), strict=True):
            before, after = self._previous[first], self._next[last]
            self._next[before], self._previous[after] = after, before
        following[run] = NULL_BLOCK
        self._length -= len(run)


class RankedEviction(EvictionPolicy):
    """Evicts the block of the lowest rank first, and among equals the least recently used.

    A subclass sets `_ranks`, an integer by block id, which does not change while a block is held.

        heap     numbers of a rank, a stamp and a block id, from the highest bits to the lowest
        stamps   by block id: the stamp of its number in the heap, 0 if the block is not held

    The number of a block that was removed stays in the heap, and is skipped there, until an eighth of all are such.
    """

    BYTES_PER_BLOCK = 72

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[int] = []
        self._ranks = array("q")
        self._stamps = array("q")
        self._stamp = 0

    def reserve(self, num_blocks: int) -> None:
        if (missing := num_blocks - len(self._ranks)) > 0:
            self._ranks = self._ranks + array("q", [0]) * missing
            self._stamps = self._stamps + array("q", [0]) * missing

    def add(self, block_ids: SomeBlocks) -> None:
        stamps = self._stamps
        for block_id in as_list(block_ids):
            self._stamp = stamps[block_id] = self._stamp + 1
            heappush(self._heap, self._number(block_id))
        self._length += len(block_ids)

    def _evict(self, count: int) -> list[BlockId]:
        victims: list[BlockId] = []
        while len(victims) < count:
            if self._is_held(number := heappop(self._heap)):
                block_id = BlockId(number & 0xFFFFFFFF)
                self._stamps[block_id] = 0
                victims.append(block_id)
        self._length -= count
        return victims

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(number & 0xFFFFFFFF) for number in filter(self._is_held, self._heap))

    def remove(self, block_ids: SomeBlocks) -> None:
        for block_id in as_list(block_ids):
            if not self._stamps[block_id]:
                raise KeyError(block_id)
            self._stamps[block_id] = 0
        self._length -= len(block_ids)
        if len(self._heap) > self._length + self._length // 8 + 64:
            self._heap = list(filter(self._is_held, self._heap))
            heapify(self._heap)

    def _number(self, block_id: int) -> int:
        return (self._ranks[block_id] << 40 | self._stamps[block_id]) << 32 | block_id

    def _is_held(self, number: int) -> bool:
        return self._stamps[number & 0xFFFFFFFF] == number >> 32 & 0xFFFFFFFFFF


class FifoEviction(RankedEviction):
    """First published, first evicted, however often it was used since."""

    def __init__(self) -> None:
        super().__init__()
        self._num_published = 0

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        self._num_published += 1
        self._ranks[block_id] = self._num_published


class PriorityEviction(RankedEviction):
    """Evicts the least important block first, and among equals the least recently used.

    A block is as important as the most important request that computed or hit it since it was published. Nothing
    ages: an important block is evicted only if all other cached blocks are at least as important.
    """

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        self._ranks[block_id] = -priority

    def hit(self, block_ids: SomeBlocks, priority: int) -> None:
        ranks = self._ranks
        for block_id in as_list(block_ids):
            if -priority > ranks[block_id]:
                ranks[block_id] = -priority

"""The contract of eviction policies, and the three that rank blocks by what is known of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol, cast

import numpy as np

from octavo.kvcache.block import BlockId, BlockIds, where

SomeBlocks = Sequence[BlockId] | BlockIds
"""Distinct blocks: a list where they are few, and an array where they are many."""


def as_list(block_ids: SomeBlocks) -> Sequence[BlockId]:
    return cast(list[BlockId], block_ids.tolist()) if isinstance(block_ids, np.ndarray) else block_ids


class Tree(Protocol):
    """What leaf-first eviction needs to know of the index of prefixes."""

    def parent(self, block_id: BlockId, /) -> BlockId | None: ...
    def children(self, block_id: BlockId, /) -> Iterator[BlockId]: ...


class EvictionPolicy(ABC):
    """The order in which cached blocks are evicted.

    A policy holds exactly the cached blocks: those in the prefix cache that no sequence references. It is also notified
    about blocks that it does not hold, which it may ignore:

        publish ──> (active) ──add──> held ──evict──> gone, until its id is published again
                       ^  hit          │  ^
                       └────remove─────┘  └──restore, right after evict

    Every operation is O(1) or amortised O(log n) per block, n being the number of held blocks.

    With a tree, only blocks without cached children are evicted, because evicting any other block would make its
    descendants unreachable while they still take memory. A victim with cached children is set aside and returns to its
    old place when the last of them leaves. Each block is set aside at most once between two additions, so `evict` stays
    amortised O(log n) and O(active children). Active children do not protect a block: their sequences hold their own
    copies of the blocks before them, and the pool must be able to hand out every block that it counts as available.

    Attributes:
        tree: the index of the blocks that the pool publishes, to evict leaves first; None to ignore it.
    """

    def __init__(self) -> None:
        self.tree: Tree | None = None
        self._aside: set[BlockId] = set()
        # By block id: its place in the order, negative or 0 if the block is not held.
        self._places = array("q")
        self._length = 0

    def reserve(self, num_blocks: int) -> None:
        """Allocate for block ids below `num_blocks`; others must not be passed to the policy."""
        if (missing := num_blocks - len(self._places)) > 0:
            # A new array, because growing one may allocate more than that.
            self._places = self._places + array(self._places.typecode, [0]) * missing

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

    def remove(self, block_ids: SomeBlocks) -> None:
        """Stop holding blocks that are referenced again. Raises KeyError if one is not held."""
        if not self._aside:
            self._remove(block_ids)
            return
        ids = as_list(block_ids)
        self._remove([block_id for block_id in ids if block_id not in self._aside])
        self._aside.difference_update(ids)
        for block_id in ids:
            if (parent := self._freed_parent(block_id, set())) is not None:
                self.restore(parent)

    def evict(self, count: int) -> list[BlockId]:
        """Choose, remove and return victims. Raises KeyError, and evicts none, if fewer are held."""
        if count > len(self):
            raise KeyError(f"{count} blocks requested, {len(self)} held")
        return self._evict(count) if self.tree is None else self._evict_leaves(count)

    @abstractmethod
    def restore(self, block_id: BlockId) -> None:
        """Put back in its old place the block that was evicted last of all that were not put back."""

    def __len__(self) -> int:
        return self._length + len(self._aside)

    def __contains__(self, block_id: object) -> bool:
        is_id = isinstance(block_id, int) and 0 <= block_id < len(self._places)
        return (is_id and self._places[cast(int, block_id)] > 0) or block_id in self._aside

    def __iter__(self) -> Iterator[BlockId]:
        yield from self._in_order()
        yield from self._aside

    @abstractmethod
    def _evict(self, count: int) -> list[BlockId]:
        """Remove and return that many victims; at least as many must be held."""

    @abstractmethod
    def _in_order(self) -> Iterator[BlockId]:
        """Iterate over what is held by place, once each."""

    @abstractmethod
    def _tidy(self) -> None:
        """Drop what is left of removed blocks if it has become much; called after some were."""

    def _remove(self, block_ids: SomeBlocks) -> None:
        places = self._places
        if isinstance(block_ids, np.ndarray):
            view = np.frombuffer(places, places.typecode)
            found = view.take(block_ids)
            if (absent := found <= 0).any():
                raise KeyError(int(block_ids[absent.argmax()]))
            view[block_ids] = -found
            del view  # the array cannot be replaced while it is viewed
        else:
            for block_id in block_ids:
                if places[block_id] <= 0:
                    raise KeyError(block_id)
                places[block_id] = -places[block_id]
        self._length -= len(block_ids)
        self._tidy()

    def _evict_leaves(self, count: int) -> list[BlockId]:
        victims: list[BlockId] = []
        most = count
        while len(victims) < count:
            if not self._length:
                raise KeyError("only blocks that wait for their children are held")
            candidates = self._evict(min(most, count - len(victims), self._length))
            most *= 2
            rest = set(candidates)
            for number, block_id in enumerate(candidates, 1):
                rest.discard(block_id)
                if self._has_cached_child(block_id, rest):
                    self._aside.add(block_id)
                    continue
                victims.append(block_id)
                if (parent := self._freed_parent(block_id, rest)) is not None:
                    # It may precede the other candidates, so choose again. This may happen with every victim, as under
                    # FIFO, so fewer are taken at a time.
                    for other in (*reversed(candidates[number:]), parent):
                        self.restore(other)
                    most = 1
                    break
        return victims

    def _has_cached_child(self, block_id: BlockId, candidates: set[BlockId]) -> bool:
        """Whether a child of a block is cached, or among the candidates that have just been taken out."""
        assert self.tree is not None
        return any(child in candidates or child in self for child in self.tree.children(block_id))

    def _freed_parent(self, block_id: BlockId, candidates: set[BlockId]) -> BlockId | None:
        """Return the parent of a block that has left, if it is set aside, but need no longer be: it is taken out."""
        parent = self.tree.parent(block_id) if self.tree is not None and self._aside else None
        if parent is None or parent not in self._aside or self._has_cached_child(parent, candidates):
            return None
        self._aside.remove(parent)
        return parent


class LruEviction(EvictionPolicy):
    """Evicts the least recently used block first. Sequences free their tail before their head, so tails go first."""

    # A place of 4 bytes, and a number in the queue, of which an eighth may be out of date.
    BYTES_PER_BLOCK = 9

    def __init__(self, num_queues: int = 1) -> None:
        super().__init__()
        self._places = array("i")
        self._queues = [_Queue(number, num_queues) for number in range(num_queues)]

    def add(self, block_ids: SomeBlocks) -> None:
        self._append(0, block_ids)

    def restore(self, block_id: BlockId) -> None:
        self._prepend(0, block_id)

    def _evict(self, count: int) -> list[BlockId]:
        return self._take(0, count)

    def _in_order(self) -> Iterator[BlockId]:
        for queue in self._queues:
            yield from cast(list[BlockId], queue.held(self._places).tolist())

    def _tidy(self) -> None:
        if sum(map(len, self._queues)) > self._length + self._length // 8 + 64:
            for queue in self._queues:
                queue.tidy(self._places)

    def _append(self, queue: int, block_ids: SomeBlocks) -> None:
        self._queues[queue].append(block_ids, self._places)
        self._length += len(block_ids)

    def _prepend(self, queue: int, block_id: BlockId) -> None:
        self._queues[queue].prepend(block_id, self._places)
        self._length += 1

    def _take(self, queue: int, most: int, stamps: array[int] | None = None) -> list[BlockId]:
        """Remove and return the oldest blocks of a queue, at most so many; with stamps, those of one stamp."""
        taken = self._queues[queue].take(most, self._places, stamps)
        self._length -= len(taken)
        return taken


class _Queue:
    """Blocks in the order in which they were added; removing one leaves its number, which is out of date from then on.

        blocks   - - - 7 3 9 4 3        a number at index i is up to date if its block's place is i * stride + offset
                       ^ head  ^ newest

    Several queues may share the places of their blocks, each with an offset of its own.
    """

    def __init__(self, number: int, num_queues: int) -> None:
        self._blocks = array("i", [0])
        self._head = 1
        self._offset = number
        self._stride = num_queues

    def __len__(self) -> int:
        """The numbers in the queue, also those out of date."""
        return len(self._blocks) - self._head

    def append(self, block_ids: SomeBlocks, places: array[int]) -> None:
        place, step = len(self._blocks) * self._stride + self._offset, self._stride
        if isinstance(block_ids, np.ndarray):
            end = place + step * len(block_ids)
            np.frombuffer(places, np.int32)[block_ids] = np.arange(place, end, step, dtype=np.int32)
            self._blocks.frombytes(block_ids.astype(np.int32, copy=False).tobytes())
            return
        for block_id in block_ids:
            places[block_id] = place
            place += step
        self._blocks.extend(block_ids)

    def prepend(self, block_id: BlockId, places: array[int]) -> None:
        if self._head == 1:
            self.tidy(places, room=64)
        self._head -= 1
        self._blocks[self._head] = block_id
        places[block_id] = self._head * self._stride + self._offset

    def oldest(self, places: array[int]) -> BlockId | None:
        blocks, head, stride, offset = self._blocks, self._head, self._stride, self._offset
        while head < len(blocks) and places[blocks[head]] != head * stride + offset:
            head += 1
        self._head = head
        return BlockId(blocks[head]) if head < len(blocks) else None

    def take(self, most: int, places: array[int], stamps: array[int] | None = None) -> list[BlockId]:
        blocks, head, stride, offset, taken = self._blocks, self._head, self._stride, self._offset, list[int]()
        while len(taken) < most and head < len(blocks):
            block_id = blocks[head]
            if places[block_id] == head * stride + offset:
                if stamps is not None and taken and stamps[block_id] != stamps[taken[0]]:
                    break
                taken.append(block_id)
                places[block_id] = 0
            head += 1
        self._head = head
        return cast(list[BlockId], taken)

    def held(self, places: array[int]) -> BlockIds:
        """Return the blocks from the oldest to the newest. O(numbers)."""
        blocks = np.array(self._blocks[self._head :], np.int32)
        expected = np.arange(self._head, len(self._blocks)) * self._stride + self._offset
        return where(np.frombuffer(places, np.int32).take(blocks) == expected, blocks)

    def tidy(self, places: array[int], room: int = 0) -> None:
        """Drop the numbers that are out of date, and leave room to prepend so many."""
        held = self.held(places)
        self._head = 1 + room
        self._blocks = array("i", [0]) * self._head
        self.append(held, places)


class RankedEviction(EvictionPolicy):
    """Evicts the block of the lowest rank first, and among equals the least recently used.

    A subclass sets `_ranks`, an integer by block id, which does not change while a block is held. A block's place is a
    stamp of when it was added; the heap has numbers of a rank, a stamp and a block id, from the highest bits to the
    lowest. The number of a block that was removed is skipped there.
    """

    # Two arrays, and numbers in a heap of which an eighth may be out of date.
    BYTES_PER_BLOCK = 72

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[int] = []
        self._ranks = array("q")
        self._stamp = 0

    def reserve(self, num_blocks: int) -> None:
        super().reserve(num_blocks)
        self._ranks = self._ranks + array("q", [0]) * (len(self._places) - len(self._ranks))

    def add(self, block_ids: SomeBlocks) -> None:
        places = self._places
        for block_id in as_list(block_ids):
            self._stamp = places[block_id] = self._stamp + 1
            heappush(self._heap, self._number(block_id))
        self._length += len(block_ids)

    def restore(self, block_id: BlockId) -> None:
        self._places[block_id] = -self._places[block_id]
        heappush(self._heap, self._number(block_id))
        self._length += 1

    def _evict(self, count: int) -> list[BlockId]:
        victims: list[BlockId] = []
        while len(victims) < count:
            if self._is_held(number := heappop(self._heap)):
                block_id = BlockId(number & 0xFFFFFFFF)
                self._places[block_id] = -self._places[block_id]
                victims.append(block_id)
        self._length -= count
        return victims

    def _in_order(self) -> Iterator[BlockId]:
        return (BlockId(number & 0xFFFFFFFF) for number in filter(self._is_held, self._heap))

    def _tidy(self) -> None:
        if len(self._heap) > self._length + self._length // 8 + 64:
            self._heap = list(filter(self._is_held, self._heap))
            heapify(self._heap)

    def _number(self, block_id: int) -> int:
        return (self._ranks[block_id] << 40 | self._places[block_id]) << 32 | block_id

    def _is_held(self, number: int) -> bool:
        return self._places[number & 0xFFFFFFFF] == number >> 32 & 0xFFFFFFFFFF


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

"""Least recently used: a policy that needs to know nothing about a block."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds

_ABSENT = -1
SPARE = 8
"""Arrays by block id grow by at least 1 / this of their length."""


class LruEviction:
    """Evicts the least recently used block first, in O(1). Sequences free their tail before their head, so tails go
    first.

    It keeps a ring of block ids in two arrays, 8 bytes per block; the null block, which is never held, joins its ends:

        null <─> oldest <─> … <─> newest <─> null
    """

    BYTES_PER_BLOCK = 8

    def __init__(self) -> None:
        self._next = array("i", [NULL_BLOCK])
        self._previous = array("i", [NULL_BLOCK])
        self._length = 0

    def reserve(self, num_blocks: int) -> None:
        missing = num_blocks - len(self._next)
        if missing > 0:
            more = array("i", [_ABSENT]) * missing
            # New arrays, because growing one may allocate more than that.
            self._next, self._previous = self._next + more, self._previous + more

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        return

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        return

    def add(self, block_id: BlockId) -> None:
        if block_id >= len(self._next):
            self._grow(block_id)
        self._insert(self._previous[NULL_BLOCK], block_id)

    def add_all(self, block_ids: BlockIds) -> None:
        if not block_ids.size:
            return
        self._grow(int(block_ids.max()))
        run = block_ids.astype(np.intp, copy=False)  # as numpy would for each line below
        first, last, newest = int(run[0]), int(run[-1]), self._previous[NULL_BLOCK]
        following, preceding = np.frombuffer(self._next, np.int32), np.frombuffer(self._previous, np.int32)
        following[run[:-1]] = run[1:]
        preceding[run[1:]] = run[:-1]
        self._next[newest], self._previous[first] = first, newest
        self._next[last], self._previous[NULL_BLOCK] = NULL_BLOCK, last
        self._length += len(run)

    def remove(self, block_id: BlockId) -> None:
        if block_id not in self:
            raise KeyError(block_id)
        following, preceding = self._next[block_id], self._previous[block_id]
        self._next[preceding] = following
        self._previous[following] = preceding
        self._next[block_id] = _ABSENT
        self._length -= 1

    def remove_all(self, block_ids: BlockIds) -> None:
        if not block_ids.size:
            return
        # Blocks that one sequence released together are adjacent here, the tail first, so remove whole runs.
        run = np.ascontiguousarray(block_ids[::-1], np.intp)
        if (highest := int(run.max())) >= len(self._next):
            raise KeyError(highest)
        following = np.frombuffer(self._next, np.int32)
        behind = following.take(run)
        if (absent := behind == _ABSENT).any():
            raise KeyError(int(run[absent.argmax()]))
        ends = np.append(np.flatnonzero(behind[:-1] != run[1:]), len(run) - 1)
        starts = np.append(0, ends[:-1] + 1)
        for first, last in zip(run.take(starts).tolist(), run.take(ends).tolist(), strict=True):
            before, after = self._previous[first], self._next[last]
            self._next[before], self._previous[after] = after, before
        following[run] = _ABSENT
        self._length -= len(run)

    @property
    def oldest(self) -> BlockId:
        """The next victim; the null block if none is held."""
        return BlockId(self._next[NULL_BLOCK])

    def evict(self) -> BlockId:
        if not self._length:
            raise KeyError("no block is held")
        block_id = self.oldest
        self.remove(block_id)
        return block_id

    def evict_many(self, count: int) -> list[BlockId]:
        if count > self._length:
            raise KeyError(f"{count} blocks requested, {self._length} held")
        following, block_id, victims = self._next, self._next[NULL_BLOCK], list[int]()
        for _ in range(count):
            victims.append(block_id)
            after = following[block_id]
            following[block_id] = _ABSENT
            block_id = after
        following[NULL_BLOCK], self._previous[block_id] = block_id, NULL_BLOCK
        self._length -= count
        return cast(list[BlockId], victims)

    def restore(self, block_id: BlockId) -> None:
        self._insert(NULL_BLOCK, block_id)

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block_id: object) -> bool:
        return isinstance(block_id, int) and 0 < block_id < len(self._next) and self._next[block_id] != _ABSENT

    def __iter__(self) -> Iterator[BlockId]:
        block_id = NULL_BLOCK
        for _ in range(self._length):
            block_id = BlockId(self._next[block_id])
            yield block_id

    def _insert(self, preceding: int, block_id: BlockId) -> None:
        following = self._next[preceding]
        self._next[preceding] = self._previous[following] = block_id
        self._previous[block_id], self._next[block_id] = preceding, following
        self._length += 1

    def _grow(self, block_id: int) -> None:
        missing = block_id + 1 - len(self._next)
        if missing > 0:
            more = array("i", [_ABSENT]) * max(missing, len(self._next) // SPARE)
            self._next.extend(more)
            self._previous.extend(more)

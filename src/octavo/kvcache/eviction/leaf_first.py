"""Evicts leaves before their ancestors, under any policy, for caches that know the tree."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds
from octavo.kvcache.eviction.base import EvictionPolicy


class Lineage(Protocol):
    """Tells which published block continues which. Blocks of groups with a sliding window have neither parent nor
    children, because a hit needs only those inside the window.
    """

    def parent(self, block_id: BlockId) -> BlockId | None:
        """Return the block before this one; None at the start, or if it is not published."""

    def children(self, block_id: BlockId) -> Iterable[BlockId]:
        """Return the published blocks right after this one."""


class LeafFirstEviction:
    """Evicts in the inner policy's order, but only blocks without cached descendants.

    Evicting any other block would make its descendants unreachable while they still take memory. A victim with cached
    children is set aside and returns to its old place when the last of them leaves. Each block is set aside at most
    once between two additions, so `evict` stays amortised O(log n). Active children do not protect a block: their
    sequences hold their own copies of the blocks before them, and the pool must be able to hand out every block that it
    counts as available.
    """

    def __init__(self, inner: EvictionPolicy, lineage: Lineage) -> None:
        self._inner = inner
        self._lineage = lineage
        self._aside: set[BlockId] = set()
        # By block id: the parent of a held block (null for none), and the number of held children.
        self._parents = array("i")
        self._num_children = array("i")

    def reserve(self, num_blocks: int) -> None:
        self._inner.reserve(num_blocks)

    def publish(self, block_id: BlockId, position: int, priority: int, key: bytes = b"") -> None:
        self._inner.publish(block_id, position, priority, key)
        # The block may replace one that was evicted before its descendants.
        for child in self._lineage.children(block_id):
            if child in self and self._parent(child) == NULL_BLOCK:
                self._stand_on(child, block_id)

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        self._inner.hit(block_ids, priority)

    def add(self, block_id: BlockId) -> None:
        self._inner.add(block_id)
        if (parent := self._lineage.parent(block_id)) is not None:
            self._stand_on(block_id, parent)

    def remove(self, block_id: BlockId) -> None:
        if block_id in self._aside:
            self._aside.remove(block_id)
        else:
            self._inner.remove(block_id)
        self._restore_parent(block_id)

    def add_all(self, block_ids: BlockIds) -> None:
        self._inner.add_all(block_ids)
        parent_of = self._lineage.parent
        for block_id in block_ids.tolist():
            if (parent := parent_of(block_id)) is not None:
                self._stand_on(block_id, parent)

    def remove_all(self, block_ids: BlockIds) -> None:
        held = block_ids
        if self._aside:
            held = np.array([b for b in block_ids.tolist() if b not in self._aside], block_ids.dtype)
        self._inner.remove_all(held)
        self._aside.difference_update(block_ids.tolist())
        for block_id in block_ids.tolist():
            self._restore_parent(block_id)

    def evict(self) -> BlockId:
        return self.evict_many(1)[0]

    def evict_many(self, count: int) -> list[BlockId]:
        if count > len(self):
            raise KeyError(f"{count} blocks requested, {len(self)} held")
        victims: list[BlockId] = []
        most = count
        while len(victims) < count:
            # At least one: if the inner policy had none left, it would raise instead of being asked for ever.
            candidates = self._inner.evict_many(max(1, min(most, count - len(victims), len(self._inner))))
            most *= 2
            for number, block_id in enumerate(candidates, 1):
                if self._has_children(block_id):
                    self._aside.add(block_id)
                    continue
                victims.append(block_id)
                if (parent := self._leave(block_id)) != NULL_BLOCK:
                    # It may precede the other candidates, so the inner policy chooses again. This may happen with every
                    # victim, as under FIFO, so fewer are taken at a time.
                    for other in (*reversed(candidates[number:]), parent):
                        self._inner.restore(other)
                    most = 1
                    break
        return victims

    def restore(self, block_id: BlockId) -> None:
        self._inner.restore(block_id)
        if (parent := self._lineage.parent(block_id)) is not None:
            self._stand_on(block_id, parent)

    def __len__(self) -> int:
        return len(self._inner) + len(self._aside)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._inner or block_id in self._aside

    def __iter__(self) -> Iterator[BlockId]:
        yield from self._inner
        yield from self._aside

    def _stand_on(self, block_id: BlockId, parent: BlockId) -> None:
        if (highest := max(block_id, parent)) >= len(self._parents):
            more = bytes(4 * max(highest + 1 - len(self._parents), len(self._parents)))
            self._parents.frombytes(more)
            self._num_children.frombytes(more)
        self._parents[block_id] = parent
        self._num_children[parent] += 1

    def _parent(self, block_id: BlockId) -> BlockId:
        return BlockId(self._parents[block_id]) if block_id < len(self._parents) else NULL_BLOCK

    def _has_children(self, block_id: BlockId) -> bool:
        return block_id < len(self._num_children) and self._num_children[block_id] > 0

    def _restore_parent(self, block_id: BlockId) -> None:
        if (parent := self._leave(block_id)) != NULL_BLOCK:
            self._inner.restore(parent)

    def _leave(self, block_id: BlockId) -> BlockId:
        """Note that a block is no longer held; returns its parent if that now leaves the blocks set aside, else null.

        The caller must restore the parent.
        """
        parent = self._parent(block_id)
        if parent == NULL_BLOCK:
            return NULL_BLOCK
        self._parents[block_id] = NULL_BLOCK
        self._num_children[parent] -= 1
        if self._num_children[parent] or parent not in self._aside:
            return NULL_BLOCK
        self._aside.remove(parent)
        return parent

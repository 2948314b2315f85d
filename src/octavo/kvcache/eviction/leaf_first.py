"""Evict leaves before their ancestors, under any policy: for caches that know the tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from octavo.kvcache.block import BlockId, BlockIds
from octavo.kvcache.eviction.base import EvictionPolicy


class Lineage(Protocol):
    """Which published block continues which. Blocks of groups with a sliding window have neither parent nor children:
    a hit needs only those inside the window.
    """

    def parent(self, block_id: BlockId) -> BlockId | None:
        """The block before this one; None at the start, or where it is not published."""

    def children(self, block_id: BlockId) -> Iterable[BlockId]:
        """The published blocks right after this one."""


class LeafFirstEviction:
    """The inner policy's order, restricted to blocks without cached descendants.

    An inner block's eviction would make its descendants unreachable while they still take memory. A victim that has
    cached children is set aside and gets back its old place when the last of them leaves: each block is set aside at
    most once between two additions, so `evict` stays amortised O(log n). Active children hold nothing back: they were
    computed by sequences that hold their own copy of what is before, and a pool must always be able to give what it
    counts as available.
    """

    def __init__(self, inner: EvictionPolicy, lineage: Lineage) -> None:
        self._inner = inner
        self._lineage = lineage
        self._aside: set[BlockId] = set()
        self._parents: dict[BlockId, BlockId] = {}  # of held blocks
        self._num_children: dict[BlockId, int] = {}  # held children; absent for none

    def publish(self, block_id: BlockId, position: int, priority: int) -> None:
        self._inner.publish(block_id, position, priority)
        # A block computed again, where the old one went before its descendants.
        for child in self._lineage.children(block_id):
            if child in self and child not in self._parents:
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
        self._leave(block_id)

    def add_all(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            self.add(block_id)

    def remove_all(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            self.remove(block_id)

    def evict(self) -> BlockId:
        while True:
            block_id = self._inner.evict()
            if block_id not in self._num_children:
                self._leave(block_id)
                return block_id
            self._aside.add(block_id)

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
        self._parents[block_id] = parent
        self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def _leave(self, block_id: BlockId) -> None:
        parent = self._parents.pop(block_id, None)
        if parent is None:
            return
        if left := self._num_children[parent] - 1:
            self._num_children[parent] = left
            return
        del self._num_children[parent]
        if parent in self._aside:
            self._aside.remove(parent)
            self._inner.restore(parent)

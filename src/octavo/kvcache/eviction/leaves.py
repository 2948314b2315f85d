"""Evicts leaves of the tree of blocks before the blocks that they continue, under any policy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds
from octavo.kvcache.eviction.policies import EvictionPolicy, SomeBlocks

_UNPUBLISHED = -1


class Tree(Protocol):
    """Tells which published block continues which, by their keys; see `PrefixIndex`."""

    def find(self, key: bytes) -> BlockId | None: ...

    def parent_key(self, block_id: BlockId) -> bytes | None: ...

    def parents(self, block_ids: BlockIds) -> npt.NDArray[np.int32]: ...


class LeavesFirst(EvictionPolicy):
    """Evicts in the inner policy's order, but only blocks without cached children.

    Evicting any other block would make its descendants unreachable while they still take memory. A victim with cached
    children is set aside and returns to its old place when the last of them leaves. Each block is set aside at most
    once between two additions, so `evict` stays amortised O(log n). Active children do not protect a block: their
    sequences hold their own copies of the blocks before them, and the pool must be able to hand out every block that it
    counts as available.

    Args:
        inner: the policy that ranks the blocks.
        tree: the index of the blocks that the pool publishes.
    """

    def __init__(self, inner: EvictionPolicy, tree: Tree) -> None:
        self._inner = inner
        self._tree = tree
        self._aside: set[BlockId] = set()
        self._num_children = array("i")  # by block id: held blocks that continue it
        # Held blocks whose parent was evicted while they were active, by its key, which may be published again.
        self._orphans: dict[bytes, set[BlockId]] = {}

    def reserve(self, num_blocks: int) -> None:
        self._inner.reserve(num_blocks)
        if (missing := num_blocks - len(self._num_children)) > 0:
            # A new array, because growing one may allocate more than that.
            self._num_children = self._num_children + array("i", [0]) * missing

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        self._inner.publish(block_id, priority, key)
        if orphans := self._orphans.pop(key, None):
            self._num_children[block_id] += len(orphans)

    def hit(self, block_ids: SomeBlocks, priority: int) -> None:
        self._inner.hit(block_ids, priority)

    def add(self, block_ids: SomeBlocks) -> None:
        self._inner.add(block_ids)
        for block_id, parent in self._with_parents(block_ids):
            self._attach(block_id, parent)

    def remove(self, block_ids: SomeBlocks) -> None:
        aside = self._aside
        self._inner.remove([b for b in _as_list(block_ids) if b not in aside] if aside else block_ids)
        aside.difference_update(_as_list(block_ids))
        for block_id, parent in self._with_parents(block_ids):
            if (restored := self._detach(block_id, parent)) != NULL_BLOCK:
                self._inner.restore(restored)

    def evict(self, count: int) -> list[BlockId]:
        self._check_held(count)
        victims: list[BlockId] = []
        most = count
        while len(victims) < count:
            # At least one: if the inner policy had none left, it would raise instead of being asked for ever.
            candidates = self._inner.evict(max(1, min(most, count - len(victims), len(self._inner))))
            most *= 2
            for number, block_id in enumerate(candidates, 1):
                if self._num_children[block_id]:
                    self._aside.add(block_id)
                    continue
                victims.append(block_id)
                if (parent := self._detach(block_id, self._parent(block_id))) != NULL_BLOCK:
                    # It may precede the other candidates, so the inner policy chooses again. This may happen with every
                    # victim, as under FIFO, so fewer are taken at a time.
                    for other in (*reversed(candidates[number:]), parent):
                        self._inner.restore(other)
                    most = 1
                    break
        return victims

    def restore(self, block_id: BlockId) -> None:
        self._inner.restore(block_id)
        self._attach(block_id, self._parent(block_id))

    def __len__(self) -> int:
        return len(self._inner) + len(self._aside)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._inner or block_id in self._aside

    def __iter__(self) -> Iterator[BlockId]:
        yield from self._inner
        yield from self._aside

    def _with_parents(self, block_ids: SomeBlocks) -> Iterable[tuple[BlockId, int]]:
        """Return each block with its parent, as `Tree.parents` does."""
        if isinstance(block_ids, np.ndarray):
            return zip(_as_list(block_ids), self._tree.parents(block_ids).tolist(), strict=True)
        return ((block_id, self._parent(block_id)) for block_id in block_ids)

    def _parent(self, block_id: BlockId) -> int:
        """Return a block's parent as `Tree.parents` does."""
        if (key := self._tree.parent_key(block_id)) is None:
            return NULL_BLOCK
        parent = self._tree.find(key)
        return _UNPUBLISHED if parent is None else parent

    def _attach(self, block_id: BlockId, parent: int) -> None:
        """Count a block that is now held as a child of its parent, or remember that its parent is not published."""
        if parent == _UNPUBLISHED:
            key = self._tree.parent_key(block_id)
            assert key is not None
            self._orphans.setdefault(key, set()).add(block_id)
        elif parent != NULL_BLOCK:
            self._num_children[parent] += 1

    def _detach(self, block_id: BlockId, parent: int) -> BlockId:
        """Discount a block that is no longer held; returns its parent if that now leaves the blocks set aside, else
        null. The caller must restore the parent.
        """
        if parent == _UNPUBLISHED:  # a published parent is not evicted before its held children
            key = self._tree.parent_key(block_id)
            assert key is not None
            self._orphans[key].remove(block_id)
            if not self._orphans[key]:
                del self._orphans[key]
        elif parent != NULL_BLOCK:
            self._num_children[parent] -= 1
            if not self._num_children[parent] and parent in self._aside:
                self._aside.remove(BlockId(parent))
                return BlockId(parent)
        return NULL_BLOCK


def _as_list(block_ids: SomeBlocks) -> Sequence[BlockId]:
    return cast(list[BlockId], block_ids.tolist()) if isinstance(block_ids, np.ndarray) else block_ids

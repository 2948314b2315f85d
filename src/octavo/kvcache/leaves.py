"""Evicts leaves of the tree of blocks before the blocks that they continue, under any policy."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction.policies import EvictionPolicy, SomeBlocks, as_list
from octavo.kvcache.prefix import PrefixIndex


class LeavesFirst(EvictionPolicy):
    """Evicts in the inner policy's order, but only blocks without cached children.

    Evicting any other block would make its descendants unreachable while they still take memory. A victim with cached
    children is set aside and returns to its old place when the last of them leaves. Each block is set aside at most
    once between two additions, so `evict` stays amortised O(log n) and O(active children). Active children do not
    protect a block: their sequences hold their own copies of the blocks before them, and the pool must be able to hand
    out every block that it counts as available.

    Args:
        inner: the policy that ranks the blocks.
        tree: the index of the blocks that the pool publishes.
    """

    def __init__(self, inner: EvictionPolicy, tree: PrefixIndex) -> None:
        self._inner = inner
        self._tree = tree
        self._aside: set[BlockId] = set()

    def reserve(self, num_blocks: int) -> None:
        self._inner.reserve(num_blocks)

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        self._inner.publish(block_id, priority, key)

    def hit(self, block_ids: SomeBlocks, priority: int) -> None:
        self._inner.hit(block_ids, priority)

    def add(self, block_ids: SomeBlocks) -> None:
        self._inner.add(block_ids)

    def remove(self, block_ids: SomeBlocks) -> None:
        aside = self._aside
        if not aside:
            self._inner.remove(block_ids)
            return
        ids = as_list(block_ids)
        self._inner.remove([block_id for block_id in ids if block_id not in aside])
        aside.difference_update(ids)
        for block_id in ids:
            if (parent := self._freed_parent(block_id, set())) is not None:
                self._inner.restore(parent)

    def evict(self, count: int) -> list[BlockId]:
        self._check_held(count)
        victims: list[BlockId] = []
        most = count
        while len(victims) < count:
            # At least one: if the inner policy had none left, it would raise instead of being asked for ever.
            candidates = self._inner.evict(max(1, min(most, count - len(victims), len(self._inner))))
            most *= 2
            rest = set(candidates)
            for number, block_id in enumerate(candidates, 1):
                rest.discard(block_id)
                if self._has_cached_child(block_id, rest):
                    self._aside.add(block_id)
                    continue
                victims.append(block_id)
                if (parent := self._freed_parent(block_id, rest)) is not None:
                    # It may precede the other candidates, so the inner policy chooses again. This may happen with every
                    # victim, as under FIFO, so fewer are taken at a time.
                    for other in (*reversed(candidates[number:]), parent):
                        self._inner.restore(other)
                    most = 1
                    break
        return victims

    def restore(self, block_id: BlockId) -> None:
        self._inner.restore(block_id)

    def __len__(self) -> int:
        return len(self._inner) + len(self._aside)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._inner or block_id in self._aside

    def __iter__(self) -> Iterator[BlockId]:
        yield from self._inner
        yield from self._aside

    def _has_cached_child(self, block_id: BlockId, candidates: set[BlockId]) -> bool:
        """Whether a child of a block is cached, or among the candidates that the inner policy has just given up."""
        return any(child in candidates or child in self for child in self._tree.children(block_id))

    def _freed_parent(self, block_id: BlockId, candidates: set[BlockId]) -> BlockId | None:
        """Return the parent of a block that has left, if it is set aside, but need no longer be: it is taken out."""
        parent = self._tree.parent(block_id) if self._aside else None
        if parent not in self._aside or parent is None or self._has_cached_child(parent, candidates):
            return None
        self._aside.remove(parent)
        return parent

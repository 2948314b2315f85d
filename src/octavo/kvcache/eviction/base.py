"""The interface of eviction policies, which choose the cached block to evict when a free one is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from octavo.kvcache.block import BlockId, BlockIds


class EvictionPolicy(Protocol):
    """The order in which cached blocks are evicted.

    A policy holds exactly the cached blocks: those in the prefix cache that no sequence references. It is also notified
    about blocks that it does not hold, which it may ignore:

        publish ──> (active) ──add──> held ──evict──> gone, until its id is published again
                       ^  hit          │  ^
                       └────remove─────┘  └──restore, right after evict

    Every operation is O(1) or amortised O(log n) in the number of held blocks.
    """

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        """Note that an active block enters the prefix cache; what was known about this id is discarded.

        Args:
            priority: priority of the request that computed it; lower is more important.
            key: identifies its contents across evictions; may be empty.
        """

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        """Note that a request of this priority found these blocks and holds them now; null blocks are skipped."""

    def add(self, block_id: BlockId) -> None:
        """Hold a block that has lost its last reference and may now be evicted. A sequence adds its tail first."""

    def remove(self, block_id: BlockId) -> None:
        """Stop holding a block that is referenced again. Raises KeyError if it is not held."""

    def reserve(self, num_blocks: int) -> None:
        """Expect block ids below `num_blocks`, which is the size of the pool."""

    def evict(self) -> BlockId:
        """Choose, remove and return a victim. Raises KeyError if no block is held."""

    def evict_many(self, count: int) -> list[BlockId]:
        """Evict `count` blocks. Raises KeyError, and evicts none, if fewer are held."""

    def add_all(self, block_ids: BlockIds) -> None:
        """Call `add` for each block in turn."""

    def remove_all(self, block_ids: BlockIds) -> None:
        """Call `remove` for each block, in any order."""

    def restore(self, block_id: BlockId) -> None:
        """Put the block that `evict` returned last, or one returned before it, back in its old place."""

    def __len__(self) -> int: ...

    def __contains__(self, block_id: object) -> bool: ...

    def __iter__(self) -> Iterator[BlockId]: ...

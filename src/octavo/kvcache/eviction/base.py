"""The contract of an eviction policy: which cached block is evicted first when a free one is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from octavo.kvcache.block import BlockId, BlockIds


class EvictionPolicy(Protocol):
    """The order in which cached blocks are evicted.

    A policy holds exactly the cached blocks: published to the prefix cache and referenced by nobody. It also hears of
    the life of blocks that it does not hold, and may ignore it:

        publish ──> (active) ──add──> held ──evict──> gone, until its id is published anew
                       ^  hit          │  ^
                       └────remove─────┘  └──restore, right after evict

    Every operation is O(1) or amortised O(log n) in the number of held blocks.
    """

    def publish(self, block_id: BlockId, position: int, priority: int, key: bytes = b"") -> None:
        """An active block enters the prefix cache; earlier knowledge of this id is discarded.

        Args:
            position: index of the block within its sequence; it can be recomputed only after those before it.
            priority: of the request that computed it; lower is more important.
            key: stands for its contents: the same after an eviction. Empty where nobody needs to know.
        """

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        """A request of that priority found these blocks and holds them now; null blocks stand for none."""

    def add(self, block_id: BlockId) -> None:
        """The block has lost its last reference and may be evicted from now on. A sequence adds its tail first."""

    def remove(self, block_id: BlockId) -> None:
        """The block is referenced again. Raises KeyError where it is not held."""

    def evict(self) -> BlockId:
        """Choose, remove and return a victim. Raises KeyError when there is none."""

    def add_all(self, block_ids: BlockIds) -> None:
        """The same as `add` of each in turn."""

    def remove_all(self, block_ids: BlockIds) -> None:
        """The same as `remove` of each, in any order."""

    def restore(self, block_id: BlockId) -> None:
        """Hold the block that `evict` gave last, or one of those before it, again, in its old place."""

    def __len__(self) -> int: ...

    def __contains__(self, block_id: object) -> bool: ...

    def __iter__(self) -> Iterator[BlockId]: ...

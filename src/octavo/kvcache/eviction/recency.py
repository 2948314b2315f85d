"""Least recently used: the policy that needs to know nothing of a block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from octavo.kvcache.block import BlockId


class LruEviction:
    """Least recently used first, O(1). Sequences free their tail before their head, so tails go first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockId, None] = OrderedDict()

    def publish(self, block_id: BlockId, position: int, priority: int) -> None:
        return

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        return

    def add(self, block_id: BlockId) -> None:
        self._blocks[block_id] = None

    def remove(self, block_id: BlockId) -> None:
        del self._blocks[block_id]

    def evict(self) -> BlockId:
        return self._blocks.popitem(last=False)[0]

    def restore(self, block_id: BlockId) -> None:
        self._blocks[block_id] = None
        self._blocks.move_to_end(block_id, last=False)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._blocks)

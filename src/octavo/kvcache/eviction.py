"""Which cached block is given up first when a free one is needed.

A policy holds exactly the cached blocks: published to the prefix cache and referenced by nobody. All operations are
O(1) or O(log n).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from octavo.errors import ConfigError
from octavo.kvcache.block import BlockId


class EvictionPolicy(Protocol):
    """The order in which cached blocks are given up."""

    def add(self, block_id: BlockId) -> None:
        """The block has lost its last reference and may be evicted from now on."""

    def remove(self, block_id: BlockId) -> None:
        """The block is referenced again."""

    def evict(self) -> BlockId:
        """Choose, remove and return a victim. Raises KeyError when there is none."""

    def __len__(self) -> int: ...

    def __contains__(self, block_id: object) -> bool: ...

    def __iter__(self) -> Iterator[BlockId]: ...


class LruEviction:
    """Least recently used first. Sequences free their tail before their head, so tails go first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[BlockId, None] = OrderedDict()

    def add(self, block_id: BlockId) -> None:
        self._blocks[block_id] = None

    def remove(self, block_id: BlockId) -> None:
        del self._blocks[block_id]

    def evict(self) -> BlockId:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._blocks)


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LruEviction}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """The policy of that name. Raises ConfigError with the known names."""
    try:
        return EVICTION_POLICIES[name]()
    except KeyError:
        raise ConfigError(f"eviction_policy must be one of {', '.join(EVICTION_POLICIES)}, got {name!r}") from None

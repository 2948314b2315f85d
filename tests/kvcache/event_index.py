"""An index such as a router keeps: strict, where routers drop what they do not understand."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from octavo.kvcache.block import BlockId
from octavo.kvcache.events import BlocksRemoved, Event
from octavo.kvcache.hashing import key_prefix
from octavo.kvcache.manager import KVCacheManager

Blocks = dict[int, tuple[int | None, tuple[int, ...], str]]
"""By hash: the parent's hash, the tokens and the scope."""


class EventIndex:
    def __init__(self, block_size: int) -> None:
        self.blocks: Blocks = {}
        self._block_size = block_size

    def apply(self, events: Iterable[Event]) -> None:
        """Raises AssertionError for a block whose parent is not known, is stored twice or is not there."""
        for event in events:
            if isinstance(event, BlocksRemoved):
                for removed in event.block_hashes:
                    assert removed in self.blocks, "removed, but not stored"
                    del self.blocks[removed]
                continue
            parent, size = event.parent, self._block_size
            assert len(event.token_ids) == len(event.block_hashes) * size
            for place, stored in enumerate(event.block_hashes):
                assert parent is None or parent in self.blocks, "its parent is not known"
                assert stored not in self.blocks, "stored twice"
                tokens = tuple(event.token_ids[place * size : (place + 1) * size])
                self.blocks[stored] = parent, tokens, event.scope
                parent = stored
        for parent, _, _ in self.blocks.values():
            assert parent is None or parent in self.blocks, "its parent was removed"


def findable(manager: KVCacheManager) -> Blocks:
    """What an index must know: the blocks of group 0 that have all those before them."""
    records, found = manager.blocks, Blocks()
    for block in map(BlockId, records.published().tolist()):
        chain, key = [], None
        while True:
            key, parent, tokens = records.label(block)
            if blake2b(parent + tokens, digest_size=16).digest() != key:
                break  # of another group
            source = records.sources[block]
            is_first = parent == manager.prefix_cache.chain(source.scope).root
            ids = tuple(memoryview(tokens).cast("i"))
            chain.append((key_prefix(key), (None if is_first else key_prefix(parent), ids, source.scope)))
            if is_first:
                found |= dict(chain)
            if is_first or (before := records.keys.get(parent)) is None:
                break
            block = BlockId(before)
    return found

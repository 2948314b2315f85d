"""The contract of a prefix cache, and the cache that never has anything.

A prefix cache is an index from token prefixes to blocks. It owns no block: the pool decides what is evicted and tells
it (`drop`). Blocks are put in only after their keys and values are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from octavo.kvcache.block import BlockId
from octavo.kvcache.hashing import HashChain, NullHashChain


class PrefixCache(Protocol):
    """Finds the block that holds a given prefix's last full block, per group of layers."""

    def chain(self, salt: str) -> HashChain:
        """An empty chain for a new sequence; sequences of different salts never share a block."""

    def get(self, group: int, chain: HashChain, index: int) -> BlockId | None:
        """The block that holds full block `index` of the chain's tokens, given all tokens before it."""

    def put(self, group: int, chain: HashChain, index: int, block_id: BlockId) -> bool:
        """Publish a computed block; False (and nothing changes) where an equal block is there already."""

    def drop(self, block_id: BlockId) -> None:
        """The pool evicts this block."""

    def __iter__(self) -> Iterator[BlockId]:
        """Every published block; for audits."""


class NullPrefixCache:
    """No prefix caching, at no cost: nothing is hashed, looked up or published."""

    def __init__(self) -> None:
        self._chain = NullHashChain()

    def chain(self, salt: str) -> HashChain:
        return self._chain

    def get(self, group: int, chain: HashChain, index: int) -> BlockId | None:
        return None

    def put(self, group: int, chain: HashChain, index: int, block_id: BlockId) -> bool:
        return False

    def drop(self, block_id: BlockId) -> None:
        return

    def __iter__(self) -> Iterator[BlockId]:
        return iter(())

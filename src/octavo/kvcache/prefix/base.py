"""The contract of a prefix cache, and the cache that never has anything.

A prefix cache is an index from token prefixes to blocks. It owns no block: the pool decides what is evicted and tells
it (`drop`). Blocks are put in only after their keys and values are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from octavo.kvcache.block import BlockId
from octavo.kvcache.hashing import NullChain, TokenChain

ChainT = TypeVar("ChainT", bound=TokenChain)


class PrefixCache(Protocol[ChainT]):
    """Finds the block that holds a given prefix's last full block, per group of layers.

    Generic in what it keeps per sequence: a chain is made, read and extended only by the cache that made it.
    """

    def chain(self, salt: str) -> ChainT:
        """An empty chain for a new sequence; sequences of different salts never share a block."""

    def leading(self, group: int, chain: ChainT, limit: int) -> list[BlockId]:
        """The blocks of full blocks 0, 1, … of the chain up to the first that is missing, at most `limit`."""

    def get(self, group: int, chain: ChainT, index: int) -> BlockId | None:
        """The block that holds full block `index` of the chain's tokens, given all tokens before it."""

    def put(self, group: int, chain: ChainT, index: int, block_id: BlockId) -> bool:
        """Publish a computed block; False (and nothing changes) where an equal block is there already."""

    def drop(self, block_id: BlockId) -> None:
        """The pool evicts this block."""

    def __iter__(self) -> Iterator[BlockId]:
        """Every published block; for audits."""


class NullPrefixCache:
    """No prefix caching, at no cost: nothing is packed, hashed, looked up or published."""

    def __init__(self) -> None:
        self._chain = NullChain()

    def chain(self, salt: str) -> NullChain:
        return self._chain

    def leading(self, group: int, chain: NullChain, limit: int) -> list[BlockId]:
        return []

    def get(self, group: int, chain: NullChain, index: int) -> BlockId | None:
        return None

    def put(self, group: int, chain: NullChain, index: int, block_id: BlockId) -> bool:
        return False

    def drop(self, block_id: BlockId) -> None:
        return

    def __iter__(self) -> Iterator[BlockId]:
        return iter(())

"""The contract of a prefix cache, and its null object.

A prefix cache is an index from token prefixes to blocks. It owns no block: the pool decides what is evicted and tells
it (`drop`). Blocks are put in only after their keys and values are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from octavo.kvcache.audit import Findings
from octavo.kvcache.block import BlockHash, BlockId, BlockTable, new_table
from octavo.kvcache.hashing import FullBlocks, NullChain, TokenChain

ChainT = TypeVar("ChainT", bound=TokenChain)


class PrefixCache(Protocol[ChainT]):
    """Finds the block that holds a given prefix's last full block, per group of layers.

    Generic in what it keeps per sequence: a chain is made, read and extended only by the cache that made it.
    """

    def full_blocks(self, token_ids: Sequence[int], salt: str) -> FullBlocks:
        """The full blocks of a prompt, packed and hashed for `chain`. O(tokens), thread-safe."""

    def chain(self, salt: str, prompt: FullBlocks | None = None) -> ChainT:
        """A chain for a new sequence; sequences of different salts never share a block.

        Args:
            prompt: what it begins with, as `full_blocks` made it under this salt; nothing by default.
        """

    def reserve(self, num_blocks: int) -> None:
        """Block ids will be below `num_blocks`: set aside what that takes, rather than when they come."""

    def tokens(self, block_id: BlockId) -> bytes:
        """The packed token ids of a published block."""

    def leading(self, group: int, chain: ChainT, limit: int) -> BlockTable:
        """The blocks of full blocks 0, 1, … of the chain up to the first that is missing, at most `limit`."""

    def get(self, group: int, chain: ChainT, index: int) -> BlockId | None:
        """The block that holds full block `index` of the chain's tokens, given all tokens before it."""

    def put(self, group: int, chain: ChainT, index: int, block_id: BlockId) -> bool:
        """Publish a computed block; False (and nothing changes) where an equal block is there already."""

    def drop(self, block_id: BlockId) -> None:
        """The pool evicts this block."""

    def __iter__(self) -> Iterator[BlockId]:
        """Every published block; for audits."""

    def check(self) -> Findings:
        """The cache's own invariants. O(blocks)."""


class NullPrefixCache:
    """No prefix caching, at no cost: nothing is packed, hashed, looked up or published."""

    def __init__(self) -> None:
        self._chain = NullChain()

    def full_blocks(self, token_ids: Sequence[int], salt: str) -> FullBlocks:
        return FullBlocks(BlockHash(b""), 1)

    def chain(self, salt: str, prompt: FullBlocks | None = None) -> NullChain:
        return self._chain

    def reserve(self, num_blocks: int) -> None:
        return

    def tokens(self, block_id: BlockId) -> bytes:
        raise KeyError(block_id)

    def leading(self, group: int, chain: NullChain, limit: int) -> BlockTable:
        return new_table()

    def get(self, group: int, chain: NullChain, index: int) -> BlockId | None:
        return None

    def put(self, group: int, chain: NullChain, index: int, block_id: BlockId) -> bool:
        return False

    def drop(self, block_id: BlockId) -> None:
        return

    def __iter__(self) -> Iterator[BlockId]:
        return iter(())

    def check(self) -> Findings:
        return iter(())

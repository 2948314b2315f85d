"""The interface of prefix caches, and its null implementation.

A prefix cache is an index from token prefixes to blocks. It owns no blocks: the pool decides what is evicted, and calls
`drop`. Blocks are put in only after their keys and values are computed.
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

    Generic in the type of chain that it keeps per sequence; a chain is used only with the cache that made it.
    """

    def full_blocks(self, token_ids: Sequence[int], salt: str) -> FullBlocks:
        """Return the full blocks of a prompt, packed and hashed for `chain`. O(tokens), thread-safe."""

    def chain(self, salt: str, prompt: FullBlocks | None = None) -> ChainT:
        """Return a chain for a new sequence; sequences of different salts never share a block.

        Args:
            prompt: its first blocks, from `full_blocks` with this salt; by default none.
        """

    def reserve(self, num_blocks: int) -> None:
        """Allocate for block ids below `num_blocks` in advance."""

    def tokens(self, block_id: BlockId) -> bytes:
        """Return the packed token ids of a published block."""

    def leading(self, group: int, chain: ChainT, limit: int) -> BlockTable:
        """Return the blocks for full blocks 0, 1, … of the chain up to the first that is missing, at most `limit`."""

    def look_up(self, group: int, chain: ChainT, limit: int, most: int) -> int:
        """Look up the next blocks, at most `most`, that `leading` with the same limit needs, and remember them.

        Returns:
            How many were found; fewer than `most` if `leading` has nothing more to look up.
        """

    def get(self, group: int, chain: ChainT, index: int) -> BlockId | None:
        """Return the block that holds full block `index` of the chain, with the same tokens before it, or None."""

    def put(self, group: int, chain: ChainT, index: int, block_id: BlockId) -> bool:
        """Publish a computed block; False (and nothing changes) if an equal block is already published."""

    def drop(self, *block_ids: BlockId) -> None:
        """Forget blocks that the pool evicts."""

    def __iter__(self) -> Iterator[BlockId]:
        """Iterate over all published blocks, for audits."""

    def check(self) -> Findings:
        """Check the cache's own invariants. O(blocks)."""


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

    def look_up(self, group: int, chain: NullChain, limit: int, most: int) -> int:
        return 0

    def get(self, group: int, chain: NullChain, index: int) -> BlockId | None:
        return None

    def put(self, group: int, chain: NullChain, index: int, block_id: BlockId) -> bool:
        return False

    def drop(self, *block_ids: BlockId) -> None:
        return

    def __iter__(self) -> Iterator[BlockId]:
        return iter(())

    def check(self) -> Findings:
        return iter(())

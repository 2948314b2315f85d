"""Prefix caching by hash chain: one table from key to block, and each block's tokens to compare on a hit."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import BlockHash, BlockId, BlockIds, BlockTable, as_array, new_table, table_of
from octavo.kvcache.hashing import (
    TOKEN,
    TOKEN_BYTES,
    FullBlocks,
    TokenChain,
    Tokens,
    group_bits,
    group_key,
    root_hash,
)
from octavo.kvcache.key_index import KeyIndex

# The first blocks of a prompt are looked up one by one, the rest as arrays, whose fixed cost is that of several
# look-ups.
_ONE_BY_ONE = 16
# Number of blocks compared in one call: a quarter of a megabyte of tokens, which stays in the processor's cache.
_COMPARED_AT_ONCE = 4096

_NO_BLOCKS: BlockIds = np.empty(0, np.int32)


class HashedChain(TokenChain):
    """A sequence's full blocks, and those that were looked up in advance.

    Attributes:
        found: by group, the ids of leading blocks, and how many blocks the cache had dropped when they were found.
    """

    __slots__ = ("found",)

    def __init__(self, prompt: FullBlocks) -> None:
        super().__init__(prompt)
        self.found: dict[int, tuple[BlockIds, int]] = {}


class HashedPrefixCache:
    """An index by hash chain, which finds a prefix of k full blocks in k look-ups.

    It keeps one key in a `KeyIndex` and the tokens per block, in flat memory without objects. Blocks found by `look_up`
    are remembered until they are dropped, which the number of the drop shows: a key never gets another block before.

    Args:
        identity: what keys and values depend on besides the tokens: model fingerprint, dtype, codec, …
        block_size: tokens per block.
    """

    def __init__(self, identity: tuple[str, ...], block_size: int) -> None:
        self._identity = (*identity, str(block_size))
        self._block_size = block_size
        self._width = block_size * TOKEN_BYTES
        self._index = KeyIndex()
        self._tokens = bytearray()  # by block id, as the chain has them
        self._published = bytearray()
        self._num_dropped = 0
        self._dropped = array("q")  # by block id, `_num_dropped` when it was last dropped
        self._unsalted_root = root_hash(*self._identity, "")
        self.reserve(16)

    def full_blocks(self, token_ids: Sequence[int], salt: str) -> FullBlocks:
        return FullBlocks.of(self._root(salt), self._block_size, token_ids)

    def chain(self, salt: str, prompt: FullBlocks | None = None) -> HashedChain:
        return HashedChain(FullBlocks(self._root(salt), self._block_size) if prompt is None else prompt)

    def reserve(self, num_blocks: int) -> None:
        missing = num_blocks - len(self._published)
        if missing > 0:
            self._index.reserve(num_blocks)
            self._tokens.extend(bytes(missing * self._width))
            self._published.extend(bytes(missing))
            self._dropped = self._dropped + array("q", [0]) * missing

    def tokens(self, block_id: BlockId) -> bytes:
        if not self._published[block_id]:
            raise KeyError(block_id)
        return bytes(self._tokens[block_id * self._width : (block_id + 1) * self._width])

    def leading(self, group: int, chain: HashedChain, limit: int) -> BlockTable:
        if chain.found:
            return table_of(self._continued(group, chain, self._still_found(group, chain), limit))
        found = new_table()
        while len(found) < min(limit, _ONE_BY_ONE):
            block_id = self.get(group, chain, len(found))
            if block_id is None:
                return found
            found.append(block_id)
        if len(found) == limit:
            return found
        return table_of(self._continued(group, chain, as_array(found), limit))

    def look_up(self, group: int, chain: HashedChain, limit: int, most: int) -> int:
        known = self._still_found(group, chain)
        found = self._continued(group, chain, known, min(limit, len(known) + most))
        chain.found[group] = found, self._num_dropped
        return len(found) - len(known)

    def _still_found(self, group: int, chain: HashedChain) -> BlockIds:
        """Return the leading blocks that `look_up` found before, up to the first that was dropped since."""
        ids, num_dropped = chain.found.get(group, (_NO_BLOCKS, 0))
        if num_dropped == self._num_dropped:
            return ids
        since = np.frombuffer(self._dropped, np.int64).take(ids) > num_dropped
        return ids[: int(since.argmax())] if since.any() else ids

    def _continued(self, group: int, chain: HashedChain, found: BlockIds, limit: int) -> BlockIds:
        """Return at most `limit` leading blocks of the chain, of which `found` are known."""
        pieces = [found[:limit]]
        for keys, tokens in chain.rows(len(found), limit):
            ids = self._index.find_leading(keys, group_bits(group))
            pieces.append(ids[: self._num_equal(ids, tokens)])
            if len(pieces[-1]) < len(keys):
                break
        return np.concatenate(pieces)

    def get(self, group: int, chain: TokenChain, index: int) -> BlockId | None:
        block_id = self._index.get(group_key(group, chain.key(index + 1)))
        if block_id is None:
            return None
        start = block_id * self._width
        same = self._tokens[start : start + self._width] == chain.tokens(index, index + 1)
        return BlockId(block_id) if same else None

    def put(self, group: int, chain: TokenChain, index: int, block_id: BlockId) -> bool:
        if block_id >= len(self._published):
            self.reserve(2 * block_id)
        if self._published[block_id] or not self._index.put_new(group_key(group, chain.key(index + 1)), block_id):
            return False
        self._tokens[block_id * self._width : (block_id + 1) * self._width] = chain.tokens(index, index + 1)
        self._published[block_id] = 1
        return True

    def drop(self, *block_ids: BlockId) -> None:
        if self._index.discard_all(block_ids) != len(block_ids):
            raise KeyError(f"not all of these blocks are published: {block_ids}")
        published, dropped = self._published, self._dropped
        for number, block_id in enumerate(block_ids, self._num_dropped + 1):
            published[block_id] = 0
            dropped[block_id] = number
        self._num_dropped += len(block_ids)

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(i) for i, published in enumerate(self._published) if published)

    def check(self) -> Findings:
        yield from self._index.check()
        num_indexed = 0
        for ids in in_slices(self._index):
            for i in ids:
                num_indexed += 1
                if not self._published[i]:
                    yield f"block {i} has a key, but is not published in the prefix cache"
            yield None
        if num_indexed != (num_published := sum(self._published)):
            yield f"{num_published} blocks are published in the prefix cache, {num_indexed} have a key"

    def _root(self, salt: str) -> BlockHash:
        # Only the unsalted root is kept, because salts come from clients and are unbounded in number.
        return root_hash(*self._identity, salt) if salt else self._unsalted_root

    def _num_equal(self, ids: BlockIds, tokens: Tokens) -> int:
        """Return how many leading blocks hold the tokens in the same row."""
        slab = np.frombuffer(self._tokens, TOKEN).reshape(-1, self._block_size)
        for start in range(0, len(ids), _COMPARED_AT_ONCE):
            part = ids[start : start + _COMPARED_AT_ONCE]
            # Usually all are equal, so one comparison is enough.
            if (differ := slab.take(part, axis=0) != tokens[start : start + len(part)]).any():
                return start + int(differ.any(axis=1).argmax())
        return len(ids)

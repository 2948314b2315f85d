"""Prefix caching by hash chain: one table from key to block, and each block's tokens to compare on a hit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import BlockHash, BlockId, BlockIds, BlockTable, new_table, table_of
from octavo.kvcache.hashing import TOKEN_BYTES, FullBlocks, TokenChain, Tokens, group_key, root_hash
from octavo.kvcache.key_index import KeyIndex

# The first blocks of a prompt are looked up one by one, what follows in pieces, each so many times as long as what was
# found before: most prompts miss early, and a piece costs as much as some hundreds of its blocks.
_ONE_BY_ONE = 16
_GROWTH = 8
# Blocks looked up in one call, and blocks whose tokens are compared in one: a quarter of a megabyte, which stays in the
# processor's cache.
MOST_AT_ONCE = 16_384
_COMPARED_AT_ONCE = 4096


class HashedPrefixCache:
    """An index by hash chain: a prefix of k full blocks is found in k look-ups, whoever computed it.

    Per block one key in a `KeyIndex` and its tokens: flat memory, no objects.

    Args:
        identity: what keys and values depend on beside the tokens: model fingerprint, dtype, codec, …
        block_size: tokens per block.
    """

    def __init__(self, identity: tuple[str, ...], block_size: int) -> None:
        self._identity = (*identity, str(block_size))
        self._block_size = block_size
        self._width = block_size * TOKEN_BYTES
        self._index = KeyIndex()
        self._tokens = bytearray()  # by block id, as the chain has them
        self._published = bytearray()
        self._unsalted_root = root_hash(*self._identity, "")
        self.reserve(16)

    def full_blocks(self, token_ids: Sequence[int], salt: str) -> FullBlocks:
        return FullBlocks.of(self._root(salt), self._block_size, token_ids)

    def chain(self, salt: str, prompt: FullBlocks | None = None) -> TokenChain:
        return TokenChain(FullBlocks(self._root(salt), self._block_size) if prompt is None else prompt)

    def reserve(self, num_blocks: int) -> None:
        missing = num_blocks - len(self._published)
        if missing > 0:
            self._index.reserve(num_blocks)
            self._tokens.extend(bytes(missing * self._width))
            self._published.extend(bytes(missing))

    def tokens(self, block_id: BlockId) -> bytes:
        if not self._published[block_id]:
            raise KeyError(block_id)
        return bytes(self._tokens[block_id * self._width : (block_id + 1) * self._width])

    def leading(self, group: int, chain: TokenChain, limit: int) -> BlockTable:
        found = new_table()
        while len(found) < min(limit, _ONE_BY_ONE):
            block_id = self.get(group, chain, len(found))
            if block_id is None:
                return found
            found.append(block_id)
        while len(found) < limit:
            start = len(found)
            end = min(limit, start + min(_GROWTH * start, MOST_AT_ONCE))
            found.extend(self._find(group, chain, start, end))
            if len(found) < end:
                break
        return found

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

    def drop(self, block_id: BlockId) -> None:
        self._index.remove(block_id)
        self._published[block_id] = 0

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
        # Only the unsalted root is kept: salts come from clients and would grow without bound.
        return root_hash(*self._identity, salt) if salt else self._unsalted_root

    def _find(self, group: int, chain: TokenChain, start: int, end: int) -> BlockTable:
        """The blocks of full blocks `start .. end` up to the first that is missing."""
        found = new_table()
        for keys, tokens in chain.rows(start, end):
            ids = self._index.find(keys ^ np.array([0, group << 48], np.uint64) if group else keys)
            length = int((ids < 0).argmax()) if ids.min() < 0 else len(ids)
            length = self._num_equal(ids[:length], tokens)
            found.extend(table_of(ids[:length]))
            if length < len(keys):
                break
        return found

    def _num_equal(self, ids: BlockIds, tokens: Tokens) -> int:
        """How many blocks hold the tokens in the same row, up to the first that does not."""
        slab = np.frombuffer(self._tokens, np.int32).reshape(-1, self._block_size)
        for start in range(0, len(ids), _COMPARED_AT_ONCE):
            part = ids[start : start + _COMPARED_AT_ONCE]
            # Mostly all are equal, which is one comparison.
            if (differ := slab.take(part, axis=0) != tokens[start : start + len(part)]).any():
                return start + int(differ.any(axis=1).argmax())
        return len(ids)

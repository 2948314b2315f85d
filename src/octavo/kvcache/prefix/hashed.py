"""Prefix caching by hash chain: one dictionary from (group, key) to block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from octavo.kvcache.block import BlockHash, BlockId
from octavo.kvcache.hashing import HashChain, root_hash


class _Entry(NamedTuple):
    block_id: BlockId
    tokens: bytes


class HashedPrefixCache:
    """An index by hash chain: a prefix of k full blocks is found in k look-ups, whoever computed it.

    Args:
        identity: what keys and values depend on beside the tokens: model fingerprint, dtype, codec, …
        block_size: tokens per block.
    """

    def __init__(self, identity: tuple[str, ...], block_size: int) -> None:
        self._identity = (*identity, str(block_size))
        self._block_size = block_size
        self._entries: dict[tuple[int, BlockHash], _Entry] = {}
        self._keys: dict[BlockId, tuple[int, BlockHash]] = {}
        self._roots: dict[str, BlockHash] = {"": root_hash(*self._identity, "")}

    def chain(self, salt: str) -> HashChain:
        # Only the unsalted root is kept: salts come from clients and would grow without bound.
        root = self._roots.get(salt) or root_hash(*self._identity, salt)
        return HashChain(root, self._block_size)

    def leading(self, group: int, chain: HashChain, limit: int) -> list[BlockId]:
        found = []
        for key, tokens in zip(chain.hashes[:limit], chain.tokens, strict=False):
            entry = self._entries.get((group, key))
            if entry is None or entry.tokens != tokens:
                break
            found.append(entry.block_id)
        return found

    def get(self, group: int, chain: HashChain, index: int) -> BlockId | None:
        entry = self._entries.get((group, chain.hashes[index]))
        return entry.block_id if entry is not None and entry.tokens == chain.tokens[index] else None

    def put(self, group: int, chain: HashChain, index: int, block_id: BlockId) -> bool:
        key = (group, chain.hashes[index])
        if key in self._entries or block_id in self._keys:
            return False
        self._entries[key] = _Entry(block_id, chain.tokens[index])
        self._keys[block_id] = key
        return True

    def drop(self, block_id: BlockId) -> None:
        del self._entries[self._keys.pop(block_id)]

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._keys)

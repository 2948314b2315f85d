"""What an index outside the engine must know of the prefix cache: which blocks it stores and removes, as events.

A router keeps a tree of each server's blocks. It drops a block whose parent it does not know, and with a block that is
removed it loses those that follow. So the log announces a block only while every block before it is announced. These
are exactly the blocks that a prefix can find; others that are still cached are held back:

    root ── b0 ── b1 ── b2 ── b3 ── b4      b2 is evicted: b2, b3 and b4 are removed; b3 and b4 are held back
                        b2                  b2 is computed again: b2, b3 and b4 are stored

Only group 0 is announced, and only if it has full attention: under a sliding window, a cached block does not mean that
those before it are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kvcache.block import BlockId
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.hashing import KEY_HALF, TOKEN, TokenChain, key_prefix
from octavo.kvcache.prefix import PrefixIndex

_OTHER, _ANNOUNCED, _HELD_BACK = range(3)


class BlocksStored(NamedTuple):
    """Consecutive blocks of one prefix that can be found from now on.

    Attributes:
        block_hashes: the first 64 bits of each block's key, which also covers tenant, model, codec and block size.
        parent: that of the block before them; None at a prompt's beginning.
        token_ids: their tokens, `block_size` each.
        scope: the part of the cache that they belong to, see `cache_scope`.
    """

    block_hashes: list[int]
    parent: int | None
    token_ids: list[int]
    scope: str


class BlocksRemoved(NamedTuple):
    """Blocks that can no longer be found."""

    block_hashes: list[int]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All announced blocks at one moment, for an index that must begin anew; parents come before their children.

    Attributes:
        hashes, parents: 64 bits of each block's key and of its parent's, [blocks].
        is_first: whether a block is a prompt's first, so that it has no parent, [blocks].
        tokens: [blocks, block_size].
    """

    hashes: npt.NDArray[np.uint64]
    parents: npt.NDArray[np.uint64]
    is_first: npt.NDArray[np.bool_]
    tokens: npt.NDArray[np.int32]
    scopes: list[str]

    def events(self, most: int) -> Iterator[list[BlocksStored]]:
        """Yield the events that describe it, at most `most` at a time."""
        for start in range(0, len(self.hashes), most):
            part = slice(start, start + most)
            rows = zip(
                self.hashes[part].tolist(),
                self.parents[part].tolist(),
                self.is_first[part].tolist(),
                self.tokens[part].tolist(),
                self.scopes[part],
                strict=True,
            )
            yield [
                BlocksStored([own], None if is_first else parent, tokens, scope)
                for own, parent, is_first, tokens, scope in rows
            ]


Event = BlocksStored | BlocksRemoved


class NullEventLog:
    """No events, at no cost."""

    def published(self, chain: TokenChain, blocks: Sequence[tuple[BlockId, int, int]]) -> None:
        """Called when blocks were published, given with their indices in the chain, in ascending order, and groups."""

    def evicted(self, block_ids: Sequence[BlockId]) -> None:
        """Called when published blocks of any group are about to be dropped from the prefix index."""

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        return []

    def snapshot(self) -> CacheSnapshot | None:
        """Return all announced blocks, to be sent instead of the events so far; None if there is no log."""
        return None


class KVEventLog(NullEventLog):
    """Collects events in the engine's thread. O(1) for each block published or evicted, unless blocks that follow an
    evicted one stay cached: O(blocks), which eviction from the tail makes rare.

    Args:
        records: the record of the pool's blocks.
        index: the index that publishes them.
    """

    def __init__(self, records: BlockRecords, index: PrefixIndex) -> None:
        self._records = records
        self._index = index
        self._events: list[Event] = []
        self._states = bytearray(records.num_blocks)
        # By block, how many published blocks follow it.
        self._num_children = array("i", [0]) * records.num_blocks
        self._held_back: dict[bytes, list[BlockId]] = {}  # by their parent's key

    def published(self, chain: TokenChain, blocks: Sequence[tuple[BlockId, int, int]]) -> None:
        records, states, before = self._records, self._states, (BlockId(0), -1)
        first = last = 0  # the run of blocks to announce: first .. last
        for block, index, group in blocks:
            if group:
                continue
            parent: int | None = None
            if index:
                parent = before[0] if before[1] == index - 1 else records.keys.get(chain.key(index))
            before = block, index
            if parent is not None:
                self._num_children[parent] += 1
            if index and (parent is None or states[parent] != _ANNOUNCED):
                states[block] = _HELD_BACK
                self._held_back.setdefault(chain.key(index), []).append(block)
            else:
                states[block] = _ANNOUNCED
                if last != index:
                    self._announce(chain, first, last)
                    first = index
                last = index + 1
            if self._held_back and (followers := self._held_back.get(key := chain.key(index + 1))) is not None:
                self._num_children[block] = len(followers)
                if states[block] == _ANNOUNCED:
                    self._announce(chain, first, last)
                    first = last
                    self._announce_held_back(key)
        self._announce(chain, first, last)

    def evicted(self, block_ids: Sequence[BlockId]) -> None:
        records, states = self._records, self._states
        gone = [(block, states[block]) for block in block_ids if states[block]]
        if not gone:
            return
        removed: list[int] = []
        for block, state in gone:
            parent_key = records.parent_prefix(block)
            if state == _HELD_BACK:
                self._held_back[parent_key].remove(block)
                if not self._held_back[parent_key]:
                    del self._held_back[parent_key]
            else:
                removed.append(key_prefix(records.key(block)))
            if (parent := records.keys.get(parent_key)) is not None:
                self._num_children[parent] -= 1
            states[block] = _OTHER
        headless = [block for block, state in gone if state == _ANNOUNCED and self._num_children[block]]
        if headless:
            removed += self._hold_back_followers(headless)
        for block, _ in gone:
            self._num_children[block] = 0
        if removed:
            self._events.append(BlocksRemoved(removed))

    def take(self) -> list[Event]:
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def snapshot(self) -> CacheSnapshot:
        """Return all announced blocks; forgets the events so far. O(blocks), a copy of their records."""
        self._events = []
        records, ids, parents = self._records, *self._announced()
        depths = np.zeros(records.num_blocks, np.int32)
        depths[ids] = 1
        ahead = parents
        while ahead.any():
            depths += depths.take(ahead)
            ahead = ahead.take(ahead)
        ids = ids[np.argsort(depths.take(ids), kind="stable")]
        return CacheSnapshot(
            np.array(records.keys.prefixes(ids.tolist()), np.uint64),
            np.frombuffer(records.parents, KEY_HALF)[::2].take(ids),
            parents.take(ids) == 0,
            np.frombuffer(records.tokens, TOKEN).reshape(-1, records.block_size).take(ids, axis=0),
            [source.scope if (source := records.sources[block]) is not None else "" for block in ids.tolist()],
        )

    def _announced(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return the announced blocks, and the parent of every block by id: 0 if it has none or is not announced."""
        ids = np.flatnonzero(np.frombuffer(self._states, np.uint8) == _ANNOUNCED)
        parents = np.zeros(self._records.num_blocks, np.intp)
        parents[ids] = np.maximum(self._index.parents(ids), 0)
        return ids, parents

    def _announce(self, chain: TokenChain, first: int, last: int) -> None:
        if last > first:
            parent, *hashes = chain.key_prefixes(first, last)
            tokens = np.frombuffer(chain.tokens(first, last), TOKEN).tolist()
            self._events.append(BlocksStored(hashes, parent if first else None, tokens, chain.source.scope))

    def _announce_held_back(self, parent_key: bytes) -> None:
        """Announce the blocks that follow a block that is announced again."""
        records, keys = self._records, [parent_key]
        while keys:
            parent = keys.pop()
            for block in self._held_back.pop(parent, ()):
                self._states[block] = _ANNOUNCED
                keys.append(key := records.key(block))
                source, tokens = records.sources[block], np.frombuffer(records.token_bytes(block), TOKEN).tolist()
                assert source is not None  # it is published
                self._events.append(BlocksStored([key_prefix(key)], key_prefix(parent), tokens, source.scope))

    def _hold_back_followers(self, headless: Sequence[BlockId]) -> list[int]:
        """Hold back what follows these evicted blocks; returns the hashes of what was announced. O(blocks)."""
        ids, ahead = self._announced()
        follows = np.zeros(self._records.num_blocks, np.bool_)
        follows[headless] = True
        while ahead.any():
            follows |= follows.take(ahead)
            ahead = ahead.take(ahead)
        hashes = []
        for block in map(BlockId, ids[follows.take(ids)].tolist()):
            self._states[block] = _HELD_BACK
            self._held_back.setdefault(self._records.parent_prefix(block), []).append(block)
            hashes.append(key_prefix(self._records.key(block)))
        return hashes

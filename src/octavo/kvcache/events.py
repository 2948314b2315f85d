"""Changes of the prefix cache, for an index outside the engine: which blocks it stores and removes, as events.

A router keeps a tree of each server's blocks. It drops a block whose parent it does not know, and with a block that is
removed it loses those that follow. So the log announces a block only while every block before it is announced. These
are exactly the blocks that a prefix can find; others that are still cached are held back:

    root ── b0 ── b1 ── b2 ── b3 ── b4      b2 is evicted: b2, b3 and b4 are removed; b3 and b4 are held back
                        b2                  b2 is computed again: b2, b3 and b4 are stored

Only group 0 is announced, and only if it has full attention: under a sliding window, a cached block does not mean that
those before it are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kvcache.block import BlockId
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.hashing import KEY_HALF, TOKEN, TokenChain, key_prefix
from octavo.kvcache.prefix import PrefixIndex, Published

_OTHER, _ANNOUNCED, _HELD_BACK = range(3)


class BlocksStored(NamedTuple):
    """Consecutive blocks of one prefix that have become available.

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
    """Blocks that are no longer available."""

    block_hashes: list[int]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All announced blocks at one moment, for an index that starts over; parents come before their children.

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


class KVEventLog:
    """Collects events in the engine's thread. O(1) for each block published or evicted, unless blocks that follow an
    evicted one stay cached: O(those), which eviction from the tail makes rare.

    Args:
        records: the record of the pool's blocks.
        index: the index that publishes them.
    """

    def __init__(self, records: BlockRecords, index: PrefixIndex) -> None:
        self._records = records
        self._index = index
        self._events: list[Event] = []
        self._states = bytearray(records.num_blocks)

    def published(self, chain: TokenChain, blocks: Sequence[Published]) -> None:
        """Called when blocks were published, in ascending order of their indices."""
        records, states, before = self._records, self._states, (BlockId(0), -1)
        first = last = 0  # the run of blocks to announce: first .. last
        for block, index, group, _ in blocks:
            if group:
                continue
            if index:
                parent = before[0] if before[1] == index - 1 else records.keys.get(chain.key(index))
                states[block] = _HELD_BACK if parent is None else states[parent]
            else:
                states[block] = _ANNOUNCED
            before = block, index
            if states[block] != _ANNOUNCED:
                continue
            if last != index:
                self._announce(chain, first, last)
                first = index
            last = index + 1
            if followers := self._follow([block], _HELD_BACK):
                self._announce(chain, first, last)
                first = last
                self._announce_again(followers)
        self._announce(chain, first, last)

    def evicted(self, block_ids: Sequence[BlockId]) -> None:
        """Called when published blocks of any group are about to be dropped from the prefix index."""
        records, states = self._records, self._states
        announced = [block for block in block_ids if states[block] == _ANNOUNCED]
        for block in block_ids:
            states[block] = _OTHER
        followers = self._follow(announced, _ANNOUNCED)
        for block in followers:
            states[block] = _HELD_BACK
        if announced:
            self._events.append(BlocksRemoved(records.keys.prefixes([*announced, *followers])))

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> CacheSnapshot:
        """Return all announced blocks; forgets the events so far. O(blocks), a copy of their records."""
        self._events = []
        records = self._records
        announced = map(BlockId, np.flatnonzero(np.frombuffer(self._states, np.uint8) == _ANNOUNCED).tolist())
        firsts = [block for block in announced if self._index.parent(block) is None]
        ids = np.array(firsts + self._follow(firsts, _ANNOUNCED), np.intp)
        return CacheSnapshot(
            np.array(records.keys.prefixes(ids.tolist()), np.uint64),
            np.frombuffer(records.parents, KEY_HALF)[::2].take(ids),
            np.arange(len(ids)) < len(firsts),
            np.frombuffer(records.tokens, TOKEN).reshape(-1, records.block_size).take(ids, axis=0),
            [records.sources[block].scope for block in ids.tolist()],
        )

    def _announce(self, chain: TokenChain, first: int, last: int) -> None:
        if last > first:
            parent, *hashes = (key_prefix(chain.key(length)) for length in range(first, last + 1))
            tokens = np.frombuffer(chain.tokens(first, last), TOKEN).tolist()
            self._events.append(BlocksStored(hashes, parent if first else None, tokens, chain.source.scope))

    def _announce_again(self, blocks: Sequence[BlockId]) -> None:
        """Announce blocks that can be found again, parents first."""
        records = self._records
        for block in blocks:
            self._states[block] = _ANNOUNCED
            tokens = np.frombuffer(records.token_bytes(block), TOKEN).tolist()
            own, parent = key_prefix(records.key(block)), key_prefix(records.parent_prefix(block))
            self._events.append(BlocksStored([own], parent, tokens, records.sources[block].scope))

    def _follow(self, blocks: Sequence[BlockId], state: int) -> list[BlockId]:
        """Return all descendants of these blocks that are in a state, parents first."""
        found: list[BlockId] = []
        ahead = list(blocks)
        while ahead:
            ahead = [child for block in ahead for child in self._index.children(block) if self._states[child] == state]
            found += ahead
        return found

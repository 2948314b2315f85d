"""What preempted sequences left behind, so that they go on where they were.

Preempting by swapping is: give back all blocks, and copy to host memory what would be lost. Each block of a sequence is

    published            nothing moves: it stays in the prefix cache, and is copied to the host if it is evicted
    equal to one that is the same
    neither              copied to the host at once, under its key if it is full and there is a prefix cache

so that a sequence holds nothing of the device while it waits. It comes back as a prefix does: what is found, on the
device and on the host, is its hit. Where the host has no room for a block that is evicted, all that was left is let go,
and the sequence is matched like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockTable, new_table
from octavo.kvcache.hashing import TokenChain
from octavo.kvcache.host_memory import HostBlockId, HostMemory
from octavo.kvcache.label import label_of
from octavo.kvcache.matching import PrefixHit
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix.base import PrefixCache
from octavo.request import Sequence, SequenceId

Place = tuple[int, int]
"""Where a block stands in a sequence's tables: (group, index)."""


class RestoreCost(NamedTuple):
    """What taking a sequence's blocks away would cost and gain.

    Attributes:
        tokens: to compute again; those in blocks that other sequences share at its beginning are kept.
        blocks: that nobody else holds: made available, and moved both ways if it is swapped.
    """

    tokens: int
    blocks: int


@dataclass(slots=True)
class PreemptedCounters:
    """Sequences since the start."""

    sequences_out: int = 0
    sequences_in: int = 0
    sequences_lost: int = 0  # what they left was given up for want of room


@dataclass(slots=True)
class _Left:
    """Where each block of a sequence is; null blocks of its tables are nowhere.

    Attributes:
        lengths: of its tables.
        host: in host memory, claimed.
        cached: in the device's prefix cache, where it may be evicted at any time.
    """

    chain: TokenChain
    tenant: str
    num_tokens: int
    lengths: list[int]
    host: dict[Place, HostBlockId] = field(default_factory=dict)
    cached: dict[Place, BlockId] = field(default_factory=dict)


class Preempted:
    """The preempted sequences that can go on where they were.

    Args:
        pool, prefix_cache: of the device.
        host: where their blocks go.
    """

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache[Any], host: HostMemory) -> None:
        self.counters = PreemptedCounters()
        self._pool = pool
        self._host = host
        self._prefix_cache = prefix_cache
        self._left: dict[SequenceId, _Left] = {}
        # Cached blocks that preempted sequences hope to find again, and whose they are.
        self._hoped_for: dict[BlockId, dict[SequenceId, Place]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._left

    def host_blocks(self, seq_id: SequenceId) -> Iterable[HostBlockId]:
        """The blocks of host memory that a sequence claims; others may claim them too."""
        left = self._left.get(seq_id)
        return () if left is None else left.host.values()

    def leave(self, seq: Sequence, tables: list[BlockTable], chain: TokenChain) -> bool:
        """A sequence is about to give back the blocks of its tables.

        Returns:
            Whether the host had room for what would be lost; if not, nothing has changed.
        """
        host, find = self._host, self._prefix_cache.get
        left = _Left(chain, seq.request.tenant, seq.num_computed, [len(table) for table in tables])
        lost: list[tuple[Place, BlockId]] = []
        num_full = min(len(chain), seq.num_computed // chain.block_size)
        for group, table in enumerate(tables):
            for index, block in enumerate(table):
                if block == NULL_BLOCK:
                    continue
                cached = find(group, chain, index) if index < num_full else None
                if cached is None:
                    lost.append(((group, index), block))
                else:
                    left.cached[group, index] = cached
        sources = [host.source_of(block) for _, block in lost]
        if not host.num_swap_slots or not host.can_claim(len(lost), len(sources) - sources.count(None)):
            return False
        for (place, block), slot in zip(lost, sources, strict=True):
            if slot is None:
                label = label_of(place[0], chain, place[1]) if place[1] < num_full else None
                slot = host.store_claimed(block, label, left.tenant)
                assert slot is not None
            else:
                # It was to be loaded with this very step.
                host.claim(slot)
            left.host[place] = slot
        for place, block in left.cached.items():
            self._hoped_for.setdefault(block, {})[seq.seq_id] = place
        self._left[seq.seq_id] = left
        self.counters.sequences_out += 1
        return True

    def find(self, seq_id: SequenceId) -> PrefixHit | None:
        """All that a sequence had computed, as a hit; None where it has left nothing."""
        left = self._left.get(seq_id)
        if left is None:
            return None
        tables = tuple(new_table([NULL_BLOCK] * length) for length in left.lengths)
        for (group, index), block in left.cached.items():
            tables[group][index] = block
        loads = tuple((group, index, slot) for (group, index), slot in left.host.items())
        return PrefixHit(left.num_tokens, tables, loads)

    def came_back(self, seq_id: SequenceId) -> None:
        """A sequence has its blocks, or the loads of them are planned."""
        self._forget(seq_id)
        self.counters.sequences_in += 1

    def give_up(self, seq_id: SequenceId) -> None:
        """A sequence will not come back, or will be matched like any other."""
        if seq_id in self._left:
            self._forget(seq_id)

    def evicted(self, block_id: BlockId) -> None:
        """The device gives a block's memory to another with the next step: who hoped for it claims a copy."""
        for seq_id, place in self._hoped_for.pop(block_id, {}).items():
            left = self._left[seq_id]
            del left.cached[place]
            slot = self._host.store_claimed(block_id, label_of(place[0], left.chain, place[1]), left.tenant)
            if slot is None:
                self.counters.sequences_lost += 1
                self._forget(seq_id)
            else:
                left.host[place] = slot

    def check(self) -> Findings:
        """Every hope is noted, and every claim is somebody's. O(blocks of these sequences)."""
        num_hopes, claimed = 0, set[HostBlockId]()
        for seq_id, left in self._left.items():
            for hopes in in_slices(left.cached.items()):
                for place, block in hopes:
                    if self._hoped_for.get(block, {}).get(seq_id) != place:
                        yield f"sequence {seq_id} hopes for block {block} at {place}, and is not noted there"
                num_hopes += len(hopes)
                yield None
            claimed.update(left.host.values())
        num_noted = 0
        for blocks in in_slices(self._hoped_for.items()):
            for block, owners in blocks:
                num_noted += len(owners)
                if not self._pool.is_published(block):
                    yield f"block {block} is hoped for, but not published"
            yield None
        if num_noted != num_hopes:
            yield f"{num_noted} hopes for cached blocks are noted, preempted sequences have {num_hopes}"
        if len(claimed) != self._host.claims.num_slots:
            yield f"preempted sequences have {len(claimed)} host blocks, {self._host.claims.num_slots} are claimed"

    def _forget(self, seq_id: SequenceId) -> None:
        left = self._left.pop(seq_id)
        for block in left.cached.values():
            owners = self._hoped_for[block]
            del owners[seq_id]
            if not owners:
                del self._hoped_for[block]
        for slot in left.host.values():
            self._host.unclaim(slot)

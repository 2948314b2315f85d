"""The blocks that preempted sequences left behind, so that they can resume where they were.

Preemption by swapping releases all blocks, and copies to host memory those that would be lost. A block of a sequence is

    published            not moved: it stays in the prefix cache, and is copied to the host if it is evicted
    equal to such one    not moved either
    neither              copied to the host at once, under its key if it is full and there is a prefix cache

so a sequence holds no blocks of the device while it waits. It resumes like a prefix hit, with the blocks found on the
device and on the host. If the host has no room for a block that is evicted, everything that the sequence left is given
up, and it is matched like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockTable, new_table
from octavo.kvcache.hashing import TokenChain
from octavo.kvcache.host_memory import HostBlockId
from octavo.kvcache.host_transfers import HostTransfers
from octavo.kvcache.label import label_of
from octavo.kvcache.matching import PrefixHit
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix.base import PrefixCache
from octavo.request import Sequence, SequenceId

TablePosition = tuple[int, int]
"""The position of a block in a sequence's tables: (group, index)."""


@dataclass(slots=True)
class PreemptedCounters:
    """Totals of sequences since the start."""

    sequences_out: int = 0
    sequences_in: int = 0
    sequences_lost: int = 0  # what they left was given up for lack of room


@dataclass(slots=True)
class _Left:
    """Where each block of a preempted sequence is, except null blocks.

    Attributes:
        lengths: lengths of its tables.
        host: blocks in host memory, which it claims.
        cached: blocks in the device's prefix cache, which may be evicted at any time.
    """

    chain: TokenChain
    tenant: str
    num_tokens: int
    lengths: list[int]
    host: dict[TablePosition, HostBlockId] = field(default_factory=dict)
    cached: dict[TablePosition, BlockId] = field(default_factory=dict)


class Preempted:
    """The preempted sequences that can resume where they were.

    Args:
        pool, prefix_cache: those of the device.
        transfers: those that copy their blocks to host memory.
    """

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache[Any], transfers: HostTransfers) -> None:
        self.counters = PreemptedCounters()
        self._pool = pool
        self._transfers = transfers
        self._prefix_cache = prefix_cache
        self._left: dict[SequenceId, _Left] = {}
        # Cached blocks that preempted sequences need to resume, with those sequences.
        self._hoped_for: dict[BlockId, dict[SequenceId, TablePosition]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._left

    def host_blocks(self, seq_id: SequenceId) -> Iterable[HostBlockId]:
        """Return the blocks of host memory that a sequence claims; others may claim them too."""
        left = self._left.get(seq_id)
        return () if left is None else left.host.values()

    def leave(self, seq: Sequence, tables: list[BlockTable], chain: TokenChain) -> bool:
        """Remember the blocks of a sequence that is about to release them.

        Returns:
            Whether the host had room for what would be lost; if not, nothing has changed.
        """
        transfers, find = self._transfers, self._prefix_cache.get
        left = _Left(chain, seq.request.tenant, seq.num_computed, [len(table) for table in tables])
        lost: list[tuple[TablePosition, BlockId]] = []
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
        sources = [transfers.source_of(block) for _, block in lost]
        num_held = len(sources) - sources.count(None)
        if not transfers.host.num_swap_slots or not transfers.can_claim(len(lost), num_held):
            return False
        for (place, block), slot in zip(lost, sources, strict=True):
            if slot is None:
                label = label_of(place[0], chain, place[1]) if place[1] < num_full else None
                slot = transfers.store_claimed(block, label, left.tenant)
                assert slot is not None
            else:
                # It was planned to be loaded with this step, so the slot still has it.
                transfers.claim(slot)
            left.host[place] = slot
        for place, block in left.cached.items():
            self._hoped_for.setdefault(block, {})[seq.seq_id] = place
        self._left[seq.seq_id] = left
        self.counters.sequences_out += 1
        return True

    def find(self, seq_id: SequenceId) -> PrefixHit | None:
        """Return everything that a sequence had computed, as a hit; None if it has left nothing."""
        left = self._left.get(seq_id)
        if left is None:
            return None
        tables = tuple(new_table([NULL_BLOCK] * length) for length in left.lengths)
        for (group, index), block in left.cached.items():
            tables[group][index] = block
        loads = tuple((group, index, slot) for (group, index), slot in left.host.items())
        return PrefixHit(left.num_tokens, tables, loads)

    def came_back(self, seq_id: SequenceId) -> None:
        """Forget a sequence that has its blocks back, or whose loads are planned."""
        self._forget(seq_id)
        self.counters.sequences_in += 1

    def give_up(self, seq_id: SequenceId) -> None:
        """Give up a sequence's claims: it will not come back, or will be matched like any other."""
        if seq_id in self._left:
            self._forget(seq_id)

    def evicted(self, block_ids: Iterable[BlockId]) -> None:
        """Claim copies of evicted blocks in host memory, for the sequences that need them."""
        if self._hoped_for:
            for block_id in block_ids:
                self._claim_copy(block_id)

    def _claim_copy(self, block_id: BlockId) -> None:
        for seq_id, place in self._hoped_for.pop(block_id, {}).items():
            left = self._left[seq_id]
            del left.cached[place]
            slot = self._transfers.store_claimed(block_id, label_of(place[0], left.chain, place[1]), left.tenant)
            if slot is None:
                self.counters.sequences_lost += 1
                self._forget(seq_id)
            else:
                left.host[place] = slot

    def check(self) -> Findings:
        """Check that the records of cached blocks and claims agree. O(blocks of these sequences)."""
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
        if len(claimed) != (num_claimed := self._transfers.host.claims.num_slots):
            yield f"preempted sequences have {len(claimed)} host blocks, {num_claimed} are claimed"

    def _forget(self, seq_id: SequenceId) -> None:
        left = self._left.pop(seq_id)
        for block in left.cached.values():
            owners = self._hoped_for[block]
            del owners[seq_id]
            if not owners:
                del self._hoped_for[block]
        for slot in left.host.values():
            self._transfers.unclaim(slot)

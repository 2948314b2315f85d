"""Swapping sequences out of the device and back: which of a sequence's blocks move, and when.

Only what would be lost moves. When a sequence is swapped out, each of its blocks is

    shared and not published    kept: the sequence goes on holding a reference to it
    published                   let go into the prefix cache, and moved only if it is ever evicted from there
    neither                     moved to the host at once

so that on its return some blocks come from the host and some never left the device. Where the host has no room for a
block that is evicted, all of the sequence is given up and it is recomputed.

A step carries its transfers out in the order: out, copies, in, compute. A device block is therefore free to be taken
again by whatever else the same step plans as soon as its transfer out is planned.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockState, BlockTable
from octavo.kvcache.host_pool import BlockSwap, HostBlockId, HostPool
from octavo.kvcache.pool import BlockPool
from octavo.request import SequenceId

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
class SwapCounters:
    """Totals since the start, in blocks and in sequences. Blocks count once a step has taken their transfer.

    `blocks_out` = `blocks_in` + `blocks_dropped` + those that lie in host memory, exactly.
    """

    blocks_out: int = 0
    blocks_in: int = 0
    blocks_dropped: int = 0  # moved out and never back: their sequence ended, or was given up
    sequences_out: int = 0
    sequences_in: int = 0
    sequences_lost: int = 0  # swapped out, then given up for want of room


@dataclass(slots=True)
class _Away:
    """A swapped sequence's blocks that its tables do not hold: theirs are null until it returns."""

    tables: list[BlockTable]
    host: dict[Place, HostBlockId] = field(default_factory=dict)
    cached: dict[Place, BlockId] = field(default_factory=dict)


class SwapSpace:
    """The swapped sequences of one manager, over its device pool and a pool of `num_host_blocks`."""

    def __init__(self, pool: BlockPool, num_host_blocks: int) -> None:
        self.host = HostPool(num_host_blocks)
        self.counters = SwapCounters()
        self._pool = pool
        self._away: dict[SequenceId, _Away] = {}
        # Cached blocks that swapped sequences hope to find again, and whose they are.
        self._hoped_for: dict[BlockId, dict[SequenceId, Place]] = {}

    @property
    def num_sequences(self) -> int:
        return len(self._away)

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._away

    def num_host_blocks(self, seq_id: SequenceId) -> int:
        """How many blocks of host memory a sequence has; 0 where it is not swapped."""
        away = self._away.get(seq_id)
        return 0 if away is None else len(away.host)

    def keeps_blocks(self, seq_id: SequenceId) -> bool:
        """Whether a swapped sequence holds blocks of the device that become available if it is given up."""
        return any(block != NULL_BLOCK for table in self._away[seq_id].tables for block in table)

    def swap_out(self, seq_id: SequenceId, tables: list[BlockTable], num_blocks: int) -> bool:
        """Let go of a sequence's blocks, as the module says; its tables keep their shape, null where one has left.

        Args:
            num_blocks: how many in each table hold anything computed; those behind are given back.

        Returns:
            Whether the host had room; if not, nothing has changed.
        """
        pool = self._pool
        moving = sum(
            block != NULL_BLOCK and pool.ref_counts[block] == 1 and not pool.is_published(block)
            for table in tables
            for block in table[:num_blocks]
        )
        if moving > self.host.num_free or not self.host.num_blocks:
            return False
        away = self._away[seq_id] = _Away(tables)
        for group, table in enumerate(tables):
            pool.release(reversed(table[num_blocks:]))
            del table[num_blocks:]
            # The tail first, as on release.
            for index in range(len(table) - 1, -1, -1):
                block = table[index]
                if block == NULL_BLOCK:
                    continue
                if pool.is_published(block):
                    away.cached[group, index] = block
                    self._hoped_for.setdefault(block, {})[seq_id] = (group, index)
                elif pool.ref_counts[block] == 1:
                    away.host[group, index] = self.host.swap_out(block, seq_id)
                else:
                    continue
                table[index] = NULL_BLOCK
                pool.release((block,))
        self.counters.sequences_out += 1
        return True

    def blocks_to_return(self, seq_id: SequenceId) -> int:
        """Available blocks of the device that bringing a sequence back takes."""
        away = self._away[seq_id]
        return len(away.host) + sum(self._pool.state(block) is BlockState.CACHED for block in away.cached.values())

    def swap_in(self, seq_id: SequenceId, tenant: str = "") -> int | None:
        """Put the blocks of a tenant's sequence back into its tables; the pool has `blocks_to_return` available.

        Returns:
            The lowest index of a block that came from the host, hence is not published; None where none did.
        """
        away = self._away.pop(seq_id)
        # Those found again first: taking new ones may evict cached blocks.
        for (group, index), block in away.cached.items():
            self._forget_hope(block, seq_id)
            self._pool.acquire(block, tenant)
            away.tables[group][index] = block
        places = sorted(away.host)
        for (group, index), block in zip(places, self._pool.allocate(len(places), tenant), strict=True):
            self.host.swap_in(away.host[group, index], block)
            away.tables[group][index] = block
        self.counters.sequences_in += 1
        return min((index for _, index in places), default=None)

    def give_up(self, seq_id: SequenceId) -> None:
        """A swapped sequence will not come back by swapping, or not at all; its kept blocks are released too."""
        away = self._away.pop(seq_id)
        for block in away.cached.values():
            self._forget_hope(block, seq_id)
        self.counters.blocks_dropped += self.host.release(away.host.values())
        for table in away.tables:
            self._pool.release_table(table)
            del table[:]

    def on_evict(self, block_id: BlockId) -> None:
        """The pool gives this block's memory to another: who hoped for it takes its contents to the host."""
        for seq_id, place in self._hoped_for.pop(block_id, {}).items():
            away = self._away[seq_id]
            del away.cached[place]
            if self.host.num_free:
                away.host[place] = self.host.swap_out(block_id, seq_id)
            else:
                self.counters.sequences_lost += 1
                self.give_up(seq_id)

    def check(self) -> Findings:
        """The invariants of the host pool and of the swapped sequences. O(blocks)."""
        yield from self.host.check()
        holders, num_held, num_hopes = self.host.holders, 0, 0
        for seq_id, away in self._away.items():
            for hosts in in_slices(away.host.values()):
                for host in hosts:
                    if holders.get(host) != seq_id:
                        yield f"host block {host} is held by {holders.get(host)}, but sequence {seq_id} has it"
                num_held += len(hosts)
                yield None
            for hopes in in_slices(away.cached.items()):
                for place, block in hopes:
                    if self._hoped_for.get(block, {}).get(seq_id) != place:
                        yield f"sequence {seq_id} hopes for block {block} at {place}, and is not noted there"
                num_hopes += len(hopes)
                yield None
        if num_held != len(holders):
            yield f"{len(holders)} host blocks are held, swapped sequences have {num_held}"
        num_noted = 0
        for blocks in in_slices(self._hoped_for.items()):
            for block, owners in blocks:
                num_noted += len(owners)
                if not self._pool.is_published(block):
                    yield f"block {block} is hoped for, but not published"
            yield None
        if num_noted != num_hopes:
            yield f"{num_noted} hopes for cached blocks are noted, swapped sequences have {num_hopes}"
        counters, (out, into) = self.counters, self.host.num_planned
        there = self.host.num_held + into - out
        if counters.blocks_out != counters.blocks_in + counters.blocks_dropped + there:
            yield (
                f"{counters.blocks_out} blocks were moved out, but {counters.blocks_in} back, "
                f"{counters.blocks_dropped} were dropped and {there} are in host memory"
            )

    @property
    def has_transfers(self) -> bool:
        return self.host.has_transfers

    def take_transfers(self) -> tuple[Seq[BlockSwap], Seq[BlockSwap]]:
        """What the next step must move: (out, in)."""
        out, into = self.host.take_transfers()
        self.counters.blocks_out += len(out)
        self.counters.blocks_in += len(into)
        return out, into

    def cancel_transfers(self) -> None:
        """Nothing that is planned and not yet taken will happen: its sequences have given up their blocks."""
        self.counters.blocks_dropped += self.host.cancel()

    def complete_transfers(self) -> None:
        """That step is over."""
        self.host.complete()

    def _forget_hope(self, block_id: BlockId, seq_id: SequenceId) -> None:
        owners = self._hoped_for[block_id]
        del owners[seq_id]
        if not owners:
            del self._hoped_for[block_id]

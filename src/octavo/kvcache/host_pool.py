"""The accounting of host blocks: free ones, and those held by swapped sequences. No memory, no torch.

A host block that a step in flight reads or writes is nobody's to take, whoever let go of it meanwhile:

    allocate ──> held ──release──> free
                   └──release──> draining ──complete──> free       (a step in flight still reads or writes it)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, NewType

from octavo.errors import CacheError
from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import BlockId
from octavo.request import SequenceId

HostBlockId = NewType("HostBlockId", int)


class BlockSwap(NamedTuple):
    """A transfer of one block between device and host; its direction is that of the list that contains it."""

    device: BlockId
    host: HostBlockId


class HostPool:
    """Host blocks and the transfers of the next step; 0 blocks is a host without room. O(1) an operation.

    Blocks are used from the first on, so that neither memory nor an audit grows with those that never were.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise CacheError(f"a host pool needs 0 or more blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self.holders: dict[HostBlockId, SequenceId] = {}
        self._num_used = 0  # blocks that have ever been held: those below this number
        self._free: list[HostBlockId] = []  # of the used
        self._draining: set[HostBlockId] = set()
        self._in_flight: set[HostBlockId] = set()
        self._out: dict[HostBlockId, BlockId] = {}
        self._in: dict[HostBlockId, BlockId] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_used

    @property
    def num_held(self) -> int:
        """Blocks that hold some swapped sequence's keys and values."""
        return len(self.holders)

    def swap_out(self, block_id: BlockId, holder: SequenceId) -> HostBlockId:
        """Take a host block for the contents of a device block.

        Raises:
            CacheError: none is free. Callers ask `num_free` first.
        """
        if not self.num_free:
            raise CacheError(f"all {self.num_blocks} host blocks are taken")
        if self._free:
            host = self._free.pop()
        else:
            host = HostBlockId(self._num_used)
            self._num_used += 1
        self.holders[host] = holder
        self._out[host] = block_id
        return host

    def swap_in(self, host: HostBlockId, block_id: BlockId) -> None:
        """Its contents go to a device block in the next step, after which it is free."""
        del self.holders[host]
        self._in[host] = block_id
        self._draining.add(host)

    def release(self, hosts: Iterable[HostBlockId]) -> int:
        """Free host blocks; returns how many of them had been moved here, or are about to be.

        A transfer out that no step has taken yet is cancelled, and not counted.

        Raises:
            CacheError: a block is held by nobody: it was freed twice.
        """
        num_moved = 0
        for host in hosts:
            if self.holders.pop(host, None) is None:
                raise CacheError(f"host block {host} is freed twice")
            if host in self._in_flight:
                self._draining.add(host)
                num_moved += 1
            else:
                num_moved += self._out.pop(host, None) is None
                self._free.append(host)
        return num_moved

    def take_transfers(self) -> tuple[list[BlockSwap], list[BlockSwap]]:
        """Take the next step's transfers (out, in), which are in flight until `complete`."""
        out = [BlockSwap(block, host) for host, block in self._out.items()]
        into = [BlockSwap(block, host) for host, block in self._in.items()]
        self._in_flight.update(self._out, self._in)
        self._out.clear()
        self._in.clear()
        return out, into

    @property
    def num_planned(self) -> tuple[int, int]:
        """Transfers that no step has taken yet: (out, in)."""
        return len(self._out), len(self._in)

    @property
    def has_transfers(self) -> bool:
        """Whether the next step must move anything."""
        return bool(self._out or self._in)

    def cancel(self) -> int:
        """Transfers in that no step has taken will not happen: their host blocks are free; returns how many."""
        for host in self._in:
            self._draining.discard(host)
            self._free.append(host)
        count = len(self._in)
        self._in.clear()
        return count

    def complete(self) -> None:
        """Complete the transfers in flight."""
        if self._in_flight:
            ended = self._draining & self._in_flight
            self._free.extend(ended)
            self._draining -= ended
            self._in_flight.clear()

    def check(self) -> Findings:
        """Every host block is in exactly one state. O(blocks ever held)."""
        free = bytearray(self._num_used)
        for batch in in_slices(self._free):
            for host in batch:
                if free[host]:
                    yield f"host block {host} stands twice in the free stack"
                free[host] = 1
            yield None
        for numbers in in_slices(range(self._num_used)):
            for i in map(HostBlockId, numbers):
                states = [bool(free[i]), i in self.holders, i in self._draining]
                if sum(states) != 1:
                    yield f"host block {i} is free: {states[0]}, held: {states[1]}, draining: {states[2]}"
            yield None
        if stray := (set(self._out) - set(self.holders) - self._draining) | (set(self._in) - self._draining):
            yield f"transfers are planned for host blocks {sorted(stray)}, which are not theirs"

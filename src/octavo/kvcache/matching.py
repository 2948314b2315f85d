"""Finds the longest cached prefix of a sequence, across groups of layers that keep different tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockTable, as_array, new_table
from octavo.kvcache.hashing import TokenChain
from octavo.kvcache.host_memory import HostBlockId, HostMemory
from octavo.kvcache.label import label_of
from octavo.kvcache.prefix import PrefixIndex
from octavo.kvcache.spec import Window


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that hold the beginning of a sequence.

    Attributes:
        num_tokens: number of tokens covered, at most all but the last of the sequence; a multiple of the block size,
            unless a preempted sequence finds what it left.
        tables: blocks per group; null if outside the group's window, or in `loads`.
        loads: blocks that are not on the device: group, index in its table, and slot of host memory.
    """

    num_tokens: int
    tables: tuple[BlockTable, ...]
    loads: tuple[tuple[int, int, HostBlockId], ...] = ()


class TieredIndex:
    """The device's prefix cache continued by host memory, with the methods that a `PrefixMatcher` needs.

    A block in host memory has a negative id, -1 minus its slot.
    """

    def __init__(self, prefix_cache: PrefixIndex, host: HostMemory) -> None:
        self._device = prefix_cache
        self._host = host

    def leading(self, group: int, chain: TokenChain, limit: int) -> BlockTable:
        found = self._device.leading(group, chain, limit)
        while len(found) < limit and (block := self.get(group, chain, len(found))) is not None:
            found.append(block)
        return found

    def get(self, group: int, chain: TokenChain, index: int) -> BlockId | None:
        block = self._device.get(group, chain, index)
        if block is not None:
            return block
        host = self._host.find(label_of(group, chain, index))
        return None if host is None else BlockId(-1 - host)


def split_tiers(tables: tuple[BlockTable, ...], block_size: int) -> PrefixHit:
    """Return the hit for tables from a `TieredIndex`, whose negative ids become loads."""
    loads: list[tuple[int, int, HostBlockId]] = []
    for group, table in enumerate(tables):
        for index in np.flatnonzero(as_array(table) < 0).tolist():
            loads.append((group, index, HostBlockId(-1 - table[index])))
            table[index] = NULL_BLOCK
    return PrefixHit(len(tables[0]) * block_size, tables, tuple(loads))


class PrefixMatcher:
    """Finds the longest prefix of a chain that all groups have cached.

    A hit of h blocks needs, in each group, the blocks that the token after it attends to: all h under full attention,
    otherwise those inside the window, and the first blocks that stay.

    Args:
        windows: sliding window per group, None for full attention.
    """

    def __init__(self, prefix_cache: PrefixIndex | TieredIndex, block_size: int, windows: Seq[Window | None]) -> None:
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._windows = windows

    def longest(self, chain: TokenChain, most: int) -> tuple[BlockTable, ...]:
        """Return the blocks of the longest cached prefix of at most `most` full blocks, as tables of equal length."""
        size, hit = self._block_size, most
        tables = [new_table() for _ in self._windows]
        for group, window in enumerate(self._windows):
            if window is None:
                tables[group] = self._prefix_cache.leading(group, chain, hit)
                hit = len(tables[group])
        # A block missing at index j fails every hit that ends after j and still sees j, so the end moves to j.
        settled = False
        while not settled:
            settled = True
            for group, window in enumerate(self._windows):
                if window is None:
                    continue
                first = window.passed(hit * size, size)
                num_sinks = min(first, window.sink_blocks)
                seen = (*range(num_sinks), *range(first, hit))
                found = [self._prefix_cache.get(group, chain, index) for index in seen]
                missing = max((i for i, block in zip(seen, found, strict=True) if block is None), default=None)
                if missing is not None:
                    hit, settled = missing, False
                    break
                blocks = [block for block in found if block is not None]
                tables[group] = new_table(
                    [*blocks[:num_sinks], *[NULL_BLOCK] * (first - num_sinks), *blocks[num_sinks:]]
                )
        return tuple(table if len(table) == hit else table[:hit] for table in tables)

    def ends_at(self, chain: TokenChain, length: int, most: int) -> bool:
        """Whether the longest prefix most probably still has `length` blocks of at most `most`. O(groups).

        Checks that its last block is cached in every group and the next one is not, because a prefix loses its tail
        before its head.
        """
        groups, get = range(len(self._windows)), self._prefix_cache.get
        if length and any(get(group, chain, length - 1) is None for group in groups):
            return False
        return length == most or any(get(group, chain, length) is None for group in groups)

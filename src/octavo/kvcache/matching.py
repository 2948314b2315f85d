"""Finding the longest cached prefix of a sequence, over groups of layers that keep different tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockTable, as_array, new_table
from octavo.kvcache.hashing import TokenChain
from octavo.kvcache.host_memory import HostBlockId, HostMemory
from octavo.kvcache.label import label_of
from octavo.kvcache.prefix.base import PrefixCache


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that hold the beginning of a sequence.

    Attributes:
        num_tokens: covered by the hit, at most num_tokens - 1 of the sequence; a multiple of the block size, except
            where a preempted sequence finds what it left.
        tables: per group the blocks, null where they lie outside the group's window, or in `loads`.
        loads: blocks that are not on the device: group, index in its table, and where they are.
    """

    num_tokens: int
    tables: tuple[BlockTable, ...]
    loads: tuple[tuple[int, int, HostBlockId], ...] = ()


class TieredIndex:
    """The device's prefix cache continued by host memory. A block there has a negative id, -1 minus its number.

    Only what a `PrefixMatcher` asks for.
    """

    def __init__(self, prefix_cache: PrefixCache[Any], host: HostMemory) -> None:
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
    """A hit of tables that a `TieredIndex` filled."""
    loads: list[tuple[int, int, HostBlockId]] = []
    for group, table in enumerate(tables):
        for index in np.flatnonzero(as_array(table) < 0).tolist():
            loads.append((group, index, HostBlockId(-1 - table[index])))
            table[index] = NULL_BLOCK
    return PrefixHit(len(tables[0]) * block_size, tables, tuple(loads))


class PrefixMatcher:
    """Asks the prefix cache what all groups have of a chain.

    A hit of h blocks needs, in each group, the blocks that the token after it attends to: all h under full attention,
    those inside the window otherwise.

    Args:
        windows: per group its sliding window, None for full attention.
    """

    def __init__(self, prefix_cache: PrefixCache[Any] | TieredIndex, block_size: int, windows: Seq[int | None]) -> None:
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._windows = windows

    def longest(self, chain: TokenChain, most: int) -> tuple[BlockTable, ...]:
        """Per group the blocks of the longest cached prefix of at most `most` full blocks, tables of one length."""
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
                first = max(0, hit * size - window + 1) // size
                found = [self._prefix_cache.get(group, chain, i) for i in range(first, hit)]
                missing = max((i for i, block in enumerate(found, first) if block is None), default=None)
                if missing is not None:
                    hit, settled = missing, False
                    break
                tables[group] = new_table([NULL_BLOCK] * first + [block for block in found if block is not None])
        return tuple(table[:hit] for table in tables)

    def ends_at(self, chain: TokenChain, length: int, most: int) -> bool:
        """Whether a longest prefix that had `length` of at most `most` blocks most probably still has. O(groups).

        It has its last block in every group, and not the next one: a prefix loses its tail before its head.
        """
        groups, get = range(len(self._windows)), self._prefix_cache.get
        if length and any(get(group, chain, length - 1) is None for group in groups):
            return False
        return length == most or any(get(group, chain, length) is None for group in groups)

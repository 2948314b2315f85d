"""Demotion policies: which blocks of the device's prefix cache are copied to host memory, and when.

on_evict         blocks that the device evicts
on_second_use    the same, but only blocks used twice: found by a request, or computed again after an eviction
all              all blocks, as soon as they are published
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.kvcache.block import BlockId
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.eviction.adaptive import GhostList
from octavo.kvcache.host_memory import HostMemory, Slot

_UNDATED = 0


class Demotion:
    """Chooses blocks of the device to copy to host memory: none, if the host has no room for prefixes.

    Args:
        name: `on_evict`, `on_second_use` or `all`.
        blocks: the record of the device's blocks.
    """

    def __init__(self, name: str, host: HostMemory, blocks: BlockRecords) -> None:
        self._name = name if host.num_prefix_slots else "never"
        self._host = host
        self._blocks = blocks
        by_use = self._name == "on_second_use"
        # By device block, whether it was used twice.
        self._used_again = bytearray(blocks.num_blocks) if by_use else None
        # Keys of evicted blocks that were used once; if one is published again, that is its second use.
        self._used_once = GhostList(4 * blocks.num_blocks if by_use else 1)

    def published(self, block_ids: Seq[BlockId]) -> Seq[BlockId]:
        """Return those of the blocks just published that are copied at once."""
        if self._used_again is not None:
            for block_id in block_ids:
                key = self._blocks.key(block_id)
                again = self._used_once.take(key) is not None or self._host.state(key) is Slot.READY
                self._used_again[block_id] = again
        return block_ids if self._name == "all" else ()

    def hit(self, block_ids: Seq[BlockId]) -> None:
        """Note that a request has found these blocks on the device."""
        if self._used_again is not None:
            for block_id in block_ids:
                self._used_again[block_id] = 1

    def evicted(self, block_ids: Seq[BlockId]) -> Seq[BlockId]:
        """Return those of the blocks being evicted that are copied; the index still has them."""
        if (again := self._used_again) is None:
            return block_ids if self._name == "on_evict" else ()
        once = [block_id for block_id in block_ids if not again[block_id]]
        # All at once: 26 together take a sixth of the time.
        self._used_once.add(self._blocks.keys.prefixes(once), [_UNDATED] * len(once))
        return [block_id for block_id in block_ids if again[block_id]]

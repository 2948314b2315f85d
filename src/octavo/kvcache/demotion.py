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
    """Chooses blocks of the device to copy to host memory; the base class chooses none."""

    def published(self, block_ids: Seq[BlockId]) -> Seq[BlockId]:
        """Return those of the blocks just published that are copied at once."""
        return ()

    def hit(self, block_ids: Seq[BlockId]) -> None:
        """Note that a request has found these blocks on the device."""

    def evicted(self, block_ids: Seq[BlockId]) -> Seq[BlockId]:
        """Return those of the blocks being evicted that are copied; the index still has them."""
        return ()


class DemoteAll(Demotion):
    """Demotes every block as soon as it is published."""

    def published(self, block_ids: Seq[BlockId]) -> Seq[BlockId]:
        return block_ids


class DemoteEvicted(Demotion):
    """Demotes every block that the device evicts."""

    def evicted(self, block_ids: Seq[BlockId]) -> Seq[BlockId]:
        return block_ids


class DemoteUsedTwice(Demotion):
    """Demotes the blocks that the device evicts if they were used twice.

    Args:
        blocks: the record of the device's blocks.
    """

    def __init__(self, host: HostMemory, blocks: BlockRecords) -> None:
        self._host = host
        self._blocks = blocks
        self._used_again = bytearray(blocks.num_blocks)  # by device block
        # Keys of evicted blocks that were used once; if one is published again, that is its second use.
        self._gone_once = GhostList(4 * blocks.num_blocks)

    def published(self, block_ids: Seq[BlockId]) -> Seq[BlockId]:
        for block_id in block_ids:
            key = self._blocks.key(block_id)
            again = self._gone_once.take(key) is not None or self._host.state(key) is Slot.READY
            self._used_again[block_id] = again
        return ()

    def hit(self, block_ids: Seq[BlockId]) -> None:
        for block_id in block_ids:
            self._used_again[block_id] = 1

    def evicted(self, block_ids: Seq[BlockId]) -> Seq[BlockId]:
        once = [block_id for block_id in block_ids if not self._used_again[block_id]]
        # All at once: 26 together take a sixth of the time.
        self._gone_once.add(self._blocks.keys.prefixes(once), [_UNDATED] * len(once))
        return [block_id for block_id in block_ids if self._used_again[block_id]]


def make_demotion(name: str, host: HostMemory, blocks: BlockRecords) -> Demotion:
    """Return the demotion policy with the given name; one that chooses nothing if the host has no room for prefixes."""
    if not host.num_prefix_slots:
        return Demotion()
    if name == "on_second_use":
        return DemoteUsedTwice(host, blocks)
    return DemoteAll() if name == "all" else DemoteEvicted()

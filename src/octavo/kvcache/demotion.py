"""Demotion policies: which blocks of the device's prefix cache are copied to host memory, and when.

on_evict         blocks that the device evicts
on_second_use    the same, but only blocks used twice: found by a request, or computed again after an eviction
all              all blocks, as soon as they are published
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction.ghosts import GhostList
from octavo.kvcache.hashing import Label, TokenChain, group_key, label_of
from octavo.kvcache.host_memory import Slot
from octavo.kvcache.host_transfers import HostTransfers
from octavo.kvcache.prefix import PrefixIndex

_UNDATED = 0


class Demoted(NamedTuple):
    """A block of the device that is worth keeping in host memory."""

    block_id: BlockId
    label: Label
    tenant: str


class Demotion(Protocol):
    """Receives events of the device's blocks, and chooses those worth keeping in host memory."""

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        """Called when blocks, each with its index and group, have been published."""

    def hit(self, block_ids: Seq[BlockId]) -> None:
        """Called when a request has found these blocks on the device."""

    def evicted(self, block_ids: Seq[BlockId]) -> list[Demoted]:
        """Return those of the evicted blocks to store; their memory does not change before the next step."""


class NoDemotion:
    """No demotion: what the device evicts is lost."""

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        return

    def hit(self, block_ids: Seq[BlockId]) -> None:
        return

    def evicted(self, block_ids: Seq[BlockId]) -> list[Demoted]:
        return []


class DemoteAll:
    """Demotes every block as soon as it is published."""

    def __init__(self, transfers: HostTransfers) -> None:
        self._transfers = transfers

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        for block_id, index, group in blocks:
            self._transfers.store_prefix(block_id, label_of(group, chain, index), tenant)

    def hit(self, block_ids: Seq[BlockId]) -> None:
        return

    def evicted(self, block_ids: Seq[BlockId]) -> list[Demoted]:
        return []


class DemoteEvicted:
    """Demotes blocks that the device evicts; optionally only those used twice.

    Args:
        num_blocks: number of blocks in the device's pool.
        index: the device's index of prefixes, which has the blocks' keys, tokens and tenants.
        used_twice: whether to demote only blocks used twice.
    """

    def __init__(self, transfers: HostTransfers, num_blocks: int, index: PrefixIndex, *, used_twice: bool) -> None:
        self._transfers = transfers
        self._index = index
        self._used_twice = used_twice
        self._used_again = bytearray(num_blocks)  # by device block
        # Keys of evicted blocks that were used once; if one is published again, that is its second use.
        self._gone_once = GhostList(4 * num_blocks)

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        for block_id, index, group in blocks:
            key = group_key(group, chain.key(index + 1))
            again = self._gone_once.take(key) is not None or self._transfers.host.state(key) is Slot.READY
            self._used_again[block_id] = again

    def hit(self, block_ids: Seq[BlockId]) -> None:
        for block_id in block_ids:
            self._used_again[block_id] = 1

    def evicted(self, block_ids: Seq[BlockId]) -> list[Demoted]:
        if self._used_twice:
            once = [block_id for block_id in block_ids if not self._used_again[block_id]]
            # All at once: 26 together take a sixth of the time.
            self._gone_once.add_all(self._index.key_prefixes(once), [_UNDATED] * len(once))
            block_ids = [block_id for block_id in block_ids if self._used_again[block_id]]
        return [self._demoted(block_id) for block_id in block_ids]

    def _demoted(self, block_id: BlockId) -> Demoted:
        source = self._index.source(block_id)
        assert source is not None  # it is still published
        return Demoted(block_id, self._index.label(block_id), source.tenant)


def make_demotion(name: str, transfers: HostTransfers, num_blocks: int, index: PrefixIndex) -> Demotion:
    """Return the demotion policy with the given name; `NoDemotion` if the host has no room for prefixes."""
    if not transfers.host.num_prefix_slots:
        return NoDemotion()
    if name == "all":
        return DemoteAll(transfers)
    return DemoteEvicted(transfers, num_blocks, index, used_twice=name == "on_second_use")

"""Which blocks of the device's prefix cache go down to host memory, and when.

on_evict         what the device evicts
on_second_use    of that, what was used twice: found by a request, or computed anew after an eviction
all              what is published, at once
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction.ghosts import Ghost, GhostList
from octavo.kvcache.hashing import DIGEST_BYTES, TokenChain, group_key
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.label import Label, label_of


class Demotion(Protocol):
    """Hears of the device's blocks, and stores those in host memory that are worth it."""

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        """Blocks, each with its index and group, are found by their prefixes from now on."""

    def hit(self, block_ids: Seq[BlockId]) -> None:
        """A request found these blocks on the device."""

    def evicted(self, block_id: BlockId) -> None:
        """The device gives a block's memory to another with the next step; until then it is as it was."""


class NoDemotion:
    """What the device evicts is lost."""

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        return

    def hit(self, block_ids: Seq[BlockId]) -> None:
        return

    def evicted(self, block_id: BlockId) -> None:
        return


class DemoteAll:
    """Everything that is published, at once."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        for block_id, index, group in blocks:
            self._host.store_prefix(block_id, label_of(group, chain, index), tenant)

    def hit(self, block_ids: Seq[BlockId]) -> None:
        return

    def evicted(self, block_id: BlockId) -> None:
        return


class DemoteEvicted:
    """What the device evicts, or what it evicts after a second use.

    Args:
        num_blocks: of the device's pool.
        tokens_of: the packed token ids of a published block.
        used_twice: only those.
    """

    def __init__(
        self, host: HostMemory, num_blocks: int, tokens_of: Callable[[BlockId], bytes], *, used_twice: bool
    ) -> None:
        self._host = host
        self._tokens_of = tokens_of
        self._used_twice = used_twice
        # Of the device's blocks, as they were published.
        self._keys = bytearray(num_blocks * DIGEST_BYTES)
        self._parents = bytearray(num_blocks * DIGEST_BYTES)
        self._tenants = [""] * num_blocks
        self._used_again = bytearray(num_blocks)
        # Keys of blocks that were used once and are gone: seen anew, they are used again.
        self._gone_once = GhostList(1 << max(4, 2 * num_blocks).bit_length())

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        for block_id, index, group in blocks:
            key, at = group_key(group, chain.key(index + 1)), block_id * DIGEST_BYTES
            self._keys[at : at + DIGEST_BYTES] = key
            self._parents[at : at + DIGEST_BYTES] = chain.key(index)
            self._tenants[block_id] = tenant
            again = self._gone_once.take(key) is not None or self._host.has(key)
            self._used_again[block_id] = again

    def hit(self, block_ids: Seq[BlockId]) -> None:
        for block_id in block_ids:
            self._used_again[block_id] = 1

    def evicted(self, block_id: BlockId) -> None:
        at = block_id * DIGEST_BYTES
        key = bytes(self._keys[at : at + DIGEST_BYTES])
        if self._used_twice and not self._used_again[block_id]:
            self._gone_once.add(key, Ghost(0, 0))
            return
        label = Label(key, bytes(self._parents[at : at + DIGEST_BYTES]), self._tokens_of(block_id))
        self._host.store_prefix(block_id, label, self._tenants[block_id])


def make_demotion(name: str, host: HostMemory, num_blocks: int, tokens_of: Callable[[BlockId], bytes]) -> Demotion:
    """The demotion of that name to a host memory; none where that has no room for prefixes."""
    if not host.num_prefix_slots:
        return NoDemotion()
    if name == "all":
        return DemoteAll(host)
    return DemoteEvicted(host, num_blocks, tokens_of, used_twice=name == "on_second_use")

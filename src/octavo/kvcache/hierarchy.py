"""All that lies below the device, for the manager of the device's blocks: evict is demote, resume is match.

    manager ── published, hit, evicted ──> demotion ──store_prefix──┐
            ── leave, evicted ───────────> preempted ─store_claimed─┴─> host memory <── stores (tiers/lower.py)
            ── match ────────────────────> what a sequence left, else the device continued by host memory
            ── load ─────────────────────> host memory: the loads of the next step

A hierarchy without room is one whose host memory has no slot: nothing of it needs a condition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from octavo.kvcache.audit import Findings
from octavo.kvcache.block import BlockId, BlockTable
from octavo.kvcache.demotion import Demotion, make_demotion
from octavo.kvcache.hashing import TokenChain
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.label import Label, label_of
from octavo.kvcache.matching import PrefixHit, PrefixMatcher, TieredIndex, split_tiers
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.preempted import Preempted
from octavo.kvcache.prefix.base import PrefixCache
from octavo.request import Sequence, SequenceId


class CacheHierarchy:
    """Host memory, which of the device's blocks go there, and what preempted sequences left.

    Args:
        pool, prefix_cache: of the device.
        windows: per group its sliding window, None for full attention.
        demotion: see `make_demotion`.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache[Any],
        host: HostMemory,
        block_size: int,
        windows: Seq[int | None],
        demotion: str,
    ) -> None:
        self.host = host
        self.preempted = Preempted(pool, prefix_cache, host)
        self._pool = pool
        self._block_size = block_size
        self._num_groups = len(windows)
        self._demotion: Demotion = make_demotion(demotion, host, pool.num_blocks, prefix_cache.tokens)
        # Without slots for prefixes, nobody is to find what others have left there.
        index = TieredIndex(prefix_cache, host) if host.num_prefix_slots else prefix_cache
        self._matcher = PrefixMatcher(index, block_size, windows)

    # What happens to the device's blocks

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        """Blocks, each with its index and group, are found by their prefixes from now on."""
        self._demotion.published(blocks, chain, tenant)

    def hit(self, table: BlockTable) -> None:
        """A request found these blocks on the device."""
        self._demotion.hit(table)

    def evicted(self, block_id: BlockId) -> None:
        """The device gives a cached block's memory to another with the next step; until then it is as it was."""
        self._demotion.evicted(block_id)
        self.preempted.evicted(block_id)

    # Finding and bringing up

    def match(self, seq: Sequence, chain: TokenChain, most: int) -> PrefixHit:
        """What a preempted sequence left, else the longest prefix of at most `most` blocks on device and host."""
        left = self.preempted.find(seq.seq_id)
        return split_tiers(self._matcher.longest(chain, most), self._block_size) if left is None else left

    def missing(self, seq: Sequence, chain: TokenChain, most: int) -> Iterator[Label]:
        """Of the first `most` blocks those that neither device nor host has; what a hit needs first is in front."""
        if not self.host.num_prefix_slots:
            return
        for index in range(self.match(seq, chain, most).num_tokens // self._block_size, most):
            for group in range(self._num_groups):
                yield label_of(group, chain, index)

    def tokens_by_tier(self, hit: PrefixHit) -> dict[str, int]:
        """A hit's tokens by the tier that they come from; where groups of layers differ, the lowest of a block's."""
        origins = {index: self.host.origin(slot) for _, index, slot in hit.loads}
        size = self._block_size
        by_tier = {tier: size * count for tier, count in Counter(origins.values()).items()}
        return {"device": hit.num_tokens - size * len(origins), **by_tier}

    def load(self, seq: Sequence, tables: list[BlockTable], hit: PrefixHit) -> None:
        """Fill a hit's places in a sequence's tables with new blocks, for what the next step is to load."""
        host, returns = self.host, seq.seq_id in self.preempted
        # First, because making room evicts blocks, which may take any slot that nobody holds.
        for _, _, slot in hit.loads:
            host.hold(slot)
        blocks = self._pool.allocate(len(hit.loads), seq.request.tenant)
        for (group, index, slot), block in zip(hit.loads, blocks, strict=True):
            tables[group][index] = block
            host.plan_load(slot, block, seq.seq_id, returns=returns)
            host.release(slot)
        if returns:
            self.preempted.came_back(seq.seq_id)

    def forget(self, seq_id: SequenceId) -> None:
        """A sequence gives up its blocks, those that it left too; loads that no step has taken will not happen."""
        self.preempted.give_up(seq_id)
        self.host.cancel_loads(seq_id)

    def check(self) -> Findings:
        """The invariants of all of it. O(slots ever used, and blocks of preempted sequences)."""
        yield from self.host.check()
        yield from self.preempted.check()

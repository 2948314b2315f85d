"""The tiers below the device, as the cache manager sees them: evicting demotes blocks, resuming matches them.

    manager ── published, hit, evicted ──> demotion ──store_prefix──┐
            ── leave, evicted ───────────> preempted ─store_claimed─┴─> transfers of the next step <─┐
            ── match ────────────────────> what a sequence left, else the device's blocks, then the host's
            ── load ─────────────────────────────────────────────────────────────────────────────────┘

    transfers ──> host memory <── stores (tiers/lower.py)

A hierarchy without host memory has zero slots, so no code needs a special case for it.
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
from octavo.kvcache.host_transfers import HostTransfers
from octavo.kvcache.label import Label, label_of
from octavo.kvcache.matching import PrefixHit, PrefixMatcher, TieredIndex, split_tiers
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.preempted import Preempted
from octavo.kvcache.prefix.base import PrefixCache
from octavo.kvcache.spec import Window
from octavo.request import Sequence, SequenceId

_TIERS = ("device", "host", "disk", "remote")  # in the order in which they are asked


class CacheHierarchy:
    """Host memory, the policy for copying the device's blocks there, and the blocks that preempted sequences left.

    Args:
        pool, prefix_cache: those of the device.
        windows: sliding window per group, None for full attention.
        demotion: see `make_demotion`.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache[Any],
        host: HostMemory,
        block_size: int,
        windows: Seq[Window | None],
        demotion: str,
    ) -> None:
        self.host = host
        self.transfers = transfers = HostTransfers(host)
        self.preempted = Preempted(pool, prefix_cache, transfers)
        self._pool = pool
        self._block_size = block_size
        self._num_groups = len(windows)
        self._demotion: Demotion = make_demotion(demotion, transfers, pool.num_blocks, prefix_cache.tokens)
        # Without slots for prefixes, a sequence must not find blocks that others have left there.
        index = TieredIndex(prefix_cache, host) if host.num_prefix_slots else prefix_cache
        self._matcher = PrefixMatcher(index, block_size, windows)

    # What happens to the device's blocks

    def published(self, blocks: Seq[tuple[BlockId, int, int]], chain: TokenChain, tenant: str) -> None:
        """Called when blocks, each with its index and group, have been published."""
        self._demotion.published(blocks, chain, tenant)

    def hit(self, table: BlockTable) -> None:
        """Called when a request has found these blocks on the device."""
        self._demotion.hit(table)

    def evicted(self, block_ids: Seq[BlockId]) -> None:
        """Called when cached blocks are evicted; their memory does not change before the next step."""
        self._demotion.evicted(block_ids)
        self.preempted.evicted(block_ids)

    # Finding and loading blocks

    def match(self, seq: Sequence, chain: TokenChain, most: int) -> PrefixHit:
        """Return what a preempted sequence left, or the longest prefix of at most `most` blocks on device and host."""
        left = self.preempted.find(seq.seq_id)
        return split_tiers(self._matcher.longest(chain, most), self._block_size) if left is None else left

    def missing(self, seq: Sequence, chain: TokenChain, most: int) -> Iterator[Label]:
        """Yield the labels of those of the first `most` blocks that neither device nor host has, in order."""
        if not self.host.num_prefix_slots:
            return
        for index in range(self.match(seq, chain, most).num_tokens // self._block_size, most):
            for group in range(self._num_groups):
                yield label_of(group, chain, index)

    def tokens_by_tier(self, hit: PrefixHit) -> dict[str, int]:
        """Return a hit's tokens by tier; a block that groups have in different tiers counts for the lowest of them."""
        depths: dict[int, int] = {}
        for _, index, slot in hit.loads:
            depths[index] = max(depths.get(index, 0), _TIERS.index(self.host.origin(slot)))
        size, by_tier = self._block_size, Counter(device=hit.num_tokens)
        for index, depth in depths.items():
            num_tokens = min(size, hit.num_tokens - index * size)
            by_tier[_TIERS[depth]] += num_tokens
            by_tier["device"] -= num_tokens
        return dict(by_tier)

    def load(self, seq: Sequence, tables: list[BlockTable], hit: PrefixHit) -> None:
        """Allocate blocks in a sequence's tables for those blocks of a hit that the next step must load."""
        host, returns = self.host, seq.seq_id in self.preempted
        # Hold the slots first, because allocating evicts blocks, which may take any slot that is not held.
        for _, _, slot in hit.loads:
            host.hold(slot)
        blocks = self._pool.allocate(len(hit.loads), seq.request.tenant)
        for (group, index, slot), block in zip(hit.loads, blocks, strict=True):
            tables[group][index] = block
            self.transfers.plan_load(slot, block, seq.seq_id, returns=returns)
            host.release(slot)
        if returns:
            self.preempted.came_back(seq.seq_id)

    def forget(self, seq_id: SequenceId) -> None:
        """Give up a sequence's blocks, including those it left behind, and cancel loads that no step has taken."""
        self.preempted.give_up(seq_id)
        self.transfers.cancel_loads(seq_id)

    def check(self) -> Findings:
        """Check all invariants. O(slots ever used + blocks of preempted sequences)."""
        yield from self.host.check()
        yield from self.transfers.check()
        yield from self.preempted.check()

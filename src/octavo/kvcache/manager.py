"""The KV cache manager: the only place where sequences take and give back blocks.

Every operation either succeeds completely or changes nothing. `audit()` proves that the pool's counts match the tables'
references.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import islice

from octavo.errors import CacheError
from octavo.kvcache.attended import Masses
from octavo.kvcache.block import NULL_BLOCK, BlockCopy, BlockId, BlockState, BlockTable, new_table
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.events import KVEventLog
from octavo.kvcache.eviction import make_eviction_policy
from octavo.kvcache.hierarchy import CacheHierarchy
from octavo.kvcache.holdings import Holding, Holdings
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.ledger import CacheLedger, Latest, RequestCopy, Stock
from octavo.kvcache.pins import PinTable
from octavo.kvcache.pool import BlockPool, check_references
from octavo.kvcache.prefix import PrefixHit, PrefixIndex
from octavo.kvcache.spec import KVCacheSpec
from octavo.request import CacheOutcome, CacheReport, PinReceipt, PinRequest, Request, Sequence

DEFAULT_PIN_BUDGET = 0.25
MOST_EVICTED = 256
MOST_COPIED = 64

# Blocks of a prefix that the order of admission depends on: sixteen prefixes of this length take 3 ms to look up.
_COMPARED_BLOCKS = 4096

_NO_COPIES: tuple[BlockCopy, ...] = ()


class KVCacheManager:
    """Block tables of all sequences over one pool.

    Args:
        spec: block size and groups.
        num_blocks: size of the pool, including the null block.
        caches_prefixes: whether full blocks are found by the tokens that they hold.
        eviction: name of the policy that chooses which cached block to evict, on the device and in host memory.
        identity: inputs of keys and values other than the tokens: model fingerprint, dtype, codec, …
        num_swap_slots: blocks of host memory for preempted sequences.
        num_prefix_slots: additional blocks of host memory, for prefixes that the device evicts.
        demotion: policy that chooses which of the device's blocks are copied to the host.
        pin_budget: share of the pool that may be pinned at once.
        pin_tenant_share: share of the pin budget that the pins of one tenant may hold.
        clock: a monotonic clock in seconds, for pins and the ledger.
        logs_events: whether to log which blocks are stored and removed, for indexes outside the engine.

    Attributes:
        holdings: what each sequence holds; read-only.
        hierarchy: the tiers below the device.
        evicted: the cached blocks evicted last.
        copied: the last copies of shared blocks, made because a sequence wrote into one.
        events: what indexes outside the engine must know; None if it is not logged.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        caches_prefixes: bool = True,
        eviction: str = "lru",
        *,
        identity: tuple[str, ...] = (),
        num_swap_slots: int = 0,
        num_prefix_slots: int = 0,
        demotion: str = "on_second_use",
        pin_budget: float = DEFAULT_PIN_BUDGET,
        pin_tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        logs_events: bool = False,
    ) -> None:
        self.spec = spec
        self.caches_prefixes = caches_prefixes
        if num_blocks < 2:
            raise CacheError(f"a pool needs the null block and at least one other, got {num_blocks}")
        self.blocks = BlockRecords(num_blocks, spec.block_size if caches_prefixes else 0)
        self._windows = spec.windows()
        self.prefix_cache = PrefixIndex(self.blocks, identity, self._windows)
        host = HostMemory(
            num_swap_slots + num_prefix_slots, num_swap_slots, spec.block_size, make_eviction_policy(eviction)
        )
        self.hierarchy = CacheHierarchy(
            self.blocks, self.prefix_cache, host, spec.block_size, len(self._windows), demotion
        )
        self.ledger = CacheLedger(num_blocks if caches_prefixes else 0, self.blocks, clock)
        self.evicted = Latest[BlockId](MOST_EVICTED)
        self.copied = Latest[RequestCopy](MOST_COPIED)
        logs_events = logs_events and caches_prefixes and self._windows[0] is None
        self.events = KVEventLog(self.blocks, self.prefix_cache) if logs_events else None
        # None of these refers to the pool, so that all are freed as soon as they are dropped. The index comes last,
        # because the others read what the blocks contain.
        on_evict = (
            self.evicted.add,
            *([] if self.events is None else [self.events.evicted]),
            self.hierarchy.evicted,
            self.ledger.evicted,
            self.prefix_cache.drop,
        )
        self.pool = BlockPool(self.blocks, make_eviction_policy(eviction), on_evict)
        budget_blocks = int(pin_budget * (num_blocks - 1))
        tenant_blocks = int(pin_tenant_share * budget_blocks)
        self.pins = PinTable(self.pool, budget_blocks, tenant_blocks, self.prefix_cache.longest, clock)
        self.holdings = Holdings(self.pool, self.prefix_cache, spec)
        self.no_hit = PrefixHit(0, tuple(new_table() for _ in self._windows))

    @property
    def usage(self) -> float:
        """The share of the pool that sequences reference, from 0 to 1."""
        return self.pool.num_active / (self.pool.num_blocks - 1)

    def tables(self, seq: Sequence) -> list[BlockTable]:
        """Return the sequence's block tables, one per group; read-only."""
        return self.holdings[seq].tables

    def match(self, seq: Sequence) -> PrefixHit:
        """Return a preempted sequence's blocks, or else the longest prefix cached on the device and in host memory.

        The sequence must hold no blocks, and takes none.
        """
        return self.hierarchy.match(seq, *self.holdings.matchable(seq))

    def cached_length(self, seq: Sequence) -> int:
        """Return the number of tokens, up to `_COMPARED_BLOCKS`, at a waiting sequence's beginning that the device has.

        The first look-up takes time proportional to the length of the prefix. The result holds until a block is
        published or evicted, and then two look-ups per group show whether the prefix still ends at the same token.
        """
        (chain, most), holding, size = self.holdings.matchable(seq), self.holdings[seq], self.spec.block_size
        version, most = self.pool.num_published_ever + self.evicted.count, min(most, _COMPARED_BLOCKS)
        known, length = holding.cached_at, holding.cached_length
        if known != version:
            holding.cached_at = version
            if known < 0 or not self.prefix_cache.ends_at(chain, length // size, most):
                holding.cached_length = self.prefix_cache.longest(chain, most).num_tokens
        return holding.cached_length

    def tokens_after(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return at most `most` cached tokens that followed the tokens of a running sequence in earlier requests."""
        if not self.caches_prefixes or seq.request.params.kv_budget is not None:
            return ()
        chain, size = self.holdings[seq].chain, self.spec.block_size
        chain.grow(seq.num_tokens, seq.tokens)
        return self.prefix_cache.tokens_after(chain, seq.tokens(len(chain) * size, seq.num_tokens), most)

    def bytes_by_state(self) -> dict[BlockState, int]:
        """Return the bytes of the pool's blocks by state, without the null block. O(1)."""
        return {state: count * self.spec.block_bytes for state, count in self.pool.count_states().items()}

    def explain(self, seq: Sequence, hit: PrefixHit) -> CacheReport:
        """Explain why the hit of a sequence is not longer; `no_hit` stands for a sequence that was not matched."""
        chain, length = self.holdings.begin(seq).chain, len(seq.request.prompt_token_ids)
        if hit is self.no_hit or not self.caches_prefixes:
            return CacheReport(length, 0, CacheOutcome.BYPASSED)
        return self.ledger.explain(seq.request, chain, hit.num_tokens // self.spec.block_size)

    def pin(self, request: Request, wanted: PinRequest) -> PinReceipt:
        """Pin the cached beginning of a request's prompt, as far as the tenant's share and the budget allow."""
        chain = self.holdings.prompt_chain(request)
        length = min(len(chain), wanted.num_tokens // self.spec.block_size)
        if None in self._windows:
            # Each full block takes at least one block of the budget, so a longer prefix could not be pinned.
            length = min(length, self.pins.budget_blocks, self.pins.tenant_blocks)
        pin = self.pins.pin(chain, length, request.cache_scope, request.tenant, wanted.ttl_seconds)
        pin_id, num_pinned = (None, 0) if pin is None else (pin.pin_id, pin.num_tokens)
        return PinReceipt(pin_id, wanted.num_tokens, num_pinned, wanted.ttl_seconds)

    def stock(self, requests: Iterable[Request]) -> Stock:
        """Count the blocks that hold something; `requests` must be all unfinished ones. O(blocks)."""
        held = (
            (seq.request, holding.tables, self.hierarchy.host_blocks(seq.seq_id))
            for seq, holding in self.holdings.of(requests)
        )
        return self.ledger.stock(held)

    def admit(self, seq: Sequence, hit: PrefixHit, num_new_tokens: int, reserve: int = 0) -> bool:
        """Give a sequence without blocks the hit's blocks and room for `num_new_tokens` after them.

        Args:
            reserve: number of blocks that must stay available afterwards.

        Returns:
            Whether there were enough blocks; if not, nothing has changed.
        """
        holding = self.holdings.begin(seq)
        if any(holding.tables):
            raise CacheError(f"sequence {seq.seq_id} is admitted while it holds blocks")
        pool, tenant = self.pool, seq.request.tenant
        if self.shortage(hit, num_new_tokens, reserve) > 0:
            return False
        total = self.spec.blocks_for_tokens(hit.num_tokens + num_new_tokens)
        for table in hit.tables:
            if table:
                pool.acquire(table, tenant, hit_by=seq.request.priority)
                self.hierarchy.hit(table)
        holding.tables, holding.cached_at = [table[:] for table in hit.tables], -1
        self.hierarchy.load(seq, holding.tables, hit, pool)
        # Loaded blocks are published together with those that the step computes.
        covered = hit.num_tokens // self.spec.block_size
        holding.num_published = min((index for _, index, _ in hit.loads), default=covered)
        self._append([(holding, total)], tenant)
        return True

    def count_owners(self, requests: Iterable[Request]) -> None:
        """Start counting blocks in use by tenant; `requests` must be all unfinished ones."""
        holdings = self.holdings.of(requests)
        self.pool.count_owners((seq.request.tenant, table) for seq, holding in holdings for table in holding.tables)

    def num_needed(self, hit: PrefixHit, num_new_tokens: int) -> int:
        """Return the number of blocks not in use that `admit` would take: new ones, and those of the hit."""
        total = self.spec.blocks_for_tokens(hit.num_tokens + num_new_tokens)
        counts = self.blocks.references
        unused = sum(counts[block] == 0 for table in hit.tables for block in table if block != NULL_BLOCK)
        return sum(total - len(table) for table in hit.tables) + unused + len(hit.loads)

    def shortage(self, hit: PrefixHit, num_new_tokens: int, reserve: int = 0) -> int:
        """Return how many available blocks `admit` lacks; 0 or negative if it would succeed.

        Blocks of the hit that other sequences hold cost nothing; the others are no longer available to evict.
        """
        total = self.spec.blocks_for_tokens(hit.num_tokens + num_new_tokens)
        needed = sum(total - len(table) for table in hit.tables) + len(hit.loads) + reserve - self.pool.num_available
        if (most := needed + sum(map(len, hit.tables))) <= 0:
            return most  # enough even if none of the hit's blocks were in use, so skip counting them
        return needed + sum(map(self.pool.num_evictable, hit.tables))

    def extend(
        self, seq: Sequence, num_new_tokens: int, room: Callable[[Sequence], int] | None = None
    ) -> Seq[BlockCopy] | None:
        """Make room for the tokens `num_computed .. num_computed + num_new_tokens`.

        If the first of them falls into a block that another sequence also holds, that block is replaced by a copy; the
        returned copies must be made before anything is written.

        Args:
            room: returns how many blocks the sequence may take; by default all that are available.

        Returns:
            The copies, or None if there are too few blocks, in which case nothing has changed.
        """
        start, holding = seq.num_computed, self.holdings[seq]
        if start + num_new_tokens <= holding.capacity:
            return _NO_COPIES
        pool, size, tables = self.pool, self.spec.block_size, holding.tables
        first, total = start // size, -(-(start + num_new_tokens) // size)
        shared = [table for table in tables if first < len(table) and self.blocks.references[table[first]] > 1]
        needed = len(shared) + sum(total - len(table) for table in tables if total > len(table))
        if needed > (pool.num_available if room is None else room(seq)):
            return None
        tenant = seq.request.tenant
        copies = []
        for table in shared:
            source, table[first] = table[first], pool.allocate(1, tenant)[0]
            pool.release((source,))
            copies.append(BlockCopy(source, table[first]))
            self.copied.add([RequestCopy(seq.request.request_id, *copies[-1])])
        self._append([(holding, total)], tenant)
        return copies

    def extend_all(self, seqs: Seq[Sequence]) -> bool:
        """Make room for the next token of each sequence, whose tables are full: `extend` for many at once.

        Returns:
            Whether it was done; if not, nothing has changed: a block is shared and must be copied first, there are too
            few blocks, or tenants' blocks are counted, so that each sequence has its own limit.
        """
        pool, size = self.pool, self.spec.block_size
        if pool.owners is not None or len(seqs) * len(self.spec.groups) > pool.num_available:
            return False
        growing = [(self.holdings[seq], seq.num_computed // size + 1) for seq in seqs]
        if any(len(table) + 1 != total for holding, total in growing for table in holding.tables):
            return False
        self._append(growing)
        return True

    def trim(self, seq: Sequence) -> bool:
        """Release the blocks behind a sequence's next token; returns whether there were any."""
        holding, num_blocks = self.holdings[seq], self.spec.blocks_for_tokens(seq.num_computed + 1)
        if holding.capacity <= num_blocks * self.spec.block_size:
            return False
        for table in holding.tables:
            self.pool.release(table[num_blocks:])
            del table[num_blocks:]
        holding.capacity = num_blocks * self.spec.block_size
        return True

    def measured(self, seq: Sequence, mass: Masses) -> None:
        """Note the mass of attention that some rows of a sequence had, before they are committed."""
        for retention, of_group in zip(self.holdings[seq].retained, mass, strict=False):
            retention.add(of_group)

    def commit(self, seq: Sequence) -> bool:
        """Publish the blocks that `num_computed` now fills and release those that are not kept, after a step.

        Returns:
            Whether blocks are gone that the runner's tables leave out (`Retention.leaves_out`).
        """
        holding, filled = self.holdings[seq], seq.num_computed // self.spec.block_size
        if filled > holding.num_published:
            self._publish(seq, holding, filled)
        if not holding.retained:
            return False
        gone, any_left_out = holding.let_go(seq.num_computed, self.spec.block_size)
        for blocks in gone:
            self.pool.release(blocks)
        return any_left_out

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the blocks of `parent` with `child`; the first to write gets a copy."""
        source = self.holdings[parent]
        if child in self.holdings:
            raise CacheError(f"sequence {child.seq_id} is forked into while it holds blocks")
        self.holdings[child] = source.fork()
        for table in source.tables:
            self.pool.acquire(table, child.request.tenant)

    def demote(self, seq: Sequence) -> bool:
        """Release all blocks of a sequence that is to resume later, and copy to the host those that would be lost.

        `match` finds all of them, as long as `can_resume` is true.

        Returns:
            Whether the host had room; if not, nothing has changed.
        """
        holding, (chain, _) = self.holdings[seq], self.holdings.matchable(seq)
        num_blocks = self.spec.blocks_for_tokens(seq.num_computed)
        if not self.hierarchy.leave(seq, [table[:num_blocks] for table in holding.tables], chain):
            return False
        self._give_back(holding)
        return True

    def has_swap_room(self, seq: Sequence) -> bool:
        """Whether the swap space has room for all blocks that only this sequence holds."""
        num_left = self.hierarchy.host.num_swap_slots - self.hierarchy.num_kept
        return self.holdings.restore_cost(seq).blocks <= num_left

    def can_resume(self, seq: Sequence) -> bool:
        """Whether `match` finds everything that a demoted sequence had computed; this may become false at any time."""
        return self.hierarchy.can_resume(seq.seq_id)

    def release(self, seq: Sequence) -> None:
        """Release all blocks, the tail first so that it is evicted before the head. The hash chain is kept."""
        self.hierarchy.forget(seq.seq_id)
        if (holding := self.holdings.get(seq)) is not None:
            self._give_back(holding)
            holding.retained = self.holdings.retained(seq)

    def forget(self, seq: Sequence) -> None:
        """Forget a finished sequence and release what it holds."""
        self.hierarchy.forget(seq.seq_id)
        if (holding := self.holdings.pop(seq, None)) is not None:
            self._give_back(holding)

    def reset_prefix_cache(self) -> int:
        """Evict every cached block and return their number. Blocks in use or pinned stay published.

        Host memory forgets its prefixes too, except those kept for preempted sequences; blocks on disk or in a remote
        store stay.
        """
        count = self.pool.evict_all_cached()
        self.hierarchy.host.clear(self.hierarchy.kept_slots())
        return count

    def audit(self) -> dict[BlockState, int]:
        """Prove that every block is in exactly one state and every count matches the tables' references. O(blocks).

        Returns:
            The number of blocks in each state.

        Raises:
            CacheError: an invariant is violated; the message lists every violation.
        """
        found = [
            *self.pool.check(),
            *check_references(self.blocks, self.holdings.tables()),
            *self.prefix_cache.check(),
            *self.pins.check(),
            *self.ledger.check(),
            *self.hierarchy.check(),
        ]
        if found:
            raise CacheError("audit failed: " + "; ".join(found))
        return self.pool.count_states()

    def _append(self, growing: Seq[tuple[Holding, int]], tenant: str = "") -> None:
        """Append available blocks to each table of some holdings, up to the given number of blocks."""
        missing = [max(0, total - len(table)) for holding, total in growing for table in holding.tables]
        counts, blocks = iter(missing), iter(self.pool.allocate(sum(missing), tenant))
        for holding, total in growing:
            for table in holding.tables:
                table.extend(islice(blocks, next(counts)))
            holding.capacity = total * self.spec.block_size

    def _give_back(self, holding: Holding) -> None:
        for table in holding.empty_tables():
            self.pool.release(table)

    def _publish(self, seq: Sequence, holding: Holding, filled: int) -> None:
        chain = holding.chain
        chain.grow(seq.num_tokens, seq.tokens)
        first, last = holding.num_published, min(filled, len(chain))
        published = self.prefix_cache.publish(chain, first, [table[first:last] for table in holding.tables])
        if self.events is not None:
            self.events.published(chain, published)
        # The tail first, as on release, so that among blocks published together the tail is evicted first.
        published.reverse()
        for block, index, _, key in published:
            self.pool.note_published(block, seq.request.priority, key)
            if not index:
                self.ledger.published(block, chain)
        self.hierarchy.published([block for block, *_ in published])
        holding.num_published = filled

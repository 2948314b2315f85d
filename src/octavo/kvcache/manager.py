"""The KV cache manager: the one place where sequences take and give back blocks.

Every operation either does all of what it is asked or changes nothing. `audit()` proves that the pool's counts are
the tables' references.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

from octavo.errors import CacheError
from octavo.kvcache.audit import Audit, Findings, counted, proven
from octavo.kvcache.block import NULL_BLOCK, BlockCopy, BlockId, BlockState, BlockTable, as_array, new_table
from octavo.kvcache.eviction import EvictionPolicy, make_eviction_policy
from octavo.kvcache.hashing import FullBlocks, TokenChain, group_key
from octavo.kvcache.hierarchy import CacheHierarchy
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.ledger import CacheLedger, NullLedger, Stock
from octavo.kvcache.matching import PrefixHit, PrefixMatcher
from octavo.kvcache.pins import PinTable
from octavo.kvcache.pool import BlockPool, check_references
from octavo.kvcache.preempted import RestoreCost
from octavo.kvcache.prefix.base import NullPrefixCache, PrefixCache
from octavo.kvcache.spec import KVCacheSpec
from octavo.request import CacheOutcome, CacheReport, PinReceipt, PinRequest, Request, Sequence, SequenceId


@dataclass(slots=True)
class _Holding:
    """The blocks and hash chain of one sequence.

    Attributes:
        num_slid: leading table entries given up to a window, per group.
        num_published: full blocks that the prefix cache was offered.
        next_full: not before so many tokens are computed is there another to offer.
        room: tokens that the sequence may write as things are: its tables have blocks for them, which nobody shares.
    """

    tables: list[BlockTable]
    chain: TokenChain
    num_slid: list[int]
    num_published: int = 0
    next_full: int = 0
    room: int = 0


DEFAULT_PIN_BUDGET = 0.25

_NO_COPIES: tuple[BlockCopy, ...] = ()


class KVCacheManager:
    """Block tables of all sequences over one pool.

    Args:
        spec: block size and groups.
        num_blocks: size of the pool, the null block included.
        prefix_cache: index of computed prefixes (`NullPrefixCache` for none).
        eviction: order in which cached blocks are given up.
        pin_budget: share of the pool that may be pinned at once.
        pin_tenant_share: share of that which the pins of one tenant may hold.
        clock: seconds, never going back; for pins and the ledger.
        host: host memory, for prefixes that the device evicts and for preempted sequences; by default none.
        demotion: which of the device's blocks go there (`make_demotion`).
        explains: whether the ledger records who computed what, to say why a prompt was not cached.

    Attributes:
        hierarchy: all that lies below the device.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        prefix_cache: PrefixCache[Any],
        eviction: EvictionPolicy,
        *,
        host: HostMemory | None = None,
        demotion: str = "on_second_use",
        pin_budget: float = DEFAULT_PIN_BUDGET,
        pin_tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        explains: bool = True,
    ) -> None:
        self.spec = spec
        self.caches_prefixes = caches = not isinstance(prefix_cache, NullPrefixCache)
        self.pool = BlockPool(num_blocks, eviction, on_evict=self._on_evict)
        self.prefix_cache = prefix_cache
        prefix_cache.reserve(num_blocks)
        self._windows = [group.sliding_window for group in spec.groups]
        self._matcher = PrefixMatcher(prefix_cache, spec.block_size, self._windows)
        if host is None:
            host = HostMemory(0, 0, spec.block_size, make_eviction_policy("lru"))
        self.hierarchy = CacheHierarchy(self.pool, prefix_cache, host, spec.block_size, self._windows, demotion)
        budget_blocks = int(pin_budget * (num_blocks - 1))
        tenant_blocks = int(pin_tenant_share * budget_blocks)
        self.pins = PinTable(self.pool, budget_blocks, tenant_blocks, self._matcher.longest, clock)
        ledger = CacheLedger if explains else NullLedger
        self.ledger = ledger(num_blocks if caches else 0, prefix_cache.tokens, clock)
        self._holdings: dict[SequenceId, _Holding] = {}
        self._num_evicted = 0
        self.no_hit = PrefixHit(0, tuple(new_table() for _ in self._windows))
        self.slides = any(window is not None for window in self._windows)

    @property
    def usage(self) -> float:
        """Share of the pool that sequences reference, 0 to 1."""
        return self.pool.num_active / (self.pool.num_blocks - 1)

    @property
    def num_evicted(self) -> int:
        """Cached blocks that gave way to others, ever."""
        return self._num_evicted

    def tables(self, seq: Sequence) -> list[BlockTable]:
        """The sequence's block tables, one per group: to read, not to change."""
        return self._holdings[seq.seq_id].tables

    def hash_prompt(self, request: Request) -> None:
        """Pack and hash a request's prompt outside the engine's thread. Thread-safe."""
        request.full_blocks = self.prefix_cache.full_blocks(request.prompt_token_ids, request.cache_scope)

    def match(self, seq: Sequence) -> PrefixHit:
        """All that a preempted sequence left, else the longest prefix that the device and host memory have.

        The sequence holds no block; takes nothing.
        """
        return self.hierarchy.match(seq, *self.matchable(seq))

    def match_on_device(self, seq: Sequence) -> PrefixHit:
        """The longest prefix of a sequence that the device has."""
        tables = self._matcher.longest(*self.matchable(seq))
        return PrefixHit(len(tables[0]) * self.spec.block_size, tables)

    def still_matches(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether `match_on_device` most probably finds as many tokens as once, at the cost of two look-ups."""
        chain, most = self.matchable(seq)
        return self._matcher.ends_at(chain, num_tokens // self.spec.block_size, most)

    @property
    def version(self) -> int:
        """Changes with every block that is published or evicted: until then `match_on_device` finds the same."""
        return self.pool.num_published_ever + self._num_evicted

    def matchable(self, seq: Sequence) -> tuple[TokenChain, int]:
        """A sequence's chain, and how many of its blocks a hit may cover: not its last token."""
        chain = self._holding(seq).chain
        chain.grow(seq.num_tokens, seq.tokens)
        return chain, min(len(chain), (seq.num_tokens - 1) // self.spec.block_size)

    def bytes_by_state(self) -> dict[BlockState, int]:
        """Of the whole pool but the null block. O(1)."""
        pool, size = self.pool, self.spec.block_bytes
        return {
            BlockState.FREE: pool.num_free * size,
            BlockState.CACHED: pool.num_cached * size,
            BlockState.PINNED: pool.num_pinned * size,
            BlockState.ACTIVE: pool.num_active * size,
        }

    def explain(self, seq: Sequence, hit: PrefixHit) -> CacheReport:
        """Why the cached prefix of a sequence that was matched, or was not to be matched, is not longer."""
        chain, length = self._holding(seq).chain, len(seq.request.prompt_token_ids)
        if hit is self.no_hit or not self.caches_prefixes:
            return CacheReport(length, 0, CacheOutcome.BYPASSED)
        return self.ledger.explain(seq.request, chain, hit.num_tokens // self.spec.block_size)

    def pin(self, request: Request, wanted: PinRequest) -> PinReceipt:
        """Pin what is cached of the beginning of a request's prompt, as far as the tenant's share and the budget go."""
        chain = self._prompt_chain(request)
        length = min(len(chain), wanted.num_tokens // self.spec.block_size)
        if None in self._windows:
            # So many blocks at least, none of them twice: no need to look for more than may be pinned.
            length = min(length, self.pins.budget_blocks, self.pins.tenant_blocks)
        known = self._published_prefix(request, length)
        pin = self.pins.pin(chain, length, request.cache_scope, request.tenant, wanted.ttl_seconds, known)
        pin_id, num_pinned = (None, 0) if pin is None else (pin.pin_id, pin.num_tokens)
        return PinReceipt(pin_id, wanted.num_tokens, num_pinned, wanted.ttl_seconds)

    def _published_prefix(self, request: Request, length: int) -> tuple[BlockTable, ...] | None:
        """The first blocks of a request that runs, where the prefix cache has these very blocks: nothing to look up.

        It has not where another request has published equal blocks before, and is asked then; and where a window has
        given up blocks that a shorter prefix needs.
        """
        if self.slides or not request.sequences or (holding := self._holdings.get(request.sequences[0].seq_id)) is None:
            return None
        tables = tuple(table[:length] for table in holding.tables)
        return tables if all(len(t) == length and self.pool.are_published(t) for t in tables) else None

    def stock(self, requests: Iterable[Request]) -> Stock:
        """Every block by state and tenant, and what each of `requests` holds: all that have not ended. O(blocks)."""
        preempted = self.hierarchy.preempted
        held = (
            (request, holding.tables, preempted.host_blocks(seq.seq_id))
            for request in requests
            for seq in request.sequences
            if (holding := self._holdings.get(seq.seq_id)) is not None
        )
        return self.ledger.stock(self.pool, held)

    def admit(self, seq: Sequence, hit: PrefixHit, num_new_tokens: int, reserve: int = 0) -> bool:
        """Give a sequence without blocks the hit's blocks and room for `num_new_tokens` after them.

        Args:
            reserve: blocks that must stay available afterwards.

        Returns:
            Whether it was possible; if not, nothing has changed.
        """
        holding = self._holding(seq)
        if any(holding.tables):
            raise CacheError(f"sequence {seq.seq_id} is admitted while it holds blocks")
        pool, tenant = self.pool, seq.request.tenant
        if self.shortage(hit, num_new_tokens, reserve) > 0:
            return False
        total = self.spec.blocks_for_tokens(hit.num_tokens + num_new_tokens)
        for table in hit.tables:
            if table:
                pool.acquire_all(table, tenant)
                pool.note_hit(table, seq.request.priority)
                self.hierarchy.hit(table)
        holding.tables = [table[:] for table in hit.tables]
        self.hierarchy.load(seq, holding.tables, hit)
        holding.num_slid = [int((as_array(table) == NULL_BLOCK).sum()) for table in holding.tables]
        # What is loaded is published with what the step computes.
        covered = hit.num_tokens // self.spec.block_size
        holding.num_published = min((index for _, index, _ in hit.loads), default=covered)
        for table in holding.tables:
            table.extend(pool.allocate(total - len(table), tenant))
        holding.room = total * self.spec.block_size
        return True

    def count_owners(self, requests: Iterable[Request]) -> None:
        """Count from now on which tenant each block in use counts for; `requests` are all that have not ended."""
        sequences = (seq for request in requests for seq in request.sequences)
        holdings = ((seq.request.tenant, self._holdings.get(seq.seq_id)) for seq in sequences)
        self.pool.count_owners(
            (tenant, table) for tenant, holding in holdings if holding is not None for table in holding.tables
        )

    def num_needed(self, hit: PrefixHit, num_new_tokens: int) -> int:
        """Blocks that `admit` takes and nobody uses: new ones, and those of the hit."""
        total = self.spec.blocks_for_tokens(hit.num_tokens + num_new_tokens)
        counts = self.pool.ref_counts
        unused = sum(counts[block] == 0 for table in hit.tables for block in table if block != NULL_BLOCK)
        return sum(total - len(table) for table in hit.tables) + unused + len(hit.loads)

    def shortage(self, hit: PrefixHit, num_new_tokens: int, reserve: int = 0) -> int:
        """How many available blocks `admit` lacks; 0 or less where it would succeed.

        Blocks of the hit that somebody else holds cost nothing; those that nobody holds can no longer be evicted.
        """
        total = self.spec.blocks_for_tokens(hit.num_tokens + num_new_tokens)
        needed = sum(total - len(table) for table in hit.tables) + len(hit.loads)
        revived = sum(map(self.pool.num_evictable, hit.tables))
        return needed + revived + reserve - self.pool.num_available

    def extend(
        self, seq: Sequence, num_new_tokens: int, room: Callable[[Sequence], int] | None = None
    ) -> Seq[BlockCopy] | None:
        """Make room for the tokens `num_computed .. num_computed + num_new_tokens`.

        Where the first of them falls into a block that another sequence also holds, that block is replaced by a
        copy: the copies returned must be done before anything is written.

        Args:
            room: how many blocks the sequence may take; by default all that are available.

        Returns:
            The copies, or None where the pool has too few blocks; then nothing has changed.
        """
        start, holding = seq.num_computed, self._holdings[seq.seq_id]
        if start + num_new_tokens <= holding.room:
            return _NO_COPIES
        pool, size, tables = self.pool, self.spec.block_size, holding.tables
        first, total = start // size, -(-(start + num_new_tokens) // size)
        shared = [table for table in tables if first < len(table) and pool.ref_counts[table[first]] > 1]
        needed = len(shared) + sum(total - len(table) for table in tables if total > len(table))
        if needed > (pool.num_available if room is None else room(seq)):
            return None
        tenant = seq.request.tenant
        copies = []
        for table in shared:
            source, table[first] = table[first], pool.allocate(1, tenant)[0]
            pool.release((source,))
            copies.append(BlockCopy(source, table[first]))
        for table in tables:
            if total > len(table):
                table.extend(pool.allocate(total - len(table), tenant))
        holding.room = total * size
        return copies

    def commit(self, seq: Sequence) -> None:
        """After a step: publish the blocks that `num_computed` now fills, give up those that slid out of a window."""
        holding = self._holdings[seq.seq_id]
        if seq.num_computed >= holding.next_full:
            self._publish(seq, holding, seq.num_computed // self.spec.block_size)
        if self.slides:
            self._slide(seq.num_computed, holding)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the blocks of `parent` with `child`; the first to write gets a copy."""
        source = self._holdings[parent.seq_id]
        if child.seq_id in self._holdings:
            raise CacheError(f"sequence {child.seq_id} is forked into while it holds blocks")
        for table in source.tables:
            self.pool.acquire_all(table, child.request.tenant)
        # The next to write looks whether its block is shared.
        source.room = 0
        self._holdings[child.seq_id] = _Holding(
            [table[:] for table in source.tables],
            source.chain.copy(),
            source.num_slid.copy(),
            source.num_published,
        )

    def demote(self, seq: Sequence) -> bool:
        """Give back all blocks of a sequence that is to go on where it is, and copy to the host what would be lost.

        `match` finds it all again, as long as `can_resume`.

        Returns:
            Whether the host had room; if not, nothing has changed.
        """
        holding, (chain, _) = self._holdings[seq.seq_id], self.matchable(seq)
        num_blocks = self.spec.blocks_for_tokens(seq.num_computed)
        if not self.hierarchy.preempted.leave(seq, [table[:num_blocks] for table in holding.tables], chain):
            return False
        self.hierarchy.host.cancel_loads(seq.seq_id)
        self._give_back(holding)
        return True

    def can_resume(self, seq: Sequence) -> bool:
        """Whether `match` finds all that a demoted sequence had computed; it may be given up at any time."""
        return seq.seq_id in self.hierarchy.preempted

    def num_freed_by(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that would become available if all of these gave theirs back. O(their blocks)."""
        counts, pins = self.pool.ref_counts, self.pool.pin_counts
        held = Counter(block for seq in sequences for table in self._holdings[seq.seq_id].tables for block in table)
        held.pop(NULL_BLOCK, None)
        return sum(counts[block] == references and not pins[block] for block, references in held.items())

    def restore_cost(self, seq: Sequence) -> RestoreCost:
        """The cost of preempting this sequence and the blocks it would free. O(blocks of the sequence)."""
        counts = self.pool.ref_counts
        tables = self._holdings[seq.seq_id].tables
        blocks = sum(block != NULL_BLOCK and counts[block] == 1 for table in tables for block in table)
        # The first block that nobody else holds, or that a window has given up, and all behind it.
        kept = min(next((i for i, block in enumerate(table) if counts[block] <= 1), len(table)) for table in tables)
        return RestoreCost(max(0, seq.num_computed - kept * self.spec.block_size), blocks)

    def release(self, seq: Sequence) -> None:
        """Give back all blocks, the tail first, so that it is evicted before the head. The hash chain is kept."""
        self.hierarchy.forget(seq.seq_id)
        if (holding := self._holdings.get(seq.seq_id)) is not None:
            self._give_back(holding)

    def _give_back(self, holding: _Holding) -> None:
        for table in holding.tables:
            self.pool.release_table(table)
        holding.tables = [new_table() for _ in self._windows]
        holding.num_slid = [0] * len(self._windows)
        holding.num_published = holding.next_full = holding.room = 0

    def forget(self, seq: Sequence) -> None:
        """Forget a finished sequence and release what it holds."""
        self.hierarchy.forget(seq.seq_id)
        if (holding := self._holdings.pop(seq.seq_id, None)) is not None:
            for table in holding.tables:
                self.pool.release_table(table)

    def reset_prefix_cache(self) -> int:
        """Evict every cached block; returns how many. Blocks in use or pinned stay published.

        Host memory forgets its prefixes too; what lies on disk or in a remote store stays.
        """
        count = self.pool.evict_all_cached()
        self.hierarchy.host.clear()
        return count

    def audit(self) -> Audit:
        """Prove that every block is in exactly one state and every count is the tables' references. O(blocks).

        Raises:
            CacheError: listing every violation.
        """
        auditor = self.auditor()
        while True:
            try:
                next(auditor)
            except StopIteration as end:
                audit: Audit = end.value
                return audit

    def auditor(self) -> Generator[None, None, Audit]:
        """`audit` in slices of some tenths of a millisecond, so that the caller can stop in between.

        Any change to the cache voids what is left of it: start anew.
        """
        pool, holdings = self.pool, self._holdings.values()
        yield from proven(self._check())
        states = yield from counted(pool.state(BlockId(i)) for i in range(pool.num_blocks))
        num_sequences = sum(any(holding.tables) for holding in holdings)
        return Audit(states, num_sequences, len(self.hierarchy.preempted), self.hierarchy.host.claims.num_slots)

    def _check(self) -> Findings:
        yield from self.pool.check()
        tables = (table for holding in self._holdings.values() for table in holding.tables)
        yield from check_references(self.pool, tables, self.prefix_cache)
        yield from self.prefix_cache.check()
        yield from self.pins.check()
        yield from self.ledger.check(self.pool)
        yield from self.hierarchy.check()

    def _on_evict(self, block_id: BlockId) -> None:
        self._num_evicted += 1
        # First, while it can still be said what the block holds.
        self.hierarchy.evicted(block_id)
        self.prefix_cache.drop(block_id)
        self.ledger.evicted(block_id)

    def _holding(self, seq: Sequence) -> _Holding:
        holding = self._holdings.get(seq.seq_id)
        if holding is None:
            tables = [new_table() for _ in self._windows]
            chain = self._prompt_chain(seq.request)
            holding = self._holdings[seq.seq_id] = _Holding(tables, chain, [0] * len(tables))
        return holding

    def _prompt_chain(self, request: Request) -> TokenChain:
        """A chain that begins with the full blocks of the prompt, which are hashed here where nobody did before."""
        if not isinstance(request.full_blocks, FullBlocks):
            self.hash_prompt(request)
        chain: TokenChain = self.prefix_cache.chain(request.cache_scope, cast(FullBlocks, request.full_blocks))
        return chain

    def _publish(self, seq: Sequence, holding: _Holding, filled: int) -> None:
        chain = holding.chain
        chain.grow(seq.num_tokens, seq.tokens)
        published = [
            (block, index, group)
            for index in range(holding.num_published, min(filled, len(chain)))
            for group, table in enumerate(holding.tables)
            if (block := table[index]) != NULL_BLOCK and self.prefix_cache.put(group, chain, index, block)
        ]
        # The tail first, as on release: what a step published together leaves by age from its end.
        published.reverse()
        for block, index, group in published:
            self.pool.mark_published(block, index, seq.request.priority, group_key(group, chain.key(index + 1)))
        self.ledger.published([(block, index) for block, index, _ in published], chain, seq.request)
        self.hierarchy.published(published, chain, seq.request.tenant)
        holding.num_published = filled
        holding.next_full = (filled + 1) * self.spec.block_size

    def _slide(self, num_computed: int, holding: _Holding) -> None:
        size = self.spec.block_size
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            table, slid = holding.tables[group], holding.num_slid[group]
            first = min(max(0, num_computed - window + 1) // size, len(table))
            if first > slid:
                self.pool.release_table(table[slid:first])
                table[slid:first] = new_table([NULL_BLOCK] * (first - slid))
                holding.num_slid[group] = first

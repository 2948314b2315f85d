"""Who holds which bytes, and why the prefix cache did not help: what the cache's books say beside its counts.

The pool counts and the prefix cache finds; neither knows whose a block is or what became of one that is gone. The
ledger notes that when a block is published or evicted, and is asked once per request and by `/debug/kv`. What it
remembers is bounded by the pool: one note a published block, and the latest evictions.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockState
from octavo.kvcache.hashing import TokenChain
from octavo.kvcache.pool import BlockPool
from octavo.request import CacheOutcome, CacheReport, Request, RequestId

TOKEN_BYTES = 4
# Evictions remembered per block of the pool, and at most: a note takes some 300 bytes.
EVICTIONS_PER_BLOCK = 4
MAX_EVICTIONS = 65_536


class _Origin(NamedTuple):
    """Where a published block comes from: `key` stands for the prefix that it ends, `parent` for the one before it."""

    key: Hashable
    parent: Hashable
    tokens: bytes
    first: bool
    tenant: str
    scope: str
    request_id: RequestId


class _Eviction(NamedTuple):
    at: float
    tenant: str


@dataclass(slots=True)
class CacheTotals:
    """Prompt tokens since the start, each counted once, at its request's first admission.

    `queried_tokens` = `cached_tokens` + the sum of `uncached_tokens`, exactly.
    """

    queried_tokens: int = 0
    cached_tokens: int = 0
    uncached_tokens: Counter[CacheOutcome] = field(default_factory=Counter)
    requests: Counter[CacheOutcome] = field(default_factory=Counter)

    def add(self, report: CacheReport) -> None:
        self.queried_tokens += report.num_prompt_tokens
        self.cached_tokens += report.num_cached_tokens
        self.uncached_tokens[report.outcome] += report.num_uncached_tokens
        self.requests[report.outcome] += 1

    def merge(self, other: CacheTotals) -> None:
        self.queried_tokens += other.queried_tokens
        self.cached_tokens += other.cached_tokens
        self.uncached_tokens.update(other.uncached_tokens)
        self.requests.update(other.requests)


@dataclass(frozen=True, slots=True)
class RequestHolding:
    """The blocks of one unfinished request, each counted once, whichever of its sequences hold it.

    Attributes:
        num_shared: of these, referenced more than once.
        num_published: of these, in the prefix cache: they will be cached, not free, once they are released.
        num_pinned: of these, pinned: they will be protected even then.
        num_swapped: blocks of host memory that its swapped sequences hold.
    """

    request: Request
    num_active: int
    num_shared: int
    num_published: int
    num_pinned: int
    num_swapped: int


@dataclass(frozen=True, slots=True)
class Stock:
    """Every block of the pool but the null block, by state, and by the tenant that is answerable for it.

    A published block is its first computer's, another the one's who holds it; free blocks are nobody's. So the
    tenants' blocks and the free ones add up to all.

    Attributes:
        swapped: blocks of host memory, by the tenant of the sequence whose keys and values they hold.
    """

    states: Mapping[BlockState, int]
    tenants: Mapping[str, Mapping[BlockState, int]]
    holdings: list[RequestHolding]
    swapped: Mapping[str, int]


class CacheLedger:
    """Notes of what is published and evicted; O(1) each.

    Args:
        num_blocks: of the pool; bounds what is remembered.
        clock: seconds, never going back.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.totals: dict[str, CacheTotals] = {}  # by tenant: as many as there are API keys
        self._clock = clock
        self._origins: dict[BlockId, _Origin] = {}
        self._continued: dict[Hashable, _Origin] = {}  # by what they continue, the latest
        self._firsts: dict[bytes, _Origin] = {}  # by tokens, whatever the scope, the latest
        self._evictions: OrderedDict[Hashable, _Eviction] = OrderedDict()
        self._max_evictions = min(EVICTIONS_PER_BLOCK * num_blocks, MAX_EVICTIONS)

    def published(self, block_id: BlockId, chain: TokenChain, index: int, request: Request) -> None:
        """A request has computed full block `index` of the chain, and it is in the prefix cache now."""
        parent, tokens = chain.key(index), chain.tokens[index]
        key = chain.key(index + 1)
        origin = _Origin(key, parent, tokens, not index, request.tenant, request.cache_scope, request.request_id)
        self._origins[block_id] = self._continued[parent] = origin
        if index == 0:
            self._firsts[tokens] = origin

    def evicted(self, block_id: BlockId) -> None:
        """A cached block has given way."""
        origin = self._origins.pop(block_id)
        if self._continued.get(origin.parent) is origin:
            del self._continued[origin.parent]
        if origin.first and self._firsts.get(origin.tokens) is origin:
            del self._firsts[origin.tokens]
        evictions = self._evictions
        evictions[origin.key] = _Eviction(self._clock(), origin.tenant)
        evictions.move_to_end(origin.key)
        if len(evictions) > self._max_evictions:
            evictions.popitem(last=False)

    def explain(self, request: Request, chain: TokenChain, cached_blocks: int) -> CacheReport:
        """Why a prompt's cached prefix ends after that many blocks."""
        size, length = chain.block_size, len(request.prompt_token_ids)
        limit = (length - 1) // size

        def report(outcome: CacheOutcome, owner: str | None = None) -> CacheReport:
            return CacheReport(length, cached_blocks * size, outcome, owner=owner)

        if limit == 0:
            return report(CacheOutcome.TOO_SHORT)
        if cached_blocks >= limit:
            return report(CacheOutcome.COMPLETE)
        tokens = chain.tokens[cached_blocks]
        if (eviction := self._evictions.get(chain.key(cached_blocks + 1))) is not None:
            ago = self._clock() - eviction.at
            return replace(report(CacheOutcome.EVICTED, eviction.tenant), evicted_seconds_ago=ago)
        rival = self._continued.get(chain.key(cached_blocks))
        common = 0 if rival is None else _common_tokens(rival.tokens, tokens)
        if rival is None or common + cached_blocks == 0:
            # Last, so that other scopes never change what is told of this one: it is cold there.
            twin = self._firsts.get(tokens) if cached_blocks == 0 else None
            if twin is not None and twin.scope != request.cache_scope:
                return report(CacheOutcome.SALT, twin.tenant)
            return report(CacheOutcome.COLD)
        if common == size:
            # One group still has it: another group's was evicted, longer ago than is remembered.
            return report(CacheOutcome.EVICTED, rival.tenant)
        at = cached_blocks * size + common
        diverged = report(CacheOutcome.DIVERGED, rival.tenant)
        return replace(diverged, diverged_at=at, diverged_from=rival.request_id)

    def admitted(self, request: Request, report: CacheReport) -> None:
        """A request has been admitted for the first time: its report is settled, and counted."""
        request.cache_report = report
        totals = self.totals.get(request.tenant)
        if totals is None:
            totals = self.totals[request.tenant] = CacheTotals()
        totals.add(report)

    def stock(self, pool: BlockPool, sequences: Iterable[tuple[Request, list[list[BlockId]], int]]) -> Stock:
        """Every block by state and tenant. O(blocks).

        Args:
            sequences: of each that holds blocks its request, its tables, and how many blocks it has in host memory.
        """
        held: dict[RequestId, tuple[Request, set[BlockId]]] = {}
        holders: dict[BlockId, str] = {}
        away: Counter[RequestId] = Counter()
        swapped: Counter[str] = Counter()
        for request, groups, num_swapped in sequences:
            _, blocks = held.setdefault(request.request_id, (request, set()))
            for table in groups:
                blocks.update(table)
            blocks.discard(NULL_BLOCK)
            holders.update(dict.fromkeys(blocks, request.tenant))
            if num_swapped:
                away[request.request_id] += num_swapped
                swapped[request.tenant] += num_swapped
        states: Counter[BlockState] = Counter({state: 0 for state in BlockState if state is not BlockState.NULL})
        tenants: dict[str, Counter[BlockState]] = {}
        for i in range(1, pool.num_blocks):
            block_id = BlockId(i)
            state = pool.state(block_id)
            states[state] += 1
            if state is not BlockState.FREE:
                origin = self._origins.get(block_id)
                tenant = holders[block_id] if origin is None else origin.tenant
                tenants.setdefault(tenant, Counter())[state] += 1
        holdings = [_holding(pool, request, blocks, away[name]) for name, (request, blocks) in held.items()]
        return Stock(states, tenants, holdings, swapped)

    def check(self, pool: BlockPool) -> Findings:
        """The ledger's own invariants. O(blocks)."""
        for batch in in_slices(range(pool.num_blocks)):
            for i in batch:
                if pool.is_published(BlockId(i)) != (i in self._origins):
                    yield f"block {i} is either published or noted, not both"
            yield None
        # Each remembered block must be one that is noted: then as many notes are remembered as there are entries.
        num_continued = num_firsts = 0
        for origins in in_slices(self._origins.values()):
            for origin in origins:
                num_continued += self._continued.get(origin.parent) is origin
                num_firsts += origin.first and self._firsts.get(origin.tokens) is origin
            yield None
        for name, number, index in (
            ("continued", num_continued, self._continued),
            ("first", num_firsts, self._firsts),
        ):
            if number != len(index):
                yield f"a {name} block is remembered that is not published"
        for tenant, totals in self.totals.items():
            if totals.queried_tokens != totals.cached_tokens + totals.uncached_tokens.total():
                yield f"tenant {tenant!r}: cached and uncached tokens do not add up to those queried"


def _holding(pool: BlockPool, request: Request, blocks: set[BlockId], num_swapped: int) -> RequestHolding:
    return RequestHolding(
        request,
        num_active=len(blocks),
        num_shared=sum(pool.ref_counts[block] > 1 for block in blocks),
        num_published=sum(pool.is_published(block) for block in blocks),
        num_pinned=sum(block in pool.pin_counts for block in blocks),
        num_swapped=num_swapped,
    )


def _common_tokens(a: bytes, b: bytes) -> int:
    """How many packed tokens two blocks have in common from their beginning."""
    if a == b:
        return len(a) // TOKEN_BYTES
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y) // TOKEN_BYTES

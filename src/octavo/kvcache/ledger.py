"""The ledger: which tenant holds which bytes, and why the prefix cache missed.

The pool counts blocks and the prefix cache finds them, but neither knows whose a block is or what became of an evicted
one. The ledger records that when a block is published or evicted, and is queried once per request and by `/debug/kv`.
Its memory is bounded by the pool: arrays by block id with one entry per published block, and the latest evictions.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockState, BlockTable, HostBlockId
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.hashing import DIGEST_BYTES, NO_SOURCE, TOKEN_BYTES, Source, TokenChain, key_prefix
from octavo.kvcache.key_index import LatestKeys
from octavo.request import CacheOutcome, CacheReport, Request, RequestId

# Evictions are remembered for as many blocks as the pool has, but at most for this many.
MAX_EVICTIONS = 65_536

# The first block is remembered for one prompt per eight blocks of the pool, but at least for 64 prompts.
_FEWEST_FIRSTS = 64
_BLOCKS_PER_FIRST = 8


_T = TypeVar("_T")


class _Eviction(NamedTuple):
    at: int  # whole seconds, so that evictions share records
    tenant: str


class _FirstBlock(NamedTuple):
    block_id: BlockId
    source: Source


@dataclass(slots=True)
class CacheTotals:
    """Prompt tokens since the start, each counted once, at its request's first admission.

    `queried_tokens` is exactly `cached_tokens` + the sum of `uncached_tokens`.
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
    """The blocks of one unfinished request, each counted once even if several of its sequences hold it.

    Attributes:
        active: blocks that it holds.
        shared: of these, blocks referenced more than once.
        published: of these, blocks in the prefix cache, which become cached rather than free when released.
        pinned: of these, blocks with a pin, which stay protected when released.
        swapped: blocks of host memory that its swapped sequences hold.
    """

    active: int = 0
    shared: int = 0
    published: int = 0
    pinned: int = 0
    swapped: int = 0


@dataclass(frozen=True, slots=True)
class Stock:
    """The blocks in use or cached, by the tenant that they count for and by request.

    A published block counts for the tenant that computed it, any other active block for the tenant that holds it. So
    the tenants' blocks and the free ones add up to all blocks.

    Attributes:
        tenants: number of blocks by tenant and state.
        swapped: number of blocks of host memory, by the tenant of the sequence whose keys and values they hold.
    """

    tenants: Mapping[str, Mapping[BlockState, int]]
    requests: Mapping[RequestId, RequestHolding]
    swapped: Mapping[str, int]


class CacheLedger:
    """Records published and evicted blocks; O(1) each.

    Args:
        num_blocks: size of the pool, which bounds what is remembered.
        blocks: the record of the pool's blocks.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, num_blocks: int, blocks: BlockRecords, clock: Callable[[], float] = time.monotonic) -> None:
        self.totals: dict[str, CacheTotals] = {}  # by tenant, so bounded by the number of API keys
        self._record = blocks
        self._clock = clock
        # The first blocks of the latest prompts, by their tokens regardless of scope.
        num_firsts = min(num_blocks, max(_FEWEST_FIRSTS, num_blocks // _BLOCKS_PER_FIRST))
        self._firsts = LatestKeys[_FirstBlock | None](num_firsts, [None])
        self._evictions = LatestKeys[_Eviction | None](min(num_blocks, MAX_EVICTIONS), [None])
        self._second = -1
        self._in_second: dict[str, _Eviction] = {}  # by tenant

    def published(self, block_id: BlockId, chain: TokenChain) -> None:
        """Record that a request has computed and published the first full block of its chain."""
        self._firsts.add((key_prefix(_first_key(chain)),), (_FirstBlock(block_id, chain.source),))

    def evicted(self, block_ids: Seq[BlockId]) -> None:
        """Record the eviction of cached blocks, which the index still has."""
        if (second := int(self._clock())) != self._second:
            self._second, self._in_second = second, {}
        noted = [
            self._in_second.setdefault(tenant, _Eviction(second, tenant))
            for tenant in (self._record.sources[block_id].tenant for block_id in block_ids)
        ]
        self._evictions.add(self._record.keys.prefixes(block_ids), noted)

    def explain(self, request: Request, chain: TokenChain, cached_blocks: int) -> CacheReport:
        """Explain why a prompt's cached prefix ends after `cached_blocks` blocks."""
        size, length = chain.block_size, len(request.prompt_token_ids)
        limit = min((length - 1) // size, chain.most)

        def report(outcome: CacheOutcome, owner: str | None = None) -> CacheReport:
            return CacheReport(length, cached_blocks * size, outcome, owner=owner)

        if limit == 0:
            return report(CacheOutcome.TOO_SHORT)
        if cached_blocks >= limit:
            return report(CacheOutcome.COMPLETE)
        if (eviction := self._evictions.get(chain.key(cached_blocks + 1))) is not None:
            ago = self._clock() - eviction.at
            return replace(report(CacheOutcome.EVICTED, eviction.tenant), evicted_seconds_ago=ago)
        block_id = self._record.children.latest(chain.key(cached_blocks))
        common = 0
        if block_id is not None:
            common = _common_tokens(self._record.token_bytes(block_id), chain.tokens(cached_blocks, cached_blocks + 1))
        if block_id is None or common + cached_blocks == 0:
            # Checked last, so that other scopes only ever affect a report that would otherwise be "cold".
            twin = self._firsts.get(_first_key(chain)) if cached_blocks == 0 else None
            is_cached = twin is not None and self._record.sources[twin.block_id] is twin.source
            if twin is not None and is_cached and twin.source.scope != request.cache_scope:
                return report(CacheOutcome.SALT, twin.source.tenant)
            return report(CacheOutcome.COLD)
        rival = self._record.sources[block_id]
        if common == size:
            # One group still has the block; another group's was evicted longer ago than is remembered.
            return report(CacheOutcome.EVICTED, rival.tenant)
        at = cached_blocks * size + common
        diverged = report(CacheOutcome.DIVERGED, rival.tenant)
        return replace(diverged, diverged_at=at, diverged_from=rival.request_id)

    def admitted(self, request: Request, report: CacheReport) -> None:
        """Record the first admission of a request, with its final report."""
        request.cache_report = report
        totals = self.totals.get(request.tenant)
        if totals is None:
            totals = self.totals[request.tenant] = CacheTotals()
        totals.add(report)

    def stock(self, sequences: Iterable[tuple[Request, list[BlockTable], Iterable[HostBlockId]]]) -> Stock:
        """Count the blocks that hold something. O(blocks).

        Args:
            sequences: request, tables and blocks of host memory of each sequence that holds blocks. A host block held
                by several counts for the first of them.
        """
        held: dict[RequestId, set[BlockId]] = {}
        holders: dict[BlockId, str] = {}
        away: Counter[RequestId] = Counter()
        swapped: Counter[str] = Counter()
        seen: set[HostBlockId] = set()
        for request, groups, slots in sequences:
            blocks = held.setdefault(request.request_id, set())
            for table in groups:
                blocks.update(table)
            blocks.discard(NULL_BLOCK)
            holders.update(dict.fromkeys(blocks, request.tenant))
            if num_swapped := len(own := set(slots) - seen):
                seen |= own
                away[request.request_id] += num_swapped
                swapped[request.tenant] += num_swapped
        tenants: dict[str, Counter[BlockState]] = {}
        record = self._record
        for block_id in map(BlockId, range(1, record.num_blocks)):
            if (state := record.state(block_id)) is not BlockState.FREE:
                source = record.sources[block_id]
                tenant = holders[block_id] if source is NO_SOURCE else source.tenant
                tenants.setdefault(tenant, Counter())[state] += 1
        requests = {
            request_id: RequestHolding(
                len(blocks),
                sum(record.references[block] > 1 for block in blocks),
                sum(map(record.is_published, blocks)),
                sum(record.pins[block] > 0 for block in blocks),
                away[request_id],
            )
            for request_id, blocks in held.items()
        }
        return Stock(tenants, requests, swapped)

    def check(self) -> Iterator[str]:
        """Yield every violation of the ledger's own invariants. O(blocks)."""
        yield from self._firsts.check()
        yield from self._evictions.check()
        for tenant, totals in self.totals.items():
            if totals.queried_tokens != totals.cached_tokens + totals.uncached_tokens.total():
                yield f"tenant {tenant!r}: cached and uncached tokens do not add up to those queried"


class RequestCopy(NamedTuple):
    """A copy-on-write for a request, which wrote into a block that another sequence held too."""

    request_id: RequestId
    source: BlockId
    destination: BlockId


class Latest(Generic[_T]):
    """Counts events since the start, and remembers the last `most`, which the live page shows.

    Each reader passes the count that it last saw, and gets newer entries.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self._latest: deque[_T] = deque(maxlen=most)

    def add(self, items: Seq[_T]) -> None:
        self.count += len(items)
        self._latest.extend(items)

    def since(self, count: int) -> list[_T]:
        """Return the remembered entries after the first `count`."""
        return list(islice(self._latest, max(0, len(self._latest) - self.count + count), None))


def _first_key(chain: TokenChain) -> bytes:
    """Return a key for the tokens of the first full block, regardless of scope."""
    return blake2b(chain.tokens(0, 1), digest_size=DIGEST_BYTES).digest()


def _common_tokens(a: bytes, b: bytes) -> int:
    """Return how many leading tokens two blocks have in common."""
    if a == b:
        return len(a) // TOKEN_BYTES
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y) // TOKEN_BYTES

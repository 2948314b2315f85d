"""The reports of `/debug/kv` and `/debug/pins` as JSON-ready values, for operators rather than clients.

They must be made between two steps, in the thread that drives the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.kvcache.attended import AttendedBlocks
from octavo.kvcache.block import BlockState
from octavo.kvcache.holdings import Holdings
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.ledger import CacheTotals, RequestHolding, Stock
from octavo.kvcache.manager import KVCacheManager
from octavo.pooling import Pooling
from octavo.request import CacheOutcome, CacheReport, Request
from octavo.request_limits import RequestLimits
from octavo.scheduler.kv_limits import KVLimits
from octavo.scheduler.scheduler import Scheduler
from octavo.tiers.base import LATENCY_BOUNDS
from octavo.tiers.store import Store

STATES = (BlockState.ACTIVE, BlockState.CACHED, BlockState.PINNED)
# Not a state of a block in the pool: it is in host memory.
SWAPPED = "swapped"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The facts of an engine that do not change while it runs.

    Attributes:
        architecture: the model's, such as "llama".
        weight_bytes: memory that the weights take.
        max_model_len: maximum length of prompt and output together, in tokens.
        hidden_size: number of dimensions of an embedding.
        pooling: how a prompt's hidden states are pooled into an embedding, if a request does not say.
        default_sampling: keywords of `SamplingParams` for requests that do not give them, as the model's authors
            recommend.
        context_length: the context that the model was trained for, in tokens; by default `max_model_len`.
        budget_refusal: why its sequences cannot have budgets (`kv_budget.py`); empty if they can.
        measures_refusal: why it cannot measure their attention, by which some budgets decide; empty if it can.
    """

    model_name: str
    architecture: str
    weight_bytes: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    hidden_size: int
    pooling: Pooling
    limits: RequestLimits
    default_sampling: Mapping[str, Any]
    context_length: int | None = None
    budget_refusal: str = ""
    measures_refusal: str = ""


@dataclass(frozen=True, slots=True)
class PinInfo:
    """The present state of one pin.

    Attributes:
        num_blocks: number of blocks in all groups; a block held by several pins counts for each.
        expires_in: seconds until it expires.
    """

    pin_id: str
    tenant: str
    num_tokens: int
    num_blocks: int
    num_bytes: int
    ttl_seconds: float
    expires_in: float


def list_pins(kv: KVCacheManager) -> list[PinInfo]:
    """Return all unexpired pins, the soonest to expire first."""
    kv.pins.expire()
    now, size = kv.pins.clock(), kv.spec.block_bytes
    return [
        PinInfo(
            pin_id=pin.pin_id,
            tenant=pin.tenant,
            num_tokens=pin.num_tokens,
            num_blocks=len(pin.blocks),
            num_bytes=len(pin.blocks) * size,
            ttl_seconds=pin.ttl_seconds,
            expires_in=pin.expires_at - now,
        )
        for pin in kv.pins
    ]


def kv_report(scheduler: Scheduler, stores: Sequence[Store] = ()) -> dict[str, Any]:
    """Return bytes by state, in total and by tenant; the blocks of each unfinished request; prefix cache totals.

    The tenants' active, cached and pinned bytes and the free bytes add up to the whole cache. Swapped bytes are in host
    memory, and with its free bytes add up to the swap space. `queried_tokens` is the sum of cached and uncached tokens.
    O(blocks).
    """
    kv = scheduler.kv
    kv.pins.expire()
    size = kv.spec.block_bytes
    requests = scheduler.requests
    stock, states = kv.stock(requests), kv.pool.count_states()
    totals = CacheTotals()
    for of_tenant in kv.ledger.totals.values():
        totals.merge(of_tenant)
    host, swapped = kv.hierarchy.host, kv.hierarchy.swapped
    return {
        "block_size": kv.spec.block_size,
        "block_bytes": size,
        "num_blocks": kv.pool.num_blocks - 1,
        "bytes": {
            BlockState.FREE.value: states[BlockState.FREE] * size,
            **_bytes(states, sum(stock.swapped.values()), size),
        },
        "swap": {
            "space_bytes": host.num_swap_slots * size,
            "free_bytes": (host.num_swap_slots - kv.hierarchy.num_kept) * size,
            "out_bytes": swapped.blocks_out * size,
            "in_bytes": swapped.blocks_in * size,
            "dropped_bytes": swapped.blocks_dropped * size,
        },
        "prefix_cache": _totals(totals),
        "tenants": _tenants_report(kv, stock, scheduler.tenants.limits),
        "pins": _pins_report(kv),
        "requests": [
            {
                "request_id": request.request_id,
                "tenant": request.tenant,
                "blocks": asdict(stock.requests.get(request.request_id, RequestHolding())),
                "cache": None if request.cache_report is None else report_fields(request.cache_report),
                "budget": budget_fields(request, kv.holdings),
            }
            for request in requests
        ],
        **({"tiers": tiers_report(host, stores, size)} if host.num_prefix_slots else {}),
    }


def _tenants_report(kv: KVCacheManager, stock: Stock, limits: Mapping[str, KVLimits]) -> dict[str, Any]:
    size, totals = kv.spec.block_bytes, kv.ledger.totals
    return {
        tenant: {
            "bytes": _bytes(stock.tenants.get(tenant, {}), stock.swapped.get(tenant, 0), size),
            "prefix_cache": _totals(totals.get(tenant, CacheTotals())),
            "pins": {"held_bytes": kv.pins.num_blocks_of(tenant) * size},
            "limits": limits_in_bytes(limits.get(tenant, KVLimits()), size),
        }
        for tenant in sorted(totals.keys() | stock.tenants.keys() | stock.swapped.keys() | limits.keys())
    }


def _pins_report(kv: KVCacheManager) -> dict[str, int]:
    counters, size = kv.pins.counters, kv.spec.block_bytes
    return {
        "budget_bytes": kv.pins.budget_blocks * size,
        "tenant_budget_bytes": kv.pins.tenant_blocks * size,
        "held_bytes": kv.pool.num_with_pins * size,
        "num_pins": len(kv.pins),
        "made": counters.num_pinned,
        "expired": counters.num_expired,
        "yielded": counters.num_yielded,
        "unpinned": counters.num_unpinned,
    }


def budget_fields(request: Request, holdings: Holdings) -> dict[str, Any] | None:
    """Return a request's budget for JSON, with the tokens that its sequences have evicted, and those that the next step
    skips in a sparse layer; None without one.

    `evicted_mass` is the share of the measured attention that went to evicted blocks, from 0 to 1.
    """
    if (budget := request.params.kv_budget) is None:
        return None
    fields: dict[str, Any] = {"mode": budget.mode, "tokens": budget.tokens}
    if not budget.measures:
        beyond = sum(max(0, seq.num_computed - budget.tokens) for seq in request.sequences)
        return {**fields, "evicted_tokens" if budget.evicts else "skipped_tokens": beyond}
    tokens, shares = 0, list[float]()
    for _, holding in holdings.of([request]):
        if attended := [each for each in holding.retained if isinstance(each, AttendedBlocks)]:
            tokens += sum(each.tokens_let_go for each in attended) // len(attended)
            gone = sum(each.mass_let_go for each in attended)
            shares.append(gone / max(1, gone + sum(each.mass_kept for each in attended)))
    mass = round(sum(shares) / len(shares), 6) if shares else 0.0
    return {**fields, "evicted_tokens": tokens, "evicted_mass": mass}


def limits_in_bytes(limits: KVLimits, block_bytes: int) -> dict[str, int | None]:
    """Return a tenant's floor and cap in bytes, for JSON; a cap of null means none."""
    cap = None if limits.cap is None else limits.cap * block_bytes
    return {"floor_bytes": limits.floor * block_bytes, "cap_bytes": cap}


def tiers_report(host: HostMemory, stores: Sequence[Store], block_bytes: int) -> dict[str, Any]:
    """Report on host memory and the stores below: bytes, blocks moved since the start, misses by reason.

    `tenants` has the bytes of each tenant in a tier, which are unknown for Redis; the sums are exact.
    """
    counters = host.counters
    by_tenant = {tenant: count * block_bytes for tenant, count in sorted(counters.by_tenant().items())}
    report: dict[str, Any] = {
        "host": {
            "space_bytes": host.num_slots * block_bytes,
            "free_bytes": host.pool.num_free * block_bytes,
            "tenants": by_tenant,
            "stored": counters.stored,
            "loaded": counters.loaded,
            "filled": counters.filled,
            "evicted": counters.evicted,
            "refused": counters.refused,
            "lost": counters.lost,
        }
    }
    for store in stores:
        read, write = store.counters.read, store.counters.write
        report[store.name] = {
            "open": store.is_open,
            "writable": store.is_writable,
            "loaded": read.blocks,
            "stored": write.blocks,
            "read_bytes": read.bytes,
            "written_bytes": write.bytes,
            "tenants": dict(sorted((store.medium.bytes_by_tenant() or {}).items())),
            "read_by_tenant": dict(sorted(read.by_tenant.items())),
            "written_by_tenant": dict(sorted(write.by_tenant.items())),
            "open_misses": {reason.value: count for reason, count in store.counters.open_misses.items()},
            "read_misses": {reason.value: count for reason, count in read.misses.items()},
            "write_misses": {reason.value: count for reason, count in write.misses.items()},
            "closings": {work.value: count for work, count in store.num_closings.items()},
            "load_latency_seconds": store.speed.per_load,
            "load_seconds_per_byte": store.speed.per_byte,
            "latency_bounds": list(LATENCY_BOUNDS),
            "read_latency": list(read.latency),
            "write_latency": list(write.latency),
        }
    return report


def report_fields(report: CacheReport) -> dict[str, Any]:
    """Return a cache report for JSON; `reason` is null if everything that can be cached was."""
    complete = report.outcome is CacheOutcome.COMPLETE
    fields: dict[str, Any] = {
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
        "reason": None if complete else report.outcome.value,
    }
    if report.outcome is CacheOutcome.DIVERGED:
        fields |= {"diverged_at": report.diverged_at, "diverged_from": report.diverged_from}
    if report.outcome is CacheOutcome.EVICTED:
        fields["evicted_seconds_ago"] = report.evicted_seconds_ago
    return fields


def _bytes(states: Mapping[BlockState, int], num_swapped: int, size: int) -> dict[str, int]:
    return {**{state.value: states.get(state, 0) * size for state in STATES}, SWAPPED: num_swapped * size}


def _totals(totals: CacheTotals) -> dict[str, Any]:
    return {
        "queried_tokens": totals.queried_tokens,
        "cached_tokens": totals.cached_tokens,
        "uncached_tokens": {outcome.value: totals.uncached_tokens[outcome] for outcome in CacheOutcome},
        "requests": {outcome.value: totals.requests[outcome] for outcome in CacheOutcome},
    }

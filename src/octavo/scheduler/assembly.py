"""From options to a cache and a scheduler: the only place that joins them.

    EngineConfig + KVCacheSpec ──assemble_cache──> KVCacheManager      prefix cache, eviction, pins, swap space
                                     │
                   + max_model_len ──assemble_scheduler──> Scheduler   queue, victims, preemption

The engine, `octavo bench memory`, the benchmarks and the simulator all build through it, so that an option means the
same in each of them. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kvcache.eviction import EvictionPolicy, RecomputeCost, make_lower_eviction
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.prefix import make_prefix_cache
from octavo.kvcache.spec import KVCacheSpec
from octavo.scheduler.cached_prefixes import CachedPrefixes
from octavo.scheduler.claims import ByPriority, ByService, Claims
from octavo.scheduler.fairness import DeficitRound, MostServed, VirtualTokenCounter
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.preemption import (
    CheaperWay,
    PreemptionMode,
    Recompute,
    RestoreSpeed,
    Swap,
    make_victim_policy,
)
from octavo.scheduler.queue import ArrivalOrder, LongestPrefixFirst, WaitingQueue
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.scheduler_config import DEFAULT_HEADROOM_TOKENS, DEFAULT_WATERMARK, SchedulerConfig
from octavo.scheduler.tenant_queue import TenantQueue


def assemble_cache(
    config: EngineConfig,
    spec: KVCacheSpec,
    num_blocks: int,
    *,
    num_host_blocks: int = 0,
    num_prefix_blocks: int = 0,
    identity: tuple[str, ...] = (),
    cost: RecomputeCost | None = None,
    wrap_eviction: Callable[[EvictionPolicy], EvictionPolicy] | None = None,
    clock: Callable[[], float] = time.monotonic,
    explains: bool = True,
) -> KVCacheManager:
    """The KV cache manager that the options describe.

    Args:
        num_blocks: size of the pool, the null block included.
        num_host_blocks: blocks of host memory that swapped sequences may take.
        num_prefix_blocks: blocks of host memory beside those, for prefixes.
        identity: what keys and values depend on beside the tokens: model fingerprint, dtype, codec, …
        cost: of computing a block again, for the eviction policy "cost"; by default that of an 8B model.
        wrap_eviction: puts an observer around the eviction policy.
        clock: seconds, never going back.
        explains: whether the ledger records who computed what, so that it can say why a prompt was not cached.
    """
    prefix_cache, eviction = make_prefix_cache(
        config.prefix_cache if config.enable_prefix_caching else None,
        config.eviction_policy,
        spec=spec,
        identity=identity,
        cost=cost or RecomputeCost(spec.block_size),
    )
    return KVCacheManager(
        spec,
        num_blocks,
        prefix_cache,
        eviction if wrap_eviction is None else wrap_eviction(eviction),
        host=_host_memory(config, spec, num_host_blocks, num_prefix_blocks),
        demotion=config.kv_demotion,
        pin_budget=config.pin_budget,
        pin_tenant_share=1.0 if config.pin_tenant_share is None else config.pin_tenant_share,
        clock=clock,
        explains=explains,
    )


def _host_memory(config: EngineConfig, spec: KVCacheSpec, num_host_blocks: int, num_prefix_blocks: int) -> HostMemory:
    if not config.enable_prefix_caching:
        num_prefix_blocks = 0
    eviction = make_lower_eviction(config.eviction_policy)
    return HostMemory(num_host_blocks + num_prefix_blocks, num_host_blocks, spec.block_size, eviction)


def assemble_scheduler(
    config: EngineConfig,
    kv: KVCacheManager,
    max_model_len: int,
    *,
    restore_speed: RestoreSpeed | None = None,
    watermark: float = DEFAULT_WATERMARK,
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS,
    builder: PlanBuilder | None = None,
    tells_all: bool = True,
) -> Scheduler:
    """The scheduler that the options describe, over a cache that `assemble_cache` made of the same options.

    Args:
        restore_speed: as measured or assumed; needed where `needs_restore_speed` says so.
        watermark, headroom_tokens: see `SchedulerConfig`.
        builder, tells_all: see `Scheduler`.

    Raises:
        ConfigError: the speed is missing.
    """
    turns = make_turns(config.scheduling_policy, kv)
    victims = make_victim_policy(config.preemption_victim, kv.restore_cost)
    return Scheduler(
        SchedulerConfig(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_model_len,
            watermark=watermark,
            headroom_tokens=headroom_tokens,
            itl_slo_ms=config.itl_slo_ms,
            priority_seconds=PRIORITY_SECONDS if config.scheduling_policy == "priority" else None,
        ),
        kv,
        victims=victims if turns is None else MostServed(turns, victims),
        waiting=make_queue(turns, _prefixes(config, kv), by_age=config.scheduling_policy == "priority"),
        preemption=_preemption_mode(config, kv, restore_speed),
        turns=turns,
        claims=make_claims(config.scheduling_policy, turns),
        builder=builder,
        tells_all=tells_all,
    )


def needs_restore_speed(config: EngineConfig, num_host_blocks: int) -> bool:
    """Whether victims are swapped or recomputed by what is cheaper, so that both speeds must be known."""
    return bool(num_host_blocks) and config.preemption_mode == "auto"


PRIORITY_SECONDS = 60.0
"""What a step of priority is worth under the policy "priority": so long may the less urgent have waited already."""

Policy = Literal["fcfs", "priority", "vtc", "dlpm"]


def make_claims(policy: Policy, turns: VirtualTokenCounter | None) -> Claims | None:
    """Who may take the place of somebody that runs; None where nobody may."""
    if policy == "priority":
        return ByPriority()
    return None if turns is None else ByService(turns)


def make_turns(policy: Policy, kv: KVCacheManager) -> VirtualTokenCounter | None:
    """Who says whose turn it is between tenants; None where the order is that of arrival."""
    if policy == "vtc":
        return VirtualTokenCounter()
    return DeficitRound(CachedPrefixes(kv)) if policy == "dlpm" else None


def make_queue(
    turns: VirtualTokenCounter | None, prefixes: CachedPrefixes | None, *, by_age: bool = False
) -> WaitingQueue:
    """A queue for all, or a line per tenant; by cached prefixes where they are given.

    Args:
        by_age: strictly in order of service, whatever is cached and however short others are.
    """
    if by_age:
        return ArrivalOrder(short_may_pass=False)

    def line() -> WaitingQueue:
        return ArrivalOrder() if prefixes is None else LongestPrefixFirst(prefixes)

    return line() if turns is None else TenantQueue(turns, line)


def _prefixes(config: EngineConfig, kv: KVCacheManager) -> CachedPrefixes | None:
    """The tree finds a prefix without hashing, so it can afford to look before it admits."""
    looks = config.prefix_cache == "radix" or config.scheduling_policy == "dlpm"
    return CachedPrefixes(kv) if looks and config.enable_prefix_caching else None


def _preemption_mode(config: EngineConfig, kv: KVCacheManager, restore_speed: RestoreSpeed | None) -> PreemptionMode:
    num_host_blocks = kv.hierarchy.host.num_swap_slots
    if not num_host_blocks or config.preemption_mode == "recompute":
        return Recompute()
    if not needs_restore_speed(config, num_host_blocks):
        return Swap()
    if restore_speed is None:
        raise ConfigError(
            "preemption_mode is 'auto' and there is host memory to swap to, but nobody measured what swapping and "
            "recomputing cost: use preemption_mode 'recompute' or 'swap'"
        )
    return CheaperWay(kv.restore_cost, restore_speed)

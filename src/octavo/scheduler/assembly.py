"""Builds the cache and the scheduler from options; the only place that does.

    EngineConfig + KVCacheSpec ──assemble_cache──> KVCacheManager      prefix cache, eviction, pins, swap space
                                     │
                   + max_model_len ──assemble_scheduler──> Scheduler   queue, victims, preemption

The engine, `octavo bench memory`, the benchmarks and the simulator all use it, so that an option means the same in each
of them. It imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.spec import KVCacheSpec
from octavo.scheduler.draft_model import DraftModel
from octavo.scheduler.drafts import DraftMethod
from octavo.scheduler.lifecycle import SchedulerConfig
from octavo.scheduler.policy import make_policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.speculation import Clock, Speculator
from octavo.scheduler.waiting import Fetching

if TYPE_CHECKING:
    from octavo.tiers.lower import LowerTiers


def assemble_cache(
    config: EngineConfig,
    spec: KVCacheSpec,
    num_blocks: int,
    *,
    num_host_blocks: int = 0,
    num_prefix_blocks: int = 0,
    identity: tuple[str, ...] = (),
    clock: Callable[[], float] = time.monotonic,
) -> KVCacheManager:
    """Return the KV cache manager that the options describe.

    Args:
        num_blocks: size of the pool, including the null block.
        num_host_blocks: blocks of host memory for swapped sequences.
        num_prefix_blocks: additional blocks of host memory for prefixes.
        identity: inputs of keys and values other than the tokens: model fingerprint, dtype, codec, …
        clock: a monotonic clock, in seconds.
    """
    return KVCacheManager(
        spec,
        num_blocks,
        config.enable_prefix_caching,
        config.eviction_policy,
        identity=identity,
        num_swap_slots=num_host_blocks,
        num_prefix_slots=num_prefix_blocks if config.enable_prefix_caching else 0,
        demotion=config.kv_demotion,
        pin_budget=config.pin_budget,
        pin_tenant_share=1.0 if config.tenant_share is None else config.tenant_share,
        clock=clock,
        logs_events=config.kv_events is not None,
    )


def assemble_scheduler(
    config: EngineConfig,
    kv: KVCacheManager,
    max_model_len: int,
    *,
    preemption: Preemption | None = None,
    tiers: LowerTiers | None = None,
    speculator: Speculator | None = None,
) -> Scheduler:
    """Return the scheduler that the options describe, for a cache from `assemble_cache` with the same options.

    Args:
        preemption: the speeds to begin with; by default they are unknown until measured. Its mode is set.
        tiers: the stores below the cache's host memory.
        speculator: that from `make_speculator` with other arguments than the default ones.
    """
    preemption = Preemption() if preemption is None else preemption
    # Prompts and decodes round quantised keys and values differently, so what decodes computed is not recomputed.
    rounds_alike = config.deterministic or all(each.plain for each in kv.spec.formats)
    swaps = config.preemption_mode == "auto" and not rounds_alike
    preemption.mode = "swap" if swaps else config.preemption_mode
    if not kv.hierarchy.host.num_swap_slots:
        preemption.mode = "recompute"
    policy = make_policy(config.scheduling_policy)
    return Scheduler(
        SchedulerConfig(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            max_model_len,
            headroom_tokens=policy.headroom_tokens,
            itl_slo_ms=config.itl_slo_ms,
        ),
        kv,
        policy=policy,
        preemption=preemption,
        by_prefix=config.prefix_cache == "radix" and config.enable_prefix_caching,
        fetching=None if tiers is None else Fetching(kv, tiers, preemption),
        speculator=speculator or make_speculator(config, kv, max_model_len),
    )


def make_speculator(
    config: EngineConfig,
    kv: KVCacheManager,
    max_model_len: int,
    *,
    method: DraftMethod | None = None,
    model: DraftModel | None = None,
    clock: Clock | None = None,
) -> Speculator | None:
    """Return the speculator that `speculative_config` describes; None without it.

    Args:
        method: finds the drafts, if not as `speculative_config` says.
        model: the draft model, once it is loaded.
        clock: see `Speculator`.
    """
    if (wanted := config.speculative_config) is None:
        return None
    if method is None:
        tree = kv if wanted.method != "ngram" else None
        method = DraftMethod(wanted.prompt_lookup_min, wanted.prompt_lookup_max, tree)
    return Speculator(method, wanted.num_speculative_tokens, max_model_len, model, clock)

"""Small caches and sequences for tests: numbers only, no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.kv_budget import KVBudget
from octavo.kvcache.block import NULL_BLOCK, BlockId
from octavo.kvcache.hashing import TokenChain
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.prefix import PrefixIndex
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec
from octavo.request import Request, RequestId, Sequence
from octavo.sampling_params import SamplingParams

FULL = LayerKVSpec(num_kv_heads=1, key_dim=8, value_dim=8)


COPIES = "int4;sinks=1,recent=2"
"""A dtype whose layers have a second group, of copies in int8, which slides and keeps its first block."""


def positions_seen(spec: KVCacheSpec, group: int, num_computed: int, budget: KVBudget | None = None) -> list[int]:
    """Return the computed positions whose keys and values a group must hold for the next token."""
    window, size = spec.windows(budget)[group], spec.block_size
    if window is None:
        return list(range(num_computed))
    first = max(0, num_computed - window.tokens + 1)
    return [*range(min(first, window.sink_blocks * size)), *range(first, num_computed)]


def sliding(window: int) -> LayerKVSpec:
    return LayerKVSpec(num_kv_heads=1, key_dim=8, value_dim=8, sliding_window=window)


@dataclass
class Clock:
    """Stands still unless a test moves it."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def extend(chain: TokenChain, tokens: list[int]) -> None:
    """Add the full blocks of `tokens` that are not yet in a chain."""
    chain.grow(len(tokens), lambda start, end: tokens[start:end])


def put(index: PrefixIndex, group: int, chain: TokenChain, position: int, block: int) -> bool:
    """Publish one block of a group; returns whether it was."""
    tables = [[BlockId(block if number == group else NULL_BLOCK)] for number in range(len(index._windows))]
    return bool(index.publish(chain, position, tables))


def make_manager(
    num_blocks: int = 16,
    block_size: int = 4,
    layers: tuple[LayerKVSpec, ...] = (FULL,),
    prefix_caching: bool = True,
    eviction: str = "lru",
    pin_budget: float = 0.25,
    clock: Callable[[], float] | None = None,
    num_host_blocks: int = 0,
    num_prefix_blocks: int = 0,
    demotion: str = "on_evict",
    pin_tenant_share: float = 1.0,
    dtype: str = "float32",
    logs_events: bool = False,
) -> KVCacheManager:
    spec = KVCacheSpec.build(layers, block_size, dtype)
    return KVCacheManager(
        spec,
        num_blocks,
        prefix_caching,
        eviction,
        identity=("model",),
        num_swap_slots=num_host_blocks,
        num_prefix_slots=num_prefix_blocks,
        demotion=demotion,
        pin_budget=pin_budget,
        pin_tenant_share=pin_tenant_share,
        clock=clock or Clock(),
        logs_events=logs_events,
    )


def make_sequence(
    token_ids: list[int], salt: str = "", n: int = 1, priority: int = 0, tenant: str = "", group: str | None = None
) -> Sequence:
    request = make_request(token_ids, salt, n, tenant=tenant, group=group)
    request.priority = priority
    return request.sequences[0]


_counter = iter(range(10**9))


def make_request(
    token_ids: list[int], salt: str = "", n: int = 1, *, tenant: str = "", group: str | None = None, **params: Any
) -> Request:
    return Request(
        request_id=RequestId(f"r{next(_counter)}"),
        prompt_token_ids=token_ids,
        params=SamplingParams(n=n, **params),
        tenant=tenant,
        cache_group=group,
        cache_salt=salt,
    )


def compute(manager: KVCacheManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """Pretend that a step computed the sequence's next tokens (all that are left by default)."""
    seq.num_computed += num_tokens or seq.num_tokens - seq.num_computed
    manager.commit(seq)


def resume(manager: KVCacheManager, seq: Sequence, num_tokens: int = 1, reserve: int = 0) -> bool:
    """Bring a demoted sequence back with room for so many tokens more; whether it had room."""
    return manager.admit(seq, manager.match(seq), num_tokens, reserve)


def admit_and_compute(manager: KVCacheManager, seq: Sequence) -> int:
    """Admit a sequence whole and compute it; returns the tokens that came from the cache."""
    hit = manager.match(seq)
    if not manager.admit(seq, hit, seq.num_tokens - hit.num_tokens):
        raise AssertionError("the pool is too small for this test")
    seq.num_computed = hit.num_tokens
    compute(manager, seq)
    return hit.num_tokens

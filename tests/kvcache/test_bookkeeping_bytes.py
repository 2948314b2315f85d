"""What the books themselves take, as the memory plan has it."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import product
from typing import Any

import pytest

from octavo.kvcache.eviction import EVICTION_POLICIES, AdaptiveEviction
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.spec import ADAPTIVE_EVICTION_BYTES, eviction_bytes
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence

# What does not grow with the pool.
FIXED_BYTES = 24_000
CACHES = [*product(["hashed"], sorted(EVICTION_POLICIES)), ("radix", "lru"), ("radix", "cost")]


# Just over a power of two, lists and dicts have grown and are half empty: no other number takes more for each block.
@pytest.mark.parametrize(
    ("prefix_cache", "eviction", "num_blocks"),
    [*((*cache, 2049) for cache in CACHES), ("radix", "cost", 3000), ("hashed", "adaptive", 4096)],
)
def test_a_full_pools_books_take_no_more_than_the_plan_says(prefix_cache: str, eviction: str, num_blocks: int) -> None:
    caching: dict[str, Any] = {"prefix_cache": prefix_cache, "eviction": eviction}
    used(65, caching)  # what is made once, what a measurement of line coverage keeps included
    gc.collect()
    tracemalloc.start()
    try:
        manager = used(num_blocks, caching)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    manager.audit()
    assert manager.pool.num_cached >= num_blocks - 2 - num_blocks // 8
    planned = manager.spec.bookkeeping_bytes + eviction_bytes(eviction)
    assert taken <= planned * num_blocks + FIXED_BYTES


def used(num_blocks: int, caching: dict[str, Any]) -> KVCacheManager:
    """A pool that was filled, and half of it evicted."""
    manager = make_manager(num_blocks, 16, **caching)
    for k in range(12):
        tokens = [k, *(i % 5000 for i in range(num_blocks * 2 - 1))]
        seq = make_sequence(tokens)
        admit_and_compute(manager, seq)
        manager.forget(seq)
    return manager


def test_the_plan_counts_ghosts_and_keys_of_adaptive_eviction() -> None:
    assert ADAPTIVE_EVICTION_BYTES == AdaptiveEviction.BYTES_PER_BLOCK

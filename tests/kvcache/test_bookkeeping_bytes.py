"""What the books themselves take, as the memory plan has it."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import product

import pytest

from octavo.kvcache.eviction import EVICTION_POLICIES, AdaptiveEviction
from octavo.kvcache.spec import ADAPTIVE_EVICTION_BYTES, eviction_bytes
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence


@pytest.mark.parametrize(
    ("prefix_cache", "eviction"), [*product(["hashed"], sorted(EVICTION_POLICIES)), ("radix", "lru"), ("radix", "cost")]
)
@pytest.mark.parametrize("num_blocks", [2049, 3000, 4096])
def test_a_full_pools_books_take_no_more_than_the_plan_says(prefix_cache: str, eviction: str, num_blocks: int) -> None:
    admit_and_compute(make_manager(16, 16), make_sequence([1] * 40))  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        manager = make_manager(num_blocks, 16, prefix_cache=prefix_cache, eviction=eviction)
        for k in range(12):  # the pool is filled, and half of it evicted
            tokens = [k, *(i % 5000 for i in range(num_blocks * 2 - 1))]
            seq = make_sequence(tokens)
            admit_and_compute(manager, seq)
            manager.forget(seq)
            del seq, tokens
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    manager.audit()
    assert manager.pool.num_cached >= num_blocks - 2 - num_blocks // 8
    planned = manager.spec.bookkeeping_bytes + eviction_bytes(eviction)
    assert taken <= planned * num_blocks + 20_000


def test_the_plan_counts_ghosts_and_keys_of_adaptive_eviction() -> None:
    assert ADAPTIVE_EVICTION_BYTES == AdaptiveEviction.BYTES_PER_BLOCK

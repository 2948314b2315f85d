"""What the books themselves take, as the memory plan has it."""

from __future__ import annotations

import pytest

from octavo.kvcache.eviction import EVICTION_POLICIES, AdaptiveEviction, LruEviction
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.spec import eviction_bytes
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence
from tests.traced import measured

# What does not grow with the pool: among it the 256 blocks evicted last (kvcache/ledger.py), with their numbers.
FIXED_BYTES = 36_000
ODD_SIZES = (1450, 1501, 2048)


# The fixed part counts most in small pools. The other sizes are those after which lists and tables would have grown.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("eviction", "num_blocks"),
    [*((policy, 1025) for policy in sorted(EVICTION_POLICIES)), *(("adaptive", n) for n in ODD_SIZES)],
)
def test_a_full_pools_books_take_no_more_than_the_plan_says(eviction: str, num_blocks: int) -> None:
    used(num_blocks, eviction)  # at the same size, because some lines run in large pools only
    taken, manager = measured(lambda: used(num_blocks, eviction))
    manager.audit()
    assert manager.pool.num_cached >= num_blocks - 2 - num_blocks // 8
    planned = manager.spec.bookkeeping_bytes + eviction_bytes(eviction)
    assert planned <= 300
    assert taken <= planned * num_blocks + FIXED_BYTES


@pytest.mark.slow
def test_blocks_of_an_answer_take_no_more_than_those_of_a_prompt() -> None:
    answered(1025)
    taken, manager = measured(lambda: answered(1025))
    assert manager.pool.num_cached >= 1000
    assert taken <= (manager.spec.bookkeeping_bytes + eviction_bytes("adaptive")) * 1025 + FIXED_BYTES


def answered(num_blocks: int) -> KVCacheManager:
    """A pool that two sequences filled one after the other, block by block as they grew."""
    manager = make_manager(num_blocks, 16, eviction="adaptive")
    for first in (1, 2):
        seq = make_sequence([first] * 16)
        admit_and_compute(manager, seq)
        for k in range(num_blocks - 2):
            seq.output_token_ids.extend([k] * 16)
            assert manager.extend(seq, 16) is not None
            seq.num_computed += 16
            manager.commit(seq)
        manager.forget(seq)
    return manager


def used(num_blocks: int, eviction: str) -> KVCacheManager:
    """A pool that was filled, and half of it evicted."""
    manager = make_manager(num_blocks, 16, eviction=eviction)
    for k in range(12):
        tokens = [k, *(i % 5000 for i in range(num_blocks * 2 - 1))]
        seq = make_sequence(tokens)
        admit_and_compute(manager, seq)
        manager.forget(seq)
    return manager


def test_the_plan_counts_ghosts_and_keys_of_adaptive_eviction() -> None:
    assert eviction_bytes("adaptive") == AdaptiveEviction.BYTES_PER_BLOCK
    assert eviction_bytes("lru") == LruEviction.BYTES_PER_BLOCK

"""One host memory for prefixes and for what preempted sequences left."""

from __future__ import annotations

import pytest

from octavo.errors import CacheError
from octavo.kvcache.audit import problems
from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction import make_eviction_policy
from octavo.kvcache.host_claims import ClaimCounters
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.label import Label
from octavo.kvcache.manager import KVCacheManager
from octavo.request import SequenceId
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence, resume


def memory(num_swap_slots: int, num_prefix_slots: int) -> HostMemory:
    return HostMemory(num_swap_slots + num_prefix_slots, num_swap_slots, 1, make_eviction_policy("lru"))


def label(number: int) -> Label:
    return Label(number.to_bytes(16, "big"), b"parent", number.to_bytes(4, "little"))


def step(host: HostMemory) -> None:
    host.take_transfers()
    host.complete()
    assert problems(host.check()) == []


def store(host: HostMemory, *numbers: int) -> None:
    for number in numbers:
        host.store_prefix(BlockId(number), label(number), "")
        step(host)


def test_a_claimed_slot_in_flight_is_nobodys_until_its_step_is_over() -> None:
    host = memory(1, 0)
    slot = host.store_claimed(BlockId(1), None, "")
    assert slot is not None
    host.take_transfers()
    host.unclaim(slot)
    assert (host.num_free, problems(host.check())) == (0, [])
    host.complete()
    assert (host.num_free, problems(host.check())) == (1, [])
    with pytest.raises(CacheError, match="given back more often than claimed"):
        host.unclaim(slot)


def test_prefixes_take_the_swap_space_that_is_not_claimed_and_yield_it() -> None:
    host = memory(2, 1)
    store(host, 1, 2, 3)
    assert (host.num_ready, host.num_free) == (3, 0)
    slots = [host.store_claimed(BlockId(n), None, "") for n in (7, 8)]
    assert None not in slots
    step(host)
    assert [host.find(label(n)) is not None for n in (1, 2, 3)] == [False, False, True]
    assert host.store_claimed(BlockId(9), None, "") is None, "the swap space bounds what is claimed"
    assert host.find(label(3)) is not None


def test_a_claim_finds_the_prefix_that_is_there_and_leaves_it_there() -> None:
    host = memory(1, 1)
    store(host, 1)
    slot = host.store_claimed(BlockId(5), label(1), "")
    assert slot == host.find(label(1))
    assert not host.has_transfers
    store(host, 2, 3)
    assert host.find(label(1)) == slot, "what is claimed is not evicted"
    assert slot is not None
    host.unclaim(slot)
    store(host, 4)
    assert host.find(label(1)) is not None
    assert problems(host.check()) == []


def test_a_block_that_another_sequence_loads_in_the_same_step_came_back_and_was_not_dropped() -> None:
    host = memory(1, 1)
    slot = host.store_claimed(BlockId(1), label(1), "")
    assert slot is not None
    step(host)
    host.plan_load(slot, BlockId(2), SequenceId(1))
    host.plan_load(slot, BlockId(3), SequenceId(2), returns=True)
    host.unclaim(slot)
    step(host)
    assert host.claims.counters == ClaimCounters(blocks_out=1, blocks_in=1, blocks_dropped=0)


def test_without_slots_for_prefixes_nothing_stays_that_nobody_claims() -> None:
    host = memory(2, 0)
    slot = host.store_claimed(BlockId(1), label(1), "")
    assert slot is not None
    step(host)
    assert host.find(label(1)) == slot
    host.unclaim(slot)
    assert (host.find(label(1)), host.num_free) == (None, 2)


def test_what_a_failed_step_was_to_store_is_found_by_nobody() -> None:
    host = memory(1, 2)
    slot = host.store_claimed(BlockId(1), label(1), "")
    host.store_prefix(BlockId(2), label(2), "")
    host.take_transfers()
    host.fail()
    assert (host.find(label(1)), host.find(label(2)), host.counters.lost) == (None, None, 1)
    assert problems(host.check()) == []
    assert slot is not None
    host.unclaim(slot)
    assert host.num_free == 3


def test_a_reset_forgets_what_it_evicts_too() -> None:
    manager = make_manager(num_blocks=8, num_prefix_blocks=8, demotion="on_evict")
    seq = make_sequence([*range(8)])
    admit_and_compute(manager, seq)
    manager.forget(seq)
    manager.reset_prefix_cache()
    step(manager.hierarchy.host)
    assert manager.match(make_sequence([*range(9)])).num_tokens == 0
    assert manager.hierarchy.host.num_free == 8


def preempt_and_evict(manager: KVCacheManager) -> None:
    seq = make_sequence([*range(9)])
    admit_and_compute(manager, seq)
    seq.append_token(9)
    assert manager.demote(seq)
    manager.pool.evict_all_cached()
    step(manager.hierarchy.host)
    assert resume(manager, seq)
    step(manager.hierarchy.host)
    manager.forget(seq)
    manager.pool.evict_all_cached()
    manager.audit()


@pytest.mark.parametrize(("num_prefix_blocks", "num_tokens"), [(0, 0), (4, 8)])
def test_what_a_preempted_sequence_left_becomes_a_prefix_where_there_is_room_for_such(
    num_prefix_blocks: int, num_tokens: int
) -> None:
    manager = make_manager(
        num_blocks=8, num_host_blocks=4, num_prefix_blocks=num_prefix_blocks, demotion="on_second_use"
    )
    preempt_and_evict(manager)
    assert manager.match(make_sequence([*range(9)])).num_tokens == num_tokens

"""One host memory for prefixes and for what preempted sequences left."""

from __future__ import annotations

import pytest

from octavo.kvcache.block import BlockId
from octavo.kvcache.manager import KVCacheManager
from tests.kvcache.caches import FULL, admit_and_compute, make_manager, make_sequence, resume, sliding
from tests.kvcache.host_tier import keep, label, memory, private, step, store


def test_prefixes_take_the_swap_space_that_is_not_in_use_and_yield_it() -> None:
    host = memory(2, 1)
    store(host, 1, 2, 3)
    assert (len(host.pool.blocks.keys), host.pool.num_free) == (3, 0)
    assert None not in [keep(host, private(n)) for n in (7, 8)]
    step(host)
    assert [host.find(label(n)) is not None for n in (1, 2, 3)] == [False, False, True]


def test_a_prefix_that_the_device_evicts_again_is_evicted_last() -> None:
    host = memory(0, 2)
    store(host, 1, 2, 1, 3)
    assert [host.find(label(n)) is not None for n in (1, 2, 3)] == [True, False, True]


def test_without_slots_for_prefixes_only_kept_blocks_stay() -> None:
    host = memory(2, 0)
    slot = keep(host, label(1))
    assert slot is not None
    step(host)
    assert host.find(label(1)) == slot
    host.release([slot])
    assert (host.find(label(1)), host.pool.num_free) == (None, 2)


def test_prefixes_alone_are_lent_and_until_their_slot_is_taken() -> None:
    host = memory(1, 1)
    assert keep(host, private(1)) is not None
    store(host, 2)
    assert host.lend(private(1).key) is None
    lent = host.lend(label(2).key)
    assert lent is not None
    assert (lent.label, host.still_lends(lent)) == (label(2), True)
    host.store_prefix(BlockId(3), label(3), "")
    assert not host.still_lends(lent), "its bytes change with the next step"
    assert (host.lend(label(2).key), host.lend(label(3).key)) == (None, None)


def test_a_reset_forgets_what_it_evicts_too() -> None:
    manager = make_manager(num_blocks=8, num_prefix_blocks=8, demotion="on_evict")
    seq = make_sequence([*range(8)])
    admit_and_compute(manager, seq)
    manager.forget(seq)
    manager.reset_prefix_cache()
    step(manager.hierarchy)
    assert manager.match(make_sequence([*range(9)])).num_tokens == 0
    assert manager.hierarchy.host.pool.num_free == 8


def preempt_and_evict(manager: KVCacheManager) -> None:
    seq = make_sequence([*range(9)])
    admit_and_compute(manager, seq)
    seq.output_token_ids.append(9)
    assert manager.demote(seq)
    manager.pool.evict_all_cached()
    step(manager.hierarchy)
    assert resume(manager, seq)
    step(manager.hierarchy)
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


@pytest.mark.parametrize(("full", "window"), [("disk", "host"), ("host", "disk"), ("disk", "remote")])
def test_a_block_that_groups_have_in_different_tiers_counts_for_the_lowest(full: str, window: str) -> None:
    manager = make_manager(num_prefix_blocks=16, layers=(FULL, sliding(64)), demotion="on_evict")
    seq = make_sequence([*range(9)])
    admit_and_compute(manager, seq)
    manager.forget(seq)
    manager.pool.evict_all_cached()
    step(manager.hierarchy)
    again = make_sequence([*range(9)])
    hit, host = manager.match(again), manager.hierarchy.host
    for group, index, slot in hit.loads:
        if index == 1:
            host._origins[slot] = (full, window)[group]
    expected = {"device": 0, "host": 4, ("remote" if "remote" in (full, window) else "disk"): 4}
    assert manager.hierarchy.tokens_by_tier(hit) == expected

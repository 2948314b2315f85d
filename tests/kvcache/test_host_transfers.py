"""Stores and loads between device and host memory, from plan to arrival."""

from __future__ import annotations

from octavo.kvcache.block import BlockId
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence, resume
from tests.kvcache.host_tier import faults, keep, label, memory, private, step, store


def test_a_kept_slot_in_flight_is_not_reused_until_its_step_is_over() -> None:
    host = memory(1, 0)
    slot = keep(host, private(1))
    assert slot is not None
    host.take()
    host.forget([slot])
    host.release([slot])
    assert (host.pool.num_free, faults(host)) == (0, [])
    host.complete()
    assert (host.pool.num_free, faults(host)) == (1, [])


def test_keeping_finds_the_prefix_that_is_there_and_leaves_it_there() -> None:
    host = memory(1, 1)
    store(host, 1)
    slot = keep(host, label(1))
    assert slot is not None
    assert slot == host.find(label(1))
    assert not host.has_transfers
    store(host, 2, 3)
    assert host.find(label(1)) == slot, "what is kept is not evicted"
    host.release([slot])
    store(host, 4)
    assert host.find(label(1)) is not None
    assert faults(host) == []


def test_a_block_that_another_sequence_loads_in_the_same_step_came_back_and_was_not_dropped() -> None:
    manager = make_manager(num_blocks=12, num_host_blocks=4, num_prefix_blocks=4, demotion="on_evict")
    away, other = make_sequence([*range(5)]), make_sequence([*range(5)])
    admit_and_compute(manager, away)
    assert manager.demote(away)
    manager.pool.evict_all_cached()
    step(manager.hierarchy)
    assert manager.admit(other, manager.match(other), 1)
    assert resume(manager, away)
    assert len(manager.hierarchy.take()[1]) == 3
    manager.hierarchy.complete()
    manager.audit()
    hierarchy = manager.hierarchy
    assert (hierarchy.swapped.blocks_in, hierarchy.swapped.blocks_dropped, hierarchy.host.counters.loaded) == (2, 0, 1)


def test_what_a_failed_step_was_to_store_is_never_found() -> None:
    host = memory(1, 2)
    assert keep(host, label(1)) is not None
    host.store_prefix(BlockId(2), label(2), "")
    host.take()
    (kept, _) = host.fail()
    assert (host.find(label(1)), host.find(label(2)), host.counters.lost) == (None, None, 1)
    assert faults(host, kept) == []
    host.release([kept])
    assert (host.pool.num_free, faults(host)) == (3, [])

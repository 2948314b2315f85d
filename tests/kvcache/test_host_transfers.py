"""Stores and loads between device and host memory, from plan to arrival."""

from __future__ import annotations

from octavo.kvcache.block import BlockId
from octavo.kvcache.host_memory import SwapCounters
from octavo.request import SequenceId
from tests.kvcache.host_tier import faults, keep, label, memory, private, step, store


def test_a_kept_slot_in_flight_is_not_reused_until_its_step_is_over() -> None:
    host = memory(1, 0)
    assert keep(host, private(1)) is not None
    host.take()
    host.let_go(private(1).key, is_private=True)
    assert (host.pool.num_free, faults(host)) == (0, [])
    host.complete()
    assert (host.pool.num_free, faults(host)) == (1, [])
    host.let_go(private(1).key, is_private=True)
    assert host.swapped == SwapCounters(blocks_out=1, blocks_dropped=1)


def test_keeping_finds_the_prefix_that_is_there_and_leaves_it_there() -> None:
    host = memory(1, 1)
    store(host, 1)
    slot = keep(host, label(1))
    assert slot == host.find(label(1))
    assert not host.has_transfers
    store(host, 2, 3)
    assert host.find(label(1)) == slot, "what is kept is not evicted"
    host.let_go(label(1).key, is_private=False)
    store(host, 4)
    assert host.find(label(1)) is not None
    assert faults(host) == []


def test_a_block_that_another_sequence_loads_in_the_same_step_came_back_and_was_not_dropped() -> None:
    host = memory(1, 1)
    slot = keep(host, label(1))
    assert slot is not None
    step(host)
    host.hold([slot], to_load=True)
    host.plan_loads([slot], [BlockId(2)], SequenceId(1))
    host.hold([slot])
    host.plan_loads([slot], [BlockId(3)], SequenceId(2), resumes=True)
    host.take()
    host.let_go(label(1).key, is_private=False)
    host.complete()
    assert faults(host) == []
    assert host.swapped == SwapCounters(blocks_out=1, blocks_in=1)


def test_what_a_failed_step_was_to_store_is_never_found() -> None:
    host = memory(1, 2)
    assert keep(host, label(1)) is not None
    host.store_prefix(BlockId(2), label(2), "")
    host.take()
    assert host.fail()
    assert (host.find(label(1)), host.find(label(2)), host.counters.lost) == (None, None, 1)
    assert faults(host) == []
    assert (host.pool.num_free, host.num_kept) == (3, 0)
    host.let_go(label(1).key, is_private=False)
    assert host.swapped == SwapCounters(blocks_out=1, blocks_dropped=1)

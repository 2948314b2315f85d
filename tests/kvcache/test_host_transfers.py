"""Stores and loads between device and host memory, from plan to arrival."""

from __future__ import annotations

from octavo.kvcache.block import BlockId
from octavo.kvcache.host_memory import SwapCounters
from octavo.request import SequenceId
from tests.kvcache.host_transfers import faults, keep, label, memory, private, step, store


def test_a_kept_slot_in_flight_is_not_reused_until_its_step_is_over() -> None:
    transfers = memory(1, 0)
    assert keep(transfers, private(1)) is not None
    transfers.take()
    transfers.let_go(private(1).key, is_private=True)
    assert (transfers.host.num_free, faults(transfers)) == (0, [])
    transfers.complete()
    assert (transfers.host.num_free, faults(transfers)) == (1, [])
    transfers.let_go(private(1).key, is_private=True)
    assert transfers.host.swapped == SwapCounters(blocks_out=1, blocks_dropped=1)


def test_keeping_finds_the_prefix_that_is_there_and_leaves_it_there() -> None:
    transfers = memory(1, 1)
    store(transfers, 1)
    slot = keep(transfers, label(1))
    assert slot == transfers.host.find(label(1))
    assert not transfers.are_planned
    store(transfers, 2, 3)
    assert transfers.host.find(label(1)) == slot, "what is kept is not evicted"
    transfers.let_go(label(1).key, is_private=False)
    store(transfers, 4)
    assert transfers.host.find(label(1)) is not None
    assert faults(transfers) == []


def test_a_block_that_another_sequence_loads_in_the_same_step_came_back_and_was_not_dropped() -> None:
    transfers = memory(1, 1)
    slot = keep(transfers, label(1))
    assert slot is not None
    step(transfers)
    transfers.plan_load(slot, BlockId(2), SequenceId(1))
    transfers.plan_load(slot, BlockId(3), SequenceId(2), resumes=True)
    transfers.take()
    transfers.let_go(label(1).key, is_private=False)
    transfers.complete()
    assert faults(transfers) == []
    assert transfers.host.swapped == SwapCounters(blocks_out=1, blocks_in=1)


def test_what_a_failed_step_was_to_store_is_never_found() -> None:
    transfers = memory(1, 2)
    assert keep(transfers, label(1)) is not None
    transfers.store_prefix(BlockId(2), label(2), "")
    transfers.take()
    assert transfers.fail()
    host = transfers.host
    assert (host.find(label(1)), host.find(label(2)), host.counters.lost) == (None, None, 1)
    assert faults(transfers) == []
    assert (host.num_free, host.num_kept) == (3, 0)
    transfers.let_go(label(1).key, is_private=False)
    assert host.swapped == SwapCounters(blocks_out=1, blocks_dropped=1)

"""Stores and loads between device and host memory, from plan to arrival."""

from __future__ import annotations

import pytest

from octavo.errors import CacheError
from octavo.kvcache.block import BlockId
from octavo.kvcache.host_claims import ClaimCounters
from octavo.request import SequenceId
from tests.kvcache.host_transfers import faults, label, memory, step, store


def test_a_claimed_slot_in_flight_is_not_reused_until_its_step_is_over() -> None:
    transfers = memory(1, 0)
    slot = transfers.store_claimed(BlockId(1), None, "")
    assert slot is not None
    transfers.take()
    transfers.unclaim(slot)
    assert (transfers.host.num_free, faults(transfers)) == (0, [])
    transfers.complete()
    assert (transfers.host.num_free, faults(transfers)) == (1, [])
    with pytest.raises(CacheError, match="given back more often than claimed"):
        transfers.unclaim(slot)


def test_a_claim_finds_the_prefix_that_is_there_and_leaves_it_there() -> None:
    transfers = memory(1, 1)
    store(transfers, 1)
    slot = transfers.store_claimed(BlockId(5), label(1), "")
    assert slot == transfers.host.find(label(1))
    assert not transfers.are_planned
    store(transfers, 2, 3)
    assert transfers.host.find(label(1)) == slot, "what is claimed is not evicted"
    assert slot is not None
    transfers.unclaim(slot)
    store(transfers, 4)
    assert transfers.host.find(label(1)) is not None
    assert faults(transfers) == []


def test_a_block_that_another_sequence_loads_in_the_same_step_came_back_and_was_not_dropped() -> None:
    transfers = memory(1, 1)
    slot = transfers.store_claimed(BlockId(1), label(1), "")
    assert slot is not None
    step(transfers)
    transfers.plan_load(slot, BlockId(2), SequenceId(1))
    transfers.plan_load(slot, BlockId(3), SequenceId(2), returns=True)
    transfers.unclaim(slot)
    step(transfers)
    assert transfers.host.claims.counters == ClaimCounters(blocks_out=1, blocks_in=1, blocks_dropped=0)


def test_what_a_failed_step_was_to_store_is_never_found() -> None:
    transfers = memory(1, 2)
    slot = transfers.store_claimed(BlockId(1), label(1), "")
    transfers.store_prefix(BlockId(2), label(2), "")
    transfers.take()
    transfers.fail()
    host = transfers.host
    assert (host.find(label(1)), host.find(label(2)), host.counters.lost) == (None, None, 1)
    assert faults(transfers) == []
    assert slot is not None
    transfers.unclaim(slot)
    assert host.num_free == 3

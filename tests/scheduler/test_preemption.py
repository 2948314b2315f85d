"""Who yields, and how it comes back."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from octavo.kv_budget import KVBudget
from octavo.kvcache.block import BlockId, BlockTransfer, HostBlockId
from octavo.kvcache.holdings import RestoreCost
from octavo.request import Request, SequenceStatus
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.preemption import Preemption
from tests.kvcache.caches import FULL, sliding
from tests.scheduler.kit import Harness, status
from tests.scheduler.plans import shares


def test_swapping_is_chosen_where_two_copies_of_the_blocks_cost_less_than_the_tokens() -> None:
    speed = Preemption(seconds_per_token=1e-3, seconds_per_block=4e-3)
    assert speed.swapping_is_cheaper(RestoreCost(tokens=17, blocks=2))
    assert not speed.swapping_is_cheaper(RestoreCost(tokens=16, blocks=2))


def test_speeds_are_learnt_from_steps_and_swapping_is_tried_until_they_are_known() -> None:
    speed, cost = Preemption(), RestoreCost(tokens=16, blocks=2)
    speed.moved(4, 2.0)
    speed.computed(15, 1.0)
    assert (speed.seconds_per_block, speed.seconds_per_token) == (0.5, None), "too few tokens to say"
    assert speed.swapping_is_cheaper(cost)
    speed.computed(100, 1.0)
    assert not speed.swapping_is_cheaper(cost)
    for _ in range(50):
        speed.moved(10, 0.1)
        speed.moved(0, 0.0)
    assert speed.seconds_per_block == pytest.approx(0.01, rel=1e-2)
    assert speed.swapping_is_cheaper(cost)


def test_a_steps_stores_and_loads_tell_how_long_a_block_takes() -> None:
    scheduler, moved = Harness().scheduler, (BlockTransfer(BlockId(1), HostBlockId(0)),)
    scheduler.observe(StepPlan(stores=moved * 3, loads=moved), 1.0, moving_seconds=2.0)
    assert scheduler.preemption.seconds_per_block == 0.5


def test_recomputing_is_checked_against_swapping_now_and_then() -> None:
    preemption = Preemption(1.0, 1.0, "auto")
    assert [preemption.swaps(RestoreCost(tokens=1, blocks=1)) for _ in range(64)] == ([False] * 31 + [True]) * 2


def swapping_engine(num_host_blocks: int = 20, speed: Preemption | None = None, **cache: Any) -> Harness:
    mode: Literal["swap", "auto"] = "swap" if speed is None else "auto"
    return Harness(num_blocks=1 + 6, num_host_blocks=num_host_blocks, mode=mode, speed=speed, **cache)


def preempt_second(engine: Harness) -> tuple[Request, Request]:
    first, second = engine.add(11), engine.add(11)
    for _ in range(3):
        engine.step()
    assert status(second) is SequenceStatus.WAITING
    return first, second


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    engine = swapping_engine(prefix_caching=False)
    first, second = preempt_second(engine)
    assert (engine.scheduler.num_swapped, second.sequences[0].num_computed) == (1, 12)
    engine.scheduler.end_request(first.request_id)
    plan = engine.step()
    assert shares(plan) == {second.request_id: 1}, "one token, not thirteen"
    assert len(plan.loads) == 3
    assert [new.seq_id for new in plan.new] == list(plan.seq_ids), "its tables are told anew"
    assert engine.scheduler.counters.recomputed_tokens == 0
    engine.run()
    assert engine.kv.hierarchy.host.pool.num_free == 20


def test_the_step_that_preempts_moves_the_blocks_out_before_it_reuses_them() -> None:
    engine = swapping_engine(prefix_caching=False)
    engine.add(11)
    second = engine.add(11)
    engine.step()
    engine.step()
    held = list(engine.kv.tables(second.sequences[0])[0])
    plan = engine.step()
    assert {swap.device for swap in plan.stores} == set(held)
    assert plan.tables[0].blocks[0][-1] in held


@pytest.mark.parametrize("num_host_blocks", [0, 2])
def test_a_full_host_falls_back_to_computing_again(num_host_blocks: int) -> None:
    engine = swapping_engine(num_host_blocks, prefix_caching=False)
    _, second = preempt_second(engine)
    assert (engine.scheduler.num_swapped, second.sequences[0].num_computed) == (0, 0)
    assert engine.scheduler.counters.recomputed_tokens == 12
    engine.run()


def test_an_aborted_swapped_sequence_frees_its_host_blocks() -> None:
    engine = swapping_engine(prefix_caching=False)
    _, second = preempt_second(engine)
    assert engine.kv.hierarchy.num_kept == 3
    engine.scheduler.end_request(second.request_id)
    assert (engine.kv.hierarchy.num_kept, engine.scheduler.num_swapped) == (0, 0)
    engine.run()


@pytest.mark.parametrize(("per_token", "swapped"), [(1.0, 1), (0.1, 0)])
def test_auto_takes_the_cheaper_way(per_token: float, swapped: int) -> None:
    engine = swapping_engine(speed=Preemption(per_token, seconds_per_block=1.0), prefix_caching=False)
    preempt_second(engine)
    assert engine.scheduler.num_swapped == swapped
    engine.run()


def test_the_first_in_service_is_never_the_victim_while_it_has_company() -> None:
    engine = Harness(num_blocks=1 + 6, prefix_caching=False)
    first, _second = engine.add(11), engine.add(11)
    while not first.finished:
        engine.step()
    assert first.sequences[0].num_preemptions == 0
    engine.run()


def test_admission_leaves_room_for_those_that_run_to_grow() -> None:
    engine = Harness(num_blocks=1 + 10, prefix_caching=False, headroom_tokens=8)
    first, second = engine.add(16), engine.add(16)
    assert list(shares(engine.step())) == [first.request_id], "two would fit now, and not with 8 tokens more each"
    engine.run()
    assert second.sequences[0].num_preemptions == 0


def test_a_budget_that_only_reads_less_reserves_as_much_as_none_next_to_a_window() -> None:
    def reserve(kv_budget: KVBudget | None) -> int:
        engine = Harness(layers=(FULL, sliding(3)), headroom_tokens=40)
        engine.add(16, max_tokens=100, kv_budget=kv_budget)
        engine.step()
        return engine.scheduler.running.reserve

    assert reserve(KVBudget(mode="sparse_read", tokens=8)) == reserve(None)


def test_what_cannot_grow_any_more_reserves_nothing() -> None:
    engine = Harness(num_blocks=1 + 10, prefix_caching=False, headroom_tokens=8)
    engine.add(16, max_tokens=1)
    engine.add(16, max_tokens=1)
    assert engine.step().num_rows == 2

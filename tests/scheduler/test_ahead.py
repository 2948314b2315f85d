"""Which steps are planned while the one before is computed; that their tokens are right is the engine's test."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.request import FinishReason, SequenceStatus
from octavo.scheduler.plan import DRAWN, StepPlan
from octavo.scheduler.policy import VirtualTokenCounter
from octavo.structured_outputs import StructuredOutputsParams
from tests.scheduler.kit import Harness
from tests.scheduler.plans import shares
from tests.scheduler.test_scheduler_machine import LAYERS, SchedulerMachine


def run_ahead(engine: Harness, most: int = 100) -> list[StepPlan]:
    """A step, and those that are planned ahead from it on, each before the one before is taken in; all are taken in."""
    plans = [engine.scheduler.schedule()]
    while len(plans) < most and (ahead := engine.scheduler.schedule()):
        engine.finish_step(plans[-1])
        plans.append(ahead)
    engine.finish_step(plans[-1])
    return plans


def test_a_step_ahead_computes_what_the_one_in_flight_draws() -> None:
    engine = Harness()
    requests = [engine.add(length, max_tokens=6) for length in (3, 9)]
    plans = run_ahead(engine)
    assert [plan.ahead for plan in plans] == [False, True, True, True, True, True]
    assert plans[1].token_ids == (DRAWN, DRAWN)
    assert [plan.starts for plan in plans] == [(0, 0), *((3 + i, 9 + i) for i in range(5))]
    assert [plan.step for plan in plans] == [1, 2, 3, 4, 5, 6]
    assert all(request.finished for request in requests), "nobody computed a sixth time"


def test_a_sequence_that_reaches_its_maximum_length_is_left_out() -> None:
    engine = Harness()
    short, long = engine.add(3, max_tokens=4), engine.add(3, max_tokens=7)
    engine.step()
    assert [plan.num_rows for plan in run_ahead(engine)] == [2, 2, 2, 1, 1, 1]
    assert (short.sequences[0].num_output_tokens, long.sequences[0].num_output_tokens) == (4, 7)


def test_tokens_computed_for_an_ended_request_are_dropped_and_not_charged() -> None:
    engine = Harness(policy=(turns := VirtualTokenCounter()))
    leaving, staying = engine.add(3, tenant="leaving"), engine.add(3, tenant="staying")
    engine.step()
    plan, ahead = engine.scheduler.schedule(), engine.scheduler.schedule()
    engine.finish_step(plan)
    received = turns.recent("leaving")
    engine.scheduler.finish(leaving.sequences[0], FinishReason.STOP, "stop")
    assert engine.kv.pool.num_active == 2
    (update,) = engine.finish_step(ahead)
    assert update.seq.request is staying
    assert leaving.sequences[0].num_output_tokens == 2
    assert turns.recent("leaving") <= received
    engine.run()


@pytest.mark.parametrize(
    ("params", "is_awaited"),
    [
        ({"presence_penalty": 1.0}, False),
        ({"logprobs": 0}, False),
        ({"structured_outputs": StructuredOutputsParams(regex="a*")}, True),
    ],
    ids=["penalty", "logprobs", "grammar"],
)
def test_only_draws_within_a_grammar_are_awaited_until_their_request_has_ended(
    params: dict[str, Any], is_awaited: bool
) -> None:
    engine = Harness()
    engine.add(3, max_tokens=40)
    following = engine.add(3, max_tokens=40, **params)
    engine.step()
    assert len(run_ahead(engine, most=4)) == (1 if is_awaited else 4)
    engine.scheduler.end_request(following.request_id)
    assert len(run_ahead(engine, most=4)) == 4


def test_chunks_of_a_prompt_are_planned_ahead_with_streams_and_its_first_token_is_pending() -> None:
    engine = Harness(max_num_batched_tokens=8)
    stream, prompt = engine.add(3, max_tokens=20), engine.add(25, max_tokens=4)
    plans = run_ahead(engine)
    assert [plan.ahead for plan in plans] == [False, *[True] * (len(plans) - 1)]
    begun = [plan for plan in plans if plan.num_rows == 2]
    chunks = [(plan.starts[-1], plan.lengths[-1]) for plan in begun]
    assert chunks[:4] == [(0, 5), (5, 7), (12, 7), (19, 6)], "the rest of the step, beside the stream's token"
    assert chunks[4:] == [(25 + i, 1) for i in range(3)]
    assert begun[4].token_ids == (DRAWN, DRAWN)
    assert (prompt.sequences[0].num_output_tokens, stream.sequences[0].num_output_tokens) == (4, 20)


def test_siblings_are_forked_before_the_step_after_their_prompt_is_planned() -> None:
    engine = Harness()
    request = engine.add(6, n=3, max_tokens=8)
    assert [plan.num_draws for plan in run_ahead(engine)] == [3]
    plans = run_ahead(engine)
    assert [(plan.num_rows, len(plan.copies), plan.ahead) for plan in plans] == [(3, 2, False), *[(3, 0, True)] * 6]
    assert request.finished


def test_no_step_is_planned_ahead_while_a_request_could_be_admitted() -> None:
    engine = Harness()
    engine.add(3, max_tokens=40)
    engine.step()
    plan = engine.scheduler.schedule()
    newcomer = engine.add(3)
    assert not engine.scheduler.schedule()
    engine.finish_step(plan)
    assert newcomer.request_id in shares(engine.scheduler.schedule())


@pytest.mark.parametrize("limits", [{"num_blocks": 6}, {"max_num_seqs": 1}], ids=str)
def test_a_request_without_room_stops_no_step_ahead_and_gets_the_first_free_place(limits: dict[str, Any]) -> None:
    engine = Harness(**limits)
    engine.add(4, max_tokens=9)
    engine.step()
    waiting = engine.add(16, max_tokens=4)
    plans: list[StepPlan] = []
    while waiting.sequences[0].status is SequenceStatus.WAITING:
        plans += run_ahead(engine)
    assert {len(plan.lengths) for plan in plans} == {1}, "no step of both, and none of nobody"
    (first,) = (number for number, plan in enumerate(plans) if plan.new)
    assert first == 8, "its prompt comes right after the other's last token"
    assert [plan.ahead for plan in plans[first - 1 : first + 1]] == [True, False]
    assert sum(plan.ahead for plan in plans[:first]) > 4
    engine.run()


def test_preemption_for_blocks_waits_until_the_step_in_flight_is_done() -> None:
    engine = Harness(num_blocks=6)
    requests = [engine.add(4, max_tokens=12) for _ in range(2)]
    engine.step()
    while not engine.scheduler.counters.num_preemptions:
        before = engine.scheduler.num_running
        plans = run_ahead(engine)
        assert {plan.num_rows for plan in plans[1:]} <= {before}
    engine.run()
    assert [len(request.sequences[0].output_token_ids) for request in requests] == [12, 12]


def test_no_step_is_planned_ahead_after_one_that_lacked_blocks_for_a_prompt() -> None:
    engine = Harness(num_blocks=5, block_size=8, max_num_batched_tokens=4)
    prompt, stream = engine.add(24, max_tokens=2), engine.add(3, max_tokens=20)
    plans: list[StepPlan] = []
    while not prompt.sequences[0].num_output_tokens:
        plans += run_ahead(engine)
    without = [plan.ahead for plan in plans if prompt.request_id not in shares(plan)]
    assert (without, stream.sequences[0].num_preemptions) == ([True, False], 1)
    engine.run()


def test_a_block_that_goes_to_the_host_is_stored_before_a_step_writes_over_it() -> None:
    engine = Harness(num_blocks=6, num_prefix_blocks=4, demotion="on_evict")
    engine.add(8, max_tokens=1)
    engine.step()
    engine.add(4, max_tokens=12)
    engine.step()
    plans: list[StepPlan] = []
    while engine.scheduler.has_work:
        plans += run_ahead(engine)
    assert sum(plan.ahead for plan in plans) > 5
    (storing,) = (plan for plan in plans if plan.stores)
    written = {block for delta in storing.tables for blocks in delta.blocks for block in blocks}
    assert not storing.ahead
    assert {store.device for store in storing.stores} & written


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(2, 12)), min_size=1, max_size=6
    ),
    num_blocks=st.integers(4, 30),
    block_size=st.sampled_from([1, 2, 4]),
    layers=st.sampled_from(LAYERS),
    max_num_seqs=st.integers(1, 6),
    mode=st.sampled_from(["swap", "recompute"]),
    num_prefix_blocks=st.sampled_from([0, 0, 20]),
    data=st.data(),
)
def test_any_course_of_steps_ahead_reads_what_was_computed_and_leaks_nothing(
    requests: list[tuple[list[int], int]], data: st.DataObject, **limits: Any
) -> None:
    """The state machine that drives the scheduler in general, where nothing but room stands in the way."""
    machine = SchedulerMachine()
    machine.build(**limits, prefix_cache="hashed", eviction="lru", budget=64, num_host_blocks=4)
    for tokens, max_tokens in requests:
        machine.arrive(tokens, max_tokens, 1, 0, None, 0.0, "", None, "")
    while machine.scheduler.has_work:
        machine.steps_ahead(20, False, data)
        machine.what_is_kept_up_is_what_a_recount_finds()
    machine.teardown()

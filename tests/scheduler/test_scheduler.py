"""What the scheduler does, one claim at a time; the state machine beside this file holds it to its invariants."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from octavo.errors import CapacityError, ContextLengthError, RequestError
from octavo.request import FinishReason, Sequence, SequenceStatus
from tests.kvcache.caches import make_request
from tests.scheduler.kit import Harness, outputs, status
from tests.scheduler.plans import rows_of, shares


def test_a_prompt_then_one_token_a_step() -> None:
    engine = Harness()
    request = engine.add(9, max_tokens=3)
    assert [shares(engine.step())[request.request_id] for _ in range(3)] == [9, 1, 1]
    assert request.sequences[0].output_token_ids == [7, 7, 7]
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert not engine.scheduler.schedule()
    assert engine.kv.pool.num_active == 0


def test_chunks_of_a_long_prompt_go_beside_the_decodes() -> None:
    engine = Harness(max_num_batched_tokens=10)
    short = engine.add(3)
    engine.step()
    long = engine.add(25)
    steps = [shares(engine.step()) for _ in range(4)]
    assert [step[short.request_id] for step in steps] == [1, 1, 1, 1], "a decode never waits for a prompt"
    assert [step[long.request_id] for step in steps] == [9, 9, 7, 1]
    assert long.sequences[0].num_output_tokens == 2


def test_only_the_last_chunk_of_a_prompt_draws_a_token() -> None:
    engine = Harness(max_num_batched_tokens=4)
    request = engine.add(10)
    drawn = []
    for _ in range(4):
        plan = engine.scheduler.schedule()
        drawn.append(len(engine.finish_step(plan)))
    assert drawn == [0, 0, 1, 1]
    assert request.sequences[0].num_output_tokens == 2


def test_a_step_keeps_to_the_token_limit() -> None:
    engine = Harness(max_num_batched_tokens=20)
    requests = [engine.add(8) for _ in range(4)]
    first, second = engine.step(), engine.step()
    assert list(shares(first).values()) == [8, 8, 4]
    # Three that decode or finish their prompt come before the newcomer.
    assert shares(second) == dict(zip([r.request_id for r in requests], [1, 1, 4, 8], strict=True))


def test_a_step_keeps_to_the_sequence_limit_and_fills_a_place_as_soon_as_it_is_free() -> None:
    engine = Harness(max_num_seqs=2)
    first, second, third = engine.add(4, max_tokens=2), engine.add(4), engine.add(4)
    engine.step()
    assert (status(first), status(second), status(third)) == (
        SequenceStatus.RUNNING,
        SequenceStatus.RUNNING,
        SequenceStatus.WAITING,
    )
    engine.step()
    assert first.finished
    assert third.request_id in shares(engine.step())


def test_the_latest_arrival_is_preempted_first_and_starts_over() -> None:
    engine = Harness(num_blocks=1 + 6, prefix_caching=False)
    first, second = engine.add(11), engine.add(11)
    engine.step()
    assert engine.kv.pool.num_available == 0
    engine.step()  # the twelfth token still has room
    plan = engine.step()  # the thirteenth needs a block
    assert shares(plan) == {first.request_id: 1}
    assert (status(second), second.sequences[0].num_computed) == (SequenceStatus.WAITING, 0)
    assert second.sequences[0].num_preemptions == 1
    assert second.sequences[0].output_token_ids == [7, 7], "what was drawn is kept"
    assert engine.scheduler.counters.num_preemptions == 1
    assert engine.scheduler.counters.recomputed_tokens == 12
    engine.run()
    assert [r.sequences[0].num_output_tokens for r in (first, second)] == [10, 10]


def test_a_preempted_sequence_returns_before_newer_arrivals() -> None:
    engine = Harness(num_blocks=1 + 6, prefix_caching=False)
    first, second = engine.add(11), engine.add(11)
    for _ in range(3):
        engine.step()
    newer = engine.add(2)
    assert engine.kv.pool.num_available == 2, "the newer one would fit, the preempted one does not"
    while not first.finished:
        assert list(shares(engine.step())) == [first.request_id]
    assert list(shares(engine.step())) == [second.request_id, newer.request_id]
    engine.run()


def test_a_preempted_sequence_finds_its_blocks_in_the_prefix_cache() -> None:
    engine = Harness(num_blocks=1 + 6)
    first, second = engine.add(11), engine.add(11)
    for _ in range(3):
        engine.step()
    assert status(second) is SequenceStatus.WAITING
    engine.scheduler.end_request(first.request_id)
    plan = engine.step()
    [item] = rows_of(plan)
    # Of its 13 tokens the first 8 or more still lie in blocks that nobody took.
    assert item.start >= 8
    assert item.start + item.num_tokens == 13
    assert second.num_cached_tokens == 0, "what a request saves by preemption is no cache hit of its prompt"


def test_no_request_is_admitted_in_a_step_that_preempts() -> None:
    engine = Harness(num_blocks=1 + 6, prefix_caching=False)
    first, _second = engine.add(11), engine.add(11)
    for _ in range(2):
        engine.step()
    tiny = engine.add(1)
    assert shares(engine.step()) == {first.request_id: 1}
    assert status(tiny) is SequenceStatus.WAITING


def test_a_lower_priority_number_is_served_first_and_preempted_last() -> None:
    engine = Harness(num_blocks=1 + 6, max_num_seqs=2, prefix_caching=False)
    ordinary, urgent = engine.add(11), engine.add(11, priority=-1)
    later, soon = engine.add(3), engine.add(3, priority=-2)
    plan = engine.step()
    assert list(shares(plan)) == [soon.request_id, urgent.request_id]
    engine.scheduler.end_request(soon.request_id)
    engine.step()
    assert next(iter(shares(engine.step()))) == urgent.request_id
    engine.run()
    assert urgent.sequences[0].num_preemptions == 0
    assert ordinary.finished
    assert later.finished


def test_a_newcomer_of_higher_priority_takes_the_blocks_of_the_lowest_when_they_run_out() -> None:
    engine = Harness(num_blocks=1 + 6, prefix_caching=False)
    ordinary = engine.add(11)
    engine.step()
    urgent = engine.add(11, priority=-1)
    for _ in range(4):
        engine.step()
    assert (status(ordinary), status(urgent)) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)
    engine.run()


def test_parallel_samples_hold_their_places_while_their_prompt_is_computed() -> None:
    engine = Harness(max_num_seqs=4, max_num_batched_tokens=8)
    parent = engine.add(20, n=3)
    single, other = engine.add(2), engine.add(2)
    for _ in range(3):
        engine.step()
    assert [s.status for s in parent.sequences] == [SequenceStatus.RUNNING] * 3
    assert (status(single), status(other)) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    engine.run()
    assert [s.num_output_tokens for s in parent.sequences] == [10, 10, 10]


def test_parallel_samples_share_their_prompts_blocks_until_one_writes_into_the_last() -> None:
    engine = Harness()
    request = engine.add(10, n=3)
    engine.step(draw=lambda seq: seq.index)
    assert engine.kv.pool.num_active == 3, "ten tokens lie in three blocks, for all three samples"
    plan = engine.scheduler.schedule()
    # Two samples get a copy of the half-full block; the last to write has it to itself by then.
    tables = [engine.kv.tables(seq)[0] for seq in engine.scheduler.planned]
    shared_head = [table[:2] for table in tables]
    tails = [table[2] for table in tables]
    assert shared_head[0] == shared_head[1] == shared_head[2]
    assert len(set(tails)) == 3
    assert len(plan.copies) == 2
    assert {copy.source for copy in plan.copies} == {tails[2]}
    assert {copy.destination for copy in plan.copies} == set(tails[:2])
    engine.finish_step(plan)
    assert engine.kv.pool.num_active == 5, "nine without sharing"
    engine.run()
    assert request.finished


def test_parallel_samples_of_a_full_last_block_copy_nothing() -> None:
    engine = Harness()
    engine.add(8, n=4)
    engine.step()
    plan = engine.scheduler.schedule()
    assert not plan.copies
    assert engine.kv.pool.num_active == 2 + 4
    engine.finish_step(plan)
    engine.run()


def test_an_aborted_parallel_request_gives_back_the_places_it_held() -> None:
    engine = Harness(max_num_seqs=4, max_num_batched_tokens=8)
    parent = engine.add(20, n=4)
    engine.step()
    other = engine.add(2)
    engine.step()
    assert status(other) is SequenceStatus.WAITING
    engine.scheduler.end_request(parent.request_id)
    assert all(s.finish_reason is FinishReason.ABORT for s in parent.sequences)
    assert other.request_id in shares(engine.step())


def test_a_shared_prompt_is_computed_once() -> None:
    engine = Harness()
    prompt = list(range(18))
    first, second = engine.add(prompt), engine.add(prompt)
    assert list(shares(engine.step()).values()) == [18, 18], "nothing is published before it is computed"
    third = engine.add(prompt)
    assert shares(engine.step())[third.request_id] == 2
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 0, 16)


def test_a_step_takes_few_long_cached_prefixes_so_that_streams_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.scheduler.admission.LONG_PROMPT", 4)
    monkeypatch.setattr("octavo.scheduler.admission.LONG_BLOCKS_PER_STEP", 8)
    engine = Harness()
    engine.add(prompt := list(range(81)), max_tokens=1)
    engine.run()
    stream, first, second, short = engine.add(3), engine.add(prompt), engine.add(prompt), engine.add(prompt[:9])
    steps = [shares(engine.step()) for _ in range(2)]
    assert all(stream.request_id in step for step in steps)
    assert [[request.request_id in step for request in (first, second, short)] for step in steps] == [
        [True, False, True],
        [True, True, True],
    ]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (80, 80)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    engine = Harness()
    prompt = list(range(16))
    engine.add(prompt, max_tokens=1)
    engine.step()
    again = engine.add(prompt)
    assert shares(engine.step())[again.request_id] == 4
    assert again.num_cached_tokens == 12


def test_prompt_logprobs_need_every_token_computed_but_only_once() -> None:
    engine = Harness(max_num_batched_tokens=8)
    prompt = list(range(20))
    engine.add(prompt, max_tokens=1)
    engine.run()
    scored = engine.add(prompt, prompt_logprobs=0)
    windows = [[(scores.first, len(scores.targets)) for scores in engine.step().scores] for _ in range(4)]
    assert windows == [[(0, 8)], [(8, 8)], [(16, 3)], []]
    assert scored.num_cached_tokens == 0
    assert len(scored.prompt_logprobs) == 19


@pytest.mark.parametrize(
    ("token_id", "params", "reason", "stop_reason"),
    [
        (9, {}, FinishReason.STOP, None),
        (9, {"ignore_eos": True}, None, None),
        (8, {"stop_token_ids": [8]}, FinishReason.STOP, 8),
        (8, {"stop_token_ids": [8], "ignore_eos": True}, FinishReason.STOP, 8),
        (9, {"min_tokens": 2}, None, None),
        (8, {"stop_token_ids": [8], "min_tokens": 2}, None, None),
        (7, {"max_tokens": 1}, FinishReason.LENGTH, None),
        (9, {"max_tokens": 1}, FinishReason.STOP, None),
    ],
)
def test_what_ends_a_sequence(
    token_id: int, params: dict[str, Any], reason: FinishReason | None, stop_reason: int | None
) -> None:
    engine = Harness()
    request = engine.add(3, **params)
    request.eos_token_ids = frozenset({9})
    engine.step(draw=lambda seq: token_id)
    assert (request.sequences[0].finish_reason, request.sequences[0].stop_reason) == (reason, stop_reason)


def test_one_parallel_sample_may_end_before_the_others() -> None:
    engine = Harness()
    request = engine.add(5, n=3)
    request.eos_token_ids = frozenset({9})
    engine.step(draw=lambda seq: 9 if seq.index == 0 else 7)
    assert [s.finished for s in request.sequences] == [True, False, False]
    assert not request.finished
    engine.run()
    assert [s.num_output_tokens for s in request.sequences] == [1, 10, 10]


def test_what_can_never_fit_is_refused_with_the_numbers_and_changes_nothing() -> None:
    engine = Harness(num_blocks=1 + 6)
    with pytest.raises(ContextLengthError, match="length is 200 tokens, but 201 were requested: 1 in the prompt"):
        engine.add(1, max_tokens=200)
    with pytest.raises(CapacityError, match=r"20 prompt tokens and 10 output tokens need 8 KV blocks .* has 6 in all"):
        engine.add(20)
    with pytest.raises(CapacityError, match="n is 9, but at most 8 sequences run at once"):
        engine.add(1, n=9)
    assert not engine.scheduler.has_work
    engine.add(15)  # 24 tokens to keep: six blocks
    engine.run()


def test_a_request_id_in_use_is_refused_and_its_holder_goes_on() -> None:
    engine = Harness()
    request = engine.add(3)
    twin = make_request([1, 2])
    twin.request_id = request.request_id
    with pytest.raises(RequestError, match="is in use"):
        engine.scheduler.add(twin)
    engine.run()
    assert request.finished
    engine.scheduler.add(twin)
    engine.run()
    assert twin.finished


def test_ending_twice_and_ending_the_unknown_do_nothing() -> None:
    engine = Harness()
    request = engine.add(3)
    assert engine.scheduler.end_request(request.request_id) is request
    assert engine.scheduler.end_request(request.request_id) is None
    engine.scheduler.finish(request.sequences[0], FinishReason.STOP)
    assert request.sequences[0].finish_reason is FinishReason.ABORT
    assert (engine.scheduler.num_waiting, engine.scheduler.num_running) == (0, 0)
    assert not engine.scheduler.schedule()


def test_aborting_a_wide_request_looks_at_each_sequence_only_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness(num_blocks=400, max_num_seqs=64)
    request = engine.add(8, n=64)
    engine.step()
    looks = 0

    def finished(seq: Sequence) -> bool:
        nonlocal looks
        looks += 1
        return seq.status is SequenceStatus.FINISHED

    monkeypatch.setattr(Sequence, "finished", property(finished))
    engine.scheduler.end_request(request.request_id)
    assert request.finished
    assert looks <= 5 * 64
    engine.kv.audit()


def test_a_request_whose_update_fails_ends_with_an_error_and_is_reported_once() -> None:
    engine = Harness()
    bad, good = engine.add(4, n=2), engine.add(4)
    engine.step()
    plan, error = engine.scheduler.schedule(), RuntimeError("publishing failed")
    commit = engine.kv.commit

    def fails_for_bad(seq: Sequence) -> None:
        if seq.request is bad:
            raise error
        commit(seq)

    for seq in (*bad.sequences, *good.sequences):
        seq.state.placed.publish_at = 0  # all are to be published
    with patch.object(engine.kv, "commit", fails_for_bad):
        updates = engine.finish_step(plan)
    assert [update.seq for update in updates] == good.sequences
    assert engine.scheduler.take_failures() == [(bad, error)]
    assert engine.scheduler.take_failures() == []
    assert {(seq.status, seq.finish_reason) for seq in bad.sequences} == {(SequenceStatus.FINISHED, FinishReason.ERROR)}
    assert engine.scheduler.requests == [good]
    engine.run()
    assert outputs(good) == [10]


def test_a_request_that_is_held_back_runs_only_after_a_restart_that_lets_it() -> None:
    engine = Harness()
    other, held = engine.add(4, max_tokens=30), engine.add(4)
    engine.scheduler.hold(held)
    assert status(held) is SequenceStatus.PARKED
    assert engine.scheduler.num_waiting == 1
    engine.steps(2)
    engine.scheduler.restart(lambda request_id: request_id == other.request_id)
    engine.steps(2)
    assert outputs(held) == [0]
    engine.scheduler.restart()
    engine.steps(2)
    assert outputs(held)[0] > 0
    engine.run()

"""Everyone keeps moving: what streams, prompts, wide requests and newcomers can rely on, whatever else there is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CapacityError
from octavo.request import Request, Sequence, SequenceStatus
from octavo.scheduler.lifecycle import DEFAULT_HEADROOM_TOKENS
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.step_budget import MOST_NEWCOMERS, MOST_SCORED_TOKENS
from octavo.scheduler.waiting import SortedSequences
from tests.kvcache.caches import make_sequence
from tests.scheduler.kit import Harness, outputs


def server_of(num_blocks: int = 2001, seqs: int = 64, budget: int = 2048, **cache: Any) -> Harness:
    """A scheduler as it serves, with blocks of 16 tokens."""
    return Harness(
        num_blocks,
        16,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=1 << 21,
        headroom_tokens=DEFAULT_HEADROOM_TOKENS,
        audits=False,
        **cache,
    )


def num_running(requests: list[Request]) -> int:
    return sum(seq.status is SequenceStatus.RUNNING for request in requests for seq in request.sequences)


@pytest.mark.parametrize("by_prefix", [False, True])
def test_requests_over_one_long_cached_prefix_run_together(by_prefix: bool) -> None:
    server = server_of(1 + 2000 + 600, by_prefix=by_prefix)
    document = list(range(32_000))
    server.add([*document, 0], max_tokens=1)
    server.run()
    # Six blocks of its own for each.
    requests = [server.add([*document, *[k] * 16], max_tokens=64) for k in range(1, 33)]
    server.step()
    assert num_running(requests) == 32
    server.run()
    assert server.scheduler.counters.num_preemptions == 0


def preemptions(count: int, n: int) -> int:
    server = server_of(401, seqs=256)
    for i in range(count):
        server.add([i] * 100, max_tokens=64, n=n)
    server.run()
    return server.scheduler.counters.num_preemptions


@pytest.mark.parametrize(("num_prompt_tokens", "num_copies"), [(7, 1), (8, 0)])
def test_a_fork_is_bound_to_copy_its_last_block_only_where_that_is_half_filled(
    num_prompt_tokens: int, num_copies: int
) -> None:
    server = Harness(block_size=4)
    server.add(num_prompt_tokens, max_tokens=8, n=2)
    server.step()
    assert server.scheduler.running.reserve == num_copies


def test_parallel_samples_are_reserved_for_like_as_many_requests() -> None:
    as_many = preemptions(256, n=1)
    assert preemptions(16, n=16) <= as_many
    assert preemptions(4, n=64) <= as_many


@pytest.mark.parametrize("priority", [-1, 0])
def test_no_prompt_takes_a_running_streams_token(priority: int) -> None:
    server = server_of(20_001)
    streams = [server.add(50, max_tokens=1000) for _ in range(8)]
    server.step()
    before = [outputs(request) for request in streams]
    server.add(100_000, max_tokens=1, priority=priority)
    for _ in range(30):
        server.step()
    assert [outputs(request)[0] - old[0] for request, old in zip(streams, before, strict=True)] == [30] * 8


def test_an_early_request_that_comes_back_takes_no_running_streams_token() -> None:
    server = server_of(6400, prefix_caching=False)
    first = server.add(60_000, max_tokens=20_000)
    server.steps_until(lambda: outputs(first)[0] >= 2)
    streams = [server.add(50, max_tokens=10_000) for _ in range(8)]
    for _ in range(3):
        server.step()
    server.scheduler.preempt(first.sequences[0])
    before = sum(outputs(request)[0] for request in streams)
    for _ in range(20):
        server.step()
    assert sum(outputs(request)[0] for request in streams) == before + 8 * 20


def test_a_short_prompt_behind_a_long_one_has_its_first_token_within_three_steps() -> None:
    alone = server_of(20_001)
    long = alone.add(200_000, max_tokens=1)
    steps_alone = alone.steps_until(lambda: long.finished)
    server = server_of(20_001)
    long = server.add(200_000, max_tokens=1)
    server.step()
    short = server.add(20, max_tokens=1)
    assert server.steps_until(lambda: short.finished) <= 3
    server.steps_until(lambda: long.finished)
    assert server.num_steps <= 1.1 * steps_alone


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 400), min_size=1, max_size=8),
    stream=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    budget=st.integers(16, 64),
)
def test_no_prompt_starves_under_a_stream_of_shorter_ones(prompts: list[int], stream: list[int], budget: int) -> None:
    server = server_of(4001, seqs=12, budget=budget)
    requests = [server.add(length, max_tokens=1) for length in prompts]
    shorter = itertools.cycle(stream)
    bound = 0
    for request, length in zip(requests, prompts, strict=True):
        # A quarter of each step is for the first in order of service; a place is free when a shorter one ends.
        bound += -(-length // max(1, (budget - 12) // 4)) + 2 + 60 // budget
        while not request.finished:
            for _ in range(3):
                server.add(next(shorter), max_tokens=1)
            server.step()
            assert server.num_steps <= 2 * bound + 8, f"{prompts} stand still"
    server.kv.audit()


def test_a_wide_request_at_the_head_does_not_leave_places_empty() -> None:
    server = server_of(1001)
    server.add(10, max_tokens=500)
    server.step()
    wide = server.add(10, n=64, max_tokens=4)
    behind = [server.add(10, max_tokens=4) for _ in range(30)]
    assert server.steps_until(lambda: all(request.finished for request in behind)) < 20
    assert wide.sequences[0].status is SequenceStatus.WAITING


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [4, 100, 5000])
def test_a_wide_request_does_not_starve_behind_a_stream_of_narrow_ones(max_tokens: int) -> None:
    server = server_of(20_001)
    server.add(10, max_tokens=500)
    server.step()
    wide = server.add(10, n=64, max_tokens=4)
    for _ in range(520):
        server.add(10, max_tokens=max_tokens)
        server.step()
        if wide.finished:
            break
    assert wide.finished, "it starts when those end that ran before it, and is done four tokens later"


def test_a_long_request_that_waits_for_blocks_lets_others_pass_and_starts_in_time() -> None:
    server = server_of(1001)
    first = server.add(8000, max_tokens=300)  # half of all blocks, for 300 steps
    server.step()
    long = server.add(12_000, max_tokens=10)
    server.step()
    assert long.sequences[0].status is SequenceStatus.WAITING
    passing = []
    while not first.finished:
        passing.append(server.add(100, max_tokens=20))
        server.step()
    assert sum(request.finished for request in passing) > 200
    assert server.steps_until(lambda: outputs(long)[0] > 0) < 25


def test_a_request_that_may_pass_may_still_do_so_after_it_did_not_fit() -> None:
    server = Harness(101, max_num_seqs=4, max_num_batched_tokens=512, max_model_len=400)
    first, *short = server.add(196, max_tokens=30), server.add(4, max_tokens=8), server.add(4, max_tokens=8)
    server.step()
    long = server.add(220, max_tokens=4)  # waits for the blocks of the first
    wide = server.add(4, n=2, max_tokens=40)  # fits beside both, but lacks a place until the short ones end
    server.steps_until(lambda: all(request.finished for request in short))
    server.steps(2)
    assert num_running([wide]) == 2
    assert num_running([long]) == 0
    server.steps_until(lambda: first.finished)
    server.steps(2)
    assert num_running([long]) == 1
    server.run()


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    server = server_of(1001, seqs=12, budget=4)
    requests = [server.add(5, max_tokens=30) for _ in range(6)]
    server.steps_until(lambda: min(outputs(request)[0] for request in requests[:4]) > 0)
    assert num_running(requests) == 4
    before = [outputs(request)[0] for request in requests]
    server.step()
    assert sum(outputs(request)[0] for request in requests) - sum(before) == 4
    with pytest.raises(CapacityError, match=r"n is 5, but at most 4 .* max_num_batched_tokens"):
        server.add(5, n=5)
    server.run()


def test_a_head_that_does_not_fit_is_not_looked_up_again_before_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = server_of(1001)
    server.add(8000, max_tokens=5000)
    server.step()
    server.add(12_000, max_tokens=10)
    server.step()
    looked_up = []
    match = type(server.kv).match
    monkeypatch.setattr(type(server.kv), "match", lambda kv, seq: looked_up.append(seq) or match(kv, seq))  # type: ignore[func-returns-value]
    for _ in range(100):
        server.step()
    assert len(looked_up) <= 1


def test_what_waits_is_counted_and_what_is_aborted_is_gone_at_once() -> None:
    server = server_of(seqs=1)
    server.add(10, max_tokens=100)
    server.step()
    waiting = [server.add(30, priority=5) for _ in range(100)]
    assert server.scheduler.num_waiting == 100
    for request in waiting:
        server.scheduler.end_request(request.request_id)
    assert server.scheduler.num_waiting == 0
    queue = server.scheduler.waiting
    assert not queue._by_size
    assert not queue._lines


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=120))
def test_sequences_stay_sorted_and_only_listed_ones_are_removed(operations: list[tuple[bool, int]]) -> None:
    keys: dict[int, tuple[int, int]] = {}
    found = SortedSequences(lambda seq: keys[seq.seq_id])
    listed: list[Sequence] = []
    for adds, number in operations:
        if adds or not listed:
            seq = make_sequence([1])
            keys[seq.seq_id] = (number, seq.seq_id)
            found.add(seq)
            listed.append(seq)
        else:
            seq = listed.pop(number % len(listed))
            found.discard(seq)
            with pytest.raises(ValueError, match="not where its key says"):
                found.discard(seq)
        assert found == sorted(listed, key=lambda seq: keys[seq.seq_id])


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
def test_a_crowd_is_admitted_in_parts_where_streams_wait_for_the_step(n: int) -> None:
    server = server_of(20_001, seqs=256)
    server.add(50, max_tokens=1000)
    server.step()
    crowd = [server.add(1, n=n, max_tokens=1000) for _ in range(200 // n)]
    for steps in range(1, 4):
        server.step()
        assert num_running(crowd) == steps * MOST_NEWCOMERS
    server.run()


def test_a_crowd_is_admitted_at_once_if_no_stream_waits() -> None:
    server = server_of(20_001, seqs=256)
    crowd = [server.add(1, max_tokens=10) for _ in range(200)]
    server.step()
    assert num_running(crowd) == 200
    server.run()


def scored_tokens(plan: StepPlan) -> int:
    return sum(len(scores.targets) for scores in plan.scores)


def test_few_tokens_of_prompts_are_scored_where_streams_wait_for_the_step() -> None:
    server = server_of(20_001)
    stream = server.add(50, max_tokens=1000)
    server.step()
    scored = [server.add(300, max_tokens=2, prompt_logprobs=5) for _ in range(3)]
    plain = server.add(1000, max_tokens=2)
    first = server.step()
    assert 0 < scored_tokens(first) <= MOST_SCORED_TOKENS
    assert outputs(plain) == [1], "the rest of the step is for others"
    server.steps_until(lambda: num_running([stream, *scored]) == 1)
    assert [len(request.prompt_logprobs) for request in scored] == [299] * 3
    assert outputs(stream)[0] == server.num_steps
    server.run()


def test_a_prompt_is_scored_at_once_if_no_stream_waits() -> None:
    server = server_of(20_001)
    server.add(1500, max_tokens=1, prompt_logprobs=5)
    assert scored_tokens(server.step()) == 1499
    server.run()

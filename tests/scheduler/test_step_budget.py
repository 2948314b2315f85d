"""Chunks of prompts sized for a latency target, on devices whose step times follow a known law."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler.step_budget import LEAST_CHUNK, SHARE_OF_PROMPTS, LatencyTarget, StepBudget
from octavo.scheduler.step_time import StepLoad, StepTimeModel
from tests.scheduler.devices import device, fitted, loads


def budget_of(model: StepTimeModel, seconds: float) -> StepBudget:
    """The budget of a step that takes so many seconds by the model, with 8 streams of 500 tokens."""
    target = LatencyTarget(seconds * (1 + model.usual_error), model)
    target._longest = 5000
    return StepBudget(10_000, target, 8, 4000)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.integers(0, 8000), st.integers(1, 3000), st.floats(0.001, 1.0))
def test_a_chunk_is_the_longest_that_fits(start: int, most: int, seconds: float) -> None:
    model, streams = fitted(count=100), StepLoad(8, 4000, 0.0, 8)
    chunk = budget_of(model, seconds).chunk(start, most)
    share = (1 + SHARE_OF_PROMPTS) * model.predict(streams)
    limit = seconds if chunk > LEAST_CHUNK else max(seconds, share)
    assert not chunk or model.predict(streams.with_chunk(start, chunk)) <= limit
    if chunk < most:
        assert model.predict(streams.with_chunk(start, chunk + 1)) > seconds


def test_prompts_share_one_steps_time() -> None:
    time = budget_of(fitted(), 0.05)
    first = time.chunk(0, 3000)
    time.take(0, first // 2)
    second = time.chunk(0, 3000)
    time.take(0, second)
    assert 0 < second < first
    assert time.chunk(0, 3000) < second / 4


def test_a_latency_target_holds_for_99_of_100_steps_of_a_noisy_device() -> None:
    target, rng = LatencyTarget(0.05), random.Random(4)
    late = steps = 0
    for _ in range(20):
        start = 0
        while start < 8000:
            lengths = [50 + steps] * 8
            budget = StepBudget(2040, target, len(lengths), sum(lengths))
            chunk = budget.chunk(start, 8000 - start)
            assert chunk >= 1
            budget.take(start, chunk)
            budget.settle()
            load = StepLoad(8, sum(lengths), 0.0, 8).with_chunk(start, chunk)
            seconds = device(load) * rng.uniform(0.9, 1.15)
            target.observe(load, seconds, num_chunk_tokens=chunk)
            late += seconds > 0.05
            steps += 1
            start += chunk
    assert steps > 500
    assert late / steps < 0.01
    # And the time is used: what is left of 50 ms beside 8 streams computes more than a hundred tokens.
    assert 20 * 8000 / steps > 80


def compute_beside(target: LatencyTarget, lengths: list[int], prompt: int) -> list[StepLoad]:
    """Compute a prompt beside streams of these lengths; returns the steps' loads."""
    load, start, steps = StepLoad(len(lengths), sum(lengths), 0.0, len(lengths)), 0, []
    while start < prompt:
        budget = StepBudget(2040, target, len(lengths), sum(lengths))
        chunk = budget.chunk(start, prompt - start, is_new=start == 0)
        step = load
        if chunk:
            budget.take(start, chunk)
            step = load.with_chunk(start, chunk)
        budget.settle()
        target.observe(step, device(step), num_chunk_tokens=chunk)
        steps.append(step)
        start += chunk
        assert len(steps) < 20_000
    return steps


@pytest.mark.parametrize("part", [0.75, 0.9, 0.97, 0.999, 1.001, 1.5, 3.0])
def test_prompts_have_a_ninth_of_the_time_however_near_streams_are_to_the_target(part: float) -> None:
    lengths = [3000] * 16
    of_streams = device(StepLoad(16, sum(lengths), 0.0, 16))
    target = LatencyTarget(of_streams / part)
    for load in loads(random.Random(5), 200):
        target.observe(load, device(load))
    steps = compute_beside(target, lengths, 6000)
    seconds = sum(map(device, steps))
    assert seconds / (of_streams * len(steps)) - 1 > 0.8 * SHARE_OF_PROMPTS, "within the model's error"
    if part > 1:
        assert seconds / (of_streams * len(steps)) - 1 < 1.1 * SHARE_OF_PROMPTS
        assert {step.rows - 16 for step in steps} <= {0, 1, *range(8, LEAST_CHUNK + 1)}
    # In chunks of single tokens, most of the time would go to reading the prompt's context again and again.
    assert len(steps) < 2500


def test_what_prompts_have_saved_is_not_spent_by_those_that_come_later() -> None:
    target = LatencyTarget(0.02)
    for load in loads(random.Random(5), 200):
        target.observe(load, device(load))
    for _ in range(100):  # a prompt of which a piece would take three steps' share is aborted and begins anew
        budget = StepBudget(2040, target, 16, 48_000)
        budget.chunk(5000, 1000)
        budget.settle()
    for _ in range(100):  # nobody asks
        StepBudget(2040, target, 16, 48_000).settle()
    time, taken = StepBudget(2040, target, 16, 48_000), 0
    while chunk := time.chunk(taken, 1000):
        time.take(taken, chunk)
        taken += chunk
    assert taken == LEAST_CHUNK


def test_a_sequence_always_enters_but_only_one_in_a_step() -> None:
    target = LatencyTarget(0.02)
    for load in loads(random.Random(5), 200):
        target.observe(load, device(load))
    time = StepBudget(2040, target, 16, 48_000)
    assert time.chunk(6000, 1000) == 0
    assert time.chunk(6000, 1000, is_new=True) == 1
    time.take(6000, 1)
    assert time.chunk(0, 1000, is_new=True) == 0


def test_chunks_grow_again_after_steps_so_late_that_single_tokens_were_left() -> None:
    target, start, chunk = LatencyTarget(0.02), 0, 0
    lengths = [500] * 8
    for step in range(1500):
        budget = StepBudget(2040, target, len(lengths), sum(lengths))
        chunk = budget.chunk(start, 10**6)
        budget.take(start, chunk)
        budget.settle()
        slowed = random.Random(step).choice((1.0, 8.0)) if 100 < step < 160 else 1.0
        target.observe(
            StepLoad(8, sum(lengths), 0.0, 8).with_chunk(start, chunk),
            slowed * device(StepLoad(8 + chunk)),
            num_chunk_tokens=chunk,
        )
        start = step  # near enough to stand still
    assert chunk > 20


def slow_attention(load: StepLoad) -> float:
    """As measured of SmolLM2 on two cores: from 4,000 tokens on, 16 more take longer than 50 ms beside 8 streams."""
    return 0.01 + 2e-4 * load.rows + 7.5e-7 * load.chunk_work


def test_a_target_holds_where_even_short_chunks_at_the_end_of_a_long_prompt_exceed_it() -> None:
    target, rng = LatencyTarget(0.05), random.Random(4)
    late = steps = start = 0
    while start < 8000:
        lengths = [50 + steps] * 8
        budget = StepBudget(2040, target, len(lengths), sum(lengths))
        chunk = budget.chunk(start, 8000 - start)
        assert chunk
        budget.take(start, chunk)
        budget.settle()
        load = StepLoad(8, sum(lengths), 0.0, 8).with_chunk(start, chunk)
        seconds = slow_attention(load) * rng.gauss(1.0, 0.08)
        target.observe(load, seconds, num_chunk_tokens=chunk)
        late += seconds > 0.05
        steps += 1
        start += chunk
    assert late / steps < 0.01
    # Computed in one piece per step of 50 ms it would take 900 of them.
    assert steps < 1500

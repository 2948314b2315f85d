"""The step-time model against devices whose law is known, and chunks sized by it. All times are made up."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler.budget import StepBudget
from octavo.scheduler.step_time import WHEN_BROKEN, ChunkTime, LatencyTarget, StepLoad, StepTimeModel


def device(load: StepLoad) -> float:
    """Weights are read in 5 ms, which hides the arithmetic of 20 rows; streams read context, chunks compute."""
    products = max(0.005, 0.00025 * load.rows)
    return 0.002 + products + 4e-7 * load.context + 2e-8 * load.chunk_work + 2e-5 * load.num_seqs


def loads(rng: random.Random, count: int) -> list[StepLoad]:
    found = []
    for _ in range(count):
        streams = rng.randint(0, 32)
        load = StepLoad(streams, sum(rng.randint(10, 4000) for _ in range(streams)), 0.0, streams)
        if rng.random() < 0.5 or not streams:
            load = load.with_chunk(rng.randrange(6000), rng.randint(2, 600))
        found.append(load)
    return found


def fitted(noise: float = 0.0, outliers: float = 0.0, count: int = 600) -> StepTimeModel:
    rng, model = random.Random(1), StepTimeModel()
    for load in loads(rng, count):
        late = 20.0 if rng.random() < outliers else 1.0
        model.observe(load, device(load) * rng.uniform(1 - noise, 1 + noise) * late)
    return model


def mean_error(model: StepTimeModel) -> float:
    held_out = loads(random.Random(2), 200)
    return sum(abs(model.predict(load) / device(load) - 1) for load in held_out) / len(held_out)


def test_the_model_finds_the_law_of_a_device() -> None:
    assert mean_error(fitted()) < 0.05


def test_noise_and_steps_that_took_twenty_times_as_long_hardly_move_it() -> None:
    assert mean_error(fitted(noise=0.1, outliers=0.01)) < 0.12


def test_a_device_that_becomes_slower_is_followed() -> None:
    model, rng = fitted(), random.Random(3)
    for load in loads(rng, 1500):
        model.observe(load, 2 * device(load))
    held_out = loads(random.Random(2), 100)
    assert all(1.6 < model.predict(load) / device(load) < 2.4 for load in held_out)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 500), st.floats(1e-4, 10.0)), max_size=40))
def test_more_to_compute_never_takes_less(observed: list[tuple[int, int, float]]) -> None:
    model = StepTimeModel()
    for start, length, seconds in observed:
        model.observe(StepLoad().with_chunk(start, length), seconds)
    base = StepLoad(4, 400, 0.0, 4)
    times = [model.predict(base.with_chunk(100, tokens)) for tokens in range(0, 400, 20)]
    assert times == sorted(times)
    assert times[0] >= 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 8000), st.integers(1, 3000), st.floats(0.001, 1.0))
def test_a_chunk_is_the_longest_that_fits(start: int, most: int, seconds: float) -> None:
    model, streams = fitted(count=100), StepLoad(8, 4000, 0.0, 8)
    chunk = ChunkTime(model, streams, seconds, 10_000).chunk(start, most)
    if chunk:
        assert model.predict(streams.with_chunk(start, chunk)) <= seconds
    if chunk < most:
        assert model.predict(streams.with_chunk(start, chunk + 1)) > seconds


def test_prompts_share_one_steps_time() -> None:
    time = ChunkTime(fitted(), StepLoad(8, 4000, 0.0, 8), 0.05, 10_000)
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
            budget = StepBudget(2040, target.limit(lengths))
            chunk = budget.chunk(start, 8000 - start)
            assert chunk >= 1
            budget.take(start, chunk)
            load = StepLoad(8, sum(lengths), 0.0, 8).with_chunk(start, chunk)
            seconds = device(load) * rng.uniform(0.9, 1.15)
            target.observe(load, seconds)
            late += seconds > 0.05
            steps += 1
            start += chunk
    assert steps > 500
    assert late / steps < 0.01
    # And the time is used: what is left of 50 ms beside 8 streams computes more than a hundred tokens.
    assert 20 * 8000 / steps > 80


def test_a_target_that_streams_alone_exceed_still_lets_prompts_move() -> None:
    target = LatencyTarget(0.001)
    for load in loads(random.Random(5), 50):
        target.observe(load, device(load))
    budget = StepBudget(500, target.limit([1000] * 8))
    assert budget.chunk(0, 400) == WHEN_BROKEN
    budget.take(0, WHEN_BROKEN)
    assert budget.chunk(WHEN_BROKEN, 384) == 0


def test_chunks_grow_again_after_steps_so_late_that_single_tokens_were_left() -> None:
    target, start, chunk = LatencyTarget(0.02), 0, 0
    lengths = [500] * 8
    for step in range(1500):
        budget = StepBudget(2040, target.limit(lengths))
        chunk = budget.chunk(start, 10**6)
        budget.take(start, chunk)
        slowed = random.Random(step).choice((1.0, 8.0)) if 100 < step < 160 else 1.0
        target.observe(StepLoad(8, sum(lengths), 0.0, 8).with_chunk(start, chunk), slowed * device(StepLoad(8 + chunk)))
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
        budget = StepBudget(2040, target.limit(lengths))
        chunk = budget.chunk(start, 8000 - start)
        assert chunk
        budget.take(start, chunk)
        load = StepLoad(8, sum(lengths), 0.0, 8).with_chunk(start, chunk)
        seconds = slow_attention(load) * rng.gauss(1.0, 0.08)
        target.observe(load, seconds)
        late += seconds > 0.05
        steps += 1
        start += chunk
    assert late / steps < 0.01
    # Computed in one piece per step of 50 ms it would take 900 of them.
    assert steps < 1500

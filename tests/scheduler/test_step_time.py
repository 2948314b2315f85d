"""The step-time model against devices whose law is known."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler.step_time import StepLoad, StepTimeModel
from tests.scheduler.devices import device, fitted, loads


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

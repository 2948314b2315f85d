"""The step-time model against devices whose law is known."""

from __future__ import annotations

import random

import pytest
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


def decodes(rows: int, context: float) -> float:
    """Kernels take eight rows at a time; a row reads its context."""
    return 0.005 + 0.003 * -(-rows // 8) + 1e-7 * rows * context


def test_times_of_decodes_are_found_between_and_beyond_those_observed() -> None:
    model, rng = StepTimeModel(), random.Random(1)
    assert model.decode_seconds(1, 100) == 0
    for _ in range(40):
        for rows in (1, 4, 16):
            model.observe_decodes(rows, 400, decodes(rows, 400) * rng.uniform(0.95, 1.05))
    for rows in (1, 4, 16):
        assert abs(model.decode_seconds(rows, 400) / decodes(rows, 400) - 1) < 0.05
    times = [model.decode_seconds(rows, 400) for rows in range(1, 40)]
    assert times == sorted(times)
    # Beyond 16 rows, each row counts half as much as one of those observed.
    assert times[31] - times[15] == pytest.approx(16 / 2 * (times[15] - times[0]) / 15)


def test_one_disturbed_step_keeps_no_number_of_rows_from_being_tried_again() -> None:
    model = StepTimeModel()
    for _ in range(20):
        model.observe_decodes(1, 100, 0.01)
    model.observe_decodes(2, 100, 1.0)
    assert model.decode_seconds(2, 100) < 0.02
    for _ in range(20):
        model.observe_decodes(2, 100, 1.0)
    assert model.decode_seconds(2, 100) > 0.02
    model = StepTimeModel()
    for rows in (1, 3, 3):
        model.observe_decodes(rows, 100, 0.01 * rows)
    for _ in range(600):
        model.observe_decodes(1, 100, 0.01)
    assert model.decode_seconds(3, 100) < 0.02, "it is forgotten"


def test_fewer_decodes_take_no_longer_than_the_next_number_observed() -> None:
    model = StepTimeModel()
    for rows, seconds in ((1, 0.01), (4, 0.05), (8, 0.02)):
        for _ in range(20):
            model.observe_decodes(rows, 100, seconds)
    assert model.decode_seconds(4, 100) == model.decode_seconds(8, 100) < 0.03

"""A law's error, taken apart: the machine's changing speed, what differs from step to step, and the law itself."""

from __future__ import annotations

import random

import pytest

from octavo.scheduler.step_time import StepLoad, StepTimes
from octavo.simulator.drift import VARIATION_S, Drift, floor, variation
from octavo.simulator.fitting import MeasuredStep, mean_abs_error

LAW = StepTimes(0.004, ((1.0, 0.0), (2.0, 0.001)))


def drifting(noise: float = 0.0, wrong: float = 1.0) -> list[MeasuredStep]:
    """Decodes that slow down to twice their time over ten seconds, beside chunks that always take half as long."""
    rng, at, steps = random.Random(1), 100.0, []
    for number in range(1000):
        load = StepLoad(1 + number % 4, 400, 0.0, 1 + number % 4)
        speed = 1.0 + number / 1000
        if number % 20 == 0:
            load, speed = load.with_chunk(0, 100), 0.5
        seconds = LAW.predict(load) * speed * rng.uniform(1 - noise, 1 + noise) * (wrong if number % 2 else 1.0)
        steps.append(MeasuredStep(load, seconds, at))
        at += 0.01
    return steps


def test_a_machine_that_slows_down_is_told_from_a_law_that_is_wrong() -> None:
    assert mean_abs_error(LAW, drifting()) > 0.25
    assert Drift(LAW, drifting()).residual() < 0.01
    assert 0.08 < Drift(LAW, drifting(wrong=1.2)).residual() < 0.13


def test_what_steps_differ_by_beside_the_machines_speed_is_known() -> None:
    spread = Drift(LAW, drifting(noise=0.2)).spread()
    assert spread.decodes[5] == pytest.approx(0.82, abs=0.03)
    assert spread.decodes[94] == pytest.approx(1.18, abs=0.03)


def test_the_speed_of_the_moment_is_that_of_steps_of_the_same_kind() -> None:
    drift, stream = Drift(LAW, drifting()), StepLoad(1, 400, 0.0, 1)
    assert drift.predict(stream, 100.1) == pytest.approx(LAW.predict(stream), rel=0.03)
    assert drift.predict(stream, 109.9) == pytest.approx(2 * LAW.predict(stream), rel=0.03)
    chunk = StepLoad().with_chunk(0, 300)
    assert drift.predict(chunk, 105.0) == pytest.approx(0.5 * LAW.predict(chunk))
    assert drift.predict(stream, 500.0) == pytest.approx(1.5 * LAW.predict(stream), rel=0.03), "far off: the median"


def test_the_floor_is_what_equal_steps_differ_by() -> None:
    equal = [MeasuredStep(StepLoad(2, 500 + i % 3, 0.0, 2), 0.01 * (1.1 if i % 2 else 0.9)) for i in range(100)]
    lone = [MeasuredStep(StepLoad(3, 2**i, 0.0, 3), 5.0) for i in range(10)]
    error, share = floor(equal + lone)
    assert error == pytest.approx(0.2, abs=0.03)
    assert share == pytest.approx(100 / 110)


def test_a_machine_whose_speed_changes_every_few_seconds_is_said_to_vary() -> None:
    """Every second span is a fifth slower; the law is a tenth off for one of the two kinds, which does not count."""
    loads = StepLoad(1, 400, 0.0, 1), StepLoad(40, 16_000, 0.0, 40)

    def steps(slower: float) -> list[MeasuredStep]:
        found = []
        for number in range(3000):
            at, load = 0.02 * number, loads[number % 2]
            factor = (slower if int(at // VARIATION_S) % 2 else 1.0) * (1.1 if number % 2 else 1.0)
            found.append(MeasuredStep(load, LAW.predict(load) * factor, at))
        return found

    assert variation(LAW, steps(1.2)) == pytest.approx(0.1 / 1.1, rel=0.05)
    assert variation(LAW, steps(1.0)) == pytest.approx(0.0, abs=1e-9)
    assert variation(LAW, []) == 0.0

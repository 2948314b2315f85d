"""The fit against devices whose law is known, and the files it goes through."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.planner.roofline import StepTimes
from octavo.request import SequenceId
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.plan_log import PlanLog, RecordedStep, read_plans
from octavo.scheduler.step_time import StepLoad
from octavo.simulator.fitting import (
    MeasuredStep,
    Spread,
    fit,
    mean_abs_error,
    nonnegative_least_squares,
    periods,
)
from octavo.simulator.sketch import Sketch
from octavo.simulator.speed import MEASURED, Speed, speed_of_plans

LAW = StepTimes(
    base=0.002,
    products=((1.0, 0.0), (8.0, 0.001), (16.0, 0.004), (64.0, 0.006), (512.0, 0.1)),
    per_context_token=4e-7,
    per_chunk_work=2e-8,
    per_seq=2e-5,
)


def steps(seed: int, count: int = 1500, noise: float = 0.0, late: float = 0.0) -> list[MeasuredStep]:
    rng, found = random.Random(seed), []
    for _ in range(count):
        streams = rng.choice((0, 1, 2, 3, 5, 8, 13, 16, 30, 50, 64))
        load = StepLoad(streams, sum(rng.randint(10, 2000) for _ in range(streams)), 0.0, streams)
        if rng.random() < 0.4 or not streams:
            load = load.with_chunk(rng.randrange(3000), rng.randint(1, 500))
        factor = rng.uniform(1 - noise, 1 + noise) * (30.0 if rng.random() < late else 1.0)
        found.append(MeasuredStep(load, LAW.predict(load) * factor))
    return found


def test_the_fit_finds_the_law_of_a_device_on_steps_that_it_has_not_seen() -> None:
    fitted = fit(steps(1))
    assert mean_abs_error(fitted.times, steps(2)) < 0.01
    assert fitted.mean_abs_error < 0.01


def test_noise_and_disturbed_steps_hardly_move_it_and_the_intervals_say_how_sure_it_is() -> None:
    fitted = fit(steps(1, noise=0.1, late=0.01))
    assert mean_abs_error(fitted.times, steps(2)) < 0.03
    low, high = fitted.intervals["per_context_token"]
    assert low <= fitted.times.per_context_token <= high
    assert low > 0.8 * LAW.per_context_token
    assert high < 1.2 * LAW.per_context_token


def test_no_coefficient_is_negative_and_the_time_rises_with_the_rows() -> None:
    times = fit(steps(5, count=80, noise=0.5)).times
    assert min(times.base, times.per_context_token, times.per_chunk_work, times.per_seq) >= 0
    seconds = [times.product_seconds(rows) for rows in range(1, 2000, 7)]
    assert seconds == sorted(seconds)


def test_nonnegative_least_squares_agrees_with_its_conditions_of_optimality() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        matrix, target = rng.normal(size=(30, 8)), rng.normal(size=30)
        x = nonnegative_least_squares(matrix.T @ matrix, matrix.T @ target)
        slope = matrix.T @ (target - matrix @ x)
        assert (x >= 0).all()
        assert (slope <= 1e-6).all()
        assert np.abs(slope[x > 0]).max(initial=0.0) < 1e-6


def test_too_few_steps_are_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match=r"49 steps: at least 50"):
        fit(steps(1, count=49))


def test_a_percentile_of_a_sketch_is_within_half_a_per_cent_and_its_size_does_not_grow() -> None:
    rng, sketch = random.Random(1), Sketch()
    values = sorted(rng.lognormvariate(-4, 1.5) for _ in range(20_000))
    for value in values:
        sketch.add(value)
    for q in (1, 50, 90, 99, 99.9):
        assert sketch.percentile(q) == pytest.approx(values[int(q / 100 * (len(values) - 1))], rel=0.006)
    assert sketch.mean == pytest.approx(sum(values) / len(values))
    assert sketch.greatest == values[-1]
    assert sketch.share_above(values[15_000]) == pytest.approx(0.25, abs=0.02)
    assert len(sketch._buckets) < 1500


def test_sketches_that_are_merged_hold_the_values_of_both() -> None:
    rng, both, parts = random.Random(2), Sketch(), [Sketch(), Sketch()]
    for number in range(2000):
        value = rng.lognormvariate(-4, 1.5)
        both.add(value)
        parts[number % 2].add(value)
    parts[0].merge(parts[1])
    assert parts[0].summary() == pytest.approx(both.summary())


def test_an_empty_sketch_has_no_percentile_and_zero_counts_as_zero() -> None:
    sketch = Sketch()
    assert sketch.summary() == dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
    sketch.add(0.0, times=3)
    assert sketch.percentile(99) == 0.0


def recording(path: Path, num_steps: int, **facts: object) -> str:
    """Steps of 2 ms a row, each begun a millisecond after the one before ended."""
    log = PlanLog(path, {"model": "m", "block_size": 16, **facts})
    at = 1.0
    for number in range(1, num_steps + 1):
        rows = 1 + number % 7
        ids = tuple(SequenceId(i) for i in range(rows))
        plan = StepPlan(
            step=number, seq_ids=ids, starts=(5,) * rows, lengths=(1,) * rows, draws=(1,) * rows, token_ids=(0,) * rows
        )
        log.record(plan, at, 0.002 * rows)
        at += 0.002 * rows + 0.001
    log.close()
    return str(path)


def test_a_speed_is_fitted_to_recorded_plans_and_survives_its_file(tmp_path: Path) -> None:
    speed = speed_of_plans([recording(tmp_path / "plans", 200)])
    load = StepLoad(4, 24, 0.0, 4)
    assert speed.times.predict(load) == pytest.approx(0.009, rel=0.01), "the host's millisecond is part of a step"
    assert speed.facts["model"] == "m"
    speed.write(tmp_path / "speed.json")
    again = Speed.read(tmp_path / "speed.json")
    assert again.times == speed.times
    assert again.spread == speed.spread
    assert speed.spread.decodes[0] == pytest.approx(speed.spread.decodes[-1], rel=0.02), "no step differs"
    assert speed.spread.chunks == (), "there were none"
    assert again.fit["steps"] == 199
    assert again.fit["mean_abs_error"] < 0.01


def recorded(number: int, at: float, seq_ids: tuple[int, ...]) -> RecordedStep:
    each = (1,) * len(seq_ids)
    return RecordedStep(number, at, 0.01, seq_ids, each, each, each, num_moved=0)


def test_a_step_knows_which_requests_came_while_it_was_computed() -> None:
    found = [
        recorded(1, 0.00, (1, 2)),
        recorded(2, 0.01, (2,)),  # the other was preempted
        recorded(3, 0.02, (1, 2, 3, 4)),
        recorded(4, 0.03, (1,)),
        recorded(5, 5.00, (5,)),  # after a pause
        recorded(6, 5.01, (5,)),
    ]
    assert [step.num_arrived for step in periods(found)] == [0, 2, 0, 0], "the fourth was followed by a pause"
    assert [step.resumed for step in periods(found)] == [False, False, False, True]


@pytest.mark.slow
def test_what_a_request_costs_that_comes_during_a_step_is_found() -> None:
    law, rng, found = replace(LAW, per_arrival=0.0025), random.Random(1), []
    for step in steps(1):
        measured = replace(step, num_arrived=int(rng.random() < 0.05))
        found.append(replace(measured, seconds=measured.predicted(law) * rng.uniform(0.9, 1.1)))
    assert fit(found).times.per_arrival == pytest.approx(0.0025, rel=0.1)


def test_the_scatter_of_steps_is_kept_by_kind() -> None:
    law, rng = StepTimes(0.01, ()), random.Random(1)
    decodes = [MeasuredStep(StepLoad(1, 9, 0.0, 1), 0.01 * rng.uniform(0.8, 1.4)) for _ in range(2000)]
    chunks = [MeasuredStep(StepLoad(9, 9, 36.0, 1), 0.02) for _ in range(20)]
    spread = Spread.of(law, decodes + chunks)
    assert spread.decodes[0] == pytest.approx(0.8, abs=0.01)
    assert spread.decodes[50] == pytest.approx(1.1, abs=0.03)
    assert spread.decodes[-1] == pytest.approx(1.4, abs=0.01)
    assert set(spread.chunks) == {2.0}
    assert Spread.of(law, chunks[:19]).chunks == (), "too few to tell"


def test_first_steps_after_a_pause_have_a_scatter_of_their_own() -> None:
    law, chunk, decode = StepTimes(0.01, ()), StepLoad(9, 9, 36.0, 1), StepLoad(1, 9, 0.0, 1)
    steps = [MeasuredStep(chunk, 0.01 * (1 + 0.3 * resumed), resumed=resumed) for resumed in (False, True) * 20]
    spread = Spread.of(law, steps)
    assert spread.ratios(chunk, resumed=True) == pytest.approx((1.3,) * 100)
    assert set(spread.ratios(chunk, resumed=False)) == {1.0}
    assert spread.ratios(decode, resumed=False) == ()
    assert set(Spread.of(law, steps[::2]).ratios(chunk, resumed=True)) == {1.0}, "no pause was measured"


def test_a_speed_file_without_what_steps_differ_by_is_read(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    speed_of_plans([recording(tmp_path / "plans", 200)]).write(path)
    content = json.loads(path.read_text())
    del content["spread"]
    path.write_text(json.dumps(content))
    assert Speed.read(path).spread.decodes == ()


def test_steps_of_the_warm_up_are_not_fitted_to(tmp_path: Path) -> None:
    path = recording(tmp_path / "plans", 200)
    later = list(read_plans(path))[100].at
    assert speed_of_plans([path], since=later).fit["steps"] == 99


def test_steps_beside_other_programs_are_not_fitted_to(tmp_path: Path) -> None:
    path = recording(tmp_path / "plans", 200)
    steps = list(read_plans(path))
    spans = [(steps[20].at, steps[40].at), (steps[60].at, steps[80].at)]
    assert speed_of_plans([path], left_out=spans).fit["steps"] == 159


def test_files_that_are_no_speed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, message in (
        ("{", "is not JSON"),
        ("[]", "not a speed file of version 2"),
        (json.dumps({"octavo_speed": 2}), "is damaged"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            Speed.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Speed.read(tmp_path / "missing")
    one, other = recording(tmp_path / "a", 60), recording(tmp_path / "b", 60, num_blocks=9)
    with pytest.raises(ConfigError, match="are recordings of different engines"):
        speed_of_plans([one, other])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"times": {"base": "x"}}, "base must be a number, finite and not below 0, got 'x'"),
        ({"times": {"base": -1.0}}, "base must be a number, finite and not below 0, got -1"),
        ({"times": {"per_seq": math.nan}}, "per_seq must be a number, finite"),
        ({"times": {"products": [[1, 0], [1, 1]]}}, "not by ascending rows"),
        ({"times": {"products": [[1, 0], [2, -1]]}}, "products must be a number"),
        ({"times": {"base": 0, "products": []}}, "a step takes no time"),
        ({"intake_s": None}, "intake_s must be a number"),
        ({"reply_s": -1}, "reply_s must be"),
        ({"spread": {"decodes": [math.inf]}}, "spread must be"),
        ({"facts": []}, "facts must be an object"),
        ({"facts": {"max_model_len": "x"}}, "max_model_len must be a positive integer, got 'x'"),
    ],
)
def test_a_speed_file_that_could_not_be_simulated_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "speed.json"
    Speed("made up", MEASURED, StepTimes(0.01, ())).write(path)
    content = json.loads(path.read_text())
    content["times"] |= changes.pop("times", {})
    path.write_text(json.dumps(content | changes))
    with pytest.raises(ConfigError, match=message):
        Speed.read(path)

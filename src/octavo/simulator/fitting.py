"""Fit the coefficients of a step to recorded plans: non-negative least squares on relative errors.

Each step is a row of the terms that `StepTimes` adds up, divided by the seconds it took, so that the residual is the
relative error. The products' curve is a sum of ramps between the measured numbers of rows, so that with coefficients of
at least 0 it rises, and needs no other shape. Steps that another process disturbed weigh less (Huber's weights).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.scheduler.plan_log import RecordedStep
from octavo.scheduler.step_time import StepLoad, StepTimes

Array = npt.NDArray[np.float64]

NAMES = ("base", "per_context_token", "per_chunk_work", "per_seq", "per_moved_block")
LEAST_STEPS = 50

_REWEIGHTINGS = 10
_LEAST_IN_RAMP = 8
_BOOTSTRAPS = 200


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step's load, the seconds it took, and when it began."""

    load: StepLoad
    seconds: float
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """The coefficients and how well they hold.

    Attributes:
        intervals: of each coefficient, the products' points as "products(ROWS)": 5th and 95th percentile over
            bootstrap samples of the steps.
        mean_abs_error: relative, over all the steps that were fitted to.
    """

    times: StepTimes
    intervals: dict[str, tuple[float, float]]
    num_steps: int
    mean_abs_error: float


def executions(steps: Iterable[RecordedStep]) -> list[MeasuredStep]:
    """Each step with the seconds that the device took for it."""
    return [MeasuredStep(load_of(step), step.seconds, step.at) for step in steps if step.seconds > 0]


def periods(steps: Iterable[RecordedStep]) -> list[MeasuredStep]:
    """Each step with the seconds until the next began, where the engine went straight on to it.

    That is what streams wait from token to token: planning, updating and reporting included. Whether it went straight
    on shows by a sequence that is in both.
    """
    found, before = [], None
    for step in steps:
        if before is not None and step.step == before.step + 1 and not set(before.seq_ids).isdisjoint(step.seq_ids):
            found.append(MeasuredStep(load_of(before), step.at - before.at, before.at))
        before = step
    return found


def load_of(step: RecordedStep) -> StepLoad:
    moved = step.num_copies + step.num_stored + step.num_loaded
    return StepLoad.of(step.starts, step.lengths, num_moved=moved)


def fit(steps: Sequence[MeasuredStep], *, seed: int = 0) -> Fit:
    """The coefficients of the steps' law.

    Raises:
        ConfigError: too few steps.
    """
    if len(steps) < LEAST_STEPS:
        raise ConfigError(f"{len(steps)} recorded steps are too few to fit a step's time to: at least {LEAST_STEPS}")
    knots = _knots([step.load.rows for step in steps])
    terms = _terms([step.load for step in steps], knots)
    seconds = np.array([step.seconds for step in steps])
    relative = terms / seconds[:, None]
    weights = _huber_weights(relative)
    solution = _solve(relative, weights)
    error = float(np.mean(np.abs(relative @ solution - 1)))
    times = _as_times(solution, knots)
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(_BOOTSTRAPS):
        drawn = rng.multinomial(len(steps), np.full(len(steps), 1 / len(steps)))
        samples.append(_named(_as_times(_solve(relative, weights * drawn), knots)))
    intervals = {}
    for name in samples[0]:
        low, high = np.percentile([sample[name] for sample in samples], [5, 95])
        intervals[name] = (float(low), float(high))
    return Fit(times, intervals, len(steps), error)


def mean_abs_error(times: StepTimes, steps: Sequence[MeasuredStep]) -> float:
    """The mean of |predicted / measured - 1|."""
    return float(np.mean([abs(times.predict(step.load) / step.seconds - 1) for step in steps]))


def _named(times: StepTimes) -> dict[str, float]:
    named = {name: float(getattr(times, name)) for name in NAMES}
    return named | {f"products({rows:g})": seconds for rows, seconds in times.products}


def _knots(rows: Sequence[int]) -> list[int]:
    """1, 2, 4, 8, … as far as there are steps between each and the next."""
    most, counts = max(rows), np.array(rows)
    knots, knot = [1], 2
    while knot < most:
        if (
            np.sum((counts > knots[-1]) & (counts <= knot)) >= _LEAST_IN_RAMP
            and np.sum(counts > knot) >= _LEAST_IN_RAMP
        ):
            knots.append(knot)
        knot *= 2
    return [*knots, max(most, knots[-1] + 1)]


def _terms(loads: Sequence[StepLoad], knots: Sequence[int]) -> Array:
    """[steps, terms]: base, a ramp between each two knots (the last goes on), context, chunk work, sequences, moves."""
    table = np.array(loads, dtype=np.float64)
    rows, others = table[:, 0], table[:, 1:]
    columns = [np.ones(len(rows))]
    for i, (low, high) in enumerate(itertools.pairwise(knots)):
        top = np.inf if i == len(knots) - 2 else high - low
        columns.append(np.clip(rows - low, 0, top))
    return np.column_stack([*columns, others])


def _as_times(solution: Array, knots: Sequence[int]) -> StepTimes:
    base, *rest = solution.tolist()
    slopes, (context, chunk, seq, moved) = rest[: len(knots) - 1], rest[len(knots) - 1 :]
    points, total = [(float(knots[0]), 0.0)], 0.0
    for slope, low, high in zip(slopes, knots, knots[1:], strict=False):
        total += slope * (high - low)
        points.append((float(high), total))
    return StepTimes(base, tuple(points), context, chunk, seq, moved)


def _huber_weights(relative: Array) -> Array:
    """A weight for each step: 1, and less for one whose error is over three times the usual."""
    weights = np.ones(len(relative))
    for _ in range(_REWEIGHTINGS):
        errors = np.abs(relative @ _solve(relative, weights) - 1)
        usual = 3 * max(float(np.median(errors)), 0.002)
        weights = np.minimum(1.0, usual / np.maximum(errors, 1e-12))
    return weights


def _solve(relative: Array, weights: Array) -> Array:
    """The coefficients of at least 0 that minimise the weighted squares of `relative @ x - 1`."""
    scale = np.sqrt(np.einsum("ij,ij->j", relative, relative)) + 1e-300
    scaled = relative / scale
    weighted = scaled * weights[:, None]
    solution: Array = nonnegative_least_squares(scaled.T @ weighted, weighted.sum(axis=0)) / scale
    return solution


def nonnegative_least_squares(gram: Array, target: Array) -> Array:
    """The x of at least 0 that minimises x·G·x - 2 t·x (Lawson and Hanson 1974, chapter 23, on normal equations)."""
    count = len(target)
    gram = gram + np.eye(count) * 1e-10 * np.trace(gram) / count
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        slope = target - gram @ x
        slope[free] = -np.inf
        if free.all() or slope.max() <= 1e-10 * np.abs(target).max():
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            if trial[free].min() > 0:
                x = trial
                break
            # As far towards it as all stay at 0 or above; whoever arrives there is bound again.
            falling = free & (trial <= 0)
            step = float(np.min(x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)))
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
            if not free.any():
                break
    return x

"""Fit the coefficients of `StepTimes` to recorded plans by non-negative least squares on relative errors.

Each step contributes one row: the terms that `StepTimes` sums, divided by the measured seconds, so that the residual is
the relative error. Matrix products are a sum of ramps between knots in the number of rows; with non-negative
coefficients their time can only rise with the rows. Huber weights reduce the influence of steps that another process
disturbed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.planner.roofline import StepTimes
from octavo.scheduler.plan_log import RecordedStep
from octavo.scheduler.step_time import StepLoad

Array = npt.NDArray[np.float64]

NAMES = (
    "base",
    "per_context_token",
    "per_chunk_work",
    "per_seq",
    "per_moved_block",
    "per_arrival",
)
LEAST_STEPS = 50

_REWEIGHTINGS = 10
_LEAST_IN_RAMP = 8
_BOOTSTRAPS = 200
_QUANTILES = 100
_LEAST_IN_SPREAD = 20  # ratios needed for quantiles

PAUSE_S = 0.02
"""An engine without work for so long is idle: its processors sleep, and its next step finds their caches cold."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step's load, the seconds it took, and when it began.

    Attributes:
        num_moved: blocks copied, stored or loaded before it.
        num_arrived: requests that came in while it was computed.
        resumed: it is the first step after a pause.
    """

    load: StepLoad
    seconds: float
    at: float = 0.0
    num_moved: int = 0
    num_arrived: int = 0
    resumed: bool = False

    def predicted(self, times: StepTimes) -> float:
        """Return the seconds that it takes by a model."""
        return times.predict(self.load, self.num_moved, self.num_arrived)


@dataclass(frozen=True, slots=True)
class Spread:
    """Scatter of single steps around the step-time model, which predicts their middle.

    One and the same step takes a tenth more or less each time, on a quiet machine too. So a simulation multiplies each
    step by a ratio drawn from these quantiles of measured / predicted seconds, evenly spaced; without any, every step
    takes what is predicted.

    Attributes:
        decodes: of steps without chunks of prompts.
        chunks: of steps with chunks.
        resumed: of the first steps after a pause, which delay a prompt that finds the engine idle.
    """

    decodes: tuple[float, ...] = ()
    chunks: tuple[float, ...] = ()
    resumed: tuple[float, ...] = ()

    @classmethod
    def of(cls, times: StepTimes, steps: Iterable[MeasuredStep]) -> Spread:
        """Return the ratios of measured steps to a model's."""
        kinds: dict[str, list[float]] = {"decodes": [], "chunks": [], "resumed": []}
        for step in steps:
            kind = "resumed" if step.resumed else "chunks" if step.load.chunk_work > 0 else "decodes"
            kinds[kind].append(step.seconds / step.predicted(times))
        return cls(**{kind: _quantiles(ratios) for kind, ratios in kinds.items()})

    def ratios(self, load: StepLoad, resumed: bool) -> tuple[float, ...]:
        """Return the ratios of steps of one kind; those of the first steps after a pause only if they were measured."""
        if resumed and self.resumed:
            return self.resumed
        return self.chunks if load.chunk_work > 0 else self.decodes


def _quantiles(ratios: list[float]) -> tuple[float, ...]:
    if len(ratios) < _LEAST_IN_SPREAD:
        return ()
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return tuple(float(value) for value in np.quantile(ratios, places))


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted coefficients, with their uncertainty.

    Attributes:
        intervals: 5th and 95th percentile of each coefficient over bootstrap samples of the steps; a point of the
            matrix products is named "products(ROWS)".
        num_steps: steps in the fit.
        mean_abs_error: mean |predicted / measured - 1| over these steps.
    """

    times: StepTimes
    intervals: dict[str, tuple[float, float]]
    num_steps: int
    mean_abs_error: float


def periods(steps: Iterable[RecordedStep]) -> list[MeasuredStep]:
    """Return the steps with the seconds until the next step began, if it followed without a pause.

    This is the inter-token latency that streams see: it includes planning, updating and output processing. After a
    pause, the next step has no sequence in common; otherwise, sequences that are new in it arrived during this step.
    """
    found, before, resumed, seen = list[MeasuredStep](), None, False, set[int]()
    for step in steps:
        new = set(step.seq_ids) - seen
        seen |= new
        if before is not None:
            goes_on = step.step == before.step + 1 and not set(before.seq_ids).isdisjoint(step.seq_ids)
            if goes_on:
                load = StepLoad.of(before.starts, before.lengths)
                seconds = step.at - before.at
                found.append(MeasuredStep(load, seconds, before.at, before.num_moved, len(new), resumed))
            resumed = not goes_on and step.at - (before.at + before.seconds) >= PAUSE_S
        before = step
    return found


def outside(steps: Iterable[MeasuredStep], spans: Sequence[tuple[float, float]]) -> list[MeasuredStep]:
    """Return the steps that touch none of the spans of time, given by beginning and end."""
    return [
        step for step in steps if not any(began < step.at + step.seconds and step.at < ended for began, ended in spans)
    ]


def fit(steps: Sequence[MeasuredStep], *, seed: int = 0) -> Fit:
    """Fit the coefficients of `StepTimes`.

    Args:
        seed: of the bootstrap samples.

    Raises:
        ConfigError: there are fewer than `LEAST_STEPS` steps.
    """
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"cannot fit step times to {len(steps)} steps: at least {LEAST_STEPS} are needed; record for longer"
        )
    knots = _knots([step.load.rows for step in steps])
    relative = _terms(steps, knots) / np.array([step.seconds for step in steps])[:, None]
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
    """Return the mean |predicted / measured - 1|."""
    return float(np.mean([abs(step.predicted(times) / step.seconds - 1) for step in steps]))


def _named(times: StepTimes) -> dict[str, float]:
    named = {name: float(getattr(times, name)) for name in NAMES}
    return named | {f"products({rows:g})": seconds for rows, seconds in times.products}


def _knots(rows: Sequence[int]) -> list[int]:
    """Return 1, 2, 4, 8, …, leaving out knots with too few steps between them."""
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


def _terms(steps: Sequence[MeasuredStep], knots: Sequence[int]) -> Array:
    """Return the terms, [steps, terms]: base, a ramp from each knot to the next (the last is unbounded), context, chunk
    work, sequences, moved blocks, arrived requests."""
    table = np.array([(*step.load, step.num_moved, step.num_arrived) for step in steps], dtype=np.float64)
    rows, others = table[:, 0], table[:, 1:]
    columns = [np.ones(len(rows))]
    for i, (low, high) in enumerate(itertools.pairwise(knots)):
        top = np.inf if i == len(knots) - 2 else high - low
        columns.append(np.clip(rows - low, 0, top))
    return np.column_stack([*columns, others])


def _as_times(solution: Array, knots: Sequence[int]) -> StepTimes:
    base, *rest = solution.tolist()
    slopes, others = rest[: len(knots) - 1], rest[len(knots) - 1 :]
    points, total = [(float(knots[0]), 0.0)], 0.0
    for slope, low, high in zip(slopes, knots, knots[1:], strict=False):
        total += slope * (high - low)
        points.append((float(high), total))
    return StepTimes(base, tuple(points), *others)


def _huber_weights(relative: Array) -> Array:
    """Return a weight for each step: 1, or less if its error is over three times the usual one."""
    weights = np.ones(len(relative))
    for _ in range(_REWEIGHTINGS):
        errors = np.abs(relative @ _solve(relative, weights) - 1)
        usual = 3 * max(float(np.median(errors)), 0.002)
        weights = np.minimum(1.0, usual / np.maximum(errors, 1e-12))
    return weights


def _solve(relative: Array, weights: Array) -> Array:
    """Return the x >= 0 that minimises the weighted sum of squares of `relative @ x - 1`."""
    scale = np.sqrt(np.einsum("ij,ij->j", relative, relative)) + 1e-300
    scaled = relative / scale
    weighted = scaled * weights[:, None]
    solution: Array = nonnegative_least_squares(scaled.T @ weighted, weighted.sum(axis=0)) / scale
    return solution


def nonnegative_least_squares(gram: Array, target: Array) -> Array:
    """Return the x >= 0 that minimises x·G·x - 2 t·x (Lawson and Hanson 1974, chapter 23, on the normal equations)."""
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
            # Move towards the trial until the first coefficient reaches 0, and fix that one there again.
            falling = free & (trial <= 0)
            step = float(np.min(x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)))
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
            if not free.any():
                break
    return x

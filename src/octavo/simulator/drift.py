"""Separate the error of a step-time model from changes in the machine's speed.

Neighbours on a host take memory bandwidth, clock rate and hyperthreads from a virtual machine. On one that was
otherwise idle, the same step took 7 ms, and 4 ms ten seconds later; the same chunk of a prompt 144 and 70 ms. No model
fitted beforehand can predict that. So three figures are reported beside the model's error:

    floor      mean |median of equal steps / step - 1|: the error of a model that knew the median of every kind of step
    drift      running median of measured / predicted time: the machine's current speed
    residual   the model's error after correcting for drift, which is estimated without the step in question
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from octavo.scheduler.step_time import StepLoad, StepTimes
from octavo.simulator.fitting import MeasuredStep
from octavo.simulator.spread import Spread

VARIATION_S = 5.0
_LEAST_IN_SPAN = 20

_SPAN_S = 1.5
_NEAREST = {False: 12, True: 3}  # steps on either side of a step; steps with chunks are rarer
_LEAST = 3  # steps needed for a median
_EQUAL = 0.1  # relative difference in context, chunk work and coldness below which loads count as equal


class Drift:
    """A step-time model, corrected by how far measured steps deviated from it over time.

    Steps with and without chunks of prompts are tracked separately: arithmetic and memory slow down at different times.

    Args:
        times: the model.
        steps: measured steps, by start time.
    """

    def __init__(self, times: StepTimes, steps: Sequence[MeasuredStep]) -> None:
        self.times = times
        self._steps = steps
        self._at: dict[bool, list[float]] = {False: [], True: []}
        self._ratios: dict[bool, list[float]] = {False: [], True: []}
        for step in steps:
            kind = step.load.chunk_work > 0
            self._at[kind].append(step.at)
            self._ratios[kind].append(step.seconds / times.predict(step.load))
        self._overall = {kind: statistics.median(ratios or [1.0]) for kind, ratios in self._ratios.items()}

    def predict(self, load: StepLoad, at: float) -> float:
        """Predict the seconds of a step that begins at time `at`, at the machine's speed around then."""
        kind = load.chunk_work > 0
        return self.times.predict(load) * self._ratio(kind, at, bisect_left(self._at[kind], at), 0)

    def residual(self) -> float:
        """Return the mean |predicted / measured - 1| after correcting each step by the steps around it."""
        return statistics.fmean(abs(1 / ratio - 1) for _, ratio in self._corrected())

    def spread(self) -> Spread:
        """Return how far steps lie from the model after correcting each by the steps around it."""
        return Spread.of(self._corrected())

    def _corrected(self) -> Iterator[tuple[StepLoad, float]]:
        """Yield the load of each step, and its measured / predicted time beside that of the steps around it."""
        places = {False: 0, True: 0}
        for step in self._steps:
            kind = step.load.chunk_work > 0
            ratio = self._ratio(kind, step.at, places[kind], 1)
            yield step.load, step.seconds / (self.times.predict(step.load) * ratio)
            places[kind] += 1

    def _ratio(self, kind: bool, at: float, place: int, left_out: int) -> float:
        """Return the median ratio around index `place`, leaving out `left_out` steps from `place` on."""
        times, ratios, nearest = self._at[kind], self._ratios[kind], _NEAREST[kind]
        around = (*range(max(0, place - nearest), place), *range(place + left_out, min(len(times), place + nearest)))
        near = [ratios[i] for i in around if abs(times[i] - at) <= _SPAN_S]
        return statistics.median(near) if len(near) >= _LEAST else self._overall[kind]


def variation(times: StepTimes, steps: Sequence[MeasuredStep]) -> float:
    """Return the standard deviation of the machine's speed from one `VARIATION_S` to the next, relative to its mean.

    It is that of the medians of measured / predicted time, each step beside the others of its kind, so that errors of
    the model count as little as possible.
    """
    kinds: dict[tuple[bool, int], list[tuple[float, float]]] = defaultdict(list)
    for step in steps:
        kind = step.load.chunk_work > 0, step.load.rows.bit_length()
        kinds[kind].append((step.at, step.seconds / times.predict(step.load)))
    spans: dict[int, list[float]] = defaultdict(list)
    for found in kinds.values():
        usual = statistics.median(ratio for _, ratio in found)
        for at, ratio in found:
            spans[int(at // VARIATION_S)].append(ratio / usual)
    medians = [statistics.median(ratios) for ratios in spans.values() if len(ratios) >= _LEAST_IN_SPAN]
    return statistics.pstdev(medians) / statistics.fmean(medians) if medians else 0.0


def floor(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """Return the mean |median of equal steps / step - 1|, and the share of steps with at least three equal ones."""
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for step in steps:
        load = step.load
        sizes = (round(math.log1p(value) / _EQUAL) for value in (load.context, load.chunk_work, load.cold))
        groups[load.rows, load.num_seqs, load.num_arrived, load.num_ended, *sizes].append(step.seconds)
    errors = [
        abs(statistics.median(group[:i] + group[i + 1 :]) / seconds - 1)
        for group in groups.values()
        if len(group) > _LEAST
        for i, seconds in enumerate(group)
    ]
    return (statistics.fmean(errors) if errors else math.nan), len(errors) / max(1, len(steps))

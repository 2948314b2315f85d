"""What no law of steps can predict: a machine whose speed changes, and steps that differ from time to time.

A virtual machine's neighbours take memory bandwidth, clock rate and the other half of its cores. On one that was
otherwise idle the same step took 7 ms, and ten seconds later 4 ms; a prompt's chunk 144 and 70. A law that was fitted
before knows nothing of that, however good it is. So beside the error of a law stand

    floor      |median of equal steps / the step - 1|: what is left to a law that knows every step's median
    drift      measured over predicted time, a running median: the machine's speed of the moment
    residual   the law's error where that is taken out, each step's own time left out of the median
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from octavo.scheduler.step_time import StepLoad, StepTimes
from octavo.simulator.fitting import MeasuredStep

_SPAN_S = 1.5
_NEAREST = {False: 12, True: 3}  # on either side; steps with chunks of prompts are rarer
_LEAST = 3  # steps that have a median
_EQUAL = 0.1  # loads whose context and chunk work differ by less are the same


class Drift:
    """The law of a machine's steps, and how much longer they took than it says, as time passed.

    Steps with chunks of prompts are apart from others: arithmetic and memory slow down at different times.

    Args:
        steps: in their order.
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
        """Seconds of a step that begins then, at the machine's speed of that moment."""
        kind = load.chunk_work > 0
        return self.times.predict(load) * self._ratio(kind, at, bisect_left(self._at[kind], at), 0)

    def residual(self) -> float:
        """The mean of |predicted / measured - 1|, at the speed of the moment as other steps show it."""
        places, errors = {False: 0, True: 0}, []
        for step in self._steps:
            kind = step.load.chunk_work > 0
            ratio = self._ratio(kind, step.at, places[kind], 1)
            errors.append(abs(self.times.predict(step.load) * ratio / step.seconds - 1))
            places[kind] += 1
        return statistics.fmean(errors)

    def _ratio(self, kind: bool, at: float, place: int, left_out: int) -> float:
        """The median around a place, `left_out` steps from there on apart."""
        times, ratios, nearest = self._at[kind], self._ratios[kind], _NEAREST[kind]
        around = (*range(max(0, place - nearest), place), *range(place + left_out, min(len(times), place + nearest)))
        near = [ratios[i] for i in around if abs(times[i] - at) <= _SPAN_S]
        return statistics.median(near) if len(near) >= _LEAST else self._overall[kind]


def floor(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """The mean of |median of equal steps / a step - 1|, and the share of steps that have three equal ones or more."""
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for step in steps:
        load = step.load
        sizes = (round(math.log1p(value) / _EQUAL) for value in (load.context, load.chunk_work))
        groups[load.rows, load.num_seqs, *sizes].append(step.seconds)
    errors = [
        abs(statistics.median(group[:i] + group[i + 1 :]) / seconds - 1)
        for group in groups.values()
        if len(group) > _LEAST
        for i, seconds in enumerate(group)
    ]
    return (statistics.fmean(errors) if errors else math.nan), len(errors) / max(1, len(steps))

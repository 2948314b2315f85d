"""Scatter of single steps around the step-time model.

One and the same step takes a tenth more or less each time, on a quiet machine too
(benchmarks/results/intel_spr/step_times.md). The model predicts the middle; percentiles of latencies include the
scatter around it. So a simulation multiplies each step by a ratio drawn from those measured, of steps with chunks of
prompts and of those without.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from octavo.scheduler.step_time import StepLoad

_QUANTILES = 100
_LEAST = 20  # ratios needed for quantiles


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of measured / predicted seconds, evenly spaced; without any, every step takes what is predicted.

    Attributes:
        decodes: of steps without chunks of prompts.
        chunks: of steps with chunks.
    """

    decodes: tuple[float, ...] = ()
    chunks: tuple[float, ...] = ()

    @classmethod
    def of(cls, ratios: Iterable[tuple[StepLoad, float]]) -> Spread:
        """Return the quantiles of steps' measured / predicted seconds."""
        kinds: dict[bool, list[float]] = {False: [], True: []}
        for load, ratio in ratios:
            kinds[load.chunk_work > 0].append(ratio)
        return cls(_quantiles(kinds[False]), _quantiles(kinds[True]))


def _quantiles(ratios: list[float]) -> tuple[float, ...]:
    if len(ratios) < _LEAST:
        return ()
    places = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return tuple(float(value) for value in np.quantile(ratios, places))


class Draws:
    """Ratios drawn from a spread, the same in every run."""

    def __init__(self, spread: Spread, seed: int = 0) -> None:
        self._spread = spread
        self._random = random.Random(seed).random

    def ratio(self, load: StepLoad) -> float:
        """Return how many times the predicted seconds the next step takes."""
        ratios = self._spread.chunks if load.chunk_work > 0 else self._spread.decodes
        return ratios[int(self._random() * len(ratios))] if ratios else 1.0

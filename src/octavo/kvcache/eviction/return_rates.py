"""A model of how soon blocks are used again, by class and age, fitted while serving."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_PER_OCTAVE = 3
_YOUNGEST = 32  # ages below pool / 32 are one bucket
_FORGETTING = 0.95  # factor on all counts after each fit
_COUNTED_AT_ONCE = 1024  # ends of rests
_ASSUMED = 4  # prior returns of each class, one per `num_blocks` uses, so that few observations have little effect

Ages = npt.NDArray[np.int64]
Kinds = npt.NDArray[np.int64]


class ReturnRates:
    """Estimates the best rate of hits that keeping a block can bring, by its class and age.

    A block's time at rest ends when it returns, or when it is forgotten. The model counts, by class and age, returns
    and the time that blocks spent at that age, including those still at rest. The rate of return of a block of age a is
    the Gittins index of its class,

        max over b > a of   returns between a and b / time between a and b

    which is the most hits per time that keeping it can bring (the hit density of LHD, Beckmann 2018, has b = infinity).
    Ages are counted in buckets, three per octave, and rates are interpolated linearly between them.

    Other features of a block (turn, think time, depth, lengths) did not help on requests outside the training set.

    Args:
        num_blocks: size of the pool. Ages are measured in uses of blocks, so all blocks could be used once in this
            time.
        oldest: ages above this share one bucket.
    """

    def __init__(self, num_blocks: int, oldest: int) -> None:
        self._num_blocks = num_blocks
        youngest = max(1.0, num_blocks / _YOUNGEST)
        self._edges = [0.0]
        while self._edges[-1] < oldest:
            self._edges.append(youngest * 2 ** ((len(self._edges) - 1) / _PER_OCTAVE))
        self._returns, self._ends = np.zeros((2, len(self._edges))), np.zeros((2, len(self._edges)))
        self._rates: list[list[float]] = []
        # Rests that are not counted yet, each as twice the age less the class: many are counted faster together.
        self._returned: list[int] = []
        self._lost: list[int] = []

    @property
    def is_fitted(self) -> bool:
        return bool(self._rates)

    def rate(self, kind: int, age: int) -> float:
        """Return the rate of a block of this class and age; only valid once fitted."""
        edges, rates = self._edges, self._rates[kind]
        bucket = self._bucket(age)
        if bucket + 1 == len(edges):
            return rates[bucket]
        step = (age - edges[bucket]) / (edges[bucket + 1] - edges[bucket])
        return rates[bucket] + step * (rates[bucket + 1] - rates[bucket])

    def note_returned(self, rests: Sequence[int]) -> None:
        """Record that blocks have returned: of each, twice its age less its class."""
        self._returned += rests
        if len(self._returned) >= _COUNTED_AT_ONCE:
            self._count_noted()

    def note_lost(self, uses: Sequence[int], now: int) -> None:
        """Record that blocks will not return, by their last uses."""
        twice = 2 * now
        self._lost += [twice - use for use in uses]
        if len(self._lost) >= _COUNTED_AT_ONCE:
            self._count_noted()

    def note_returns(self, kinds: npt.NDArray[np.uint8], ages: Ages) -> None:
        """Call `note_returned` for many blocks, by their classes and ages."""
        if not ages.size:
            return
        youngest, oldest = self._bucket(int(ages.min())), self._bucket(int(ages.max()))
        if youngest == oldest:  # the usual case: they were used together
            counts = np.zeros(self._ends.shape, np.int64)
            counts[:, youngest] = np.bincount(kinds, minlength=2)
        else:
            counts = self._count(kinds, ages)
        self._ends += counts
        self._returns += counts

    def fit(self, waiting: Iterable[tuple[Kinds, Ages, float]]) -> None:
        """Fit the rates to times at rest that have ended, and to those that continue.

        Args:
            waiting: samples of the blocks still at rest: classes, ages, and how many blocks each entry stands for.
        """
        self._count_noted()
        ends = self._ends.copy()
        for kinds, ages, weight in waiting:
            ends += weight * self._count(kinds, ages)
        widths = np.diff(self._edges, append=2 * self._edges[-1])
        # A block whose rest ends in a bucket spent the full width of all younger ones and half of its own.
        reached = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1]
        spent = (reached - ends) * widths + ends * widths / 2
        assumed_time = _ASSUMED * self._num_blocks
        self._rates = [
            [
                float(((np.cumsum(returns[b:]) + _ASSUMED) / (np.cumsum(time[b:]) + assumed_time)).max())
                for b in range(len(widths))
            ]
            for returns, time in zip(self._returns, spent, strict=True)
        ]
        self._returns *= _FORGETTING
        self._ends *= _FORGETTING

    def _count_noted(self) -> None:
        returned, lost = (np.array(noted, np.int64) for noted in (self._returned, self._lost))
        returns = self._count(returned & 1, (returned + 1) >> 1)
        self._returns += returns
        self._ends += returns + self._count(lost & 1, (lost + 1) >> 1)
        self._returned.clear()
        self._lost.clear()

    def _count(self, kinds: npt.NDArray[np.integer[Any]], ages: Ages) -> npt.NDArray[Any]:
        """Return the number of blocks of each class and age."""
        buckets = np.searchsorted(self._edges, ages, side="right") - 1
        counts = np.bincount(kinds.astype(np.int64) * len(self._edges) + buckets, minlength=self._ends.size)
        return counts.reshape(self._ends.shape)

    def _bucket(self, age: int) -> int:
        return bisect_right(self._edges, age) - 1

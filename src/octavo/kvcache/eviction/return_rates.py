"""How soon blocks are used again: a model of their rate of return by class and age, fitted while serving."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_PER_OCTAVE = 3
_YOUNGEST = 32  # ages below pool / 32 are one bucket
_FORGETTING = 0.95  # of what was counted, this much remains after each fit
_ASSUMED = 4  # returns of each class, one a pool's time, so that few observations mean little

Ages = npt.NDArray[np.int64]
Kinds = npt.NDArray[np.int64]


class ReturnRates:
    """The best rate of hits that keeping a block can bring, by its class and age.

    A block's time at rest ends when it returns, or when it is forgotten. Counted are, by class and age, returns and the
    time that blocks spent at that age, those still at rest included. The rate of return of a block of age a is the
    Gittins index of its class,

        max over b > a of   returns between a and b / time between a and b

    which is the most hits per time that keeping it can bring (the hit density of LHD, Beckmann 2018, has b = infinity).
    Ages are counted in buckets, three an octave; between two of them a rate is in proportion.

    What else a server knows of a block (turn, think time, depth, lengths) brought nothing on requests that it was not
    fitted on: benchmarks/results/return_signals.md.

    Args:
        num_blocks: of the pool; ages are uses of blocks, so that this is the time in which all could be used once.
        oldest: ages above it are one bucket.
    """

    def __init__(self, num_blocks: int, oldest: int) -> None:
        self._num_blocks = num_blocks
        youngest = max(1.0, num_blocks / _YOUNGEST)
        self._edges = [0.0]
        while self._edges[-1] < oldest:
            self._edges.append(youngest * 2 ** ((len(self._edges) - 1) / _PER_OCTAVE))
        self.returns, self.ends = np.zeros((2, len(self._edges))), np.zeros((2, len(self._edges)))
        self._rates: list[list[float]] = []

    @property
    def is_fitted(self) -> bool:
        return bool(self._rates)

    def rate(self, kind: int, age: int) -> float:
        """Of a block of that class and age; once fitted."""
        edges, rates = self._edges, self._rates[kind]
        bucket = self._bucket(age)
        if bucket + 1 == len(edges):
            return rates[bucket]
        step = (age - edges[bucket]) / (edges[bucket + 1] - edges[bucket])
        return rates[bucket] + step * (rates[bucket + 1] - rates[bucket])

    def note(self, kind: int, age: int, *, returned: bool) -> None:
        """A block's time at rest has ended."""
        bucket = self._bucket(age)
        self.ends[kind, bucket] += 1
        if returned:
            self.returns[kind, bucket] += 1

    def note_returns(self, kinds: npt.NDArray[np.uint8], ages: Ages) -> None:
        """The same of many that returned."""
        buckets = np.searchsorted(self._edges, ages, side="right") - 1
        for counts in (self.ends, self.returns):
            np.add.at(counts, (kinds, buckets), 1)

    def fit(self, waiting: Iterable[tuple[Kinds, Ages, float]]) -> None:
        """Rates of all that has ended and of what is still at rest: samples of classes and ages, and how many blocks
        each entry stands for."""
        ends = self.ends.copy()
        for kinds, ages, weight in waiting:
            np.add.at(ends, (kinds, np.searchsorted(self._edges, ages, side="right") - 1), weight)
        widths = np.diff(self._edges, append=2 * self._edges[-1])
        # Who ends in a bucket has spent all of the younger ones in full, and half of its own.
        reached = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1]
        spent = (reached - ends) * widths + ends * widths / 2
        assumed_time = _ASSUMED * self._num_blocks
        self._rates = [
            [
                float(((np.cumsum(returns[b:]) + _ASSUMED) / (np.cumsum(time[b:]) + assumed_time)).max())
                for b in range(len(widths))
            ]
            for returns, time in zip(self.returns, spent, strict=True)
        ]
        self.returns *= _FORGETTING
        self.ends *= _FORGETTING

    def _bucket(self, age: int) -> int:
        return bisect_right(self._edges, age) - 1

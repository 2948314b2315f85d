"""How long a load from a store takes, learned from those before it."""

from __future__ import annotations

_SMOOTHING = 0.2


class LoadSpeed:
    """The seconds of a load: a part for each, and a part for each byte."""

    def __init__(self) -> None:
        self._per_load: float | None = None
        self._per_byte: float | None = None

    def expected(self, num_bytes: int) -> float | None:
        """Seconds; None where nothing was measured."""
        if self._per_byte is None or self._per_load is None:
            return None
        return self._per_load + num_bytes * self._per_byte

    def measure(self, seconds: float, num_bytes: int) -> None:
        """Take in one load; small ones tell of the part for each."""
        per_load = seconds if self._per_load is None else min(seconds, self._per_load * 1.05)
        per_byte = max(0.0, seconds - per_load) / num_bytes if self._per_byte is not None else 0.0
        self._per_load = per_load
        old = self._per_byte
        self._per_byte = per_byte if old is None else old + _SMOOTHING * (per_byte - old)

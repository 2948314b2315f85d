"""How long a load from a store takes, learned from earlier loads."""

from __future__ import annotations

_SMOOTHING = 0.2


class LoadSpeed:
    """Models the time of a load as a constant plus a time per byte.

    Attributes:
        per_load: the constant in seconds; None before the first measurement.
        per_byte: seconds per byte; 0 after one measurement, which cannot tell the two apart.
    """

    def __init__(self) -> None:
        self.per_load: float | None = None
        self.per_byte: float | None = None

    def expected(self, num_bytes: int) -> float | None:
        """Return the expected time of a load in seconds; None before the first measurement."""
        if self.per_byte is None or self.per_load is None:
            return None
        return self.per_load + num_bytes * self.per_byte

    def measure(self, seconds: float, num_bytes: int) -> None:
        """Learn from one load; short loads determine the constant."""
        per_load = seconds if self.per_load is None else min(seconds, self.per_load * 1.05)
        per_byte = max(0.0, seconds - per_load) / num_bytes if self.per_byte is not None else 0.0
        self.per_load = per_load
        old = self.per_byte
        self.per_byte = per_byte if old is None else old + _SMOOTHING * (per_byte - old)

"""The circuit breaker of a medium: after repeated failures of reads or of writes there are none for a while."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from octavo.tiers.base import Reason

logger = logging.getLogger(__name__)

# Reasons that count as faults although the medium reports them instead of raising.
_FAULTS = {Reason.IO_ERROR, Reason.NO_SPACE, Reason.READ_ONLY}


class Breaker:
    """Counts a medium's consecutive faults at one kind of work. Thread-safe.

    Args:
        name: name of the tier, for the log.
        work: what fails, in the plural, for the log.
        most_faults: number of consecutive faults after which that work is not tried for `retry_seconds`.
        clock: a monotonic clock, in seconds.

    Attributes:
        num_closings: how often that has happened.
    """

    def __init__(
        self, name: str, work: str, most_faults: int, retry_seconds: float, clock: Callable[[], float]
    ) -> None:
        self.num_closings = 0
        self._name = name
        self._work = work
        self._most_faults = most_faults
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0
        self._closed_until = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the work must not be tried at present."""
        return self._clock() < self._closed_until

    def judge(self, reasons: Sequence[Reason | None]) -> None:
        """Count the outcomes of a call that did not raise."""
        if not _FAULTS.isdisjoint(reasons):
            self.fault(None)
        elif reasons:
            self._faults = 0

    def fault(self, error: BaseException | None) -> None:
        """Count a failure; `error` is None if the medium reported faults without raising."""
        with self._lock:
            self._faults += 1
            if self._faults < self._most_faults or self.is_closed:
                return
            self._faults = 0
            self._closed_until = self._clock() + self._retry_seconds
            self.num_closings += 1
        logger.warning(
            "%s: %s failed %d times in a row (%s): there are none for %.0f s, then they are tried again",
            self._name,
            self._work,
            self._most_faults,
            "see its counters" if error is None else f"{type(error).__name__}: {error}",
            self._retry_seconds,
        )

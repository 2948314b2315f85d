"""The circuit breaker of a medium: what only fails is left alone for a while, then tried again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from octavo.tiers.base import Reason

logger = logging.getLogger(__name__)

# What a medium reports rather than raises, and is a fault all the same.
_FAULTS = {Reason.IO_ERROR, Reason.NO_SPACE}


class Breaker:
    """Counts a medium's faults in a row. Thread-safe.

    Args:
        name: of the tier, for the log.
        most_faults: in a row, after which the medium is left alone for `retry_seconds`.

    Attributes:
        num_closings: how often it was.
    """

    def __init__(self, name: str, most_faults: int, retry_seconds: float, clock: Callable[[], float]) -> None:
        self.num_closings = 0
        self._name = name
        self._most_faults = most_faults
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0
        self._closed_until = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether the medium is left alone at present."""
        return self._clock() < self._closed_until

    def judge(self, reasons: Sequence[Reason | None]) -> None:
        """What the medium said of some blocks, without raising."""
        if not _FAULTS.isdisjoint(reasons):
            self.fault(None)
        elif reasons:
            self._faults = 0

    def fault(self, error: BaseException | None) -> None:
        """The medium failed; None: by what it said."""
        with self._lock:
            self._faults += 1
            if self._faults < self._most_faults or self.is_closed:
                return
            self._faults = 0
            self._closed_until = self._clock() + self._retry_seconds
            self.num_closings += 1
        logger.warning(
            "%s: failed %d times in a row (%s): it is not used for %.0f s, then tried again",
            self._name,
            self._most_faults,
            "see its counters" if error is None else f"{type(error).__name__}: {error}",
            self._retry_seconds,
        )

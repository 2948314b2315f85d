"""Reports a step that does not end. What to do about it is the operator's decision: nothing is ended here."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

from octavo.observe.stats import EngineStats

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks at the engine's thread from one of its own.

    A step that has not ended after `seconds` is logged with the thread's stack, counted, and shown in the statistics
    until it ends. It is logged again each time that its age has doubled.

    Args:
        seconds: how long a step may take; None: nothing is watched.

    Attributes:
        began: when the present step began, by `time.monotonic`; None between two steps. Set by the engine's thread.
    """

    def __init__(self, thread: threading.Thread, stats: EngineStats, seconds: float | None) -> None:
        self.began: float | None = None
        self._thread = thread
        self._stats = stats
        self._seconds = seconds
        self._reported: float | None = None  # the step that was reported, by when it began
        self._report_at = 0.0
        self._stopped = threading.Event()

    def start(self) -> None:
        if self._seconds is not None:
            threading.Thread(target=self._run, name="octavo-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        assert self._seconds is not None
        while not self._stopped.wait(min(1.0, self._seconds / 4)):
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Report the present step if it has taken too long, or the end of one that was reported."""
        assert self._seconds is not None
        began = self.began
        if self._reported not in (None, began):
            logger.warning("the step that hung has ended; the engine goes on")
            self._reported = self._stats.hung_step_seconds = None
        if began is None or now - began < self._seconds:
            return
        age = now - began
        self._stats.hung_step_seconds = age
        if self._reported is None:
            self._reported, self._report_at = began, age
            self._stats.num_hung_steps += 1
        if age >= self._report_at:
            self._report_at = 2 * age
            logger.error("a step has been running for %.0f s; the engine's thread is here:\n%s", age, self._stack())

    def _stack(self) -> str:
        frame = None if self._thread.ident is None else sys._current_frames().get(self._thread.ident)
        return "(it has no stack)" if frame is None else "".join(traceback.format_stack(frame)).rstrip()

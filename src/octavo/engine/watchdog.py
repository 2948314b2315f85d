"""Reports a step that does not end. It ends nothing, because that is the operator's decision."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

from octavo.observe.stats import EngineStats

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches the engine's thread, from another thread.

    A step that has not ended after `seconds` is logged with the thread's stack, counted, and shown in the statistics
    until it ends. It is logged again each time its age has doubled.

    Args:
        seconds: how long a step may take; if None, steps are not watched.

    Attributes:
        began: start of the current step by `time.monotonic`; None between two steps. Set by the engine's thread.
    """

    def __init__(self, thread: threading.Thread, stats: EngineStats, seconds: float | None) -> None:
        self.began: float | None = None
        self._thread = thread
        self._stats = stats
        self._seconds = seconds
        self._reported: float | None = None  # start of the step that was reported
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
        """Report the current step if it has taken too long, or the end of one that was reported."""
        assert self._seconds is not None
        began = self.began
        if self._reported not in (None, began):
            logger.warning("the hung step has ended; the engine continues")
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

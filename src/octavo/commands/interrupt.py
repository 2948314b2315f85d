"""Handles Ctrl-C while modules are imported and a model loads, when Python may lose it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A flag that records whether Ctrl-C has been pressed."""

    came = False

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C has been pressed."""
        if self.came:
            raise KeyboardInterrupt


@contextmanager
def remembered_interrupt() -> Generator[Interrupt]:
    """Remember Ctrl-C, in addition to raising `KeyboardInterrupt`.

    An exception that is raised within a finaliser or a callback of a weak reference is lost, and importing a module
    runs such a callback. So callers must `check` again after importing or loading.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        interrupt.came = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)

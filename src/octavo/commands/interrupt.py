"""Handles Ctrl-C while modules are imported and a model loads, when Python may lose it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C has been pressed."""

    came = False

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if it has."""
        if self.came:
            raise KeyboardInterrupt


@contextmanager
def remembered_interrupt() -> Generator[Interrupt]:
    """Remember Ctrl-C, beside raising `KeyboardInterrupt` as ever.

    An exception that is raised within a finaliser or a callback of a weak reference goes nowhere, and importing a
    module runs such a callback each time: whoever loads asks again once that is done.
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

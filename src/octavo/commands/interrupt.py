"""Handles Ctrl-C while modules are imported and a model loads, when Python may lose it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether Ctrl-C has been pressed, and whether it has to wait."""

    came = False
    is_held = False

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C has been pressed."""
        if self.came:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Generator[None]:
        """Let Ctrl-C wait until the end of what would crash if an exception were raised within, as importing torch."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False
        self.check()


@contextmanager
def remembered_interrupt() -> Generator[Interrupt]:
    """Remember Ctrl-C, in addition to raising `KeyboardInterrupt` unless it is held.

    An exception that is raised within a finaliser or a callback of a weak reference is lost, and importing a module
    runs such a callback. So callers must `check` again after importing or loading.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        interrupt.came = True
        if not interrupt.is_held:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)

"""Engines made to preempt."""

from __future__ import annotations

from octavo.engine.core import EngineCore


def thrash(core: EngineCore) -> None:
    """Hold nothing back at admission, so that there is something to preempt."""
    core.scheduler.running._bound = lambda place, held: 0

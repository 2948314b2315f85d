"""Engines made to preempt."""

from __future__ import annotations

from octavo.engine.core import EngineCore


def thrash(core: EngineCore) -> None:
    """Hold nothing back at admission, so that there is something to preempt."""
    core.scheduler._composer._admission._watermark = 0
    core.scheduler.running._bound = lambda place, held: 0

"""Engines made to preempt."""

from __future__ import annotations

from octavo.engine.core import EngineCore


def thrash(core: EngineCore) -> None:
    """Hold nothing back at admission, so that there is something to preempt."""
    limits = core.scheduler.config
    core.scheduler.config = type(limits)(limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, 0, 0)

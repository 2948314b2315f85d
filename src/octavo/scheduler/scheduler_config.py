"""The limits of a scheduler's steps."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_WATERMARK = 0.01
DEFAULT_HEADROOM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one step.

    Attributes:
        watermark: share of the pool that admission leaves available, so that a newcomer does not force a
            preemption in the next few steps. Not applied while nothing runs.
        headroom_tokens: tokens, rounded up to blocks, that each running sequence, the newcomer and its parallel samples
            must be able to grow by after an admission, as far as max_tokens lets them, on top of the rest of their
            prompts.
        itl_slo_ms: target for the time between two tokens of a running stream, in milliseconds, which limits the chunks
            of prompts, and the streams of several tenants; if None, only the token budget limits them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = DEFAULT_WATERMARK
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS
    itl_slo_ms: float | None = None

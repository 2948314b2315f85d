"""The limits of a scheduler's steps."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_WATERMARK = 0.01
DEFAULT_HEADROOM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step.

    Attributes:
        watermark: share of the pool that admission leaves available, so that a newcomer does not force a
            preemption in the very next steps. Not applied while nothing runs.
        headroom_tokens: tokens, rounded up to blocks, that each running sequence, the newcomer and its parallel samples
            must be able to grow by after an admission, as far as max_tokens lets them; what is left of their prompts
            comes on top.
        itl_slo_ms: milliseconds between two tokens of a running stream that chunks of prompts leave room for; None:
            the token budget alone sizes them.
        priority_seconds: what a step of priority is worth in seconds of waiting, so that whoever waits long enough is
            next; None: priorities do not age.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = DEFAULT_WATERMARK
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS
    itl_slo_ms: float | None = None
    priority_seconds: float | None = None

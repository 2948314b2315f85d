"""The budget of a step for prompts: tokens, and time if running streams have a latency target."""

from __future__ import annotations

from typing import Protocol


class TimeLimit(Protocol):
    """How long the rest of a step may take."""

    def chunk(self, start: int, most: int) -> int:
        """The longest chunk of a prompt, at most `most` tokens after `start` computed ones, that still fits."""

    def take(self, start: int, num_tokens: int) -> None:
        """Charge a chunk to the budget."""


class StepBudget:
    """Shared by all prompts of a step, in the order in which they ask.

    Args:
        num_tokens: what decodes have left.
        time: None where no latency has to be kept.
    """

    def __init__(self, num_tokens: int, time: TimeLimit | None = None) -> None:
        self.num_tokens = num_tokens
        self._time = time

    def chunk(self, start: int, missing: int) -> int:
        """The longest chunk of a prompt with `start` tokens computed and `missing` to compute; 0: the step is full."""
        most = min(missing, self.num_tokens)
        if self._time is None or most <= 0:
            return most
        return self._time.chunk(start, most)

    def take(self, start: int, num_tokens: int) -> None:
        """Charge a chunk to the budget."""
        self.num_tokens -= num_tokens
        if self._time is not None:
            self._time.take(start, num_tokens)

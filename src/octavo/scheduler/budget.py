"""The budget of a step for prompts: tokens, and time if running streams have a latency target."""

from __future__ import annotations

from typing import Protocol


class TimeLimit(Protocol):
    """How long the rest of a step may take."""

    def chunk(self, start: int, most: int) -> int:
        """The longest chunk of a prompt, at most `most` tokens after `start` computed ones, that still fits."""

    def take(self, start: int, num_tokens: int) -> None:
        """Charge a chunk to the budget."""


NEWCOMERS_BESIDE_STREAMS = 8
"""Sequences admitted in a step that streams wait for, siblings too: each takes the engine 70 µs, or 200 behind a large
model, and each sibling a copy of the prompt's last block, which in fresh memory takes a quarter of a millisecond."""

SCORED_BESIDE_STREAMS = 32
"""Tokens of prompts whose log-probabilities are computed in such a step: at 49,152 tokens of vocabulary 0.2 ms each."""


class StepBudget:
    """Shared by all prompts of a step, in the order in which they ask.

    Args:
        num_tokens: what decodes have left.
        time: None where no latency has to be kept.
        beside_streams: somebody waits for the step's tokens.

    Attributes:
        num_newcomers: sequences that may yet be admitted.
    """

    def __init__(self, num_tokens: int, time: TimeLimit | None = None, *, beside_streams: bool = False) -> None:
        self.num_tokens = num_tokens
        self.num_newcomers = NEWCOMERS_BESIDE_STREAMS if beside_streams else num_tokens
        self._num_scored = SCORED_BESIDE_STREAMS if beside_streams else num_tokens
        self._time = time

    def chunk(self, start: int, missing: int, *, scored: bool = False) -> int:
        """The longest chunk of a prompt with `start` tokens computed and `missing` to compute; 0: the step is full.

        Args:
            scored: log-probabilities of its tokens are wanted.
        """
        most = min(missing, self.num_tokens)
        if scored:
            most = min(most, self._num_scored)
        if self._time is None or most <= 0:
            return most
        return self._time.chunk(start, most)

    def take(self, start: int, num_tokens: int, *, scored: bool = False) -> None:
        """Charge a chunk to the budget."""
        self.num_tokens -= num_tokens
        if scored:
            self._num_scored -= num_tokens
        if self._time is not None:
            self._time.take(start, num_tokens)

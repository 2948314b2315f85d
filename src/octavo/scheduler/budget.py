"""The budget of a step for prompts: tokens, and time if running streams have a latency target."""

from __future__ import annotations

from typing import Protocol


class TimeLimit(Protocol):
    """A limit on the time that the chunks of a step may take."""

    def chunk(self, start: int, most: int, *, is_new: bool = False) -> int:
        """Return the longest chunk of at most `most` tokens that fits, after `start` computed tokens."""

    def take(self, start: int, num_tokens: int) -> None:
        """Charge a chunk to the budget."""


NEWCOMERS_BESIDE_STREAMS = 8
"""The maximum number of sequences, including siblings, admitted in a step that streams wait for. Each takes the engine
70 µs, or 200 µs with a large model, and each sibling also a copy of the prompt's last block, which takes 250 µs in
fresh memory."""

SCORED_BESIDE_STREAMS = 32
"""The maximum number of prompt tokens whose log-probabilities are computed in such a step: each takes 0.2 ms with a
vocabulary of 49,152 tokens."""


class StepBudget:
    """The budget that all prompts of a step share, first come, first served.

    Args:
        num_tokens: tokens that decodes have left over.
        time: time limit; None if there is no latency target.
        beside_streams: whether streams wait for the step.

    Attributes:
        num_newcomers: sequences that may still be admitted.
    """

    def __init__(self, num_tokens: int, time: TimeLimit | None = None, *, beside_streams: bool = False) -> None:
        self.num_tokens = num_tokens
        self.num_newcomers = NEWCOMERS_BESIDE_STREAMS if beside_streams else num_tokens
        self._num_scored = SCORED_BESIDE_STREAMS if beside_streams else num_tokens
        self._time = time

    def chunk(self, start: int, missing: int, *, scored: bool = False, is_new: bool = False) -> int:
        """Return the longest chunk of a prompt that fits; 0 if the step is full.

        Args:
            start: computed tokens of the prompt.
            missing: tokens of the prompt that remain to be computed.
            scored: whether log-probabilities of its tokens are wanted.
            is_new: whether it is the prompt's first.
        """
        most = min(missing, self.num_tokens)
        if scored:
            most = min(most, self._num_scored)
        if self._time is None or most <= 0:
            return most
        return self._time.chunk(start, most, is_new=is_new)

    def take(self, start: int, num_tokens: int, *, scored: bool = False) -> None:
        """Charge a chunk to the budget."""
        self.num_tokens -= num_tokens
        if scored:
            self._num_scored -= num_tokens
        if self._time is not None:
            self._time.take(start, num_tokens)

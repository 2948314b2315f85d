"""The budget of a step: tokens and, if running streams have a latency target, time.

`StepBudget` is what the prompts of one step share; `LatencyTarget` says how long the step may take.
"""

from __future__ import annotations

import bisect
import math
from functools import partial
from typing import NamedTuple

from octavo.scheduler.step_time import StepLoad, StepTimeModel

SHARE_OF_PROMPTS = 0.125
"""The time that prompts may use however little the target leaves them, as a part of the streams' time."""

LEAST_CHUNK = 16
"""Prompt tokens computed at once in such time, because each chunk reads the keys and values of all tokens before it.
Also the most in the first chunk that streams wait for; each may be twice as long as the longest so far."""


class StreamTime(NamedTuple):
    """The seconds that streams take in a step, as far as that depends on which of them it computes.

    Attributes:
        wanted: time of all of them.
        available: time that they may take.
        per_stream: time of each, whatever its length.
        per_token: time of each token of its context.
    """

    wanted: float
    available: float
    per_stream: float
    per_token: float

    def of(self, num_tokens: int) -> float:
        """Return the time of a stream of this length."""
        return self.per_stream + self.per_token * num_tokens


class LatencyTarget:
    """Sizes chunks of prompts so that the inter-token latency of running streams stays below `seconds`.

    Streams of several tenants may take the target, and chunks what the streams leave of it, by the model's prediction
    and its usual error on top. The model is not extrapolated far: a chunk is at most twice as long as the longest one
    measured together with streams.

    Prompts do not starve. Where streams leave them little of `seconds`, or nothing, they may use `SHARE_OF_PROMPTS` of
    the streams' time all the same. Time too short for `LEAST_CHUNK` tokens is carried over to the next step:

        target   ─────────────────────────────────────────█████──
        streams  ████████  ████████  ████████  ████████  ████████     one step in five exceeds the target

    Args:
        seconds: target for the time between two tokens of a stream.
        model: how long steps take; by default, a new one.

    Attributes:
        saved: prompt time carried over from earlier steps, in seconds.
    """

    def __init__(self, seconds: float, model: StepTimeModel | None = None) -> None:
        self.seconds = seconds
        self.model = StepTimeModel() if model is None else model
        self._longest = LEAST_CHUNK
        self._fastest = math.inf  # seconds of the shortest step
        self.saved = 0.0

    def observe(self, load: StepLoad, seconds: float, *, num_chunk_tokens: int = 0) -> None:
        """Learn from a step that took `seconds`, from the end of the previous step to its own.

        Args:
            num_chunk_tokens: prompt tokens that it computed together with streams.
        """
        self._longest = max(self._longest, num_chunk_tokens)
        self._fastest = min(self._fastest, seconds) if seconds > 0 else self._fastest
        self.model.observe(load, seconds)

    @property
    def most_tokens(self) -> int:
        """The maximum number of prompt tokens in a step."""
        return 2 * self._longest

    @property
    def predicted_limit(self) -> float:
        """The prediction of a step that keeps the target although it may be wrong by its usual error, in seconds."""
        return self.seconds / (1 + self.model.usual_error)

    def stream_time(self, num_streams: int, context: int) -> StreamTime:
        """Return how long so many streams take, whose contexts hold `context` tokens together.

        An empty step takes a part of the target, which is not theirs. Where it takes more than half, as with a large
        model, they may take as long again: else steps would be spent on reading weights for few streams each.
        """
        predict = self.model.predict
        # The fit may take what streams always need for the time of an empty step.
        base, of_rows = min(predict(StepLoad()), self._fastest), predict(StepLoad(num_streams, 0, 0.0, num_streams))
        of_all = predict(StepLoad(num_streams, context, 0.0, num_streams))
        available = max(self.predicted_limit - base, base)
        return StreamTime(of_all - base, available, (of_rows - base) / num_streams, (of_all - of_rows) / context)


MOST_NEWCOMERS = 8
"""The maximum number of sequences, including siblings, admitted in a step that streams wait for. Each takes the engine
70 µs, or 200 µs with a large model, and each sibling also a copy of the prompt's last block, which takes 250 µs in
fresh memory."""

MOST_SCORED_TOKENS = 32
"""The maximum number of prompt tokens whose log-probabilities are computed in such a step: each takes 0.2 ms with a
vocabulary of 49,152 tokens."""


class StepBudget:
    """The budget that all prompts of a step share, first come, first served.

    Args:
        num_tokens: tokens that decodes have left over.
        target: the latency target; if None, only the number of tokens is limited.
        num_streams: number of streams that wait for the step.
        context: tokens in their contexts together, which only a target needs.

    Attributes:
        num_newcomers: sequences that may still be admitted.
        num_taken: prompt tokens in the step so far.
    """

    def __init__(
        self, num_tokens: int, target: LatencyTarget | None = None, num_streams: int = 0, context: int = 0
    ) -> None:
        with_streams = num_streams > 0
        self.num_tokens = num_tokens
        self.num_taken = 0
        self.num_newcomers = MOST_NEWCOMERS if with_streams else num_tokens
        self._num_scored = MOST_SCORED_TOKENS if with_streams else num_tokens
        self._target = target if with_streams else None
        self._was_asked = False
        if self._target is not None:
            self._load = StepLoad(num_streams, context, 0.0, num_streams)
            self._of_streams = self._target.model.predict(self._load)
            self._due = self._target.saved + SHARE_OF_PROMPTS * self._of_streams
            self._lacking = 0.0  # seconds that prompts would have used, if the target left them too few

    def chunk(self, start: int, missing: int, *, scored: bool = False, is_new: bool = False, share: int = 1) -> int:
        """Return the longest chunk of a prompt that fits; 0 if the step is full.

        Args:
            start: computed tokens of the prompt.
            missing: tokens of the prompt that remain to be computed.
            scored: whether log-probabilities of its tokens are wanted.
            is_new: whether it is the prompt's first, of which one may always enter, with a token.
            share: divisor of what fits, of which at least a token is left.
        """
        fits = self._longest(start, missing, scored=scored, is_new=is_new)
        return max(min(1, fits), fits // share)

    def _longest(self, start: int, missing: int, *, scored: bool, is_new: bool) -> int:
        most = min(missing, self.num_tokens, self._num_scored if scored else missing)
        if (target := self._target) is None or most <= 0:
            return most
        self._was_asked = True
        # The predicted time rises with the tokens.
        sizes = range(1, min(most, target.most_tokens - self.num_taken) + 1)
        fits = bisect.bisect_right(sizes, target.predicted_limit, key=partial(self._seconds_with, start))
        least = min(most, LEAST_CHUNK - self.num_taken)
        if fits < least:
            self._lacking = self._seconds_with(start, least) - self._of_streams
            if self._lacking <= self._due:
                return least
        return max(fits, int(is_new and not self.num_taken))

    def take(self, start: int, num_tokens: int, *, scored: bool = False) -> None:
        """Add a chunk to the step."""
        self.num_tokens -= num_tokens
        self.num_taken += num_tokens
        if scored:
            self._num_scored -= num_tokens
        if self._target is not None:
            self._load = self._load.with_chunk(start, num_tokens)

    def settle(self) -> None:
        """Carry over the time that prompts are still due, once the step is planned."""
        if self._target is not None and self._was_asked:
            left = self._due - (self._target.model.predict(self._load) - self._of_streams)
            self._target.saved = min(max(left, 0.0), self._lacking)

    def _seconds_with(self, start: int, num_tokens: int) -> float:
        assert self._target is not None
        return self._target.model.predict(self._load.with_chunk(start, num_tokens))

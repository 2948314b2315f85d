"""What a step may take: tokens and, if running streams have a latency target, time.

`LatencyTarget` learns how long steps take, and sizes chunks of prompts so that streams keep their inter-token latency.
`StepBudget` is what the prompts of one step share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from octavo.scheduler.step_time import NUM_TERMS, StepLoad, StepTimeModel

_RATIO_GAIN = 0.1
_LEVEL_GAIN = 0.2  # about the last five steps
_STREAM_GAIN = 1.1
_MOST_LATE = 8.0
_FORGETTING = 0.995  # what is known of contexts halves every 140 steps

SHARE_OF_PROMPTS = 0.125
"""The time that prompts may use however little the target leaves them, as a part of the streams' time."""

LASTING = 32
"""Steps' shares that prompts may have had in advance, so that a few late steps do not cost streams their target."""

LEAST_CHUNK = 16
"""Prompt tokens computed at once in such time, because each chunk reads the keys and values of all tokens before it."""


KNOWN_CONTEXT = 8192
"""Tokens of context up to which a step needs no measurement before."""

MOST_GROWTH = 2
"""How much longer than any known the contexts of a step may be together, if it is to keep the latency target."""


class StreamTime(NamedTuple):
    """How long streams take in a step, in seconds, as far as it depends on which of them it computes.

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

    The model predicts a mean over a few hundred steps, but what matters is how far the next step may exceed it. So two
    factors are tracked beside the model:

        level     recent measured / predicted time: a neighbour on the machine slows down many steps in a row
        ratio     the (1 - `misses`) quantile of the remaining error: a step that exceeds it raises it, and every other
                  step lowers it a little, balanced so that a share of `misses` exceeds it (Robbins and Monro 1951)

    Both learn only from steps with chunks, which vary more than others. Streams have a factor of their own, the median
    of measured / predicted time over recent steps and at least 1: what sampling takes is not in the model, and the fit
    follows a device that becomes slower only in hundreds of steps.

    The model is not extrapolated far: a chunk is at most twice as long as the longest one measured beside streams.

    Prompts do not starve. Where streams leave them little of `seconds`, or nothing, they may use `SHARE_OF_PROMPTS` of
    the streams' time all the same. What is too little for `LEAST_CHUNK` tokens adds up from step to step:

        target   ─────────────────────────────────────────█████──
        streams  ████████  ████████  ████████  ████████  ████████     one step in five exceeds the target

    Args:
        seconds: target for the time between two tokens of a stream.
        misses: share of steps that may exceed it.
    """

    def __init__(self, seconds: float, misses: float = 0.005) -> None:
        self.seconds = seconds
        self.model = StepTimeModel()
        self._misses = misses
        self._level = 1.0
        self._ratio = 1.3
        self._longest = 16
        self._context = float(KNOWN_CONTEXT)
        self._fastest = math.inf
        self._stream_level = 1.0
        self._last: ChunkTime | None = None
        self._saved = 0.0  # seconds that prompts were due in earlier steps

    def observe(self, load: StepLoad, seconds: float, *, num_chunk_tokens: int = 0) -> None:
        """Learn from a step that took `seconds`, from the end of the previous step to its own.

        Args:
            num_chunk_tokens: prompt tokens that it computed beside streams.
        """
        self._context = max(KNOWN_CONTEXT, load.context, _FORGETTING * self._context)
        self._fastest = min(self._fastest, seconds) if seconds > 0 else self._fastest
        predicted = self.model.predict(load)
        if self.model.num_observed > NUM_TERMS:
            late = seconds > predicted * self._stream_level
            level = self._stream_level * (_STREAM_GAIN if late else 1 / _STREAM_GAIN)
            self._stream_level = min(_MOST_LATE, max(1.0, level))
        if num_chunk_tokens:
            self._longest = max(self._longest, num_chunk_tokens)
            if self.model.num_observed > NUM_TERMS and predicted > 0:
                residual = seconds / predicted
                missed = residual > self._level * self._ratio
                self._ratio = min(2.0, max(1.0, self._ratio + _RATIO_GAIN * (missed - self._misses)))
                self._level += _LEVEL_GAIN * (min(2.0, max(0.5, residual)) - self._level)
        self.model.observe(load, seconds)

    def skip_step(self) -> None:
        """Note that the step that `limit` was called for is not computed."""
        self._last = None

    def limit(self, stream_lengths: Iterable[int]) -> ChunkTime:
        """Return the time limit for the chunks of a step with streams of these lengths."""
        if self._last is not None:
            self._saved = self._last.left_for_prompts(self._saved)
        lengths = list(stream_lengths)
        load = StepLoad(len(lengths), sum(lengths), 0.0, len(lengths))
        seconds = self.seconds / (self._level * self._ratio)
        self._last = ChunkTime(self.model, load, seconds, 2 * self._longest, self._saved)
        return self._last

    def stream_time(self, num_streams: int, context: int) -> StreamTime:
        """Return how long so many streams take, whose contexts hold `context` tokens together.

        An empty step takes a part of the target, which is not theirs. Where it takes more than half, as with a large
        model, they may take as long again: else steps would be spent on reading weights for few streams each.

        The model is not extrapolated far: contexts `MOST_GROWTH` times as long as the longest known take all the time
        there is. If they take less, that will have been measured, and the next step may have longer ones.
        """
        base = min(self.model.predict(StepLoad()), self._fastest)
        of_rows = self._stream_level * self.model.predict(StepLoad(num_streams, 0, 0.0, num_streams))
        of_all = self._stream_level * self.model.predict(StepLoad(num_streams, context, 0.0, num_streams))
        per_context = of_all - of_rows
        available = max(self.seconds - base, base)
        if context > MOST_GROWTH * self._context:
            per_context = max(per_context, available * context / (MOST_GROWTH * self._context))
        rows = of_rows - base
        return StreamTime(rows + per_context, available, rows / num_streams, per_context / context)


class ChunkTime:
    """The time left for prompts in one step.

    Args:
        load: load of the streams.
        seconds: predicted time that the whole step may take.
        most: maximum number of prompt tokens.
        saved: seconds that prompts were due in earlier steps; negative if they had more than their share.

    Attributes:
        num_taken: prompt tokens added to the step so far.
    """

    def __init__(self, model: StepTimeModel, load: StepLoad, seconds: float, most: int, saved: float = 0.0) -> None:
        self._model = model
        self._load = load
        self._seconds = seconds
        self._most = most
        self._of_streams = model.predict(load)
        self._share = SHARE_OF_PROMPTS * self._of_streams
        self._due = saved + self._share
        self._lacking = 0.0  # seconds that prompts would have used, if the target left them too few
        self._was_asked = False
        self.num_taken = 0

    def chunk(self, start: int, most: int, *, is_new: bool = False) -> int:
        """Return the longest chunk of at most `most` tokens that fits, after `start` computed tokens; possibly 0.

        Args:
            is_new: whether it is the first of a sequence, of which one may always enter, with a token.
        """
        self._was_asked = True
        fits = self._longest(start, min(most, self._most), self._seconds)
        least = min(most, LEAST_CHUNK - self.num_taken)
        if fits < least:
            self._lacking = self._model.predict(self._load.with_chunk(start, least)) - self._of_streams
            if self._lacking <= self._due:
                return least
        return max(fits, int(is_new and not self.num_taken))

    def take(self, start: int, num_tokens: int) -> None:
        """Add a chunk to the step."""
        self._load = self._load.with_chunk(start, num_tokens)
        self.num_taken += num_tokens
        self._most -= num_tokens

    def left_for_prompts(self, saved: float) -> float:
        """Return the seconds that prompts are due once the step is planned, of which `saved` were due before."""
        if not self._was_asked:
            return saved
        used = self._model.predict(self._load) - self._of_streams
        return min(max(self._due - used, -LASTING * self._share), self._lacking)

    def _longest(self, start: int, most: int, seconds: float) -> int:
        fits, too_long = 0, most + 1
        # Bisect: the predicted time rises with the tokens.
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self._model.predict(self._load.with_chunk(start, middle)) <= seconds:
                fits = middle
            else:
                too_long = middle
        return fits


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

    def __init__(self, num_tokens: int, time: ChunkTime | None = None, *, beside_streams: bool = False) -> None:
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

"""How long a step takes: a model of a few terms, fitted to the steps as they are computed.

    T =  c0                                       a step with nothing in it, the host's share included
       + Σ_k c_k · max(0, rows - k)               matrix products: reading the weights hides the first rows' arithmetic
       + a · Σ context                            attention: bytes of keys and values
       + b · Σ (query - 1) · context              attention of chunks: arithmetic, once for each further query
       + d · sequences                            sampling and bookkeeping

All coefficients are at least 0, so the time rises with everything that is added to a step, and the products' term is
convex. The fit is weighted least squares in relative errors with exponential forgetting, kept as normal equations and
solved by non-negative coordinate descent from the last solution: O(terms²) a step, no step is kept. A step that took
far longer than others do (a page fault, another process) moves the fit no more than a step at the edge of what is usual
does (Huber's weights).

Pure numbers, no clock: the scheduler sizes chunks by it.

`StepTimes` is the same sum with coefficients that are known: fitted to recorded plans at leisure, its products then
piecewise linear through as many points as were measured, or taken from a device's data sheet. The simulator takes it
for a device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

KNOTS = (16, 64, 256)
NUM_TERMS = 5 + len(KNOTS)

_FORGETTING = 0.995  # a step counts half after 140 others
_USUAL_ERROR = 3.0  # Huber's threshold, in mean relative errors
_SWEEPS = 2


class StepLoad(NamedTuple):
    """What a step computes, as far as its time depends on it.

    Attributes:
        rows: tokens.
        context: tokens whose keys and values are read: the sum of the sequences' lengths.
        chunk_work: sum, over chunks of prompts, of their tokens but one times their mean context.
        num_seqs: sequences.
        num_moved: blocks that are copied, or swapped in or out, before it.
    """

    rows: int = 0
    context: int = 0
    chunk_work: float = 0.0
    num_seqs: int = 0
    num_moved: int = 0

    def with_chunk(self, start: int, num_tokens: int) -> StepLoad:
        """And `num_tokens` tokens of a prompt after `start` computed ones; one token of a stream is no different."""
        return StepLoad(
            self.rows + num_tokens,
            self.context + start + num_tokens,
            self.chunk_work + max(0, num_tokens - 1) * (start + 0.5 * num_tokens),
            self.num_seqs + 1,
            self.num_moved,
        )

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], *, num_streams: int = 0, num_moved: int = 0) -> StepLoad:
        """Of a plan: `starts[i]` tokens of sequence i are computed, and `lengths[i]` more will be.

        Args:
            num_streams: so many of the first sequences compute one token: they need no look at each.
        """
        rows = sum(lengths)
        chunk_work = 0.0
        for start, length in zip(starts[num_streams:], lengths[num_streams:], strict=True):
            chunk_work += (length - 1) * (start + 0.5 * length)
        return cls(rows, sum(starts) + rows, chunk_work, len(lengths), num_moved)


def _terms(load: StepLoad) -> list[float]:
    rows = load.rows
    # Scaled so that all are of one order of magnitude.
    return [
        1.0,
        rows / 256,
        *(max(0, rows - knot) / 256 for knot in KNOTS),
        load.context / 8192,
        load.chunk_work / 1e6,
        load.num_seqs / 64,
    ]


class StepTimeModel:
    """The fit. Before the first step it predicts 0."""

    def __init__(self) -> None:
        self.num_observed = 0
        self._weights = [0.0] * NUM_TERMS
        self._products = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        self._targets = [0.0] * NUM_TERMS
        self._mean_error = 0.1

    def predict(self, load: StepLoad) -> float:
        """Seconds that a step of this load takes on average."""
        return sum(map(float.__mul__, self._weights, _terms(load)))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of this load took so long."""
        if not seconds > 0:
            return
        terms = _terms(load)
        self.num_observed += 1
        weight = 1.0 / seconds**2
        if self.num_observed > 2 * NUM_TERMS:
            error = abs(self.predict(load) / seconds - 1)
            usual = _USUAL_ERROR * self._mean_error
            self._mean_error += 0.02 * (min(error, 2 * usual) - self._mean_error)
            if error > usual:
                weight *= usual / error
        for row, term in zip(self._products, terms, strict=True):
            weighted = weight * term
            row[:] = [_FORGETTING * old + weighted * other for old, other in zip(row, terms, strict=True)]
        weighted = weight * seconds
        self._targets = [_FORGETTING * old + weighted * term for old, term in zip(self._targets, terms, strict=True)]
        for _ in range(_SWEEPS if self.num_observed > 64 else 16 * _SWEEPS):
            self._sweep()

    def _sweep(self) -> None:
        weights = self._weights
        for index, (row, target) in enumerate(zip(self._products, self._targets, strict=True)):
            diagonal = row[index]
            if diagonal > 0:
                # A millionth of ridge: terms that always rise together share their weight.
                slope = target - sum(map(float.__mul__, row, weights))
                weights[index] = max(0.0, weights[index] + slope / (diagonal * 1.000001))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The time of a step by known coefficients, in seconds.

    Attributes:
        base: of any step.
        products: (rows, seconds) of the matrix products, by rising rows: linear in between, and on beyond the last.
        per_context_token: of reading one token's keys and values, all layers.
        per_chunk_work: see `StepLoad.chunk_work`.
        per_seq: of a sequence.
        per_moved_block: of a block that is copied or swapped.
    """

    base: float
    products: tuple[tuple[float, float], ...]
    per_context_token: float = 0.0
    per_chunk_work: float = 0.0
    per_seq: float = 0.0
    per_moved_block: float = 0.0

    def predict(self, load: StepLoad) -> float:
        """Seconds that a step of this load takes."""
        return (
            self.base
            + self.product_seconds(load.rows)
            + self.per_context_token * load.context
            + self.per_chunk_work * load.chunk_work
            + self.per_seq * load.num_seqs
            + self.per_moved_block * load.num_moved
        )

    def product_seconds(self, rows: float) -> float:
        """Of `base` apart: the matrix products of so many rows."""
        points = self.products
        if len(points) < 2:
            return points[0][1] if points else 0.0
        above = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
        (low, at_low), (high, at_high) = points[above - 1], points[above]
        return max(0.0, at_low + (at_high - at_low) * (rows - low) / (high - low))

    def with_kv_bytes(self, ratio: float) -> StepTimes:
        """The same device where a token's keys and values take `ratio` times the bytes, and so the time to read."""
        return replace(
            self,
            per_context_token=self.per_context_token * ratio,
            per_moved_block=self.per_moved_block * ratio,
        )


_RATIO_GAIN = 0.1
_LEVEL_GAIN = 0.2  # about the last five steps

WHEN_BROKEN = 16
"""Tokens of prompts in a step that takes longer than the latency target without them."""


class LatencyTarget:
    """Sizes chunks of prompts so that streams wait no longer than `seconds` between two tokens.

    The model predicts a mean over some hundred steps. What counts is how far the next step may lie above it, so two
    things are followed beside the model:

        level     measured over predicted time, of late: a neighbour on the machine slows many steps in a row
        ratio     the quantile 1 - `misses` of what is left. A step that took longer pushes it up, and every other one
                  lets it sink a little, in such a proportion that just that share of steps lies above (Robbins and
                  Monro 1951)

    Both learn from steps with chunks alone, which vary more than others.

    Nothing is extrapolated far: a chunk is at most twice as long as the longest that was measured beside streams.

    No prompt starves: a step computes a token of some prompt even where the model sees no time for it. Where streams
    alone take longer than `seconds` on average nothing is left to keep, and prompts are given `WHEN_BROKEN` tokens.

    Args:
        seconds: between two tokens of one stream, as its client sees it.
        misses: share of steps that may take longer.
    """

    def __init__(self, seconds: float, misses: float = 0.005) -> None:
        self.seconds = seconds
        self.model = StepTimeModel()
        self._misses = misses
        self._level = 1.0
        self._ratio = 1.3
        self._longest = 16
        self._planned: ChunkTime | None = None  # of the step whose time is awaited

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step took so long, from the end of the one before to its own."""
        planned, self._planned = self._planned, None
        predicted = self.model.predict(load)
        if planned is not None and planned.num_taken:
            self._longest = max(self._longest, planned.num_taken)
            if self.model.num_observed > NUM_TERMS and predicted > 0:
                residual = seconds / predicted
                missed = residual > self._level * self._ratio
                self._ratio = min(2.0, max(1.0, self._ratio + _RATIO_GAIN * (missed - self._misses)))
                self._level += _LEVEL_GAIN * (min(2.0, max(0.5, residual)) - self._level)
        self.model.observe(load, seconds)

    def limit(self, stream_lengths: Iterable[int]) -> ChunkTime:
        """For a step with streams of these lengths."""
        lengths = list(stream_lengths)
        load = StepLoad(len(lengths), sum(lengths), 0.0, len(lengths))
        least = 1 if self.model.predict(load) <= self.seconds else WHEN_BROKEN
        seconds = self.seconds / (self._level * self._ratio)
        self._planned = ChunkTime(self.model, load, seconds, 2 * self._longest, least)
        return self._planned


class ChunkTime:
    """What is left of one step's time, as `scheduler.budget.TimeLimit` wants it.

    Args:
        load: of the streams.
        seconds: that the whole step may take, as the model predicts.
        most: tokens of prompts.
        least: tokens that prompts are given in all, however little time is left.

    Attributes:
        num_taken: tokens of prompts that became part of the step.
    """

    def __init__(self, model: StepTimeModel, load: StepLoad, seconds: float, most: int, least: int = 0) -> None:
        self._model = model
        self._load = load
        self._seconds = seconds
        self._most = most
        self._least = least
        self.num_taken = 0

    def chunk(self, start: int, most: int) -> int:
        """The longest chunk of at most `most` tokens after `start` computed ones that still fits; maybe 0."""
        fits, too_long = min(most, self._least), min(most, self._most) + 1
        # Time rises with the tokens: bisect.
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self._model.predict(self._load.with_chunk(start, middle)) <= self._seconds:
                fits = middle
            else:
                too_long = middle
        return fits

    def take(self, start: int, num_tokens: int) -> None:
        """A chunk is part of the step."""
        self._load = self._load.with_chunk(start, num_tokens)
        self.num_taken += num_tokens
        self._most -= num_tokens
        self._least = max(0, self._least - num_tokens)

"""Predict how long a step takes, with a model of a few terms that is fitted online to the steps themselves.

    T =  c0                                       an empty step, host work included
       + Σ_k c_k · max(0, rows - k)               matrix products: reading the weights hides the first rows' arithmetic
       + a · Σ context                            attention: bytes of keys and values
       + b · Σ (query - 1) · context              attention of chunks: arithmetic for each query after the first
       + d · sequences                            sampling and bookkeeping

All coefficients are non-negative, so the time never falls when work is added to a step, and the products' term is
convex. The fit is weighted least squares on relative errors with exponential forgetting. It is kept as normal equations
and solved by non-negative coordinate descent from the previous solution: O(terms²) per step, and no step is stored.
Huber weights bound the influence of a step that took unusually long (a page fault, another process).

Kernels take rows in tiles, so the time of a few rows rises in steps, which need not be convex: for steps of decodes
alone, `decode_seconds` has what steps of exactly so many rows took.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

KNOTS = (16, 64, 256)
NUM_TERMS = 5 + len(KNOTS)
_CONTEXT, _CONTEXT_SCALE = 2 + len(KNOTS), 8192

_FORGETTING = 0.995  # a step's weight halves every 140 steps
_USUAL_ERROR = 4.0  # in mean errors of the last 20 steps or so; noisy steps rarely exceed it, if they are normal
_SWEEPS = 2

MOST_DECODES = 128
"""The maximum number of rows whose times are kept one by one."""

_FITTED = 16  # of so many steps of decodes the fit, which takes longer, learns from one
_LEVEL_GAIN = 0.05
_LEAST_GAIN = 0.1  # of the time of one number of rows
_ERROR_GAIN = 0.02
_MOST_ERROR = 0.5  # of a time, beyond which a step counts as disturbed
_SWEPT = 64  # steps of decodes after which those that are stale are forgotten


class _DecodeTime:
    """The mean time of steps of one number of decodes, in seconds at level 1, and their mean context."""

    __slots__ = ("context", "count", "last", "seconds")

    def __init__(self, seconds: float, context: float) -> None:
        self.seconds, self.context = seconds, context
        self.count = self.last = 0


class StepLoad(NamedTuple):
    """The work of a step, as far as its time depends on it.

    Attributes:
        rows: tokens computed.
        context: tokens whose keys and values are read, which is the sum of the sequences' lengths.
        chunk_work: sum over chunks of prompts of (tokens - 1) times their mean context.
        num_seqs: sequences.
    """

    rows: int = 0
    context: int = 0
    chunk_work: float = 0.0
    num_seqs: int = 0

    def with_chunk(self, start: int, num_tokens: int) -> StepLoad:
        """Return the load with `num_tokens` more tokens of a sequence that has `start` computed tokens."""
        return StepLoad(
            self.rows + num_tokens,
            self.context + start + num_tokens,
            self.chunk_work + max(0, num_tokens - 1) * (start + 0.5 * num_tokens),
            self.num_seqs + 1,
        )

    @classmethod
    def of(cls, starts: Sequence[int], lengths: Sequence[int], *, num_streams: int = 0) -> StepLoad:
        """Return the load of a plan.

        Args:
            starts: tokens of each sequence that are already computed.
            lengths: tokens of each sequence that the step computes.
            num_streams: number of sequences, the first ones, that compute one token each and need not be inspected.
        """
        rows = sum(lengths)
        chunk_work = 0.0
        for start, length in zip(starts[num_streams:], lengths[num_streams:], strict=True):
            chunk_work += (length - 1) * (start + 0.5 * length)
        return cls(rows, sum(starts) + rows, chunk_work, len(lengths))


def _terms(load: StepLoad) -> list[float]:
    rows = load.rows
    # Scaled to similar magnitudes.
    return [
        1.0,
        rows / 256,
        *(max(0, rows - knot) / 256 for knot in KNOTS),
        load.context / _CONTEXT_SCALE,
        load.chunk_work / 1e6,
        load.num_seqs / 64,
    ]


class StepTimeModel:
    """The step-time model, fitted online; predicts 0 before the first step.

    Attributes:
        decode_error: mean relative error of `decode_seconds` for the latest steps.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._weights = [0.0] * NUM_TERMS
        self._products = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        self._targets = [0.0] * NUM_TERMS
        self._mean_error = 0.1
        self._decodes: dict[int, _DecodeTime] = {}  # by number of rows
        self._known: list[int] = []  # these numbers, ascending
        self._level = 1.0  # of all their times, which follows the machine from moment to moment
        self._num_decodes = 0
        self.decode_error = 0.05

    def predict(self, load: StepLoad) -> float:
        """Predict the mean time of a step with this load, in seconds."""
        return sum(map(float.__mul__, self._weights, _terms(load)))

    @property
    def usual_error(self) -> float:
        """The relative error that few steps exceed; a step that does counts as an outlier."""
        return _USUAL_ERROR * self._mean_error

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Update the fit with a measured step."""
        if not seconds > 0:
            return
        terms = _terms(load)
        self.num_observed += 1
        weight, predicted = 1.0 / seconds**2, self.predict(load)
        if self.num_observed > 2 * NUM_TERMS and predicted > 0:
            # Relative to the prediction, so that a device that becomes slower is followed like one that becomes faster.
            weight, error = 1.0 / predicted**2, abs(seconds / predicted - 1)
            usual = self.usual_error
            self._mean_error += 0.05 * (min(error, 2 * usual) - self._mean_error)
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
                # A ridge of one millionth: terms that always rise together share their weight.
                slope = target - sum(map(float.__mul__, row, weights))
                weights[index] = max(0.0, weights[index] + slope / (diagonal * 1.000001))

    def decode_seconds(self, rows: int, context: float) -> float:
        """Predict the time of a step of so many decodes; 0 before one of any number of rows was observed.

        What steps of exactly so many rows took, or between neighbours. Beyond all that were observed, rows count half
        as much as those before, so that each number is tried that could pay, but no other.

        Args:
            context: mean number of tokens that a row reads.
        """
        known = self._known
        if not known:
            return 0.0
        place = bisect_left(known, rows)
        if rows in self._decodes:
            # More rows that took less show that these were disturbed.
            return min([self._measured(these, context) for these in known[place : place + 2]])
        above, below = known[min(place, len(known) - 1)], known[max(place - 1, 0)]
        last = self.decode_seconds(below, context)
        if not place:
            return last
        if place < len(known):
            return last + (self.decode_seconds(above, context) - last) * (rows - below) / (above - below)
        per_row = last / (2 * below + 2)
        if len(known) > 1:
            slope = (last - self.decode_seconds(known[0], context)) / (below - known[0])
            per_row = min(per_row, max(0.5 * slope, 0.01 * last))
        return last + per_row * (rows - below)

    def _measured(self, rows: int, context: float) -> float:
        found, per_token = self._decodes[rows], rows * self._weights[_CONTEXT] / _CONTEXT_SCALE
        return max(0.5 * found.seconds, found.seconds + per_token * (context - found.context)) * self._level

    def observe_decodes(self, rows: int, context: float, seconds: float) -> None:
        """Learn from a step of decodes alone."""
        if rows > MOST_DECODES or not seconds > 0:
            return
        if not self._num_decodes % _FITTED:
            self.observe(StepLoad(rows, int(rows * context), 0.0, rows), seconds)
        found = self._decodes.get(rows)
        expected = self.decode_seconds(rows, context) if found is None else self._measured(rows, context)
        expected = expected or seconds
        error = min(_MOST_ERROR, max(-_MOST_ERROR, seconds / expected - 1))
        if found is None:
            # Nearer to what it should have taken than to what it took: this step may be a disturbed one.
            found = self._decodes[rows] = _DecodeTime(expected * (1 + error / 2) / self._level, context)
            insort(self._known, rows)
        else:
            gain = max(_LEAST_GAIN, 2 / (found.count + 3))
            found.seconds *= 1 + gain * error
            found.context += gain * (context - found.context)
            if gain == _LEAST_GAIN:
                self._level *= 1 + _LEVEL_GAIN * error
        self._num_decodes += 1
        self.decode_error += _ERROR_GAIN * (abs(error) - self.decode_error)
        found.count, found.last = found.count + 1, self._num_decodes
        if not self._num_decodes % _SWEPT:
            # Forget numbers of rows that no step had for long, sooner those that few had, so that they are tried again.
            now, old = self._num_decodes, self._decodes
            self._decodes = {rows: t for rows, t in old.items() if now - t.last < _SWEPT * 2 ** min(6, t.count)}
            self._known = sorted(self._decodes)

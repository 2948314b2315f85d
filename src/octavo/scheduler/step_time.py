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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

KNOTS = (16, 64, 256)
NUM_TERMS = 5 + len(KNOTS)

_FORGETTING = 0.995  # a step's weight halves every 140 steps
_USUAL_ERROR = 4.0  # in mean errors of the last 20 steps or so; noisy steps rarely exceed it, if they are normal
_SWEEPS = 2


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
        load.context / 8192,
        load.chunk_work / 1e6,
        load.num_seqs / 64,
    ]


class StepTimeModel:
    """The step-time model, fitted online; predicts 0 before the first step."""

    def __init__(self) -> None:
        self.num_observed = 0
        self._weights = [0.0] * NUM_TERMS
        self._products = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        self._targets = [0.0] * NUM_TERMS
        self._mean_error = 0.1

    def predict(self, load: StepLoad) -> float:
        """Predict the mean time of a step with this load, in seconds."""
        return sum(map(float.__mul__, self._weights, _terms(load)))

    @property
    def usual_error(self) -> float:
        """The relative error that few steps exceed; one that does counts as disturbed."""
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

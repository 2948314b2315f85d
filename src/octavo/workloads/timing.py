"""Timing short calls on a machine with other load.

Candidates take turns, and every other round runs backwards, so that a drift of the machine affects all equally:

    round 0   A B C
    round 1   C B A
    round 2   A B C
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from octavo import kernels

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one candidate's calls in seconds, one per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The time of the fastest call: what the machine can do, as opposed to what it usually does."""
        return min(self.seconds)


def interleaved(
    candidates: Mapping[str, Sequence[Call]], *, seconds: float = 0.5, min_rounds: int = 5
) -> dict[str, Timing]:
    """Time the candidates interleaved, for about `seconds` each, in at least `min_rounds` rounds after a warm-up.

    Args:
        candidates: calls by name; a candidate makes one of its calls per round, in turn. If its calls touch different
            memory, that memory has left the CPU's caches when the same call comes again.
    """
    names = list(candidates)
    for calls in candidates.values():
        for call in calls[:2]:
            call()
    taken: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.perf_counter() + seconds * len(names)
    number = 0
    while number < min_rounds or time.perf_counter() < deadline:
        for name in names if number % 2 == 0 else reversed(names):
            calls = candidates[name]
            call = calls[number % len(calls)]
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
        number += 1
    return {name: Timing(tuple(values)) for name, values in taken.items()}


def paired_ratio(one: Timing, other: Timing) -> float:
    """Return the median over the rounds of `one` / `other`, in which disturbances of a round cancel out."""
    return statistics.median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch and the kernels on `count` threads within the context."""
    before = torch.get_num_threads()
    kernels_before = kernels.num_threads() if kernels.available() else None
    _set_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if kernels_before is not None:
            kernels.set_num_threads(kernels_before)


def _set_threads(count: int) -> None:
    torch.set_num_threads(count)
    if kernels.available():
        kernels.set_num_threads(count)

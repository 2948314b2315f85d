"""Preemption modes: whether a preempted sequence is swapped or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.kvcache.holdings import RestoreCost
from octavo.request import Sequence

CostOf = Callable[[Sequence], RestoreCost]

# Steps with fewer prompt tokens say little about the cost of one.
_LEAST_TOKENS = 16
_SMOOTHING = 0.2
# One in this many sequences that seem cheaper to recompute is swapped all the same, to measure the speed again.
_TRY_EVERY = 32


class PreemptionMode(Protocol):
    """Decides whether a victim is swapped or recomputed."""

    def swaps(self, seq: Sequence) -> bool:
        """Whether to move a victim's blocks to the host, if there is room, rather than recompute them."""


class Recompute:
    """Always recomputes what is no longer in the prefix cache."""

    def swaps(self, seq: Sequence) -> bool:
        return False


class Swap:
    """Always swaps to host memory, as long as there is room."""

    def swaps(self, seq: Sequence) -> bool:
        return True


@dataclass(slots=True)
class RestoreSpeed:
    """How long computing tokens and moving blocks takes, as measured while serving.

    Attributes:
        seconds_per_token: time to compute a prompt token; None until measured.
        seconds_per_block: time to copy a block to or from host memory, one way; None until measured.
    """

    seconds_per_token: float | None = None
    seconds_per_block: float | None = None

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step with so many prompt tokens."""
        if num_tokens >= _LEAST_TOKENS:
            self.seconds_per_token = _smoothed(self.seconds_per_token, seconds / num_tokens)

    def moved(self, num_blocks: int, seconds: float) -> None:
        """Learn from a step's stores to host memory and loads from there."""
        if num_blocks and seconds:
            self.seconds_per_block = _smoothed(self.seconds_per_block, seconds / num_blocks)

    def swapping_is_cheaper(self, cost: RestoreCost) -> bool:
        """Whether moving the blocks out and back is faster than recomputing the tokens, as far as is known."""
        if self.seconds_per_token is None or self.seconds_per_block is None:
            return True
        return 2 * cost.blocks * self.seconds_per_block < cost.tokens * self.seconds_per_token


def _smoothed(known: float | None, measured: float) -> float:
    return measured if known is None else known + _SMOOTHING * (measured - known)


class CheaperWay:
    """Swaps or recomputes, whichever is cheaper for this victim according to the measured speeds.

    Both costs are upper bounds, because published blocks may be found in the prefix cache either way.
    """

    def __init__(self, cost: CostOf, speed: RestoreSpeed) -> None:
        self._cost = cost
        self.speed = speed
        self._num_recomputed = 0

    def swaps(self, seq: Sequence) -> bool:
        if self.speed.swapping_is_cheaper(self._cost(seq)):
            return True
        self._num_recomputed += 1
        return self._num_recomputed % _TRY_EVERY == 0

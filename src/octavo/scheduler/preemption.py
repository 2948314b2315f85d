"""Preemption modes: whether a preempted sequence is swapped or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.kvcache.holdings import RestoreCost
from octavo.request import Sequence

CostOf = Callable[[Sequence], RestoreCost]


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


@dataclass(frozen=True, slots=True)
class RestoreSpeed:
    """Speeds measured for this model on this machine: seconds per computed token, and per block moved one way."""

    seconds_per_token: float
    seconds_per_block: float

    def swapping_is_cheaper(self, cost: RestoreCost) -> bool:
        """Whether moving the blocks out and back is faster than recomputing the tokens."""
        return 2 * cost.blocks * self.seconds_per_block < cost.tokens * self.seconds_per_token


class CheaperWay:
    """Swaps or recomputes, whichever is cheaper for this victim according to the measured speeds.

    Both costs are upper bounds, because published blocks may be found in the prefix cache either way.
    """

    def __init__(self, cost: CostOf, speed: RestoreSpeed) -> None:
        self._cost = cost
        self.speed = speed

    def swaps(self, seq: Sequence) -> bool:
        return self.speed.swapping_is_cheaper(self._cost(seq))

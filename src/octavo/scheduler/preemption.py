"""Preemption: which sequence yields its blocks, and whether they are swapped or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ConfigError
from octavo.kvcache.holdings import RestoreCost
from octavo.request import Sequence

CostOf = Callable[[Sequence], RestoreCost]


class VictimPolicy(Protocol):
    """Chooses a victim among running sequences.

    The scheduler never offers the first sequence in order of service that has tokens to compute, unless it runs alone.
    So that one always progresses, whatever the policy prefers.
    """

    def choose(self, running: Seq[Sequence]) -> Sequence:
        """Choose one of `running`, which is in order of service and never empty."""


class LatestArrival:
    """Chooses the sequence that arrived last, regardless of priority."""

    def choose(self, running: Seq[Sequence]) -> Sequence:
        return max(running, key=lambda seq: (seq.request.arrival_time, seq.seq_id))


class LowestPriority:
    """Chooses the last sequence in order of service: of those with the lowest priority, the latest arrival."""

    def choose(self, running: Seq[Sequence]) -> Sequence:
        return running[-1]


class Cheapest:
    """Chooses the sequence with the fewest tokens to recompute, not counting those in shared blocks.

    Sequences that would free no block come last; among equals the last in order of service yields.

    Args:
        cost: the cost of restoring a sequence (`Holdings.restore_cost`).
    """

    def __init__(self, cost: CostOf) -> None:
        self._cost = cost

    def choose(self, running: Seq[Sequence]) -> Sequence:
        def key(seq: Sequence) -> tuple[bool, int]:
            cost = self._cost(seq)
            return (cost.blocks == 0, cost.tokens)

        return min(reversed(running), key=key)


VICTIM_POLICIES = ("latest", "lowest_priority", "cheapest")


def make_victim_policy(name: str, cost: CostOf) -> VictimPolicy:
    """Return the victim policy with the given name.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    if name == "latest":
        return LatestArrival()
    if name == "lowest_priority":
        return LowestPriority()
    if name == "cheapest":
        return Cheapest(cost)
    raise ConfigError(f"preemption_victim must be one of {', '.join(VICTIM_POLICIES)}, got {name!r}")


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

"""Preemption: which sequence yields its blocks, and whether they are swapped or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ConfigError
from octavo.kvcache.preempted import RestoreCost
from octavo.request import Sequence

CostOf = Callable[[Sequence], RestoreCost]


class VictimPolicy(Protocol):
    """Chooses among running sequences.

    The scheduler never offers the first in order of service that has tokens to compute, unless it runs alone: so that
    one always goes on, whatever the policy prefers.
    """

    def choose(self, running: Seq[Sequence]) -> Sequence:
        """One of `running`, which is in order of service and never empty."""


class LatestArrival:
    """The one that arrived last, whatever its priority."""

    def choose(self, running: Seq[Sequence]) -> Sequence:
        return max(running, key=lambda seq: (seq.request.arrival_time, seq.seq_id))


class LowestPriority:
    """The last in order of service: the lowest priority, and among those the latest arrival."""

    def choose(self, running: Seq[Sequence]) -> Sequence:
        return running[-1]


class Cheapest:
    """The one with the fewest tokens to compute again; those in blocks that others share count as kept.

    Who would free no block at all is passed over; among equals the last in order of service yields.

    Args:
        cost: what a sequence's blocks are worth (`KVCacheManager.restore_cost`).
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
    """The policy of that name.

    Raises:
        ConfigError: an unknown name, with the known ones.
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
        """Whether to move them to the host, where there is room, rather than to compute them again."""


class Recompute:
    """Recomputes everything that is no longer in the prefix cache."""

    def swaps(self, seq: Sequence) -> bool:
        return False


class Swap:
    """Always through host memory, as long as there is room."""

    def swaps(self, seq: Sequence) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class RestoreSpeed:
    """What was measured on this machine, for this model: seconds per token computed, and per block moved one way."""

    seconds_per_token: float
    seconds_per_block: float

    def swapping_is_cheaper(self, cost: RestoreCost) -> bool:
        """2 · blocks · seconds_per_block < tokens · seconds_per_token: out and back against computed once."""
        return 2 * cost.blocks * self.seconds_per_block < cost.tokens * self.seconds_per_token


class CheaperWay:
    """Swaps or recomputes, whichever the measured speeds make cheaper for this victim.

    Both sides are upper bounds of the same kind: published blocks may be found again in the prefix cache either way.
    """

    def __init__(self, cost: CostOf, speed: RestoreSpeed) -> None:
        self._cost = cost
        self.speed = speed

    def swaps(self, seq: Sequence) -> bool:
        return self.speed.swapping_is_cheaper(self._cost(seq))

"""Who must yield its blocks when the pool runs out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from octavo.request import Sequence


class VictimPolicy(Protocol):
    """Chooses among running sequences; `running` is in order of service and never empty."""

    def choose(self, running: Seq[Sequence]) -> Sequence: ...


class LatestArrival:
    """The last in order of service: the lowest priority, and among those the latest arrival."""

    def choose(self, running: Seq[Sequence]) -> Sequence:
        return running[-1]

"""What is tried after a step has failed, so that nobody ends but the one request that cannot be computed.

    all ──fails──> all once more ──fails──> one half ──fails──> … ──fails──> one alone ──fails twice──> the culprit
     ^                  │                      └──succeeds──> the other half, and so on
     └─────succeeds─────┴───────── all have got past where they failed ──────────┘

A step that fails once costs nobody anything: it is computed again. One that fails for the same requests again is cut
down. Between two of its successes a request takes part in at most 3 + ceil(log2(requests)) failed steps, so that
something ends or moves on within a bounded number of tries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.request import RequestId

Progress = Callable[[RequestId], int | None]
"""How many tokens of a request are computed (of its longest sequence); None where it has ended."""


class Containment:
    """Which requests may take part in the next step. Pure bookkeeping: names and numbers.

    A suspect is cleared once it has got past the tokens that the failed step would have computed, or has ended. What
    merely had another chunk of its prompt computed may yet fail where it failed before.
    """

    def __init__(self) -> None:
        self._once: dict[RequestId, int] = {}  # of the last failed step, with the tokens to get past
        self._groups: list[dict[RequestId, int]] = []  # the last one is being tried, all others are held back
        self._alone: RequestId | None = None  # has failed once while nobody else ran

    @property
    def is_calm(self) -> bool:
        """Whether there are no suspects."""
        return not self._once and not self._groups

    def may_run(self, request_id: RequestId) -> bool:
        return not self._groups or request_id in self._groups[-1]

    def failed(self, goals: Mapping[RequestId, int]) -> RequestId | None:
        """A step has failed.

        Args:
            goals: who took part in it, and how many tokens of each would have been computed after it; not empty.

        Returns:
            The culprit, where it was alone; it is no suspect any more.
        """
        if self._groups:
            group = self._groups.pop()
            if unplanned := {name: goal for name, goal in group.items() if name not in goals}:
                self._groups.append(unplanned)
        elif self._once.keys().isdisjoint(goals):
            self._once = dict(goals)
            return None
        self._once = {}
        suspects = list(goals.items())
        if len(suspects) == 1:
            name = suspects[0][0]
            if self._alone == name:
                self._alone = None
                return name
            self._alone = name
            self._groups.append(dict(suspects))
            return None
        middle = (len(suspects) + 1) // 2
        self._groups += [dict(suspects[middle:]), dict(suspects[:middle])]
        return None

    def advance(self, progress: Progress) -> bool:
        """Clear whoever has got past where it failed; whether others may run now than before."""
        self._once = _uncleared(self._once, progress)
        changed = False
        while self._groups and not (left := _uncleared(self._groups[-1], progress)):
            self._groups.pop()
            self._alone = None
            changed = True
        if self._groups and not changed:
            self._groups[-1] = left
        return changed


def _uncleared(goals: dict[RequestId, int], progress: Progress) -> dict[RequestId, int]:
    if not goals:
        return goals
    return {name: goal for name, goal in goals.items() if (computed := progress(name)) is not None and computed < goal}

"""Finds the request that made a step fail, so that only that request ends.

    all ──fails──> all once more ──fails──> one half ──fails──> … ──fails──> a single one ──fails twice──> the culprit
     ^                  │                      └──succeeds──> the other half, and so on
     └─────succeeds─────┴───────── all have passed the point of failure ─────────┘

A step that fails once is simply computed again, and no request ends. If it fails again for the same requests, they are
split in halves. Between two successes a request takes part in at most 3 + ceil(log2(requests)) failed steps, so that
within a bounded number of tries some request ends or progresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.request import RequestId

Progress = Callable[[RequestId], int | None]
"""Returns how many tokens of a request (of its longest sequence) are computed; None if it has ended."""


class Containment:
    """Decides which requests may take part in the next step; knows them only by their ids.

    A suspect is cleared once it has computed all tokens that the failed step would have computed, or has ended. A
    smaller chunk of its prompt does not clear it, because it may still fail at the same token.
    """

    def __init__(self) -> None:
        self._once: dict[RequestId, int] = {}  # requests of the last failed step, with their goals
        self._groups: list[dict[RequestId, int]] = []  # the last group is being tried, the others are held back
        self._alone: RequestId | None = None  # has failed once while no other ran

    @property
    def is_calm(self) -> bool:
        """Whether there are no suspects."""
        return not self._once and not self._groups

    def may_run(self, request_id: RequestId) -> bool:
        return not self._groups or request_id in self._groups[-1]

    def failed(self, goals: Mapping[RequestId, int]) -> RequestId | None:
        """Record a failed step, and decide what to try next.

        Args:
            goals: the requests that took part, with the number of computed tokens that each would have had after it;
                not empty.

        Returns:
            The culprit, if it failed twice alone, which is then no longer a suspect; else None.
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
        """Clear requests that have passed the point of failure; returns whether other requests may run now."""
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

"""How much of host memory requests that wait may hold, and who is next where there is too little.

A request that finds too little room stands in the line of its tenant. Of the tenants in line, the one whose requests
hold least goes first: who sends a crowd waits for its own crowd, and others do not.
"""

from __future__ import annotations

from collections import Counter

from octavo.tiers.fetch import Fetch


class Room:
    """Slots that may be held for requests that wait, and those in line for them.

    Args:
        most: slots that may be held at once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_held = 0
        self._held = Counter[str]()  # by tenant
        # By tenant: who waits, in order of arrival, and how many slots each wants. No line is empty.
        self._lines: dict[str, dict[Fetch, int]] = {}
        self._num_wanted = Counter[str]()  # by tenant, by all in its line
        self._length = 0

    def __len__(self) -> int:
        """Requests in line."""
        return self._length

    @property
    def num_left(self) -> int:
        """Slots that may still be held."""
        return max(0, self.most - self.num_held)

    def hold(self, tenant: str, count: int) -> None:
        """Count slots that are held for a tenant's requests."""
        self.num_held += count
        self._held[tenant] += count

    def release(self, tenant: str, count: int) -> None:
        """Count slots that are held no longer."""
        self.num_held -= count
        self._held[tenant] -= count
        if not self._held[tenant]:
            del self._held[tenant]

    def num_wanted(self, tenant: str) -> int:
        """Slots that all of a tenant's line waits for."""
        return self._num_wanted[tenant]

    def line_up(self, fetch: Fetch) -> None:
        """Wait for slots, behind those of the same tenant; where it is in line already, it may want more."""
        line, count = self._lines.setdefault(fetch.tenant, {}), min(fetch.num_wanted, self.most)
        self._length += fetch not in line
        self._num_wanted[fetch.tenant] += count - line.get(fetch, 0)
        line[fetch] = count

    def leave(self, fetch: Fetch) -> None:
        """Wait no longer; nothing happens where it is not in line."""
        line = self._lines.get(fetch.tenant, {})
        if fetch not in line:
            return
        self._num_wanted[fetch.tenant] -= line.pop(fetch)
        self._length -= 1
        if not line:
            del self._lines[fetch.tenant], self._num_wanted[fetch.tenant]

    def first(self) -> Fetch | None:
        """Who is next. O(tenants in line)."""
        if not self._lines:
            return None
        return next(iter(self._lines[min(self._lines, key=self._held.__getitem__)]))

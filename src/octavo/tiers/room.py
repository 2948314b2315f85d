"""What waiting requests fetch from stores, how much of host memory they may hold, and which tenant is next.

A request that finds too little room queues with its tenant's other requests. Of the waiting tenants, the one whose
requests hold the fewest slots is served first, so that a tenant with many requests delays only itself.
"""

from __future__ import annotations

from collections import Counter

from octavo.kvcache.block import HostBlockId
from octavo.kvcache.hashing import Label
from octavo.least_served import LeastServed
from octavo.tiers.store import Store
from octavo.tiers.transfer import Transfer


class Fetch:
    """The blocks being loaded for one request, and those that have arrived and are held for it.

        asking ──the store has them──> wanted ──room for them──> transfers ──verified──> held
                                       coming ──another request's transfers─────────────> held

    Attributes:
        tenant: the tenant that the blocks are accounted to.
        seconds_to_compute: time to compute one block instead; None if not known yet.
        deadline: time after which the request stops waiting.
        asking: questions to stores that are not answered yet.
        wanted: blocks that a store has, but for which host memory has had no room yet.
        transfers: blocks that are being loaded, each label with its slot.
        coming: blocks whose slots are already being filled, for another request or by an earlier step.
        held: slots that must not be evicted until the fetch is released.
        released: whether the request has its blocks, or has ended.
    """

    def __init__(self, tenant: str, seconds_to_compute: float | None, deadline: float) -> None:
        self.tenant = tenant
        self.seconds_to_compute = seconds_to_compute
        self.deadline = deadline
        self.asking: list[tuple[Store, Transfer]] = []
        self.wanted: list[tuple[Store, list[Label]]] = []
        self.transfers: list[tuple[Store, Transfer, list[HostBlockId]]] = []
        self.coming: list[Label] = []
        self.held: list[HostBlockId] = []
        self.released = False

    @property
    def pending(self) -> bool:
        """Whether anything is still to arrive."""
        return bool(self.transfers or self.asking or self.wanted or self.coming)

    @property
    def num_wanted(self) -> int:
        """The number of slots that the fetch waits for."""
        return sum(len(labels) for _, labels in self.wanted)


class Room:
    """The slots that may be held for waiting requests, and the queues for them.

    Args:
        most: maximum number of slots held at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_held = 0
        self._held = LeastServed()  # slots
        # By tenant: the waiting requests in order of arrival, and how many slots each wants. No queue is empty.
        self._lines: dict[str, dict[Fetch, int]] = {}
        self._num_wanted = Counter[str]()  # by tenant, summed over its queue
        self._length = 0

    def __len__(self) -> int:
        """The number of waiting requests."""
        return self._length

    @property
    def num_left(self) -> int:
        """The number of slots that may still be held."""
        return max(0, self.most - self.num_held)

    def hold(self, tenant: str, count: int) -> None:
        """Count slots that are held for a tenant's requests."""
        self.num_held += count
        self._held.charge(tenant, count)

    def release(self, tenant: str, count: int) -> None:
        """Count slots that are no longer held."""
        self.num_held -= count
        self._held.charge(tenant, -count)
        if not self._held[tenant]:
            self._held.forget(tenant)

    def num_wanted(self, tenant: str) -> int:
        """Return the number of slots that all of a tenant's waiting requests want."""
        return self._num_wanted[tenant]

    def line_up(self, fetch: Fetch) -> None:
        """Queue behind other requests of the same tenant; a request that is queued already may want more slots."""
        line, count = self._lines.setdefault(fetch.tenant, {}), min(fetch.num_wanted, self.most)
        self._length += fetch not in line
        self._num_wanted[fetch.tenant] += count - line.get(fetch, 0)
        line[fetch] = count

    def leave(self, fetch: Fetch) -> None:
        """Leave the queue; does nothing if the request is not queued."""
        line = self._lines.get(fetch.tenant, {})
        if fetch not in line:
            return
        self._num_wanted[fetch.tenant] -= line.pop(fetch)
        self._length -= 1
        if not line:
            del self._lines[fetch.tenant], self._num_wanted[fetch.tenant]

    def first(self) -> Fetch | None:
        """Return the next request, in O(waiting tenants)."""
        tenant = self._held.next(self._lines)
        return None if tenant is None else next(iter(self._lines[tenant]))

"""The blocks that one request waits for while stores load them into host memory."""

from __future__ import annotations

from octavo.kvcache.hashing import Label
from octavo.kvcache.host_memory import HostBlockId
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

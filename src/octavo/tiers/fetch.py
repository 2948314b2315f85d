"""What one request waits for: blocks that stores have, on their way to host memory."""

from __future__ import annotations

from octavo.kvcache.host_memory import HostBlockId
from octavo.kvcache.label import Label
from octavo.tiers.store import Store
from octavo.tiers.transfer import Transfer


class Fetch:
    """Blocks on their way for one request, and those that have come and are kept for it.

        asking ──the store has them──> wanted ──room for them──> transfers ──proven──> held
                                       coming ──another request's transfers───────────> held

    Attributes:
        tenant: whom the blocks count for.
        seconds_to_compute: one block; None where it is not known yet.
        deadline: nobody waits for it any longer than this.
        asking: what stores were asked for, and have not answered yet.
        wanted: what a store has and host memory has had no room for yet.
        transfers: what is being loaded, each label with its slot.
        coming: what another request is loading, or a step before it.
        held: slots that are kept from being evicted until the fetch is released.
        released: its request has its blocks, or has ended.
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
        """Whether anything is still on its way."""
        return bool(self.transfers or self.asking or self.wanted or self.coming)

    @property
    def num_wanted(self) -> int:
        """Slots that it waits for."""
        return sum(len(labels) for _, labels in self.wanted)

"""The network between simulated servers: blocks that a neighbour hands over, on the virtual clock.

    scheduler ── fetch ──> LowerTiers (the engine's own) ── ask, get ──> NeighbourStore ──> neighbour's host memory
              <── arrived ──────────────────────────────────────────────── when the link has carried the bytes

A server's link carries one transfer after another in each direction; nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from octavo.kvcache.block import HostBlockId
from octavo.kvcache.hashing import Label
from octavo.kvcache.host_memory import HostMemory, Slot
from octavo.tiers.base import Medium, Reason, Transfer, Work
from octavo.tiers.store import Store

ROUND_TRIP_S = 0.0005
"""Time from a question until its answer, and until the first byte of blocks: an assumption."""


class LinkedMemory(Medium):
    """The blocks in the host memory of neighbours, which are all in this process.

    Args:
        neighbours: of all servers, by the address that hints name.

    Attributes:
        busy_until: when the link has finished its transfers, into this server and out of it.
    """

    name = "neighbour"
    must_ask = True
    is_read_only = True

    def __init__(self, neighbours: Mapping[str, LinkedMemory]) -> None:
        self.busy_until = {"in": 0.0, "out": 0.0}
        self._neighbours = neighbours
        self._memory: HostMemory | None = None
        self._hints: dict[bytes, str] = {}  # by key of a block that was not read yet

    def lend(self, memory: HostMemory, row: Callable[[HostBlockId], memoryview]) -> None:
        self._memory = memory

    def expect(self, labels: Sequence[Label], address: str) -> None:
        self._hints.update((label.key, address) for label in labels)

    def contains(self, key: bytes) -> bool | None:
        return None if key in self._hints else False

    def holder(self, label: Label) -> LinkedMemory | None:
        """Return the neighbour that has a block, if it is the one that a hint names."""
        found = self._neighbours.get(self._hints.get(label.key, ""))
        has_it = found is not None and found._memory is not None and found._memory.state(label.key) is Slot.READY
        return found if has_it else None

    def ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        return [Reason.ABSENT if self.holder(label) is None else None for label in labels]

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        found = self.ask(labels)
        for label in labels:
            self._hints.pop(label.key, None)
        return found

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        return Reason.READ_ONLY

    def close(self) -> None:
        """There is nothing to close."""


class _Arriving(Transfer):
    """A transfer with known outcomes, which ends at a given time of the virtual clock."""

    def __init__(
        self, transfer: Transfer, outcomes: Sequence[Reason | None], ends: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(transfer.work, transfer.labels, transfer.buffers, transfer.deadline, transfer.tenant)
        self.outcomes = list(outcomes)
        self.ends = ends
        self._clock = clock

    @property
    def done(self) -> bool:
        return self._clock() >= self.ends


class NeighbourStore(Store):
    """A store without threads, whose transfers take the time of a link.

    Args:
        block_bytes: bytes of a block on all devices of a server.
        bytes_per_second: of the link, in each direction.

    Attributes:
        block_bytes: see above.
        num_bytes: bytes transferred so far.
    """

    def __init__(
        self, memory: LinkedMemory, block_bytes: int, bytes_per_second: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(memory, num_threads=0, clock=clock)
        self.num_bytes = 0
        self._link = memory
        self.block_bytes = block_bytes
        self._bytes_per_second = bytes_per_second
        self._under_way: list[_Arriving] = []

    def next_end(self) -> float | None:
        """Return when the next transfer ends; None if none is under way."""
        self._under_way = [each for each in self._under_way if not each.done]
        return min((each.ends for each in self._under_way), default=None)

    def _submit(self, transfer: Transfer) -> Transfer:
        now = self._clock()
        holders = [each for each in map(self._link.holder, transfer.labels) if each is not None]
        outcomes, ends = self._tried(transfer, transfer.labels, transfer.buffers), now + ROUND_TRIP_S
        if transfer.work is Work.READ and holders:
            ends = self._carried(holders[0], len(holders) * self.block_bytes, ends)
            self.speed.measure(ends - now, len(holders) * self.block_bytes)
        self._under_way.append(arriving := _Arriving(transfer, outcomes, ends, self._clock))
        return arriving

    def _carried(self, holder: LinkedMemory, num_bytes: int, begins: float) -> float:
        """Return when a transfer of that many bytes from a neighbour ends."""
        self.num_bytes += num_bytes
        begins = max(begins, self._link.busy_until["in"], holder.busy_until["out"])
        ends = begins + num_bytes / self._bytes_per_second
        self._link.busy_until["in"] = holder.busy_until["out"] = ends
        return ends

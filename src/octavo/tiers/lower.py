"""Moves blocks between host memory and the stores below it.

    host memory ── ready ──> every store that lacks it           the slot is held until it is written
                <── fetched ── the first store that has it       for a waiting request; the slot is reserved

A store that cannot tell without being asked what it has is asked first, so that slots are only reserved for blocks that
are there. If too few slots are left, a request waits until others have their blocks and release their slots
(`FetchQueue`).

Everything here happens in the engine's thread; the stores' own threads only touch the slots that they were given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile

from octavo.kvcache.block import HostBlockId
from octavo.kvcache.hashing import Label
from octavo.kvcache.host_memory import HostMemory, Slot
from octavo.least_served import LeastServed
from octavo.tiers.base import Reason, Transfer
from octavo.tiers.store import Store

# Maximum time that a request waits for room for its blocks, and then for the blocks; what is missing then is computed.
LOAD_SECONDS = 5.0
# Maximum time that a request waits for a store's answer whether it has the blocks.
ASK_SECONDS = 0.25
# Maximum share of the slots that may be held for waiting requests, so that the rest remains usable as a cache.
_MOST_HELD = 0.5
# Maximum number of requests that may wait for room, because each is checked in every step.
_MOST_QUEUED = 1024
# Time between two looks at writes that are waited for.
_MOMENT = 0.05
# One in this many loads that seem slower than computing is made all the same, to measure the speed again.
_TRY_EVERY = 32


class LowerTiers:
    """The stores below one host memory.

    Args:
        row: returns the memory of a slot.
        block_bytes: size of a slot.
        clock: a monotonic clock, in seconds.
        load_seconds: maximum time of a load, see `LOAD_SECONDS`.
    """

    def __init__(
        self,
        host: HostMemory,
        stores: Sequence[Store],
        row: Callable[[HostBlockId], memoryview],
        block_bytes: int,
        clock: Callable[[], float],
        *,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self.stores = stores
        self.num_not_worth = 0  # loads that were expected to take longer than computing
        self._host = host
        self._row = row
        self._block_bytes = block_bytes
        self._clock = clock
        self._load_seconds = load_seconds
        self._writing: list[tuple[Transfer, HostBlockId]] = []
        self._fetches: list[Fetch] = []  # that still wait for something
        self._unreleased: set[Fetch] = set()
        self._queue = FetchQueue(int(_MOST_HELD * host.num_prefix_slots))
        self._arrived = threading.Event()
        host.on_ready = self._write_down
        host.holders.append(self._held)
        host.fillers.append(self._filling)
        for store in stores:
            store.on_done = self._arrived.set
            store.medium.lend(host, row)

    def prefetch(
        self, labels: Iterable[Label], tenant: str, seconds_to_compute: float | None, kv_hint: str | None = None
    ) -> Fetch | None:
        """Start loading the blocks that the stores have, up to the first one that no store has.

        Args:
            seconds_to_compute: time to compute one block; None if not known yet.
            kv_hint: address of a neighbour that has the blocks.

        Returns:
            None if there is nothing to wait for, because no block is there or computing is faster.
        """
        host, fetch = self._host, Fetch(tenant, seconds_to_compute, self._clock() + ASK_SECONDS)
        found: dict[Store, list[Label]] = {}
        labels = islice(labels, self._queue.most)
        if kv_hint is not None:
            labels = list(labels)
            for each in self.stores:
                each.medium.expect(labels, kv_hint)
        for label in labels:
            state = host.state(label.key)
            if state is Slot.FILLING:
                fetch.coming.append(label)
            elif state is None:
                store = next((s for s in self.stores if s.lookup(label.key) is not False), None)
                if store is None:
                    break
                found.setdefault(store, []).append(label)
        if fetch.coming:
            fetch.deadline = self._clock() + self._load_seconds
        for store, chosen in found.items():
            if not self._is_worth(store, chosen, seconds_to_compute):
                continue
            if store.must_ask:
                fetch.asking.append((store, store.ask(chosen, ASK_SECONDS)))
            else:
                fetch.wanted.append((store, chosen))
        self._enqueue(fetch)
        self._start_loads()
        if not fetch.pending:
            return None
        self._fetches.append(fetch)
        self._unreleased.add(fetch)
        return fetch

    def poll(self) -> None:
        """Process what has arrived, and start the loads that there is room for."""
        self._arrived.clear()
        host = self._host
        written, self._writing = self._writing, []
        for transfer, slot in written:
            if transfer.done:
                host.release((slot,))
            else:
                self._writing.append((transfer, slot))
        for fetch in self._fetches:
            answered = [each for each in fetch.asking if each[1].done]
            fetch.asking = [each for each in fetch.asking if not each[1].done]
            for store, transfer in answered:
                self._answered(fetch, store, transfer)
            on_their_way = []
            for store, transfer, slots in fetch.transfers:
                if not transfer.done:
                    on_their_way.append((store, transfer, slots))
                    continue
                for slot, reason in zip(slots, transfer.outcomes, strict=True):
                    self._take_in(fetch, store, slot, reason)
            fetch.transfers = on_their_way
        self._start_loads()
        for fetch in self._fetches:
            # Blocks of one transfer arrive together, so checking the first is enough for most.
            if fetch.coming and host.state(fetch.coming[0].key) is not Slot.FILLING:
                # Blocks that other fetches have loaded are held for this one too; those that failed are computed.
                coming, fetch.coming = fetch.coming, []
                for label in coming:
                    self._is_here(fetch, label)
        self._fetches = [fetch for fetch in self._fetches if fetch.pending]

    def is_late(self, fetch: Fetch) -> bool:
        """Return whether the request should stop waiting for this fetch."""
        return self._clock() > fetch.deadline

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, for at most `seconds`."""
        self._arrived.wait(seconds)

    def release(self, fetch: Fetch) -> None:
        """Release a fetch whose request has its blocks, or has ended."""
        fetch.released = True
        self._unreleased.discard(fetch)
        self._queue.leave(fetch)
        fetch.wanted, fetch.coming = [], []
        for _, question in fetch.asking:
            question.cancel()
        for _, transfer, _ in fetch.transfers:
            transfer.cancel()
        self._host.release(fetch.held)
        self._queue.hold(fetch.tenant, -len(fetch.held))
        fetch.held = []

    def finish_writes(self, seconds: float) -> None:
        """Wait for pending writes, for at most `seconds`."""
        ends = self._clock() + seconds
        while self._writing and self._clock() < ends:
            self.wait(min(_MOMENT, seconds))
            self.poll()

    def close(self, seconds: float = 10.0) -> None:
        """Finish the pending writes, and close the stores. Slots that the stores still use are not reused."""
        for store in self.stores:
            store.close(seconds)
        self.poll()
        if not self._writing and not self._unreleased:
            # Nothing is held any more; host memory, to which this refers, must not refer back to be freed at once.
            self._host.on_ready, self._host.holders, self._host.fillers = lambda slot: None, [], []

    def _held(self) -> Iterator[HostBlockId]:
        yield from (slot for _, slot in self._writing)
        yield from (slot for fetch in self._unreleased for slot in fetch.held)

    def _filling(self) -> Iterator[HostBlockId]:
        return (slot for fetch in self._fetches for _, _, slots in fetch.transfers for slot in slots)

    def _answered(self, fetch: Fetch, store: Store, question: Transfer) -> None:
        """Queue the loads of the blocks that a store has, up to the first that it lacks."""
        if fetch.released:
            return
        answers = zip(question.labels, question.outcomes, strict=True)
        found = [label for label, _ in takewhile(lambda each: each[1] is None, answers)]
        if found and self._is_worth(store, found, fetch.seconds_to_compute):
            fetch.wanted.append((store, found))
            self._enqueue(fetch)

    def _enqueue(self, fetch: Fetch) -> None:
        """Queue a fetch for room; it waits no longer than computing all blocks wanted by the tenant would take."""
        if not fetch.wanted:
            return
        if len(self._queue) >= _MOST_QUEUED:
            fetch.wanted = []
            return
        self._queue.join(fetch)
        seconds = self._load_seconds
        if fetch.seconds_to_compute is not None:
            seconds = min(seconds, fetch.seconds_to_compute * self._queue.num_wanted(fetch.tenant))
        fetch.deadline = max(fetch.deadline, self._clock() + seconds)

    def _start_loads(self) -> None:
        """Start the loads that there is room for, in turn; a late fetch takes the room that is left."""
        while (fetch := self._queue.first()) is not None:
            left = min(self._queue.num_left, self._host.pool.num_available)
            if not left or (left < min(fetch.num_wanted, self._queue.most) and not self.is_late(fetch)):
                return
            self._queue.leave(fetch)
            self._load(fetch)

    def _load(self, fetch: Fetch) -> None:
        """Start the loads of a fetch for which there is room."""
        wanted, fetch.wanted = fetch.wanted, []
        for store, labels in wanted:
            missing: list[Label] = []
            slots: list[HostBlockId] = []
            for label in labels:
                if self._is_here(fetch, label):
                    continue
                slot = self._host.reserve(label, fetch.tenant) if self._queue.num_left else None
                if slot is None:
                    break
                self._queue.hold(fetch.tenant, 1)
                missing.append(label)
                slots.append(slot)
            if slots:
                rows = [self._row(slot) for slot in slots]
                transfer = store.get(missing, rows, self._load_seconds, fetch.tenant)
                fetch.transfers.append((store, transfer, slots))
        fetch.deadline = self._clock() + self._load_seconds

    def _is_here(self, fetch: Fetch, label: Label) -> bool:
        """Return whether a block has arrived in the meantime, and hold it, or is being loaded."""
        host = self._host
        if (slot := host.find(label)) is not None:
            host.hold((slot,))
            self._queue.hold(fetch.tenant, 1)
            fetch.held.append(slot)
            return True
        state = host.state(label.key)
        if state is Slot.FILLING:
            fetch.coming.append(label)
        return state is not None

    def _take_in(self, fetch: Fetch, store: Store, slot: HostBlockId, reason: Reason | None) -> None:
        hold = not fetch.released
        if reason is not None:
            self._host.not_filled(slot)
        elif self._host.filled(slot, store.name, hold=hold) and hold:
            fetch.held.append(slot)
            return
        self._queue.hold(fetch.tenant, -1)

    def _write_down(self, slot: HostBlockId) -> None:
        label = self._host.records.label(slot)
        for store in self.stores:
            if store.wants(label.key):
                self._host.hold((slot,))
                transfer = store.put(label, self._row(slot), self._host.tenant(slot))
                self._writing.append((transfer, slot))

    def _is_worth(self, store: Store, labels: Sequence[Label], seconds_to_compute: float | None) -> bool:
        expected = store.expected_seconds(labels, len(labels) * self._block_bytes)
        if expected is None or seconds_to_compute is None or expected < len(labels) * seconds_to_compute:
            return True
        self.num_not_worth += 1
        return self.num_not_worth % _TRY_EVERY == 0


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


class FetchQueue:
    """The slots that may be held for waiting requests, and the queues for them.

    Args:
        most: maximum number of slots held at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_held = 0
        self._held = LeastServed()  # slots
        # By tenant: the waiting requests in order of arrival, and how many slots each wants. No queue is empty.
        self._queues: dict[str, dict[Fetch, int]] = {}

    def __len__(self) -> int:
        """The number of waiting requests."""
        return sum(map(len, self._queues.values()))

    @property
    def num_left(self) -> int:
        """The number of slots that may still be held."""
        return max(0, self.most - self.num_held)

    def hold(self, tenant: str, count: int) -> None:
        """Count slots that are held for a tenant's requests, or no longer held if negative."""
        self.num_held += count
        self._held.charge(tenant, count)
        if not self._held[tenant]:
            self._held.forget(tenant)

    def num_wanted(self, tenant: str) -> int:
        """Return the number of slots that all of a tenant's waiting requests want."""
        return sum(self._queues.get(tenant, {}).values())

    def join(self, fetch: Fetch) -> None:
        """Queue behind other requests of the same tenant; a request that is queued already may want more slots."""
        self._queues.setdefault(fetch.tenant, {})[fetch] = min(fetch.num_wanted, self.most)

    def leave(self, fetch: Fetch) -> None:
        """Leave the queue; does nothing if the request is not queued."""
        queue = self._queues.get(fetch.tenant, {})
        if queue.pop(fetch, None) is not None and not queue:
            del self._queues[fetch.tenant]

    def first(self) -> Fetch | None:
        """Return the next request, in O(waiting tenants)."""
        tenant = self._held.next(self._queues)
        return None if tenant is None else next(iter(self._queues[tenant]))

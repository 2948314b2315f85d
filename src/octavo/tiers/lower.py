"""Between host memory and the stores below it: what is written down, and what comes up for whoever waits.

    host memory ── ready ──> every store that lacks it           the slot is held until it is written
                <── fetched ── the first store that has it       for a request that waits; the slot is reserved

Where only asking tells what a store has, it is asked first: slots are reserved for what is there, and for nothing else.

Everything here happens in the engine's thread; the stores' own threads touch nothing but the slots they were given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import takewhile

from octavo.kvcache.host_memory import HostBlockId, HostMemory, Label
from octavo.tiers.base import LookupResult, Reason, Store, Transfer

# A request waits so long at most: then what is missing is computed.
LOAD_SECONDS = 5.0
# And so long for a store's answer whether it has them.
ASK_SECONDS = 0.25
# Of the slots, so many may be held for requests that wait: the others go on serving.
_MOST_HELD = 0.5
# A load that seemed dearer than computing is tried all the same now and then, to measure anew.
_TRY_EVERY = 32


class Fetch:
    """Blocks on their way for one request, and those that have come and are kept for it.

    Attributes:
        asking: what stores were asked for, and have not answered yet.
        held: slots that are kept from being evicted until `LowerTiers.release`.
    """

    def __init__(self, tenant: str, seconds_to_compute: float | None, deadline: float) -> None:
        self.tenant = tenant
        self.seconds_to_compute = seconds_to_compute
        self.deadline = deadline
        self.asking: list[tuple[Store, Transfer]] = []
        self.transfers: list[tuple[Store, Transfer, list[HostBlockId]]] = []
        self.held: list[HostBlockId] = []
        self.released = False

    @property
    def pending(self) -> bool:
        """Whether anything is still on its way."""
        return bool(self.transfers or self.asking)


class LowerTiers:
    """The stores below one host memory.

    Args:
        row: the memory of a slot.
        block_bytes: of a slot.
        clock: seconds, never going back.
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
        self.num_not_worth = 0  # loads that would have taken longer than computing
        self._host = host
        self._row = row
        self._block_bytes = block_bytes
        self._clock = clock
        self._load_seconds = load_seconds
        self._writing: list[tuple[Transfer, HostBlockId]] = []
        self._fetches: list[Fetch] = []
        self._num_held = 0
        self._arrived = threading.Event()
        host.on_ready = self._write_down
        for store in stores:
            store.on_done = self._arrived.set

    @property
    def is_busy(self) -> bool:
        """Whether stores still use slots."""
        return bool(self._writing or self._fetches)

    def prefetch(self, labels: Sequence[Label], tenant: str, seconds_to_compute: float | None) -> Fetch | None:
        """Begin to load what the stores have of these blocks, up to the first that none has.

        Args:
            seconds_to_compute: one of the blocks; None where it is not known yet.

        Returns:
            None where there is nothing to wait for: nothing is there, or computing is quicker.
        """
        host = self._host
        wanted: dict[Store, list[Label]] = {}
        for label in labels[: self._room]:
            if host.find(label) is not None or host.is_coming(label.key):
                continue
            store = next((s for s in self.stores if s.lookup(label.key) is not LookupResult.MISS), None)
            if store is None:
                break
            wanted.setdefault(store, []).append(label)
        fetch = Fetch(tenant, seconds_to_compute, self._clock() + ASK_SECONDS)
        for store, chosen in wanted.items():
            if not self._is_worth(store, len(chosen), seconds_to_compute):
                continue
            if store.must_ask:
                fetch.asking.append((store, store.ask(chosen, ASK_SECONDS)))
            else:
                self._begin(fetch, store, chosen)
        if not fetch.pending:
            return None
        self._fetches.append(fetch)
        return fetch

    def poll(self) -> None:
        """Take in what has arrived since."""
        self._arrived.clear()
        host = self._host
        written, self._writing = self._writing, []
        for transfer, slot in written:
            if transfer.done:
                host.release(slot)
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
        self._fetches = [fetch for fetch in self._fetches if fetch.pending]

    def is_late(self, fetch: Fetch) -> bool:
        """Whether nobody should wait for it any longer."""
        return self._clock() > fetch.deadline

    def wait(self, seconds: float) -> None:
        """Until something arrives, or so long."""
        self._arrived.wait(seconds)

    def release(self, fetch: Fetch) -> None:
        """Its request has its blocks, or has ended."""
        fetch.released = True
        for _, question in fetch.asking:
            question.cancel()
        for _, transfer, _ in fetch.transfers:
            transfer.cancel()
        for slot in fetch.held:
            self._host.release(slot)
            self._num_held -= 1
        fetch.held = []

    def close(self, seconds: float = 10.0) -> None:
        """Write down what is on its way, and close the stores. What they still use then is theirs for good."""
        for store in self.stores:
            store.close(seconds)
        self.poll()

    @property
    def _room(self) -> int:
        """Slots that may still be held for requests."""
        return max(0, int(_MOST_HELD * self._host.num_prefix_slots) - self._num_held)

    def _answered(self, fetch: Fetch, store: Store, question: Transfer) -> None:
        """Begin to load what a store has of the blocks, up to the first that it lacks."""
        if fetch.released:
            return
        found = [
            label
            for label, _ in takewhile(
                lambda each: each[1] is None, zip(question.labels, question.outcomes, strict=True)
            )
        ]
        host = self._host
        missing = [label for label in found if host.find(label) is None and not host.is_coming(label.key)][: self._room]
        if missing and self._is_worth(store, len(missing), fetch.seconds_to_compute):
            self._begin(fetch, store, missing)

    def _begin(self, fetch: Fetch, store: Store, labels: Sequence[Label]) -> None:
        slots: list[HostBlockId] = []
        for label in labels:
            slot = self._host.reserve(label, fetch.tenant)
            if slot is None:
                break
            slots.append(slot)
        if slots:
            transfer = store.get(labels[: len(slots)], [self._row(slot) for slot in slots], self._load_seconds)
            fetch.transfers.append((store, transfer, slots))
            fetch.deadline = self._clock() + self._load_seconds
            self._num_held += len(slots)

    def _take_in(self, fetch: Fetch, store: Store, slot: HostBlockId, reason: Reason | None) -> None:
        hold = not fetch.released
        if reason is not None:
            self._host.give_back(slot)
        elif self._host.filled(slot, store.name, hold=hold) and hold:
            fetch.held.append(slot)
            return
        self._num_held -= 1

    def _write_down(self, slot: HostBlockId, label: Label) -> None:
        for store in self.stores:
            if store.wants(label.key):
                self._host.hold(slot)
                self._writing.append((store.put(label, self._row(slot)), slot))

    def _is_worth(self, store: Store, num_blocks: int, seconds_to_compute: float | None) -> bool:
        expected = store.expected_seconds(num_blocks * self._block_bytes)
        if expected is None or seconds_to_compute is None or expected < num_blocks * seconds_to_compute:
            return True
        self.num_not_worth += 1
        return self.num_not_worth % _TRY_EVERY == 0

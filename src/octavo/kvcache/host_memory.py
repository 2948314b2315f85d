"""Host memory for blocks: which slot holds what. Bookkeeping only; the runner moves the bytes.

One pool of slots serves two uses: prefixes that the device evicted, and blocks that preempted sequences left behind.

    free ──reserve──> storing ──stored──> ready ──evict──> free     a step writes it (`host_transfers.py`)
      └────reserve──> filling ──filled──────^                       a store below does: disk, remote

One index maps the key of a block to its slot from the moment the slot is reserved, and the slot's state says whether
the block is coming or there: a block that is already here or in transfer is not fetched again. The key is that of the
prefix that the block ends; or, for a half-filled block or without prefix caching, a private key of the preempted
sequence that it belongs to.

A slot is held while a step copies it to the device, a store writes it out, a request waits for it or it is kept for
preempted sequences. Held slots are not evicted, because the eviction policy knows only the others. The swap space
limits how many slots are kept; prefixes take all remaining ones, and yield them to preempted sequences.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, KeysView
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NewType

from octavo.errors import CacheError
from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction import EvictionPolicy
from octavo.kvcache.eviction.adaptive import GhostList
from octavo.kvcache.hashing import DIGEST_BYTES, TOKEN_BYTES, Label
from octavo.kvcache.key_index import KeyIndex

HostBlockId = NewType("HostBlockId", int)


class Slot(Enum):
    FREE = "free"
    STORING = "storing"  # being written by a step
    FILLING = "filling"  # being filled by a store
    READY = "ready"


@dataclass(slots=True)
class HostCounters:
    """Totals of prefixes since the start, in blocks, and who has slots now. Any thread may read."""

    stored: int = 0  # from the device
    filled: int = 0  # from a store
    loaded: int = 0  # to the device
    evicted: int = 0
    refused: int = 0  # no slot was free or evictable
    lost: int = 0  # the step failed
    slots: Counter[str] = field(default_factory=Counter)  # in use, by tenant


@dataclass(slots=True)
class SwapCounters:
    """Totals of preempted sequences since the start, and of the blocks kept for them in host memory.

    `blocks_out` is exactly `blocks_in` + `blocks_dropped` + the blocks that are still kept.
    """

    blocks_out: int = 0
    blocks_in: int = 0  # loaded back
    blocks_dropped: int = 0  # never loaded back: their sequence ended, was given up, or found the block on the device
    sequences_out: int = 0
    sequences_in: int = 0
    sequences_lost: int = 0  # given up, because there was no room for a block that the device evicted


class HostMemory:
    """Slots for blocks in host memory, and an index by key of those that are there or coming. O(1) per operation.

    Slots are used in ascending order, so that memory and audits do not grow with slots that were never used.

    Args:
        num_slots: number of slots; 0 disables host memory.
        num_swap_slots: how many of them may be kept for preempted sequences at once. If it is all of them, there are
            no others in use.
        eviction: policy that chooses which prefix to evict.

    Attributes:
        swapped: what was kept for preempted sequences so far.
        on_ready: called with each slot that a step has just filled with a prefix, and its label.
        holders: each returns the slots that it holds, once for each time; audits compare them with the holds.
        writers: each returns the slots that it has reserved and not yet made ready, for audits.
    """

    def __init__(self, num_slots: int, num_swap_slots: int, block_size: int, eviction: EvictionPolicy) -> None:
        if not 0 <= num_swap_slots <= num_slots:
            raise CacheError(f"of {num_slots} slots of host memory {num_swap_slots} cannot be for swapping")
        self.num_slots = num_slots
        self.num_swap_slots = num_swap_slots
        self.counters = HostCounters()
        self.swapped = SwapCounters()
        self.on_ready: Callable[[HostBlockId, Label], None] = lambda slot, label: None
        self.holders: list[Callable[[], Iterable[HostBlockId]]] = []
        self.writers: dict[Slot, Callable[[], Iterable[HostBlockId]]] = {}
        self._keeps_prefixes = num_slots > num_swap_slots
        self._width = block_size * TOKEN_BYTES
        self._eviction = eviction
        self._index = KeyIndex(num_slots)
        eviction.reserve(num_slots + 1)
        self._free: list[HostBlockId] = []  # among slots that were ever used
        # By slot, for slots that were ever used.
        self._states: list[Slot] = []
        self._tenants: list[str] = []
        self._origins: list[str] = []
        self._tokens = bytearray()
        self._holds = array("i")
        self._kept: dict[HostBlockId, bool] = {}  # for preempted sequences; whether one has loaded it back
        # By slot that is being written: the label by which it will be found, if any. Its key is in the index.
        self._labels: dict[HostBlockId, Label | None] = {}

    @staticmethod
    def bookkeeping_bytes(block_size: int) -> int:
        """Return the bookkeeping bytes of one slot, including those for the device's block that may go there."""
        return 4 * KeyIndex.BYTES_PER_ID + 8 * DIGEST_BYTES + TOKEN_BYTES * block_size + 4 * GhostList.BYTES_EACH

    @property
    def num_prefix_slots(self) -> int:
        """The number of slots left for prefixes even if the whole swap space is in use."""
        return self.num_slots - self.num_swap_slots

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_slots - len(self._states)

    @property
    def num_takeable(self) -> int:
        """The number of slots that are free or evictable."""
        return self.num_free + len(self._eviction)

    @property
    def num_ready(self) -> int:
        """The number of ready slots that can be found by key."""
        return len(self._index) - sum(label is not None for label in self._labels.values())

    @property
    def num_kept(self) -> int:
        """The number of slots that are kept for preempted sequences."""
        return len(self._kept)

    @property
    def num_held(self) -> int:
        """The number of holds by requests that wait and by transfers in progress."""
        return sum(self._holds) - len(self._kept)

    @property
    def being_written(self) -> KeysView[HostBlockId]:
        """Slots that a step or a store writes."""
        return self._labels.keys()

    def by_tenant(self) -> dict[str, int]:
        """Return the number of slots in use by tenant."""
        return {tenant: count for tenant, count in self.counters.slots.items() if count}

    # Looking up and holding

    def find(self, label: Label) -> HostBlockId | None:
        """Return the ready slot with this label's key and tokens, if any."""
        slot = self._index.get(label.key)
        if slot is None or self._states[slot] is not Slot.READY:
            return None
        same = label.is_private or self._tokens[slot * self._width : (slot + 1) * self._width] == label.tokens
        return HostBlockId(slot) if same else None

    def where(self, key: bytes) -> tuple[HostBlockId, Slot] | None:
        """Return the slot that has this key or is being written with it, and its state."""
        slot = self._index.get(key)
        return None if slot is None else (HostBlockId(slot), self._states[slot])

    def state(self, key: bytes) -> Slot | None:
        """Return the state of the slot with this key; None if there is none."""
        slot = self._index.get(key)
        return None if slot is None else self._states[slot]

    def origin(self, slot: HostBlockId) -> str:
        """Return the tier that a slot's bytes came from; after their first use it is the host."""
        return self._origins[slot]

    def tenant(self, slot: HostBlockId) -> str:
        """Return the tenant that a slot is accounted to."""
        return self._tenants[slot]

    def is_held(self, slot: HostBlockId) -> bool:
        return self._holds[slot] > 0

    def renew(self, slot: HostBlockId) -> None:
        """Let a slot be evicted as late as if it had been used just now."""
        if BlockId(slot + 1) in self._eviction:
            self._eviction.remove([BlockId(slot + 1)])
            self._eviction.add([BlockId(slot + 1)])

    def note_hit(self, slot: HostBlockId) -> None:
        """Note that a prefix in a slot, which is held, is used again."""
        self._eviction.hit([BlockId(slot + 1)], 0)

    def hold(self, slot: HostBlockId) -> None:
        """Protect a slot from eviction until `release`."""
        if self._holds[slot] == 0 and self._states[slot] is Slot.READY:
            self._eviction.remove([BlockId(slot + 1)])
        self._holds[slot] += 1

    def release(self, slot: HostBlockId) -> None:
        if self._holds[slot] < 1:
            raise CacheError(f"slot {slot} of host memory is released more often than held")
        self._holds[slot] -= 1
        self._settle(slot)

    # Keeping for preempted sequences

    def kept(self, key: bytes) -> HostBlockId | None:
        """Return the slot with this key, if it is kept; it may still be written."""
        slot = self._index.get(key)
        return HostBlockId(slot) if slot in self._kept else None

    def may_keep(self, slots: Iterable[HostBlockId | None]) -> bool:
        """Whether the swap space has room for these slots, all different; None stands for one to be reserved."""
        more = [slot for slot in slots if slot not in self._kept]
        num_taken = sum(slot is None or BlockId(slot + 1) in self._eviction for slot in more)
        return len(self._kept) + len(more) <= self.num_swap_slots and num_taken <= self.num_takeable

    def keep(self, slot: HostBlockId) -> None:
        """Keep a slot until `let_go`; does nothing if it is kept already. Check `may_keep` before."""
        if slot not in self._kept:
            self._kept[slot] = False
            self.swapped.blocks_out += 1
            self.hold(slot)

    def kept_returns(self, slot: HostBlockId) -> None:
        """Note that a step loads a slot back for a preempted sequence, which may have been given up meanwhile."""
        if slot in self._kept:
            self._kept[slot] = True

    def let_go(self, slot: HostBlockId, *, is_private: bool) -> None:
        """Keep a slot no longer. It stays as a prefix, unless its key is private."""
        if self._kept.pop(slot):
            self.swapped.blocks_in += 1
        else:
            self.swapped.blocks_dropped += 1
        if is_private:
            self._unname(slot)
        self.release(slot)

    # Writing

    def reserve(self, label: Label, tenant: str, state: Slot = Slot.FILLING) -> HostBlockId | None:
        """Reserve a slot that a store or a step will write; None if no slot is free or evictable.

        Args:
            label: label by which it will be found, unless another slot has its key.
            state: `Slot.FILLING` if a store will write it, `Slot.STORING` if a step will.
        """
        slot = self._take(state, label, tenant)
        self.counters.refused += slot is None
        return slot

    def filled(self, slot: HostBlockId, origin: str, *, hold: bool) -> bool:
        """Make a reserved slot ready, once all its bytes have arrived and match its label.

        Args:
            origin: the tier that the bytes came from.
            hold: whether to hold the slot at once.

        Returns:
            False if the slot was freed instead, because nobody could find it: `clear` was called, or its key taken.
        """
        if self._become_ready(slot) is None:
            return False
        self._origins[slot] = origin
        self.counters.filled += 1
        if hold:
            self.hold(slot)
        return True

    def give_back(self, slot: HostBlockId) -> None:
        """Free a reserved slot that was not written and is no longer being written."""
        self._free_slot(slot)

    def stored(self, slot: HostBlockId, *, as_prefix: bool) -> None:
        """Note that the step that writes a slot is done.

        Args:
            as_prefix: whether it was stored as a prefix, and not only for preempted sequences.
        """
        label = self._become_ready(slot)
        if label is not None and as_prefix:
            self.counters.stored += 1
            self.on_ready(slot, label)

    def store_failed(self, slot: HostBlockId, *, as_prefix: bool) -> None:
        """Note that the step that writes a slot has failed: its contents are undefined, so forget its key."""
        self.counters.lost += as_prefix
        self._unname(slot)
        if slot in self._kept:
            self.let_go(slot, is_private=False)
        self._become_ready(slot)

    def loaded(self, slot: HostBlockId) -> None:
        """Note that the step that copied a slot to the device is over, and end its hold."""
        self._origins[slot] = "host"
        self.release(slot)

    def clear(self) -> None:
        """Forget all prefixes, including those being written, except those kept for preempted sequences."""
        for entry in list(self._eviction):
            self._eviction.remove([entry])
            self._index.remove(entry - 1)
            self._free_slot(HostBlockId(entry - 1))
        for slot in map(HostBlockId, list(self._index)):
            if slot not in self._kept:
                self._unname(slot)

    def check(self) -> Iterator[str]:
        """Check every slot, the index, and that somebody answers for each hold and each unfinished slot. O(slots).

        Every slot is in exactly one state, and evictable if and only if ready and not held.
        """
        num_used = len(self._states)
        free, tenants = bytearray(num_used), Counter[str]()
        for slot in self._free:
            if free[slot]:
                yield f"slot {slot} of host memory stands twice in its free list"
            free[slot] = 1
        writing = self.being_written
        held = Counter[int](self._kept.keys())
        held.update(chain.from_iterable(holder() for holder in self.holders))
        written = {state: set(writer()) for state, writer in self.writers.items()}
        for slot in map(HostBlockId, range(num_used)):
            state, holds = self._states[slot], self._holds[slot]
            idle = BlockId(slot + 1) in self._eviction
            if bool(free[slot]) != (state is Slot.FREE):
                yield f"slot {slot} of host memory is {state.value}, free list: {bool(free[slot])}"
            if (slot in writing) != (state in (Slot.STORING, Slot.FILLING)):
                yield f"slot {slot} of host memory is {state.value}, being written: {slot in writing}"
            tenants[self._tenants[slot]] += state is not Slot.FREE
            if idle != (state is Slot.READY and holds == 0):
                yield f"slot {slot} of host memory is {state.value} with {holds} holds, idle: {idle}"
            if state is Slot.FREE and holds:
                yield f"slot {slot} of host memory is free and has {holds} holds"
            if self.holders and holds != held[slot]:
                yield f"slot {slot} of host memory has {holds} holds, {held[slot]} are known"
            if state in written and slot not in written[state]:
                yield f"slot {slot} of host memory is {state.value}, and nobody writes it"
        if self.by_tenant() != +tenants:
            yield f"slots of host memory by tenant are {dict(+tenants)}, counted are {self.by_tenant()}"
        for slot, label in self._labels.items():
            if label is not None and self._index.get(label.key) != slot:
                yield f"slot {slot} of host memory is being written with a key that the index does not have"
        for slot in map(HostBlockId, self._index):
            if self._states[slot] is Slot.FREE or (slot in writing and self._labels[slot] is None):
                yield f"slot {slot} of host memory is {self._states[slot].value} without a label, and has a key"
        swapped = self.swapped
        if swapped.blocks_out != swapped.blocks_in + swapped.blocks_dropped + len(self._kept):
            yield (
                f"{swapped.blocks_out} blocks were moved out, but {swapped.blocks_in} back, "
                f"{swapped.blocks_dropped} were dropped and {len(self._kept)} are kept"
            )
        if len(self._kept) > self.num_swap_slots:
            yield f"{len(self._kept)} slots are kept for preempted sequences, {self.num_swap_slots} may be"
        yield from self._index.check()

    def _take(self, state: Slot, label: Label, tenant: str) -> HostBlockId | None:
        """Take a free or evictable slot for writing; None if there is none."""
        if self._free:
            slot = self._free.pop()
        elif len(self._states) < self.num_slots:
            slot = HostBlockId(len(self._states))
            self._states.append(Slot.FREE)
            self._tenants.append("")
            self._origins.append("host")
            self._tokens.extend(bytes(self._width))
            self._holds.append(0)
        elif len(self._eviction):
            slot = HostBlockId(self._eviction.evict(1)[0] - 1)
            self._index.remove(slot)
            self.counters.slots[self._tenants[slot]] -= 1
            self.counters.evicted += 1
        else:
            return None
        self._states[slot] = state
        self._tenants[slot] = tenant
        self.counters.slots[tenant] += 1
        self._labels[slot] = label if self._index.put_new(label.key, slot) else None
        return slot

    def _unname(self, slot: HostBlockId) -> None:
        """Forget the key of a slot, if it has one."""
        if slot in self._index:
            self._index.remove(slot)
        if slot in self._labels:
            self._labels[slot] = None

    def _become_ready(self, slot: HostBlockId) -> Label | None:
        """Make a written slot ready; returns its label if it can be found by it from now on."""
        label = self._labels.pop(slot)
        self._states[slot] = Slot.READY
        self._origins[slot] = "host"
        if label is not None and not label.is_private:
            self._tokens[slot * self._width : (slot + 1) * self._width] = label.tokens
            self._eviction.publish(BlockId(slot + 1), 0, label.key)
        self._settle(slot)
        return label if self._states[slot] is Slot.READY else None

    def _settle(self, slot: HostBlockId) -> None:
        """Make a ready slot that is no longer held evictable if it can be found by its key; otherwise free it."""
        if self._holds[slot] or self._states[slot] is not Slot.READY:
            return
        if self._keeps_prefixes and slot in self._index:
            self._eviction.add([BlockId(slot + 1)])
        else:
            self._free_slot(slot)

    def _free_slot(self, slot: HostBlockId) -> None:
        self._unname(slot)
        self._labels.pop(slot, None)
        self._states[slot] = Slot.FREE
        self.counters.slots[self._tenants[slot]] -= 1
        self._free.append(slot)

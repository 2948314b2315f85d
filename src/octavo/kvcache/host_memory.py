"""Host memory for blocks: which slot holds what, and what the next step copies there and back. The runner moves bytes.

One pool of slots serves two uses: prefixes that the device evicted, and blocks that preempted sequences left behind.

    free ──store_prefix, keep──> storing ──complete──> ready ──evict──> free     a step writes it
      └────reserve─────────────> filling ──filled───────^                        a store below does: disk, remote

One index maps the key of a block to its slot from the moment the slot is taken, and the slot's state says whether the
block is coming or there: a block that is already here or in transfer is not fetched again. The key is that of the
prefix that the block ends; or, for a half-filled block or without prefix caching, a private key of the preempted
sequence that it belongs to.

A slot is held while a step copies it to the device, a store writes it out, a request waits for it or it is kept for
preempted sequences. Held slots are not evicted, because the eviction policy knows only the others. The swap space
limits how many slots are kept; prefixes take all remaining ones, and yield them to preempted sequences.

A step's transfers are planned until `take`, and then in flight until `complete` or `fail`. A block stored only for
preempted sequences is not stored at all if they let go of it before a step has taken it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple

from octavo.errors import CacheError
from octavo.kvcache.block import BlockId, BlockTransfer, HostBlockId
from octavo.kvcache.eviction import EvictionPolicy
from octavo.kvcache.eviction.adaptive import GhostList
from octavo.kvcache.hashing import DIGEST_BYTES, TOKEN_BYTES, Label
from octavo.kvcache.key_index import KeyIndex
from octavo.request import SequenceId


class Slot(Enum):
    FREE = "free"
    STORING = "storing"  # being written by a step
    FILLING = "filling"  # being filled by a store
    READY = "ready"


@dataclass(slots=True)
class _Write:
    """A slot that is being written.

    Attributes:
        label: label by which it will be found; None if it will not be.
        as_prefix: whether a step stores it for all sequences, and not only for preempted ones.
    """

    label: Label | None
    as_prefix: bool


class _Load(NamedTuple):
    slot: HostBlockId
    seq_id: SequenceId
    resumes: bool  # whether the sequence was preempted, and the slot kept for it


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
    """The slots of host memory, their index by key, and the transfers of the next step and of the step in flight.

    O(1) per operation and block.

    Slots are used in ascending order, so that audits do not grow with slots that were never used.

    Args:
        num_slots: number of slots; 0 disables host memory.
        num_swap_slots: how many of them may be kept for preempted sequences at once. If it is all of them, there are
            no others in use.
        eviction: policy that chooses which prefix to evict.

    Attributes:
        swapped: what was kept for preempted sequences so far.
        on_ready: called with each slot that a step has just filled with a prefix, and its label.
        holders: each returns the slots that it holds, once for each time; audits compare them with the holds.
        fillers: each returns the slots that it has reserved and not yet made ready, for audits.
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
        self.fillers: list[Callable[[], Iterable[HostBlockId]]] = []
        self._keeps_prefixes = num_slots > num_swap_slots
        self._width = block_size * TOKEN_BYTES
        self._eviction = eviction
        eviction.reserve(num_slots + 1)
        self._index = KeyIndex(num_slots)
        self._free: list[HostBlockId] = []  # among slots that were ever used
        # By slot, for slots that were ever used.
        self._states: list[Slot] = []
        self._tenants: list[str] = []
        self._origins: list[str] = []
        self._tokens = bytearray()
        self._holds = array("i")
        self._kept: dict[HostBlockId, bool] = {}  # for preempted sequences; whether one has loaded it back
        self._writing: dict[HostBlockId, _Write] = {}
        # Planned for the next step.
        self._stores: dict[HostBlockId, BlockId] = {}
        self._loads: dict[BlockId, _Load] = {}
        self._stores_in_flight: list[HostBlockId] = []
        self._loads_in_flight: list[HostBlockId] = []

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
    def num_kept(self) -> int:
        """The number of slots that are kept for preempted sequences."""
        return len(self._kept)

    @property
    def num_held(self) -> int:
        """The number of holds by requests that wait and by transfers in progress."""
        return sum(self._holds) - len(self._kept)

    @property
    def has_transfers(self) -> bool:
        """Whether the next step has anything to move."""
        return bool(self._stores or self._loads)

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

    def state(self, key: bytes) -> Slot | None:
        """Return the state of the slot that has this key or is being written with it; None if there is none."""
        slot = self._index.get(key)
        return None if slot is None else self._states[slot]

    def origin(self, slot: HostBlockId) -> str:
        """Return the tier that a slot's bytes came from; after their first use it is the host."""
        return self._origins[slot]

    def tenant(self, slot: HostBlockId) -> str:
        """Return the tenant that a slot is accounted to."""
        return self._tenants[slot]

    def hold(self, slot: HostBlockId) -> None:
        """Protect a slot from eviction until `release`."""
        if self._holds[slot] == 0 and self._states[slot] is Slot.READY:
            self._eviction.remove([BlockId(slot + 1)])
        self._holds[slot] += 1

    def release(self, slot: HostBlockId) -> None:
        if self._holds[slot] < 1:
            raise CacheError(f"slot {slot} of host memory is released more often than held")
        self._holds[slot] -= 1
        self._make_evictable(slot)

    # From the device

    def store_prefix(self, block_id: BlockId, label: Label, tenant: str) -> None:
        """Plan to store a block of the device with the next step, until which its contents must not change."""
        if (known := self._index.get(label.key)) is None:
            if (slot := self._take_slot(Slot.STORING, label, tenant)) is not None:
                self._stores[slot] = block_id
                self._writing[slot].as_prefix = True
        elif self._states[known] is Slot.STORING:
            self._writing[HostBlockId(known)].as_prefix = True
        elif (entry := BlockId(known + 1)) in self._eviction:
            # To be evicted as late as if it had been used just now.
            self._eviction.remove([entry])
            self._eviction.add([entry])

    def keep(self, blocks: Seq[tuple[BlockId, Label]], tenant: str) -> bool:
        """Keep blocks of the device for a preempted sequence, and plan to store those that no slot has yet.

        Returns:
            Whether the swap space has room for all of them; if not, nothing has changed.
        """
        slots: list[HostBlockId | None] = []
        for block_id, label in blocks:
            slot = self._index.get(label.key)
            if slot is None and block_id not in self._loads:
                slots.append(None)
            elif slot is not None and (self._states[slot] is Slot.STORING or self.find(label) is not None):
                slots.append(HostBlockId(slot))
            else:
                # A store is filling it, or its slot was forgotten before a step has loaded it.
                return False
        more = [slot for slot in slots if slot not in self._kept]
        num_taken = sum(slot is None or BlockId(slot + 1) in self._eviction for slot in more)
        if len(self._kept) + len(more) > self.num_swap_slots or num_taken > self.num_takeable:
            return False
        # First those that are there, so that they are not evicted for the others.
        for known in slots:
            if known is not None:
                self._keep_slot(known)
        for (block_id, label), known in zip(blocks, slots, strict=True):
            if known is None:
                taken = self._take_slot(Slot.STORING, label, tenant)
                assert taken is not None
                self._stores[taken] = block_id
                self._keep_slot(taken)
        return True

    def kept(self, key: bytes) -> HostBlockId | None:
        """Return the slot with this key, if it is kept; it may still be written."""
        slot = self._index.get(key)
        return HostBlockId(slot) if slot in self._kept else None

    def let_go(self, key: bytes, *, is_private: bool) -> None:
        """Keep the slot with this key, if any, no longer. It stays as a prefix, unless the key is private."""
        if (slot := self.kept(key)) is not None:
            self._let_go_slot(slot, is_private=is_private)
            self._cancel_store(slot)

    # To the device

    def plan_load(self, slot: HostBlockId, block_id: BlockId, seq_id: SequenceId, *, resumes: bool = False) -> None:
        """Plan to copy a slot's bytes with the next step to a block that the sequence has just been given.

        Args:
            resumes: whether the sequence was preempted, and the slot kept for it.
        """
        self.hold(slot)
        if not resumes:
            self._eviction.hit([BlockId(slot + 1)], 0)
        self._loads[block_id] = _Load(slot, seq_id, resumes)

    def cancel_loads(self, seq_id: SequenceId) -> None:
        """Cancel the loads of a sequence that no step has taken, because it gives up its blocks."""
        for block_id in [block for block, load in self._loads.items() if load.seq_id == seq_id]:
            slot = self._loads.pop(block_id).slot
            self.release(slot)
            self._cancel_store(slot)

    # With steps

    def take(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Return the next step's stores and loads, which are in flight until `complete` or `fail`."""
        stores = [BlockTransfer(block, slot) for slot, block in self._stores.items()]
        loads = [BlockTransfer(block, load.slot) for block, load in self._loads.items()]
        for load in self._loads.values():
            if not load.resumes:
                self.counters.loaded += 1
            elif load.slot in self._kept:  # unless the sequence was given up meanwhile
                self._kept[load.slot] = True
        self._stores_in_flight.extend(self._stores)
        self._loads_in_flight.extend(slot for _, slot in loads)
        self._stores.clear()
        self._loads.clear()
        return stores, loads

    def complete(self) -> None:
        """Note that the step is done and all its transfers have arrived."""
        stored, self._stores_in_flight = self._stores_in_flight, []
        for slot in stored:
            as_prefix = self._writing[slot].as_prefix
            label = self._become_ready(slot)
            if label is not None and as_prefix:
                self.counters.stored += 1
                self.on_ready(slot, label)
        self._end_loads()

    def fail(self) -> bool:
        """Note that the step failed: the slots it was to store have undefined contents, so forget their keys.

        Returns:
            Whether there were any.
        """
        lost, self._stores_in_flight = self._stores_in_flight, []
        for slot in lost:
            self.counters.lost += self._writing[slot].as_prefix
            self._forget_key(slot)
            if slot in self._kept:
                self._let_go_slot(slot, is_private=False)
            self._become_ready(slot)
        self._end_loads()
        return bool(lost)

    # With stores below

    def reserve(self, label: Label, tenant: str) -> HostBlockId | None:
        """Reserve a slot that a store will fill; None if no slot is free or evictable.

        It will be found by the label, unless another slot has its key.
        """
        return self._take_slot(Slot.FILLING, label, tenant)

    def filled(self, slot: HostBlockId, origin: str, *, hold: bool) -> bool:
        """Make a reserved slot ready, once all its bytes have arrived and match its label.

        Args:
            origin: the tier that the bytes came from.
            hold: whether to hold the slot at once.

        Returns:
            False if the slot was freed instead, because nothing could find it: `clear` was called, or its key taken.
        """
        if self._become_ready(slot) is None:
            return False
        self._origins[slot] = origin
        self.counters.filled += 1
        if hold:
            self.hold(slot)
        return True

    def not_filled(self, slot: HostBlockId) -> None:
        """Free a reserved slot that is no longer being filled."""
        self._free_slot(slot)

    def clear(self) -> None:
        """Forget all prefixes, including those being written, except those kept for preempted sequences."""
        for entry in list(self._eviction):
            self._eviction.remove([entry])
            self._free_slot(HostBlockId(entry - 1))
        for slot in map(HostBlockId, list(self._index)):
            if slot not in self._kept:
                self._forget_key(slot)
        for write in self._writing.values():
            write.as_prefix = False
        for slot in list(self._stores):
            self._cancel_store(slot)

    def check(self) -> Iterator[str]:
        """Check every slot, the index, and that each hold and each slot being written has a known owner. O(slots).

        Every slot is in exactly one state, and evictable if and only if ready and not held.
        """
        num_used = len(self._states)
        free, tenants = bytearray(num_used), Counter[str]()
        for slot in self._free:
            if free[slot]:
                yield f"slot {slot} of host memory stands twice in its free list"
            free[slot] = 1
        held = Counter[int]((*self._kept, *(load.slot for load in self._loads.values()), *self._loads_in_flight))
        held.update(chain.from_iterable(holder() for holder in self.holders))
        written = {Slot.STORING: {*self._stores, *self._stores_in_flight}}
        written[Slot.FILLING] = set(chain.from_iterable(filler() for filler in self.fillers))
        for slot in map(HostBlockId, range(num_used)):
            state, holds = self._states[slot], self._holds[slot]
            idle = BlockId(slot + 1) in self._eviction
            if bool(free[slot]) != (state is Slot.FREE):
                yield f"slot {slot} of host memory is {state.value}, free list: {bool(free[slot])}"
            if (slot in self._writing) != (state in (Slot.STORING, Slot.FILLING)):
                yield f"slot {slot} of host memory is {state.value}, being written: {slot in self._writing}"
            tenants[self._tenants[slot]] += state is not Slot.FREE
            if idle != (state is Slot.READY and holds == 0):
                yield f"slot {slot} of host memory is {state.value} with {holds} holds, idle: {idle}"
            if state is Slot.FREE and holds:
                yield f"slot {slot} of host memory is free and has {holds} holds"
            if holds != held[slot]:
                yield f"slot {slot} of host memory has {holds} holds, {held[slot]} are known"
            if state in written and slot not in written[state]:
                yield f"slot {slot} of host memory is {state.value}, and nothing writes it"
        if self.by_tenant() != +tenants:
            yield f"slots of host memory by tenant are {dict(+tenants)}, counted are {self.by_tenant()}"
        if stray := written[Slot.STORING] - self._writing.keys():
            yield f"stores are planned for slots {sorted(stray)}, which nothing writes"
        for slot, write in self._writing.items():
            if write.label is not None and self._index.get(write.label.key) != slot:
                yield f"slot {slot} of host memory is being written with a key that the index does not have"
        for slot in map(HostBlockId, self._index):
            if self._states[slot] is Slot.FREE or (slot in self._writing and self._writing[slot].label is None):
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

    def _take_slot(self, state: Slot, label: Label, tenant: str) -> HostBlockId | None:
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
            self._index.discard((slot,))
            self.counters.slots[self._tenants[slot]] -= 1
            self.counters.evicted += 1
        else:
            self.counters.refused += 1
            return None
        self._states[slot] = state
        self._tenants[slot] = tenant
        self.counters.slots[tenant] += 1
        self._writing[slot] = _Write(label if self._index.put(label.key, slot) else None, as_prefix=False)
        return slot

    def _keep_slot(self, slot: HostBlockId) -> None:
        if slot not in self._kept:
            self._kept[slot] = False
            self.swapped.blocks_out += 1
            self.hold(slot)

    def _let_go_slot(self, slot: HostBlockId, *, is_private: bool) -> None:
        if self._kept.pop(slot):
            self.swapped.blocks_in += 1
        else:
            self.swapped.blocks_dropped += 1
        if is_private:
            self._forget_key(slot)
        self.release(slot)

    def _cancel_store(self, slot: HostBlockId) -> None:
        """Cancel a store that was planned only for preempted sequences, if none is left and no step has taken it."""
        if slot in self._stores and not self._writing[slot].as_prefix and not self._holds[slot]:
            del self._stores[slot]
            self._free_slot(slot)

    def _end_loads(self) -> None:
        loaded, self._loads_in_flight = self._loads_in_flight, []
        for slot in loaded:
            self._origins[slot] = "host"
            self.release(slot)

    def _forget_key(self, slot: HostBlockId) -> None:
        """Forget the key of a slot, if it has one."""
        self._index.discard((slot,))
        if slot in self._writing:
            self._writing[slot].label = None

    def _become_ready(self, slot: HostBlockId) -> Label | None:
        """Make a written slot ready; returns its label if it can be found by it from now on."""
        label = self._writing.pop(slot).label
        self._states[slot] = Slot.READY
        self._origins[slot] = "host"
        if label is not None and not label.is_private:
            self._tokens[slot * self._width : (slot + 1) * self._width] = label.tokens
            self._eviction.publish(BlockId(slot + 1), 0, label.key)
        self._make_evictable(slot)
        return label if self._states[slot] is Slot.READY else None

    def _make_evictable(self, slot: HostBlockId) -> None:
        """Let a ready slot that is no longer held be evicted if it can be found by its key; otherwise free it."""
        if self._holds[slot] or self._states[slot] is not Slot.READY:
            return
        if self._keeps_prefixes and slot in self._index:
            self._eviction.add([BlockId(slot + 1)])
        else:
            self._free_slot(slot)

    def _free_slot(self, slot: HostBlockId) -> None:
        self._forget_key(slot)
        self._writing.pop(slot, None)
        self._states[slot] = Slot.FREE
        self.counters.slots[self._tenants[slot]] -= 1
        self._free.append(slot)

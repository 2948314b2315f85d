"""Host memory for blocks: which slot holds what, and what the next step copies there and back. The runner moves bytes.

One pool of slots serves two uses: prefixes that the device evicted, and blocks that preempted sequences left behind. It
is a `BlockPool` like the device's, whose records give each slot's key, tokens and references:

    free ──store_prefix, keep──> storing ──complete──> ready ──evict──> free     a step writes it
      └────reserve─────────────> filling ──filled───────^                        a store below does: disk, remote

A slot is in the index under its block's key from the moment it is taken: a block that is already here or in transfer is
not fetched again. The key is that of the prefix that the block ends; or, for a half-filled block or without prefix
caching, a private key of the preempted sequence that it belongs to.

A slot is referenced by whoever writes it, and by each hold: a step copies it to the device, a store writes it out, a
request waits for it, or it is kept for preempted sequences. Like the device's blocks, slots without references are
cached if they can be found, and free if not. The swap space limits how many slots are kept; prefixes take all remaining
ones, and yield them to preempted sequences.

A step's transfers are planned until `take`, and then in flight until `complete` or `fail`. A block stored only for
preempted sequences is not stored at all if they let go of it before a step has taken it.

The null block of the pool is no slot, so slot 1 is row 0 of the memory that the runner and the stores move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from typing import NamedTuple, cast

import numpy as np

from octavo.errors import CacheError
from octavo.kvcache.block import BlockId, BlockTransfer, HostBlockId, new_table
from octavo.kvcache.blocks import UNPUBLISHED, BlockRecords
from octavo.kvcache.eviction import EvictionPolicy
from octavo.kvcache.eviction.adaptive import GhostList
from octavo.kvcache.hashing import DIGEST_BYTES, TOKEN_BYTES, Label
from octavo.kvcache.key_index import KeyIndex
from octavo.kvcache.pool import BlockPool, check_references
from octavo.request import SequenceId


class Slot(Enum):
    """The state of a slot that has a key."""

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

    state: Slot
    label: Label | None
    as_prefix: bool = False


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

    Args:
        num_slots: number of slots; 0 disables host memory.
        num_swap_slots: how many of them may be kept for preempted sequences at once. If it is all of them, there are
            no others in use.
        eviction: policy that chooses which prefix to evict.

    Attributes:
        swapped: what was kept for preempted sequences so far.
        on_ready: called with each slot that a step has just filled with a prefix, and its label.
        pool: references of slots, which are free, cached or active as the device's blocks.
        holders: each returns the slots that it holds, once for each time; audits compare them with the references.
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
        self._width = block_size * TOKEN_BYTES
        self._records = BlockRecords(num_slots + 1, block_size, in_tree=False)
        self._tenants = [""] * (num_slots + 1)
        # Not a method, so that no circle of references keeps a dropped engine's memory.
        forget = partial(_forget_evicted, self._records, self._tenants, self.counters.slots)
        self.pool = BlockPool(self._records, eviction, (forget,))
        self._origins: dict[HostBlockId, str] = {}  # of slots filled by a store and not loaded since
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
    def num_kept(self) -> int:
        """The number of slots that are kept for preempted sequences."""
        return len(self._kept)

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
        slot = self._records.keys.get(label.key)
        if slot is None or slot in self._writing:
            return None
        same = label.is_private or self._records.tokens[slot * self._width : (slot + 1) * self._width] == label.tokens
        return HostBlockId(slot) if same else None

    def ready_slot(self, key: bytes) -> HostBlockId | None:
        """Return the ready slot with this key, if any. Any thread may call it; what it returns may be outdated."""
        slot = self._records.keys.get(key)
        return None if slot is None or slot in self._writing else HostBlockId(slot)

    def state(self, key: bytes) -> Slot | None:
        """Return the state of the slot that has this key or is being written with it; None if there is none."""
        if (slot := self._records.keys.get(key)) is None:
            return None
        write = self._writing.get(HostBlockId(slot))
        return Slot.READY if write is None else write.state

    def origin(self, slot: HostBlockId) -> str:
        """Return the tier that a slot's bytes came from; after their first use it is the host."""
        return self._origins.get(slot, "host")

    def tenant(self, slot: HostBlockId) -> str:
        """Return the tenant that a slot is accounted to."""
        return self._tenants[slot]

    def hold(self, slots: Seq[HostBlockId], *, to_load: bool = False) -> None:
        """Protect slots from eviction until `release`; to load them is a use."""
        self.pool.acquire(_ids(slots), hit_by=0 if to_load else None)

    def release(self, slots: Seq[HostBlockId]) -> None:
        """Drop one hold of each slot. Raises CacheError if one is released more often than held."""
        references = self._records.references
        for slot in slots:
            if references[slot] == 1:
                if not self.num_prefix_slots:
                    self._forget_key(slot)
                self.counters.slots[self._tenants[slot]] -= not self._records.is_published(slot)
        self.pool.release(_ids(slots))

    # From the device

    def store_prefix(self, block_id: BlockId, label: Label, tenant: str) -> None:
        """Plan to store a block of the device with the next step, until which its contents must not change."""
        if (known := self._records.keys.get(label.key)) is None:
            if (slot := self._take_slot(Slot.STORING, label, tenant)) is not None:
                self._stores[slot] = block_id
                self._writing[slot].as_prefix = True
            return
        slot = HostBlockId(known)
        if (write := self._writing.get(slot)) is not None:
            write.as_prefix |= write.state is Slot.STORING
        elif not self._records.references[slot]:
            # To be evicted as late as if it had been used just now.
            self.hold((slot,))
            self.release((slot,))

    def keep(self, blocks: Seq[tuple[BlockId, Label]], tenant: str) -> bool:
        """Keep blocks of the device for a preempted sequence, and plan to store those that no slot has yet.

        Returns:
            Whether the swap space has room for all of them; if not, nothing has changed.
        """
        slots: list[HostBlockId | None] = []
        for block_id, label in blocks:
            state = self.state(label.key)
            if state is None and block_id not in self._loads:
                slots.append(None)
            elif state is Slot.STORING or (state is Slot.READY and self.find(label) is not None):
                slots.append(HostBlockId(self._records.keys.get(label.key) or 0))
            else:
                # A store is filling it, or its slot was forgotten before a step has loaded it.
                return False
        more = [slot for slot in slots if slot not in self._kept]
        num_taken = sum(slot is None or not self._records.references[slot] for slot in more)
        if len(self._kept) + len(more) > self.num_swap_slots or num_taken > self.pool.num_available:
            return False
        # First those that are there, so that they are not evicted for the others.
        self._keep_slots([slot for slot in slots if slot is not None])
        for (block_id, label), known in zip(blocks, slots, strict=True):
            if known is None:
                taken = self._take_slot(Slot.STORING, label, tenant)
                assert taken is not None
                self._stores[taken] = block_id
                self._keep_slots([taken])
        return True

    def kept(self, key: bytes) -> HostBlockId | None:
        """Return the slot with this key, if it is kept; it may still be written."""
        slot = self._records.keys.get(key)
        return HostBlockId(slot) if slot in self._kept else None

    def let_go(self, key: bytes, *, is_private: bool) -> None:
        """Keep the slot with this key, if any, no longer. It stays as a prefix, unless the key is private."""
        if (slot := self.kept(key)) is not None:
            self._let_go_slot(slot, is_private=is_private)
            self._cancel_store(slot)

    # To the device

    def plan_loads(
        self, slots: Seq[HostBlockId], block_ids: Seq[BlockId], seq_id: SequenceId, *, resumes: bool = False
    ) -> None:
        """Plan to copy slots' bytes with the next step to blocks that the sequence has just been given.

        The caller's holds of the slots become the loads'.

        Args:
            resumes: whether the sequence was preempted, and the slots kept for it.
        """
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._loads[block_id] = _Load(slot, seq_id, resumes)

    def cancel_loads(self, seq_id: SequenceId) -> None:
        """Cancel the loads of a sequence that no step has taken, because it gives up its blocks."""
        for block_id in [block for block, load in self._loads.items() if load.seq_id == seq_id]:
            slot = self._loads.pop(block_id).slot
            self.release((slot,))
            self._cancel_store(slot)

    # With steps

    def take(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Return the next step's stores and loads, which are in flight until `complete` or `fail`.

        They name rows of memory instead of slots.
        """
        stores = [BlockTransfer(block, HostBlockId(slot - 1)) for slot, block in self._stores.items()]
        loads = [BlockTransfer(block, HostBlockId(load.slot - 1)) for block, load in self._loads.items()]
        for load in self._loads.values():
            if not load.resumes:
                self.counters.loaded += 1
            elif load.slot in self._kept:  # unless the sequence was given up meanwhile
                self._kept[load.slot] = True
        self._stores_in_flight.extend(self._stores)
        self._loads_in_flight.extend(load.slot for load in self._loads.values())
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
            self.hold((slot,))
        return True

    def not_filled(self, slot: HostBlockId) -> None:
        """Free a reserved slot that is no longer being filled."""
        self._forget_key(slot)
        self._become_ready(slot)

    def clear(self) -> None:
        """Forget all prefixes, including those being written, except those kept for preempted sequences."""
        self.pool.evict_all_cached()
        for slot in map(HostBlockId, list(self._records.keys)):
            if slot not in self._kept:
                self._forget_key(slot)
        for write in self._writing.values():
            write.as_prefix = False
        for slot in list(self._stores):
            self._cancel_store(slot)

    def check(self) -> Iterator[str]:
        """Check every slot, the index, and that each reference and each write has a known owner. O(slots)."""
        records, writing = self._records, self._writing
        for found in chain(self.pool.check(), records.keys.check()):
            yield f"host memory: {found}"
        written = {Slot.STORING: {*self._stores, *self._stores_in_flight}}
        written[Slot.FILLING] = set(chain.from_iterable(filler() for filler in self.fillers))
        for state, slots in written.items():
            if slots != (noted := {slot for slot, write in writing.items() if write.state is state}):
                yield f"slots {sorted(noted)} of host memory are {state.value}, those written are {sorted(slots)}"
        held = [*self._kept, *(load.slot for load in self._loads.values()), *self._loads_in_flight, *writing]
        held += chain.from_iterable(holder() for holder in self.holders)
        for found in check_references(records, [new_table(held)]):
            yield f"host memory: {found}"
        if has_key := np.setxor1d(records.keys.ids(), records.published()).tolist():
            yield f"slots {has_key} of host memory have a key or are published, but not both"
        for slot, write in writing.items():
            if write.label is not None and records.keys.get(write.label.key) != slot:
                yield f"slot {slot} of host memory is being written with a key that the index does not have"
            if write.label is None and records.is_published(slot):
                yield f"slot {slot} of host memory is being written without a label, and has a key"
        used = np.flatnonzero((records.references_array != 0) | (records.groups_array != UNPUBLISHED)).tolist()
        if self.by_tenant() != (tenants := Counter(self._tenants[slot] for slot in used)):
            yield f"slots of host memory by tenant are {dict(tenants)}, counted are {self.by_tenant()}"
        swapped = self.swapped
        if swapped.blocks_out != swapped.blocks_in + swapped.blocks_dropped + len(self._kept):
            yield (
                f"{swapped.blocks_out} blocks were moved out, but {swapped.blocks_in} back, "
                f"{swapped.blocks_dropped} were dropped and {len(self._kept)} are kept"
            )
        if len(self._kept) > self.num_swap_slots:
            yield f"{len(self._kept)} slots are kept for preempted sequences, {self.num_swap_slots} may be"

    def _take_slot(self, state: Slot, label: Label, tenant: str) -> HostBlockId | None:
        """Take a free or evictable slot for writing, with the writer's reference; None if there is none."""
        if not self.pool.num_available:
            self.counters.refused += 1
            return None
        self.counters.evicted += not self.pool.num_free
        slot = HostBlockId(self.pool.allocate(1)[0])
        self._tenants[slot] = tenant
        self.counters.slots[tenant] += 1
        is_found = self._records.keys.put(label.key, slot)
        if is_found:
            self._records.groups[slot] = 0
        self._writing[slot] = _Write(state, label if is_found else None)
        return slot

    def _keep_slots(self, slots: Seq[HostBlockId]) -> None:
        more = [slot for slot in dict.fromkeys(slots) if slot not in self._kept]
        self._kept.update(dict.fromkeys(more, False))
        self.swapped.blocks_out += len(more)
        self.hold(more)

    def _let_go_slot(self, slot: HostBlockId, *, is_private: bool) -> None:
        if self._kept.pop(slot):
            self.swapped.blocks_in += 1
        else:
            self.swapped.blocks_dropped += 1
        if is_private:
            self._forget_key(slot)
        self.release((slot,))

    def _cancel_store(self, slot: HostBlockId) -> None:
        """Cancel a store that was planned only for preempted sequences, if none is left and no step has taken it."""
        if slot in self._stores and not self._writing[slot].as_prefix and self._records.references[slot] == 1:
            del self._stores[slot]
            self.not_filled(slot)

    def _end_loads(self) -> None:
        loaded, self._loads_in_flight = self._loads_in_flight, []
        for slot in loaded:
            self._origins.pop(slot, None)
            self.release((slot,))

    def _forget_key(self, slot: HostBlockId) -> None:
        """Forget the key of a slot with a reference, if it has one."""
        self._records.forget((BlockId(slot),))
        if slot in self._writing:
            self._writing[slot].label = None

    def _become_ready(self, slot: HostBlockId) -> Label | None:
        """Release a slot that is written; returns its label if it can be found by it from now on."""
        label = self._writing.pop(slot).label
        self._origins.pop(slot, None)
        if label is not None and not label.is_private:
            self._records.tokens[slot * self._width : (slot + 1) * self._width] = label.tokens
            self.pool.note_published(BlockId(slot), 0, label.key)
        self.release((slot,))
        return label if self._records.is_published(slot) else None


def _forget_evicted(records: BlockRecords, tenants: Seq[str], num_used: Counter[str], slots: Seq[BlockId]) -> None:
    """Forget the keys of slots that the pool evicts."""
    records.forget(slots)
    num_used.subtract(tenants[slot] for slot in slots)


def _ids(slots: Seq[HostBlockId]) -> Seq[BlockId]:
    """Return slots as the ids of the pool's blocks, which they are."""
    return cast(Seq[BlockId], slots)

"""Host memory for blocks: which slot holds what, and what the next step copies there and back. The runner moves bytes.

One pool of slots serves two uses: prefixes that the device evicted, and blocks that preempted sequences left behind. It
is a `BlockPool` like the device's, whose records give each slot's key, parent, tokens and references:

    free ──store_prefix, keep──> storing ──complete──> ready ──evict──> free     a step writes it
      └────reserve─────────────> filling ──filled───────^                        a store below does: disk, remote

A slot is in the index under its block's key from the moment it is taken: a block that is already here or in transfer is
not fetched again. The key is that of the prefix that the block ends; or, for a half-filled block or without prefix
caching, a private key of the preempted sequence that it belongs to.

A slot is referenced by its writer and by each hold: a step copies it to the device, a store writes it out, a
request waits for it, or preempted sequences need it. Like the device's blocks, slots without references are cached if
they can be found, and free if not.

A step's transfers are planned until `take`, and then in flight until `complete` or `fail`. A block stored only for
preempted sequences is not stored at all if they release it before a step has taken it.

The null block of the pool is no slot, so slot 1 is row 0 of the memory that the runner and the stores move.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import NamedTuple, cast

import numpy as np

from octavo.errors import CacheError
from octavo.kvcache.block import BlockId, BlockTransfer, HostBlockId, new_table
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.eviction import EvictionPolicy
from octavo.kvcache.eviction.adaptive import GhostList
from octavo.kvcache.hashing import DIGEST_BYTES, TOKEN_BYTES, Label
from octavo.kvcache.key_index import KeyIndex
from octavo.kvcache.pool import BlockPool, check_references
from octavo.request import SequenceId

_PREFIX, _PRIVATE = 0, 1  # groups of slots with a key


class Slot(Enum):
    """The state of a slot that has a key or is being written."""

    STORING = "storing"  # a step writes it as a prefix, for all sequences
    KEEPING = "keeping"  # a step writes it for preempted sequences alone
    FILLING = "filling"  # a store fills it
    READY = "ready"


class Lent(NamedTuple):
    """A ready slot as seen by another thread. Its contents are the label's as long as its `fill` stays the same."""

    slot: HostBlockId
    fill: int
    label: Label


@dataclass(slots=True)
class HostCounters:
    """Totals of prefixes since the start, in blocks, and a count of the slots in use by tenant. Any thread may read."""

    stored: int = 0  # from the device
    filled: int = 0  # from a store
    loaded: int = 0  # to the device
    evicted: int = 0
    refused: int = 0  # no slot was free or evictable
    lost: int = 0  # the step failed
    by_tenant: Callable[[], dict[str, int]] = dict


class HostMemory:
    """The slots of host memory, their index by key, and the transfers of the next step and of the step in flight.

    O(1) per operation and block.

    Args:
        num_slots: number of slots; 0 disables host memory.
        num_swap_slots: how many of them may be kept for preempted sequences at once. If it is all of them, there are
            no others in use.
        eviction: policy that chooses which prefix to evict.

    Attributes:
        on_ready: called with each slot that a step has just filled with a prefix.
        records: what each slot contains.
        pool: references of slots, which are free, cached or active as the device's blocks.
        holders: each returns the slots that it holds, once for each time; audits compare them with the references.
        fillers: each returns the slots that it has reserved and not yet made ready, for audits.
    """

    def __init__(self, num_slots: int, num_swap_slots: int, block_size: int, eviction: EvictionPolicy) -> None:
        if not 0 <= num_swap_slots <= num_slots:
            raise CacheError(f"of {num_slots} slots of host memory {num_swap_slots} cannot be for swapping")
        self.num_slots = num_slots
        self.num_swap_slots = num_swap_slots
        self.on_ready: Callable[[HostBlockId], None] = lambda slot: None
        self.holders: list[Callable[[], Iterable[HostBlockId]]] = []
        self.fillers: list[Callable[[], Iterable[HostBlockId]]] = []
        self.records = BlockRecords(num_slots + 1, block_size, in_tree=False)
        # Not a method of this, so that no circle of references keeps a dropped engine's memory.
        self.pool = BlockPool(self.records, eviction, (self.records.forget,))
        self.pool.count_owners(())
        self.counters = HostCounters(by_tenant=self.pool.by_tenant)
        self._num_fills = 0
        self._fills = array("Q", [0]) * (num_slots + 1)  # by slot: a new number each time a prefix is ready, 0 for none
        self._origins: dict[HostBlockId, str] = {}  # of slots filled by a store and not loaded since
        self._writing: dict[HostBlockId, Slot] = {}
        # Planned for the next step.
        self._stores: dict[HostBlockId, BlockId] = {}
        self._loads: dict[BlockId, tuple[HostBlockId, SequenceId]] = {}
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
    def has_transfers(self) -> bool:
        """Whether the next step has transfers."""
        return bool(self._stores or self._loads)

    # Looking up and holding

    def find(self, label: Label) -> HostBlockId | None:
        """Return the ready slot with this label's key and tokens, if any."""
        slot = self._slot(label.key)
        if slot is None or slot in self._writing:
            return None
        return slot if label.is_private or self.records.token_bytes(slot) == label.tokens else None

    def state(self, key: bytes) -> Slot | None:
        """Return the state of the slot that has this key; None if there is none."""
        slot = self._slot(key)
        return None if slot is None else self._writing.get(slot, Slot.READY)

    def lend(self, key: bytes) -> Lent | None:
        """Return the ready prefix with this key, if any. Any thread may call it, and then `still_lends`."""
        slot = self._slot(key)
        if slot is None or not (fill := self._fills[slot]):
            return None
        try:
            label = self.records.label(slot)
        except KeyError:  # evicted just now
            return None
        return Lent(slot, fill, label) if label.key == key else None

    def still_lends(self, lent: Lent) -> bool:
        """Return whether everything read from a slot since `lend` belongs to its label."""
        return self._fills[lent.slot] == lent.fill

    def origin(self, slot: HostBlockId) -> str:
        """Return the tier that a slot's bytes came from; after their first use it is the host."""
        return self._origins.get(slot, "host")

    def tenant(self, slot: HostBlockId) -> str:
        """Return the tenant that a slot counts for."""
        assert self.pool.owners is not None
        return self.pool.owners.of(slot)

    def hold(self, slots: Seq[HostBlockId], *, to_load: bool = False) -> None:
        """Protect slots from eviction until `release`; to load them is a use."""
        self.pool.acquire(_ids(slots), hit_by=0 if to_load else None)

    def release(self, slots: Seq[HostBlockId]) -> None:
        """Drop one hold of each slot. Raises CacheError if one is released more often than held."""
        references = self.records.references
        if not self.num_prefix_slots:
            self.forget([slot for slot in slots if references[slot] == 1])
        self.pool.release(_ids(slots))
        for slot in slots:
            if references[slot] == 1 and slot in self._stores and self._writing[slot] is Slot.KEEPING:
                # Nobody wants it any more but the step that has not taken it.
                del self._stores[slot]
                self.not_filled(slot)

    def forget(self, slots: Iterable[HostBlockId]) -> None:
        """Forget the keys of slots with a reference, so that they are free once no hold is left."""
        self.records.forget(_ids([*slots]))

    # From the device

    def store_prefix(self, block_id: BlockId, label: Label, tenant: str) -> None:
        """Plan to store a block of the device with the next step, until which its contents must not change."""
        if (slot := self._slot(label.key)) is None:
            if (slot := self.reserve(label, tenant, Slot.STORING)) is not None:
                self._stores[slot] = block_id
        elif self._writing.get(slot) is Slot.KEEPING:
            self._writing[slot] = Slot.STORING
        elif not self.records.references[slot]:
            # To be evicted as late as if it had been used just now.
            self.hold((slot,))
            self.release((slot,))

    def keep(self, blocks: Seq[tuple[BlockId, Label]], tenant: str) -> list[HostBlockId] | None:
        """Hold a slot for each of these blocks of the device, and plan to store those that no slot has yet.

        Returns:
            The slots; None, and nothing has changed, if there is no room for all of them.
        """
        known: list[HostBlockId | None] = []
        for block_id, label in blocks:
            state = self.state(label.key)
            if (state is None and block_id in self._loads) or state is Slot.FILLING:
                return None  # a store is filling it, or its slot was forgotten before a step has loaded it
            if state is Slot.READY and self.find(label) is None:
                return None
            known.append(self._slot(label.key))
        if sum(slot is None or not self.records.references[slot] for slot in known) > self.pool.num_available:
            return None
        # First those that are there, so that they are not evicted for the others.
        self.hold([slot for slot in known if slot is not None])
        slots: list[HostBlockId] = []
        for (block_id, label), there in zip(blocks, known, strict=True):
            if (slot := there) is None:
                slot = self.reserve(label, tenant, Slot.KEEPING)
                assert slot is not None
                self._stores[slot] = block_id
                self.hold((slot,))
            slots.append(slot)
        return slots

    # To the device

    def plan_loads(self, slots: Seq[HostBlockId], block_ids: Seq[BlockId], seq_id: SequenceId) -> None:
        """Plan to copy slots' bytes with the next step to blocks that the sequence has just been given.

        The caller's holds of the slots become the loads'.
        """
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._loads[block_id] = slot, seq_id

    def cancel_loads(self, seq_id: SequenceId) -> None:
        """Cancel the loads of a sequence that no step has taken, because it gives up its blocks."""
        for block_id in [block for block, (_, loading) in self._loads.items() if loading == seq_id]:
            self.release(self._loads.pop(block_id)[:1])

    # With steps

    def take(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Return the next step's stores and loads, which are in flight until `complete` or `fail`.

        They name rows of memory instead of slots.
        """
        stores = [BlockTransfer(block, HostBlockId(slot - 1)) for slot, block in self._stores.items()]
        loads = [BlockTransfer(block, HostBlockId(slot - 1)) for block, (slot, _) in self._loads.items()]
        self._stores_in_flight.extend(self._stores)
        self._loads_in_flight.extend(slot for slot, _ in self._loads.values())
        self._stores.clear()
        self._loads.clear()
        return stores, loads

    def complete(self) -> None:
        """Note that the step is done and all its transfers have arrived."""
        stored, self._stores_in_flight = self._stores_in_flight, []
        for slot in stored:
            as_prefix = self._writing[slot] is Slot.STORING
            if self._become_ready(slot) and as_prefix:
                self.counters.stored += 1
                self.on_ready(slot)
        self._end_loads()

    def fail(self) -> list[HostBlockId]:
        """Note that the step failed: the slots it was to store have undefined contents, so forget their keys.

        Returns:
            Those slots.
        """
        lost, self._stores_in_flight = self._stores_in_flight, []
        for slot in lost:
            self.counters.lost += self._writing[slot] is Slot.STORING
            self.not_filled(slot)
        self._end_loads()
        return lost

    # With stores below

    def reserve(self, label: Label, tenant: str, state: Slot = Slot.FILLING) -> HostBlockId | None:
        """Take a slot for writing, with the writer's reference; None if no slot is free or evictable.

        It will be found by the label, unless another slot has its key.
        """
        if not self.pool.num_available:
            self.counters.refused += 1
            return None
        self.counters.evicted += not self.pool.num_free
        slot = HostBlockId(self.pool.allocate(1, tenant)[0])
        self._fills[slot] = 0
        self._writing[slot] = state
        if self.records.keys.put(label.key, slot):
            self.records.groups[slot] = _PRIVATE if label.is_private else _PREFIX
            if not label.is_private:
                self.records.write(slot, label.parent, label.tokens)
        return slot

    def filled(self, slot: HostBlockId, origin: str, *, hold: bool) -> bool:
        """Make a reserved slot ready, once all its bytes have arrived and match its label.

        Args:
            origin: the tier that the bytes came from.
            hold: whether to hold the slot at once.

        Returns:
            False if the slot was freed instead, because nothing could find it: `clear` was called, or its key taken.
        """
        if not self._become_ready(slot):
            return False
        self._origins[slot] = origin
        self.counters.filled += 1
        if hold:
            self.hold((slot,))
        return True

    def not_filled(self, slot: HostBlockId) -> None:
        """Forget a slot that is no longer being written, which is free once no hold is left."""
        self.forget((slot,))
        self._become_ready(slot)

    def clear(self, kept: Iterable[HostBlockId]) -> None:
        """Forget all prefixes, including those being written, except those kept for preempted sequences."""
        self.pool.evict_all_cached()
        self.forget(set(map(HostBlockId, self.records.keys)).difference(kept))
        for slot, state in self._writing.items():
            if state is Slot.STORING:
                self._writing[slot] = Slot.KEEPING
        for slot in list(self._stores):
            self.hold((slot,))
            self.release((slot,))  # which cancels the store unless the slot is held elsewhere

    def check(self, kept: Iterable[HostBlockId]) -> Iterator[str]:
        """Check every slot, the index, and that each reference and each write has a known owner. O(slots).

        Args:
            kept: the slots that are held for preempted sequences.
        """
        records, writing = self.records, self._writing
        for found in chain(self.pool.check(), records.keys.check()):
            yield f"host memory: {found}"
        filling = {slot for slot, state in writing.items() if state is Slot.FILLING}
        for noted, written, how in (
            (filling, set(chain.from_iterable(filler() for filler in self.fillers)), "filled by stores"),
            (writing.keys() - filling, {*self._stores, *self._stores_in_flight}, "written by steps"),
        ):
            if noted != written:
                yield f"slots {sorted(noted)} of host memory are noted as {how}, those are {sorted(written)}"
        held = [*kept, *(slot for slot, _ in self._loads.values()), *self._loads_in_flight, *writing]
        held += chain.from_iterable(holder() for holder in self.holders)
        for found in check_references(records, [new_table(held)]):
            yield f"host memory: {found}"
        if has_key := np.setxor1d(records.keys.ids(), records.published()).tolist():
            yield f"slots {has_key} of host memory have a key or are published, but not both"
        if lent := [slot for slot in writing if self._fills[slot]]:
            yield f"slots {lent} of host memory are lent while they are being written"

    def _slot(self, key: bytes) -> HostBlockId | None:
        return cast("HostBlockId | None", self.records.keys.get(key))

    def _become_ready(self, slot: HostBlockId) -> bool:
        """Release a slot that is no longer written; returns whether it can be found from now on."""
        del self._writing[slot]
        self._origins.pop(slot, None)
        if self.records.groups[slot] == _PREFIX:
            self.pool.note_published(BlockId(slot), 0, self.records.key(slot))
            self._num_fills += 1
            self._fills[slot] = self._num_fills
        self.release((slot,))
        return self.records.is_published(slot)

    def _end_loads(self) -> None:
        loaded, self._loads_in_flight = self._loads_in_flight, []
        for slot in loaded:
            self._origins.pop(slot, None)
            self.release((slot,))


def _ids(slots: Seq[HostBlockId]) -> Seq[BlockId]:
    """Return slots as the ids of the pool's blocks, which they are."""
    return cast(Seq[BlockId], slots)

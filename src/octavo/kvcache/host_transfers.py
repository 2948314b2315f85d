"""Transfers of blocks between device and host memory, planned for the next step or in flight with the current one.

    store_prefix, keep ──┐            ┌──complete──> slots with these blocks
                         ├──take──> in flight
    plan_load ───────────┘            └──fail──────> slots whose keys are forgotten

A block stored as a prefix can be found by any sequence. A block stored only for preempted sequences is not stored at
all if they let go of it before a step has taken it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

from octavo.kvcache.block import BlockId
from octavo.kvcache.hashing import Label
from octavo.kvcache.host_memory import HostBlockId, HostMemory, Slot
from octavo.request import SequenceId


class BlockTransfer(NamedTuple):
    """One block between device and host; its direction is that of the list that contains it."""

    device: BlockId
    host: HostBlockId


class _Load(NamedTuple):
    slot: HostBlockId
    seq_id: SequenceId
    resumes: bool  # whether the sequence was preempted, and the slot kept for it


class HostTransfers:
    """The stores and loads of the next step, and of the step in flight. O(1) per operation.

    Attributes:
        host: the host memory whose slots they read and write.
    """

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        self._stores: dict[HostBlockId, BlockId] = {}
        self._loads: dict[BlockId, _Load] = {}
        self._chosen: set[HostBlockId] = set()  # stored even if they are kept for no sequence
        self._stores_in_flight: list[HostBlockId] = []
        self._loads_in_flight: list[HostBlockId] = []
        host.holders.append(lambda: [*(load.slot for load in self._loads.values()), *self._loads_in_flight])
        host.writers[Slot.STORING] = lambda: [*self._stores, *self._stores_in_flight]

    @property
    def are_planned(self) -> bool:
        """Whether the next step has anything to move."""
        return bool(self._stores or self._loads)

    # From the device

    def store_prefix(self, block_id: BlockId, label: Label, tenant: str) -> None:
        """Plan to store a block of the device with the next step, until which its contents must not change."""
        host = self.host
        known = host.where(label.key)
        if known is None:
            if (slot := host.reserve(label, tenant, Slot.STORING)) is not None:
                self._stores[slot] = block_id
                self._chosen.add(slot)
            return
        slot, state = known
        if state is Slot.READY:
            host.renew(slot)
        elif state is Slot.STORING:
            self._chosen.add(slot)

    def keep(self, blocks: Seq[tuple[BlockId, Label]], tenant: str) -> bool:
        """Keep blocks of the device for a preempted sequence, and plan to store those that no slot has yet.

        Returns:
            Whether the swap space has room for all of them; if not, nothing has changed.
        """
        host = self.host
        slots: list[HostBlockId | None] = []
        for block_id, label in blocks:
            known = host.where(label.key)
            if known is None and block_id not in self._loads:
                slots.append(None)
            elif known is not None and (known[1] is Slot.STORING or host.find(label) is not None):
                slots.append(known[0])
            else:
                # A store is filling it, or its slot was forgotten before a step has loaded it.
                return False
        if not host.may_keep(slots):
            return False
        # First those that are there, so that they are not evicted for the others.
        for slot in slots:
            if slot is not None:
                host.keep(slot)
        for (block_id, label), slot in zip(blocks, slots, strict=True):
            if slot is None:
                reserved = host.reserve(label, tenant, Slot.STORING)
                assert reserved is not None
                self._stores[reserved] = block_id
                host.keep(reserved)
        return True

    def let_go(self, key: bytes, *, is_private: bool) -> None:
        """Keep the slot with this key, if any, for preempted sequences no longer."""
        if (slot := self.host.kept(key)) is not None:
            self.host.let_go(slot, is_private=is_private)
            self._drop_unwanted(slot)

    # To the device

    def plan_load(self, slot: HostBlockId, block_id: BlockId, seq_id: SequenceId, *, resumes: bool = False) -> None:
        """Plan to copy a slot's bytes with the next step to a block that the sequence has just been given.

        Args:
            resumes: whether the sequence was preempted, and the slot kept for it.
        """
        self.host.hold(slot)
        if not resumes:
            self.host.note_hit(slot)
        self._loads[block_id] = _Load(slot, seq_id, resumes)

    def cancel_loads(self, seq_id: SequenceId) -> None:
        """Cancel the loads of a sequence that no step has taken, because it gives up its blocks."""
        for block_id in [block for block, load in self._loads.items() if load.seq_id == seq_id]:
            slot = self._loads.pop(block_id).slot
            self.host.release(slot)
            self._drop_unwanted(slot)

    # With steps

    def take(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Return the next step's stores and loads, which are in flight until `complete` or `fail`."""
        stores = [BlockTransfer(block, slot) for slot, block in self._stores.items()]
        loads = [BlockTransfer(block, load.slot) for block, load in self._loads.items()]
        for load in self._loads.values():
            if load.resumes:
                self.host.kept_returns(load.slot)
            else:
                self.host.counters.loaded += 1
        self._stores_in_flight.extend(self._stores)
        self._loads_in_flight.extend(slot for _, slot in loads)
        self._stores.clear()
        self._loads.clear()
        return stores, loads

    def complete(self) -> None:
        """Note that the step is done and all its transfers have arrived."""
        if self._stores_in_flight or self._loads_in_flight:
            self._end(failed=False)

    def fail(self) -> bool:
        """Note that the step failed: the slots it was to store have undefined contents, so forget their keys.

        Returns:
            Whether there were any.
        """
        is_lost = bool(self._stores_in_flight)
        if is_lost or self._loads_in_flight:
            self._end(failed=True)
        return is_lost

    def clear(self) -> None:
        """Forget the prefixes in host memory, including those being written, that are kept for no sequence."""
        self.host.clear()
        self._chosen.clear()
        for slot in list(self._stores):
            self._drop_unwanted(slot)

    def check(self) -> Iterator[str]:
        """Check that every store is to a slot that is being written. O(transfers)."""
        if stray := (set(self._stores) | set(self._stores_in_flight) | self._chosen) - self.host.being_written:
            yield f"stores are planned for slots {sorted(stray)}, which nobody writes"

    def _end(self, *, failed: bool) -> None:
        host = self.host
        stored, self._stores_in_flight = self._stores_in_flight, []
        for slot in stored:
            as_prefix = slot in self._chosen
            self._chosen.discard(slot)
            if failed:
                host.store_failed(slot, as_prefix=as_prefix)
            else:
                host.stored(slot, as_prefix=as_prefix)
        loaded, self._loads_in_flight = self._loads_in_flight, []
        for slot in loaded:
            host.loaded(slot)

    def _drop_unwanted(self, slot: HostBlockId) -> None:
        """Cancel a store that was planned only for preempted sequences, if none is left and no step has taken it."""
        if slot in self._stores and slot not in self._chosen and not self.host.is_held(slot):
            del self._stores[slot]
            self.host.give_back(slot)

"""Transfers of blocks between device and host memory, planned for the next step or in flight with the current one.

    store_prefix, store_claimed ──┐            ┌──complete──> slots with these blocks
                                  ├──take──> in flight
    plan_load ────────────────────┘            └──fail──────> slots whose keys are forgotten

A block stored as a prefix can be found by any sequence. A block stored only for preempted sequences is not stored at
all if they release their claims before a step has taken it.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.kvcache.audit import Findings
from octavo.kvcache.block import BlockId
from octavo.kvcache.host_memory import HostBlockId, HostMemory, Slot
from octavo.kvcache.label import Label
from octavo.request import SequenceId


class BlockTransfer(NamedTuple):
    """One block between device and host; its direction is that of the list that contains it."""

    device: BlockId
    host: HostBlockId


class _Load(NamedTuple):
    slot: HostBlockId
    seq_id: SequenceId
    returns: bool  # whether the sequence claimed it


class HostTransfers:
    """The stores and loads of the next step, and of the step in flight. O(1) per operation.

    Attributes:
        host: the host memory whose slots they read and write.
    """

    def __init__(self, host: HostMemory) -> None:
        self.host = host
        self._stores: dict[HostBlockId, BlockId] = {}
        self._loads: dict[BlockId, _Load] = {}
        self._chosen: set[HostBlockId] = set()  # stored even if no sequence claims them
        self._stores_in_flight: list[HostBlockId] = []
        self._loads_in_flight: list[HostBlockId] = []
        host.holders.append(lambda: [*(load.slot for load in self._loads.values()), *self._loads_in_flight])
        host.writers[Slot.STORING] = lambda: [*self._stores, *self._stores_in_flight]

    @property
    def are_planned(self) -> bool:
        """Whether the next step has anything to move."""
        return bool(self._stores or self._loads)

    # From the device, as prefixes

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

    # For preempted sequences

    def can_claim(self, count: int, num_held: int = 0) -> bool:
        """Whether `count` slots can be claimed, of which `num_held` are already held."""
        return self.host.claims.may_add(count) and count - num_held <= self.host.num_takeable

    def store_claimed(self, block_id: BlockId, label: Label | None, tenant: str) -> HostBlockId | None:
        """Claim a slot for a block of the device, and plan to store the block if no slot has it yet.

        Args:
            label: label by which others may find it; None if they must not.

        Returns:
            The slot, or None if no slot can be claimed.
        """
        host = self.host
        known = None if label is None else host.where(label.key)
        if label is not None and known is not None:
            slot, state = known
            if state is Slot.STORING or host.find(label) is not None:
                if not host.claims[slot] and not host.claims.may_add(1):
                    return None
                self.claim(slot)
                return slot
            label = None
        if not self.can_claim(1):
            return None
        reserved = host.reserve(label, tenant, Slot.STORING)
        assert reserved is not None
        self._stores[reserved] = block_id
        self.claim(reserved)
        return reserved

    def claim(self, slot: HostBlockId) -> None:
        """Keep a slot for a preempted sequence until `unclaim`; check `can_claim` before."""
        self.host.hold(slot)
        self.host.claims.add(slot, planned=slot in self._stores)

    def unclaim(self, slot: HostBlockId) -> None:
        """Remove a preempted sequence's claim to a slot."""
        self.host.claims.remove(slot)
        self._release(slot)

    # To the device

    def plan_load(self, slot: HostBlockId, block_id: BlockId, seq_id: SequenceId, *, returns: bool = False) -> None:
        """Plan to copy a slot's bytes with the next step to a block that the sequence has just been given.

        Args:
            returns: whether the sequence claims the slot.
        """
        self.host.hold(slot)
        if not returns:
            self.host.note_hit(slot)
        else:
            self.host.claims.plan_return(slot)
        self._loads[block_id] = _Load(slot, seq_id, returns)

    def source_of(self, block_id: BlockId) -> HostBlockId | None:
        """Return the slot whose bytes the next step loads into this block; None if there is no such load."""
        load = self._loads.get(block_id)
        return None if load is None else load.slot

    def cancel_loads(self, seq_id: SequenceId) -> None:
        """Cancel the loads of a sequence that no step has taken, because it gives up its blocks."""
        for block_id in [block for block, load in self._loads.items() if load.seq_id == seq_id]:
            load = self._loads.pop(block_id)
            if load.returns:
                self.host.claims.cancel_return(load.slot)
            self._release(load.slot)

    # With steps

    def take(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Return the next step's stores and loads, which are in flight until `complete` or `fail`."""
        stores = [BlockTransfer(block, slot) for slot, block in self._stores.items()]
        loads = [BlockTransfer(block, load.slot) for block, load in self._loads.items()]
        self.host.claims.moved(self._stores, (slot for _, slot in loads))
        self.host.counters.loaded += sum(not load.returns for load in self._loads.values())
        self._stores_in_flight.extend(self._stores)
        self._loads_in_flight.extend(slot for _, slot in loads)
        self._stores.clear()
        self._loads.clear()
        return stores, loads

    def complete(self) -> None:
        """Note that the step is done and all its transfers have arrived."""
        if self._stores_in_flight or self._loads_in_flight:
            self._end(failed=False)

    def fail(self) -> None:
        """Note that the step failed: the slots it was to store have undefined contents, so forget their keys.

        Claims remain; the code that resumes a sequence knows that the failed step moved its blocks.
        """
        if self._stores_in_flight or self._loads_in_flight:
            self._end(failed=True)

    def clear(self) -> None:
        """Forget all prefixes in host memory, including those being written."""
        self.host.clear()
        self._chosen.clear()
        for slot in list(self._stores):
            self._drop_unwanted(slot)

    def check(self) -> Findings:
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

    def _release(self, slot: HostBlockId) -> None:
        self.host.release(slot)
        self._drop_unwanted(slot)

    def _drop_unwanted(self, slot: HostBlockId) -> None:
        """Cancel a store that was planned only for claimants, if none is left and no step has taken it."""
        if slot in self._stores and slot not in self._chosen and not self.host.is_held(slot):
            del self._stores[slot]
            self.host.give_back(slot)

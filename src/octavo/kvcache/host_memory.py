"""Host memory for blocks: which slot holds what, and what moves next. Numbers only; the runner moves bytes.

One pool of slots for two uses: prefixes that the device evicted, and what preempted sequences left behind.

    free ──store_prefix──> storing ──complete──> ready ──evict──> free
      ├────store_claimed──────^                    ^
      └────reserve──> filling ──filled─────────────┘          (from a store below: disk, remote)

A slot is ready only once its bytes are there. One with a full block's key is found by it; one without, a half-filled
block or what no prefix cache may show, is known to its claimant alone, and free once that lets go of it.

A slot that somebody holds, because a step copies it to the device, a store writes it, a request waits for it or a
preempted sequence claims it, is not evicted: the eviction policy knows only those that nobody holds. Claims are bounded
by the swap space; prefixes take all slots that are left, and yield them to claims.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType

from octavo.errors import CacheError
from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction.base import EvictionPolicy
from octavo.kvcache.eviction.ghosts import GhostList
from octavo.kvcache.hashing import DIGEST_BYTES, TOKEN_BYTES
from octavo.kvcache.host_claims import HostClaims
from octavo.kvcache.key_index import KeyIndex
from octavo.kvcache.label import Label
from octavo.request import SequenceId

HostBlockId = NewType("HostBlockId", int)


class BlockTransfer(NamedTuple):
    """One block between device and host; its direction is that of the list that contains it."""

    device: BlockId
    host: HostBlockId


class Slot(Enum):
    FREE = "free"
    STORING = "storing"  # a step writes it
    FILLING = "filling"  # a store writes it
    READY = "ready"


class _Load(NamedTuple):
    slot: HostBlockId
    seq_id: SequenceId
    returns: bool  # to a sequence that claimed it


@dataclass(slots=True)
class HostCounters:
    """Totals of prefixes since the start, in blocks."""

    stored: int = 0  # from the device
    filled: int = 0  # from a store
    loaded: int = 0  # to the device
    evicted: int = 0
    refused: int = 0  # no slot was free, and none evictable
    lost: int = 0  # their step failed


class HostMemory:
    """Slots for blocks in host memory, and the index of those that are found by their key. O(1) an operation.

    Slots are used from the first on, so that neither memory nor an audit grows with those that never were.

    Args:
        num_slots: may be 0: a host without room.
        num_swap_slots: of these, as many as preempted sequences may claim at once. With no more than these, no prefix
            is kept but for who claims it.
        eviction: the order in which slots of prefixes are given up.

    Attributes:
        claims: what preempted sequences claim of it.
        on_ready: told of each slot with a prefix that a step has just filled, with its label.
    """

    def __init__(self, num_slots: int, num_swap_slots: int, block_size: int, eviction: EvictionPolicy) -> None:
        if not 0 <= num_swap_slots <= num_slots:
            raise CacheError(f"of {num_slots} slots of host memory {num_swap_slots} cannot be for swapping")
        self.num_slots = num_slots
        self.claims = HostClaims(num_swap_slots)
        self.counters = HostCounters()
        self.on_ready: Callable[[HostBlockId, Label], None] = lambda slot, label: None
        self._keeps_prefixes = num_slots > num_swap_slots
        self._width = block_size * TOKEN_BYTES
        self._eviction = eviction
        self._index = KeyIndex()
        self._free: list[HostBlockId] = []  # of those that were ever used
        # By slot, as far as ever used.
        self._states: list[Slot] = []
        self._tenants: list[str] = []
        self._origins: list[str] = []
        self._tokens = bytearray()
        self._holds = array("i")  # claims included
        # Of slots that are being written: what they will be found by, if by anything.
        self._labels: dict[HostBlockId, Label | None] = {}
        self._coming: dict[bytes, HostBlockId] = {}
        self._chosen: set[HostBlockId] = set()  # stored whether or not anybody claims them
        self._out: dict[HostBlockId, BlockId] = {}
        self._in: dict[BlockId, _Load] = {}
        self._out_flying: list[HostBlockId] = []
        self._in_flying: list[HostBlockId] = []

    @staticmethod
    def bookkeeping_bytes(block_size: int) -> int:
        """Of one slot, the device's block that may go there included."""
        return 4 * KeyIndex.BYTES_PER_ID + 8 * DIGEST_BYTES + TOKEN_BYTES * block_size + 4 * GhostList.BYTES_EACH

    @property
    def num_swap_slots(self) -> int:
        """Slots that preempted sequences may claim at once."""
        return self.claims.most

    @property
    def num_prefix_slots(self) -> int:
        """Slots that are left for prefixes, however much is claimed."""
        return self.num_slots - self.num_swap_slots

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_slots - len(self._states)

    @property
    def num_takeable(self) -> int:
        """Slots that are free, or can be evicted."""
        return self.num_free + len(self._eviction)

    @property
    def num_ready(self) -> int:
        """Slots that are found by their key."""
        return len(self._index)

    @property
    def num_held(self) -> int:
        """Holds on slots that are no claims; none where nothing waits and no step or store is under way."""
        return sum(self._holds) - self.claims.total()

    @property
    def has_transfers(self) -> bool:
        return bool(self._out or self._in)

    def by_tenant(self) -> dict[str, int]:
        """Slots in use, by the tenant that they count for. O(slots)."""
        return Counter(
            tenant for tenant, state in zip(self._tenants, self._states, strict=True) if state is not Slot.FREE
        )

    # Looking up and holding

    def find(self, label: Label) -> HostBlockId | None:
        """The ready slot with these tokens after this prefix."""
        slot = self._index.get(label.key)
        if slot is None or self._tokens[slot * self._width : (slot + 1) * self._width] != label.tokens:
            return None
        return HostBlockId(slot)

    def has(self, key: bytes) -> bool:
        """Whether some slot is ready with it."""
        return self._index.get(key) is not None

    def is_coming(self, key: bytes) -> bool:
        """Whether some slot is being written with it."""
        return key in self._coming

    def is_filling(self, key: bytes) -> bool:
        """Whether a store is writing it to some slot."""
        slot = self._coming.get(key)
        return slot is not None and self._states[slot] is Slot.FILLING

    def origin(self, slot: HostBlockId) -> str:
        """Which tier a slot's bytes came from; once they were used they are the host's."""
        return self._origins[slot]

    def hold(self, slot: HostBlockId) -> None:
        """Keep a slot from being evicted, until `release`."""
        if self._holds[slot] == 0 and self._states[slot] is Slot.READY:
            self._eviction.remove(BlockId(slot + 1))
        self._holds[slot] += 1

    def release(self, slot: HostBlockId) -> None:
        if self._holds[slot] < 1:
            raise CacheError(f"slot {slot} of host memory is released more often than held")
        self._holds[slot] -= 1
        self._settle(slot)

    # From the device, for whoever finds it

    def store_prefix(self, block_id: BlockId, label: Label, tenant: str) -> None:
        """With the next step, copy a block of the device; it is as it is now until then."""
        if (known := self._index.get(label.key)) is not None:
            if BlockId(known + 1) in self._eviction:  # as if it had been used just now
                self._eviction.remove(BlockId(known + 1))
                self._eviction.add(BlockId(known + 1))
            return
        if (coming := self._coming.get(label.key)) is not None:
            if self._states[coming] is Slot.STORING:
                self._chosen.add(coming)
            return
        slot = self._take(Slot.STORING, label, tenant)
        if slot is None:
            self.counters.refused += 1
            return
        self._out[slot] = block_id
        self._chosen.add(slot)

    # For preempted sequences

    def can_claim(self, count: int, num_held: int = 0) -> bool:
        """Whether so many slots can be claimed, of which `num_held` are held already."""
        return self.claims.may_add(count) and count - num_held <= self.num_takeable

    def store_claimed(self, block_id: BlockId, label: Label | None, tenant: str) -> HostBlockId | None:
        """The slot of a block of the device that a sequence claims, which is copied there if it is not there yet.

        Args:
            label: what it may be found by; None: by nobody.

        Returns:
            None where none can be claimed.
        """
        if label is not None:
            known = self.find(label)
            coming = self._coming.get(label.key)
            if known is None and coming is not None and self._states[coming] is Slot.STORING:
                known = coming
            if known is not None:
                if not self.claims[known] and not self.claims.may_add(1):
                    return None
                self.claim(known)
                return known
            if coming is not None or self.has(label.key):
                label = None
        if not self.can_claim(1):
            return None
        slot = self._take(Slot.STORING, label, tenant)
        assert slot is not None
        self._out[slot] = block_id
        self.claim(slot)
        return slot

    def claim(self, slot: HostBlockId) -> None:
        """Keep a slot for a preempted sequence until `unclaim`; within what may be claimed (`can_claim`)."""
        self.hold(slot)
        self.claims.add(slot, planned=slot in self._out)

    def unclaim(self, slot: HostBlockId) -> None:
        self.claims.remove(slot)
        self.release(slot)

    # From stores below

    def reserve(self, label: Label, tenant: str) -> HostBlockId | None:
        """A slot for bytes that a store is to fill in; None where none is free or evictable."""
        slot = self._take(Slot.FILLING, label, tenant)
        self.counters.refused += slot is None
        return slot

    def filled(self, slot: HostBlockId, origin: str, *, hold: bool) -> bool:
        """All bytes of a reserved slot are there, and proven to be its label's; held at once where wanted.

        Returns:
            False where nobody would find it: another slot was filled with the same meanwhile, or all were to be
            forgotten. It is free then.
        """
        if self._become_ready(slot) is None:
            return False
        self._origins[slot] = origin
        self.counters.filled += 1
        if hold:
            self.hold(slot)
        return True

    def give_back(self, slot: HostBlockId) -> None:
        """A reserved slot was not filled, and nobody writes to it any more."""
        self._free_slot(slot)

    # With steps

    def plan_load(self, slot: HostBlockId, block_id: BlockId, seq_id: SequenceId, *, returns: bool = False) -> None:
        """With the next step a slot's bytes go to a block that the sequence has just been given.

        Args:
            returns: the sequence claims the slot.
        """
        self.hold(slot)
        if not returns:
            self._eviction.hit([BlockId(slot + 1)], 0)
        else:
            self.claims.plan_return(slot)
        self._in[block_id] = _Load(slot, seq_id, returns)

    def source_of(self, block_id: BlockId) -> HostBlockId | None:
        """The slot whose bytes go to that block with the next step."""
        load = self._in.get(block_id)
        return None if load is None else load.slot

    def cancel_loads(self, seq_id: SequenceId) -> None:
        """A sequence gives up its blocks; what no step has taken yet will not happen."""
        for block_id in [block for block, load in self._in.items() if load.seq_id == seq_id]:
            load = self._in.pop(block_id)
            if load.returns:
                self.claims.cancel_return(load.slot)
            self.release(load.slot)

    def take_transfers(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """The next step's stores and loads, in flight until `complete` or `fail`."""
        stores = [BlockTransfer(block, slot) for slot, block in self._out.items()]
        loads = [BlockTransfer(block, load.slot) for block, load in self._in.items()]
        self.claims.moved(self._out, (slot for _, slot in loads))
        self.counters.loaded += sum(not load.returns for load in self._in.values())
        self._out_flying.extend(self._out)
        self._in_flying.extend(slot for _, slot in loads)
        self._out.clear()
        self._in.clear()
        return stores, loads

    def complete(self) -> None:
        """The step is done, and all it moved has arrived."""
        if not (self._out_flying or self._in_flying):
            return
        flying, self._out_flying = self._out_flying, []
        for slot in flying:
            chosen = slot in self._chosen
            label = self._become_ready(slot)
            if label is not None and chosen:
                self.counters.stored += 1
                self.on_ready(slot, label)
        self._land()

    def fail(self) -> None:
        """The step failed: what it was to store may be anything, so nobody finds it any more.

        What a sequence claims is left to that: whoever lets it go on knows that the step moved its blocks.
        """
        flying, self._out_flying = self._out_flying, []
        for slot in flying:
            self.counters.lost += slot in self._chosen
            self._unname(slot)
            self._become_ready(slot)
        self._land()

    def clear(self) -> None:
        """Let nobody find any prefix that is here now, or on its way."""
        for entry in list(self._eviction):
            self._eviction.remove(entry)
            self._index.remove(entry - 1)
            self._free_slot(HostBlockId(entry - 1))
        for slot in list(self._index):
            self._index.remove(slot)
        for slot in list(self._labels):
            self._unname(slot)
            if slot in self._out:
                self._settle(slot)

    def check(self) -> Findings:
        """Every slot is in exactly one state, and evictable exactly where it is ready and nobody holds it. O(slots)."""
        num_used = len(self._states)
        free = bytearray(num_used)
        for slot in self._free:
            if free[slot]:
                yield f"slot {slot} of host memory stands twice in its free list"
            free[slot] = 1
        writing = self._labels.keys()
        for slots in in_slices(range(num_used)):
            for slot in map(HostBlockId, slots):
                state, holds = self._states[slot], self._holds[slot]
                idle = BlockId(slot + 1) in self._eviction
                if bool(free[slot]) != (state is Slot.FREE):
                    yield f"slot {slot} of host memory is {state.value}, free list: {bool(free[slot])}"
                if (slot in writing) != (state in (Slot.STORING, Slot.FILLING)):
                    yield f"slot {slot} of host memory is {state.value}, being written: {slot in writing}"
                if idle != (state is Slot.READY and holds == 0):
                    yield f"slot {slot} of host memory is {state.value} with {holds} holds, idle: {idle}"
                if state is Slot.FREE and holds:
                    yield f"slot {slot} of host memory is free and has {holds} holds"
            yield None
        if stray := (set(self._out) | set(self._out_flying) | self._chosen) - writing:
            yield f"stores are planned for slots {sorted(stray)}, which nobody writes"
        named = {label.key: slot for slot, label in self._labels.items() if label is not None}
        if named != self._coming:
            yield f"{len(named)} slots of host memory are being written with keys, {len(self._coming)} are coming"
        yield from self.claims.check(self._holds)
        yield from self._index.check()

    def __iter__(self) -> Iterator[HostBlockId]:
        """Every slot that is found by its key."""
        return map(HostBlockId, self._index)

    def _take(self, state: Slot, label: Label | None, tenant: str) -> HostBlockId | None:
        """A slot that nobody uses or holds, to be written."""
        if self._free:
            slot = self._free.pop()
        elif len(self._states) < self.num_slots:
            slot = HostBlockId(len(self._states))
            self._states.append(Slot.FREE)
            self._tenants.append("")
            self._origins.append("host")
            self._tokens.extend(bytes(self._width))
            self._holds.append(0)
            self.claims.grow()
        elif len(self._eviction):
            slot = HostBlockId(self._eviction.evict() - 1)
            self._index.remove(slot)
            self.counters.evicted += 1
        else:
            return None
        self._states[slot] = state
        self._tenants[slot] = tenant
        self._labels[slot] = label
        if label is not None:
            self._coming[label.key] = slot
        return slot

    def _unname(self, slot: HostBlockId) -> None:
        """Nobody shall find what is being written to a slot."""
        label = self._labels[slot]
        if label is not None:
            del self._coming[label.key]
            self._labels[slot] = None
        self._chosen.discard(slot)

    def _become_ready(self, slot: HostBlockId) -> Label | None:
        """A slot has been written; returns its label where it is found by that from now on."""
        label = self._labels[slot]
        self._unname(slot)
        del self._labels[slot]
        self._states[slot] = Slot.READY
        self._origins[slot] = "host"
        if label is not None and self.has(label.key):
            label = None
        if label is not None:
            self._index.put(label.key, slot)
            self._tokens[slot * self._width : (slot + 1) * self._width] = label.tokens
            self._eviction.publish(BlockId(slot + 1), 0, 0, label.key)
        self._settle(slot)
        return label if self._states[slot] is Slot.READY else None

    def _settle(self, slot: HostBlockId) -> None:
        """A slot that nobody holds any more can be evicted where it is found by its key; else it is free."""
        if self._holds[slot]:
            return
        if self._states[slot] is not Slot.READY:
            if slot in self._out and slot not in self._chosen:
                # Only its claimants wanted it, and no step has taken it.
                del self._out[slot]
                self._free_slot(slot)
        elif self._index.get(self._index.key(slot)) != slot:
            self._free_slot(slot)
        elif self._keeps_prefixes:
            self._eviction.add(BlockId(slot + 1))
        else:
            self._index.remove(slot)
            self._free_slot(slot)

    def _free_slot(self, slot: HostBlockId) -> None:
        if slot in self._labels:
            self._unname(slot)
            del self._labels[slot]
        self._states[slot] = Slot.FREE
        self._free.append(slot)

    def _land(self) -> None:
        landed, self._in_flying = self._in_flying, []
        for slot in landed:
            self._origins[slot] = "host"
            self.release(slot)

"""Prefix blocks in host memory: which slot holds what, and what moves next. Numbers only; the runner moves bytes.

A block that the device evicts goes down, a block that a prompt matches comes up; both are one index over the same keys.

    free ──plan_store──> storing ──complete──> ready ──evict──> free
      └──reserve──> filling ──filled──────────────^                       (from a store below: disk, remote)

A slot is ready only once its bytes are there. One that somebody holds, because a step copies it to the device, a store
writes it or a request waits for it, is not evicted: the eviction policy knows only those that nobody holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from octavo.errors import CacheError
from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction import EvictionPolicy
from octavo.kvcache.eviction.ghosts import Ghost, GhostList
from octavo.kvcache.hashing import DIGEST_BYTES, TOKEN_BYTES
from octavo.kvcache.host_pool import BlockSwap, HostBlockId
from octavo.kvcache.key_index import KeyIndex
from octavo.request import SequenceId

DEMOTIONS = ("on_evict", "on_second_use", "all")


class Label(NamedTuple):
    """What a block outside the device must prove to be.

    Attributes:
        key: of the prefix that it ends; stands for the model, its weights, dtype, block size and tenant too.
        parent: the key of the prefix before it.
        tokens: its own packed token ids.
    """

    key: bytes
    parent: bytes
    tokens: bytes


class Slot(Enum):
    FREE = "free"
    STORING = "storing"  # a step writes it
    FILLING = "filling"  # a store writes it
    READY = "ready"


class HostCounters:
    """Totals since the start, in blocks."""

    def __init__(self) -> None:
        self.stored = 0  # from the device
        self.filled = 0  # from a store
        self.loaded = 0  # to the device
        self.evicted = 0
        self.refused = 0  # no slot was free, and none evictable
        self.lost = 0  # their step failed


class HostCache:
    """The index of host memory for prefixes.

    Args:
        num_slots: at least 1.
        first: the number of slot 0 in the tier, behind those of swapped sequences.
        num_blocks: of the device's pool.
        demotion: `on_evict`: what the device evicts; `on_second_use`: of that, what was used twice; `all`: what is
            published, at once.
        eviction: the order in which slots are given up.

    Attributes:
        on_ready: told of each slot that a step has just filled, with its label.
    """

    def __init__(
        self, num_slots: int, first: int, num_blocks: int, block_size: int, demotion: str, eviction: EvictionPolicy
    ) -> None:
        self.num_slots = num_slots
        self.counters = HostCounters()
        self.on_ready: Callable[[HostBlockId, Label], None] = lambda slot, label: None
        self._first = first
        self._demotion = demotion
        self._width = block_size * TOKEN_BYTES
        self._eviction = eviction
        self._index = KeyIndex(num_slots)
        self._tokens = bytearray(num_slots * self._width)
        self._parents = bytearray(num_slots * DIGEST_BYTES)
        self._tenants = [""] * num_slots
        self._origins = ["host"] * num_slots
        self._states = [Slot.FREE] * num_slots
        self._holds = array("i", bytes(4 * num_slots))
        self._free = list(range(num_slots - 1, -1, -1))
        self._labels: dict[int, tuple[Label, str]] = {}  # of slots that are being written
        self._coming: set[bytes] = set()  # their keys
        self._out: dict[int, BlockId] = {}
        self._in: dict[BlockId, tuple[int, SequenceId]] = {}
        self._out_flying: list[int] = []
        self._in_flying: list[int] = []
        # Of the device's blocks, as they were published.
        self._block_keys = bytearray(num_blocks * DIGEST_BYTES)
        self._block_parents = bytearray(num_blocks * DIGEST_BYTES)
        self._block_tenants = [""] * num_blocks
        self._used_again = bytearray(num_blocks)
        # Keys of blocks that were used once and are gone: seen anew, they are used again.
        self._gone_once = GhostList(1 << max(4, 2 * num_blocks).bit_length())

    @staticmethod
    def bookkeeping_bytes(block_size: int) -> int:
        """Of one slot, the device's block that may go there included."""
        return 4 * KeyIndex.BYTES_PER_ID + 8 * DIGEST_BYTES + TOKEN_BYTES * block_size + 4 * GhostList.BYTES_EACH

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_ready(self) -> int:
        return len(self._index)

    @property
    def has_transfers(self) -> bool:
        return bool(self._out or self._in)

    def by_tenant(self) -> dict[str, int]:
        """Slots in use, by the tenant that they count for. O(slots)."""
        counts: dict[str, int] = {}
        for slot, state in enumerate(self._states):
            if state is not Slot.FREE:
                tenant = self._tenants[slot]
                counts[tenant] = counts.get(tenant, 0) + 1
        return counts

    # What happens to the device's blocks

    def published(self, block_id: BlockId, label: Label, tenant: str) -> None:
        """A block of the device is found by its prefix from now on."""
        at = block_id * DIGEST_BYTES
        self._block_keys[at : at + DIGEST_BYTES] = label.key
        self._block_parents[at : at + DIGEST_BYTES] = label.parent
        self._block_tenants[block_id] = tenant
        again = self._gone_once.take(label.key) is not None or self._index.get(label.key) is not None
        self._used_again[block_id] = again
        if self._demotion == "all":
            self._plan_store(block_id, label, tenant)

    def hit(self, block_ids: Iterable[BlockId]) -> None:
        """Requests found these blocks on the device."""
        for block_id in block_ids:
            self._used_again[block_id] = 1

    def evicted(self, block_id: BlockId, tokens: bytes) -> None:
        """The device gives a block's memory to another with the next step; until then it is as it was."""
        if self._demotion == "all":
            return
        at = block_id * DIGEST_BYTES
        key = bytes(self._block_keys[at : at + DIGEST_BYTES])
        if self._demotion == "on_second_use" and not self._used_again[block_id]:
            self._gone_once.add(key, Ghost(0, 0))
            return
        label = Label(key, bytes(self._block_parents[at : at + DIGEST_BYTES]), tokens)
        self._plan_store(block_id, label, self._block_tenants[block_id])

    # Looking up and holding

    def find(self, label: Label) -> HostBlockId | None:
        """The ready slot with these tokens after this prefix."""
        slot = self._index.get(label.key)
        if slot is None or self._tokens[slot * self._width : (slot + 1) * self._width] != label.tokens:
            return None
        return self._number(slot)

    def is_coming(self, key: bytes) -> bool:
        """Whether some slot is being written with it."""
        return key in self._coming

    def origin(self, host: HostBlockId) -> str:
        """Which tier a slot's bytes came from; once they were used they are the host's."""
        return self._origins[host - self._first]

    def hold(self, host: HostBlockId) -> None:
        """Keep a ready slot from being evicted, until `release`."""
        slot = host - self._first
        if self._holds[slot] == 0:
            self._eviction.remove(BlockId(slot + 1))
        self._holds[slot] += 1

    def release(self, host: HostBlockId) -> None:
        slot = host - self._first
        if self._holds[slot] < 1:
            raise CacheError(f"slot {slot} of the host cache is released more often than held")
        self._holds[slot] -= 1
        if self._holds[slot] == 0:
            self._eviction.add(BlockId(slot + 1))

    # From stores below

    def reserve(self, label: Label, tenant: str) -> HostBlockId | None:
        """A slot for bytes that a store is to fill in; None where none is free or evictable."""
        slot = self._take_slot(label, tenant, Slot.FILLING)
        return None if slot is None else self._number(slot)

    def filled(self, host: HostBlockId, origin: str, *, hold: bool) -> bool:
        """All bytes of a reserved slot are there, and proven to be its label's; held at once where wanted.

        Returns:
            False where another slot has been filled with the same meanwhile: this one is free.
        """
        slot = host - self._first
        if not self._become_ready(slot, origin):
            return False
        self.counters.filled += 1
        if hold:
            self.hold(host)
        return True

    def give_back(self, host: HostBlockId) -> None:
        """A reserved slot was not filled, and nobody writes to it any more."""
        self._free_slot(host - self._first)

    # With steps

    def plan_load(self, host: HostBlockId, block_id: BlockId, seq_id: SequenceId) -> None:
        """With the next step a slot's bytes go to a block that the sequence has just been given."""
        self.hold(host)
        self._eviction.hit([BlockId(host - self._first + 1)], 0)
        self._in[block_id] = (host - self._first, seq_id)

    def cancel_loads(self, seq_id: SequenceId) -> None:
        """A sequence gives up its blocks; what no step has taken yet will not happen."""
        for block_id in [block for block, (_, owner) in self._in.items() if owner == seq_id]:
            slot, _ = self._in.pop(block_id)
            self.release(self._number(slot))

    def take_transfers(self) -> tuple[list[BlockSwap], list[BlockSwap]]:
        """The next step's stores and loads, in flight until `complete` or `fail`."""
        stores = [BlockSwap(block, self._number(slot)) for slot, block in self._out.items()]
        loads = [BlockSwap(block, self._number(slot)) for block, (slot, _) in self._in.items()]
        self._out_flying.extend(self._out)
        self._in_flying.extend(slot for slot, _ in self._in.values())
        self._out.clear()
        self._in.clear()
        return stores, loads

    def complete(self) -> None:
        """The step is done, and all it moved has arrived."""
        if not (self._out_flying or self._in_flying):
            return
        flying, self._out_flying = self._out_flying, []
        for slot in flying:
            label, _ = self._labels[slot]
            if self._become_ready(slot, "host"):
                self.counters.stored += 1
                self.on_ready(self._number(slot), label)
        self.counters.loaded += len(self._in_flying)
        self._land()

    def fail(self) -> None:
        """The step failed: what it was to store may be anything."""
        for slot in self._out_flying:
            self.counters.lost += 1
            self._free_slot(slot)
        self._out_flying.clear()
        self._land()

    def clear(self) -> int:
        """Forget every ready slot that nobody holds; returns how many."""
        idle = list(self._eviction)
        for entry in idle:
            self._eviction.remove(entry)
            self._index.remove(entry - 1)
            self._free_slot(entry - 1)
        return len(idle)

    def check(self) -> Findings:
        """Every slot is in exactly one state, and evictable exactly where it is ready and nobody holds it. O(slots)."""
        free = bytearray(self.num_slots)
        for slot in self._free:
            if free[slot]:
                yield f"slot {slot} of the host cache stands twice in its free list"
            free[slot] = 1
        writing = set(self._labels)
        for slots in in_slices(range(self.num_slots)):
            for slot in slots:
                state = self._states[slot]
                idle = BlockId(slot + 1) in self._eviction
                if bool(free[slot]) != (state is Slot.FREE):
                    yield f"slot {slot} of the host cache is {state.value}, free list: {bool(free[slot])}"
                if (slot in writing) != (state in (Slot.STORING, Slot.FILLING)):
                    yield f"slot {slot} of the host cache is {state.value}, being written: {slot in writing}"
                if idle != (state is Slot.READY and self._holds[slot] == 0):
                    yield f"slot {slot} of the host cache is {state.value} with {self._holds[slot]} holds, idle: {idle}"
            yield None
        if stray := (set(self._out) | set(self._out_flying)) - writing:
            yield f"stores are planned for slots {sorted(stray)}, which nobody writes"
        if len(self._coming) != len(writing):
            yield f"{len(writing)} slots of the host cache are being written, {len(self._coming)} keys are coming"
        yield from self._index.check()

    @property
    def num_held(self) -> int:
        """Holds on ready slots; none where nothing waits and no step or store is under way."""
        return sum(self._holds)

    def _plan_store(self, block_id: BlockId, label: Label, tenant: str) -> None:
        known = self._index.get(label.key)
        if known is not None:
            if self._holds[known] == 0:  # as if it had been used just now
                self._eviction.remove(BlockId(known + 1))
                self._eviction.add(BlockId(known + 1))
            return
        if label.key in self._coming:
            return
        slot = self._take_slot(label, tenant, Slot.STORING)
        if slot is not None:
            self._out[slot] = block_id

    def _take_slot(self, label: Label, tenant: str, state: Slot) -> int | None:
        if self._free:
            slot = self._free.pop()
        elif len(self._eviction):
            slot = self._eviction.evict() - 1
            self._index.remove(slot)
            self.counters.evicted += 1
        else:
            self.counters.refused += 1
            return None
        self._states[slot] = state
        self._tenants[slot] = tenant
        self._labels[slot] = (label, tenant)
        self._coming.add(label.key)
        return slot

    def _become_ready(self, slot: int, origin: str) -> bool:
        label, _ = self._labels[slot]
        if self._index.get(label.key) is not None:
            self._free_slot(slot)
            return False
        del self._labels[slot]
        self._coming.discard(label.key)
        self._states[slot] = Slot.READY
        self._origins[slot] = origin
        self._index.put(label.key, slot)
        self._tokens[slot * self._width : (slot + 1) * self._width] = label.tokens
        self._parents[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES] = label.parent
        self._eviction.publish(BlockId(slot + 1), 0, 0, label.key)
        self._eviction.add(BlockId(slot + 1))
        return True

    def _free_slot(self, slot: int) -> None:
        if (writing := self._labels.pop(slot, None)) is not None:
            self._coming.discard(writing[0].key)
        self._states[slot] = Slot.FREE
        self._free.append(slot)

    def _land(self) -> None:
        for slot in self._in_flying:
            self._origins[slot] = "host"
            self.release(self._number(slot))
        self._in_flying.clear()

    def _number(self, slot: int) -> HostBlockId:
        return HostBlockId(self._first + slot)

    def __iter__(self) -> Iterator[HostBlockId]:
        """Every ready slot."""
        return map(self._number, self._index)

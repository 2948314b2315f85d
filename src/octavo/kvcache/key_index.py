"""A hash table from 16-byte keys to small ids in flat memory, without an object per entry for the garbage collector.

    slots  [ 0 | 5 | 0 | 2 | 7 | 0 | … ]       id + 1 at the key's home or the next places after it, 0 for none
    keys   [ – | key of 0 | key of 1 | … ]     by id + 1

Linear probing at a load of at most one half; a removal moves back what was displaced, so nothing is left to clean up.
Where a key belongs depends on a secret number of the process: nobody outside can choose keys that crowd together.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import BlockIds
from octavo.kvcache.hashing import DIGEST_BYTES, Keys

_MASK64 = (1 << 64) - 1


class KeyIndex:
    """Keys of ids 0 .. capacity - 1. Each id has at most one key, each key at most one id.

    Args:
        capacity: grows by doubling where an id is beyond it, which moves every entry: say it beforehand if known.
    """

    # What each id of the capacity takes: 16 of its key, 4 each of two to four slots.
    BYTES_PER_ID = DIGEST_BYTES + 16

    def __init__(self, capacity: int = 16) -> None:
        self._factor = secrets.randbits(64) | 1
        self._length = 0
        self._allocate(capacity)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Every id that has a key."""
        return (entry - 1 for entry in self._slots if entry)

    def get(self, key: bytes) -> int | None:
        """The id of a key."""
        slots, keys = self._slots, self._keys
        slot = (int.from_bytes(key[:8], "little") * self._factor & _MASK64) >> self._shift
        while entry := slots[slot]:
            at = entry * DIGEST_BYTES
            if keys[at : at + DIGEST_BYTES] == key:
                return entry - 1
            slot = (slot + 1) & self._mask
        return None

    def key(self, entry_id: int) -> bytes:
        """The key that was last put for an id."""
        at = (entry_id + 1) * DIGEST_BYTES
        return bytes(self._keys[at : at + DIGEST_BYTES])

    def put(self, key: bytes, entry_id: int) -> None:
        """Map a key to an id that has no key yet; a previous id of this key is forgotten."""
        self._put(key, entry_id, replaces=True)

    def put_new(self, key: bytes, entry_id: int) -> bool:
        """Map a key to an id that has no key yet; False (and nothing changes) where the key has an id."""
        return self._put(key, entry_id, replaces=False)

    def _put(self, key: bytes, entry_id: int, *, replaces: bool) -> bool:
        if entry_id >= self._capacity:
            self._grow(entry_id + 1)
        slots, keys, entry = self._slots, self._keys, entry_id + 1
        slot = (int.from_bytes(key[:8], "little") * self._factor & _MASK64) >> self._shift
        while other := slots[slot]:
            at = other * DIGEST_BYTES
            if keys[at : at + DIGEST_BYTES] == key:
                if not replaces:
                    return False
                self._length -= 1
                break
            slot = (slot + 1) & self._mask
        keys[entry * DIGEST_BYTES : (entry + 1) * DIGEST_BYTES] = key
        slots[slot] = entry
        self._length += 1
        return True

    def remove(self, entry_id: int) -> None:
        """Forget an id and its key. Raises KeyError where no key stands for it."""
        slots, mask, entry = self._slots, self._mask, entry_id + 1
        slot = self._home(entry)
        while slots[slot] != entry:
            if not slots[slot]:
                raise KeyError(entry_id)
            slot = (slot + 1) & mask
        hole = slot
        while other := slots[slot := (slot + 1) & mask]:
            # It may move back to the hole unless its home lies behind that.
            if (slot - self._home(other)) & mask >= (slot - hole) & mask:
                slots[hole] = other
                hole = slot
        slots[hole] = 0
        self._length -= 1

    def find(self, keys: Keys) -> BlockIds:
        """The id of each of many keys, -1 where there is none."""
        # In place and by `take`, several times as fast as brackets: a long prompt has tens of thousands of keys.
        home = keys[:, 0] * np.uint64(self._factor)
        home >>= np.uint64(self._shift)
        slot = home.view(np.int64)
        slots = np.frombuffer(self._slots, np.int32)
        rows = np.frombuffer(self._keys, np.uint64).reshape(-1, 2)
        found = slots.take(slot)
        # Those that met another key at their home look one place further, until all have met theirs or nothing.
        open_ = np.flatnonzero(_differ(rows.take(found, axis=0), keys) & (found != 0))
        slot, keys = slot.take(open_), keys.take(open_, axis=0)
        while open_.size:
            slot += 1
            slot &= self._mask
            found[open_] = there = slots.take(slot)
            still = np.flatnonzero(_differ(rows.take(there, axis=0), keys) & (there != 0))
            open_, slot, keys = open_.take(still), slot.take(still), keys.take(still, axis=0)
        found -= 1
        return found

    def reserve(self, capacity: int) -> None:
        """Make room for ids below `capacity`."""
        if capacity > self._capacity:
            self._grow(capacity)

    def check(self) -> Findings:
        """The table's own invariants. O(capacity)."""
        length = 0
        for entries in in_slices(self._slots):
            for entry in entries:
                length += entry != 0
                if entry and self.get(self.key(entry - 1)) != entry - 1:
                    yield f"id {entry - 1} is not found by its key"
            yield None
        if length != self._length:
            yield f"{length} entries stand in the slots, {self._length} are counted"

    def _home(self, entry: int) -> int:
        at = entry * DIGEST_BYTES
        return (int.from_bytes(self._keys[at : at + 8], "little") * self._factor & _MASK64) >> self._shift

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        bits = max(3, (2 * capacity - 1).bit_length())
        self._mask = (1 << bits) - 1
        self._shift = 64 - bits
        self._slots = array("i", bytes(4 << bits))
        self._keys = bytearray((capacity + 1) * DIGEST_BYTES)

    def _grow(self, capacity: int) -> None:
        known = [(entry_id, self.key(entry_id)) for entry_id in self]
        self._length = 0
        self._allocate(max(capacity, 2 * self._capacity))
        for entry_id, key in known:
            self.put(key, entry_id)


def _differ(ours: Keys, theirs: Keys) -> npt.NDArray[np.bool_]:
    parts = ours ^ theirs
    differ: npt.NDArray[np.bool_] = (parts[:, 0] | parts[:, 1]) != 0
    return differ

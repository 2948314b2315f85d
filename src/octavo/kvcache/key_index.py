"""A hash table from 16-byte keys to small ids in flat memory, without an object per entry for the garbage collector.

    slots  [ 0 | 5 | 0 | 2 | 7 | 0 | … ]       id + 1 at the key's home or in the next slots after it, 0 for none
    keys   [ – | key of 0 | key of 1 | … ]     by id + 1

It uses linear probing at a load of at most one half; a removal moves displaced entries back, so it leaves no
tombstones. A key's home depends on a random secret of the process, so that clients cannot choose keys that collide.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import BlockIds
from octavo.kvcache.hashing import DIGEST_BYTES, KEY_HALF, Keys

_MASK64 = (1 << 64) - 1
# Keys looked up at once: few at first, because most prompts miss early, then a growing number, up to what stays in the
# processor's cache.
_FIRST_PIECE = 128
_PIECE_GROWTH = 8
_LARGEST_PIECE = 8192


PREFIX_BYTES = 8
"""A prefix of a key for uses where a collision does no harm: among a million keys, the chance of one is 1 in 37
million."""


class KeyIndex:
    """Keys of ids 0 .. capacity - 1. Each id has at most one key, each key at most one id.

    Args:
        capacity: initial capacity. It doubles when an id exceeds it, which moves every entry, so pass it if known.
        width: bytes of a key that are stored and compared; `find_leading` requires all of them.
    """

    # Per id of the capacity: 16 bytes for its key, and 4 for each of two to four slots.
    BYTES_PER_ID = DIGEST_BYTES + 16

    def __init__(self, capacity: int = 16, width: int = DIGEST_BYTES) -> None:
        self._width = width
        self._factor = secrets.randbits(64) | 1
        self._length = 0
        self._allocate(capacity)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Iterate over all ids that have a key."""
        return (entry - 1 for entry in self._slots if entry)

    def get(self, key: bytes) -> int | None:
        """Return the id of a key, or None."""
        slots, keys, width = self._slots, self._keys, self._width
        slot = (int.from_bytes(key[:8], "little") * self._factor & _MASK64) >> self._shift
        key = key[:width]
        while entry := slots[slot]:
            at = entry * width
            if keys[at : at + width] == key:
                return entry - 1
            slot = (slot + 1) & self._mask
        return None

    def key(self, entry_id: int) -> bytes:
        """Return the stored part of the key last put for an id."""
        at = (entry_id + 1) * self._width
        return bytes(self._keys[at : at + self._width])

    def put(self, key: bytes, entry_id: int) -> None:
        """Map a key to an id that has no key yet; a previous id of this key is forgotten."""
        self._put(key, entry_id, replaces=True)

    def put_new(self, key: bytes, entry_id: int) -> bool:
        """Map a key to an id that has no key yet; False (and nothing changes) if the key already has an id."""
        return self._put(key, entry_id, replaces=False)

    def _put(self, key: bytes, entry_id: int, *, replaces: bool) -> bool:
        if entry_id >= self._capacity:
            self._grow(entry_id + 1)
        slots, keys, width, entry = self._slots, self._keys, self._width, entry_id + 1
        slot = (int.from_bytes(key[:8], "little") * self._factor & _MASK64) >> self._shift
        key = key[:width]
        while other := slots[slot]:
            at = other * width
            if keys[at : at + width] == key:
                if not replaces:
                    return False
                self._length -= 1
                break
            slot = (slot + 1) & self._mask
        keys[entry * width : (entry + 1) * width] = key
        slots[slot] = entry
        self._length += 1
        return True

    def remove(self, entry_id: int) -> None:
        """Forget an id and its key. Raises KeyError if the id has no key."""
        slots, mask, entry = self._slots, self._mask, entry_id + 1
        slot = self._home(entry)
        while slots[slot] != entry:
            if not slots[slot]:
                raise KeyError(entry_id)
            slot = (slot + 1) & mask
        hole = slot
        while other := slots[slot := (slot + 1) & mask]:
            # It may move back to the hole, unless its home lies after the hole.
            if (slot - self._home(other)) & mask >= (slot - hole) & mask:
                slots[hole] = other
                hole = slot
        slots[hole] = 0
        self._length -= 1

    def find_leading(self, keys: Keys, flip: int = 0) -> BlockIds:
        """Return the ids of the leading keys, up to the first key that has none.

        Args:
            flip: bits to flip in each key's second half before looking it up.
        """
        slots = np.frombuffer(self._slots, np.int32)
        found: list[npt.NDArray[np.int32]] = []
        elsewhere: list[npt.NDArray[np.intp]] = []  # keys whose home holds another key
        start, end, is_missing = 0, min(len(keys), _FIRST_PIECE), False
        while start < end and not is_missing:
            piece = _flipped(keys[start:end], flip)
            at = slots.take(self._homes(piece))
            if is_missing := not at.all():
                at = at[: int((at == 0).argmax())]
                piece = piece[: len(at)]
            found.append(at)
            elsewhere.append(np.flatnonzero(self._differ(at, piece)) + start)
            start, end = end, min(len(keys), end + min(_PIECE_GROWTH * end, _LARGEST_PIECE))
        if not found:
            return np.empty(0, np.int32)
        ids, open_ = np.concatenate(found), np.concatenate(elsewhere)
        # Probe the next slot until each key has found its entry or an empty slot. All keys are probed together, because
        # the fixed cost of a round exceeds the work for a few keys.
        some = _flipped(keys.take(open_, axis=0), flip)
        slot = self._homes(some)
        while open_.size:
            slot += 1
            slot &= self._mask
            ids[open_] = there = slots.take(slot)
            still = np.flatnonzero(self._differ(there, some) & (there != 0))
            open_, slot, some = open_.take(still), slot.take(still), some.take(still, axis=0)
        if not ids.all():
            ids = ids[: int((ids == 0).argmax())]
        ids -= 1
        return ids

    def _homes(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the home slot of each key."""
        # In place, because a long prompt has tens of thousands of keys.
        home = keys[:, 0] * np.uint64(self._factor)
        home >>= np.uint64(self._shift)
        return home.view(np.int64)

    def _differ(self, entries: npt.NDArray[np.int32], keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which entries have a key other than the given one."""
        parts = np.frombuffer(self._keys, KEY_HALF).reshape(-1, 2).take(entries, axis=0)
        parts ^= keys
        differ: npt.NDArray[np.bool_] = (parts[:, 0] | parts[:, 1]) != 0
        return differ

    def reserve(self, capacity: int) -> None:
        """Make room for ids below `capacity`."""
        if capacity > self._capacity:
            self._grow(capacity)

    def check(self) -> Findings:
        """Check the table's own invariants. O(capacity)."""
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
        at = entry * self._width
        return (int.from_bytes(self._keys[at : at + 8], "little") * self._factor & _MASK64) >> self._shift

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        bits = max(3, (2 * capacity - 1).bit_length())
        self._mask = (1 << bits) - 1
        self._shift = 64 - bits
        self._slots = array("i", bytes(4 << bits))
        self._keys = bytearray((capacity + 1) * self._width)

    def _grow(self, capacity: int) -> None:
        known = [(entry_id, self.key(entry_id)) for entry_id in self]
        self._length = 0
        self._allocate(max(capacity, 2 * self._capacity))
        for entry_id, key in known:
            self.put(key, entry_id)


def _flipped(keys: Keys, flip: int) -> Keys:
    return keys ^ np.array([0, flip], np.uint64) if flip else keys

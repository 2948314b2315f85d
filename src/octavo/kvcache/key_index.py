"""Flat tables by key, without objects for the garbage collector: ids of keys, latest keys, children of prefixes.

All three are one hash table from keys of 16 or 8 bytes to small ids:

    heads  [ 0 | 5 | 0 | 2 | … ]            by home: id + 1 of the key put last there, 0 for none
    after  [ – | 0 | 4 | 0 | 0 | 0 | … ]    by id + 1: the next key of the same home, 0 for none
    keys   [ – | key of 0 | key of 1 | … ]  by id + 1

There are as many homes as ids, so that a home never has more than one key on average. A key's home depends on
a random secret of the process, so that clients cannot choose keys that collide.
"""

from __future__ import annotations

import secrets
import struct
from array import array
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds
from octavo.kvcache.hashing import DIGEST_BYTES, PREFIX_BYTES, Keys

_MASK64 = (1 << 64) - 1
_FIRST_HALF, _BOTH_HALVES = struct.Struct("<Q").unpack_from, struct.Struct("<QQ").unpack_from
# Keys looked up at once: few at first, because most prompts miss early, then a growing number, up to what stays in the
# processor's cache.
_FIRST_PIECE = 128
_PIECE_GROWTH = 8
_LARGEST_PIECE = 8192

_Value = TypeVar("_Value")


class KeyIndex:
    """Keys of ids 0 .. capacity - 1. Each id has at most one key, each key at most one id.

    Args:
        capacity: number of ids.
        width: bytes of a key that are stored and compared, 8 or 16; `replace` requires 8.
    """

    # Per id of the capacity: its key, and 4 bytes each for a home and for the next key.
    BYTES_PER_ID = DIGEST_BYTES + 8

    def __init__(self, capacity: int, width: int = DIGEST_BYTES) -> None:
        self._halves = width // PREFIX_BYTES
        self._factor = secrets.randbits(64) | 1
        self._length = 0
        self._capacity = capacity = max(1, capacity)
        # Repeated, because an array made of bytes takes a sixteenth more than they do.
        self._heads = array("i", [0]) * capacity
        self._after = array("i", [0]) * (capacity + 1)
        self._keys = array("Q", [0]) * (self._halves * (capacity + 1))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Iterate over all ids that have a key."""
        return iter(self.ids().tolist())

    def ids(self) -> npt.NDArray[np.int32]:
        """Return all ids that have a key. O(capacity)."""
        entries, after = np.array(self._heads, np.int32), np.frombuffer(self._after, np.int32)
        found = [entries := entries[entries != 0]]
        # Go on to the next of each home; more rounds than entries would mean a circle.
        while entries.size and len(found) <= self._length:
            entries = after.take(entries)
            found.append(entries := entries[entries != 0])
        return np.concatenate(found) - 1

    def get(self, key: bytes) -> int | None:
        """Return the id of a key, or None."""
        first = _FIRST_HALF(key)[0]
        entry = self._heads[((first * self._factor & _MASK64) >> 32) * self._capacity >> 32]
        if not entry:
            return None
        keys, after = self._keys, self._after
        if self._halves == 1:
            while entry and keys[entry] != first:
                entry = after[entry]
        else:
            second = _BOTH_HALVES(key)[1]
            while entry and (keys[2 * entry] != first or keys[2 * entry + 1] != second):
                entry = after[entry]
        return entry - 1 if entry else None

    def key(self, entry_id: int) -> bytes:
        """Return the stored part of the key last put for an id."""
        at = (entry_id + 1) * self._halves
        return b"".join(half.to_bytes(8, "little") for half in self._keys[at : at + self._halves])

    def prefixes(self, entry_ids: Iterable[int]) -> list[int]:
        """Return the first `PREFIX_BYTES` of the keys last put for these ids, as numbers."""
        keys, halves = self._keys, self._halves
        return [keys[halves * (entry_id + 1)] for entry_id in entry_ids]

    def put(self, key: bytes, entry_id: int) -> bool:
        """Map a key to an id that has no key yet; False (and nothing changes) if the key already has an id."""
        heads, keys, halves, entry = self._heads, self._keys, self._halves, entry_id + 1
        first, second = _BOTH_HALVES(key) if halves == 2 else (_FIRST_HALF(key)[0], 0)
        home = ((first * self._factor & _MASK64) >> 32) * self._capacity >> 32
        other = heads[home]
        while other and (keys[halves * other] != first or (halves == 2 and keys[2 * other + 1] != second)):
            other = self._after[other]
        if other:
            return False
        keys[halves * entry] = first
        if halves == 2:
            keys[2 * entry + 1] = second
        self._after[entry], heads[home] = heads[home], entry
        self._length += 1
        return True

    def discard(self, entry_ids: Iterable[int]) -> int:
        """Forget these ids and their keys; returns how many of them had one."""
        heads, after, keys, halves = self._heads, self._after, self._keys, self._halves
        factor, size, removed = self._factor, self._capacity, 0
        for entry_id in entry_ids:
            entry = entry_id + 1
            if entry > size:
                continue
            home = ((keys[halves * entry] * factor & _MASK64) >> 32) * size >> 32
            other = heads[home]
            if other == entry:
                heads[home] = after[entry]
            else:
                while other and (following := after[other]) != entry:
                    other = following
                if not other:
                    continue
                after[other] = after[entry]
            removed += 1
        self._length -= removed
        return removed

    def replace(self, prefixes: Sequence[int], entry_ids: Sequence[int]) -> list[int]:
        """Give each id, none of which has a key, a key of 8 bytes, which another id may have now.

        Returns:
            For each id, the other that had its key and has lost it; -1 if there was none.
        """
        heads, after, keys = self._heads, self._after, self._keys
        factor, size, displaced = self._factor, self._capacity, list[int]()
        for first, entry_id in zip(prefixes, entry_ids, strict=True):
            entry, before = entry_id + 1, 0
            home = ((first * factor & _MASK64) >> 32) * size >> 32
            head = other = heads[home]
            if other and keys[other] == first:
                before, head = other, after[other]
            elif other:
                while (following := after[other]) and keys[following] != first:
                    other = following
                if following:
                    before, after[other] = following, after[following]
            keys[entry], after[entry], heads[home] = first, head, entry
            displaced.append(before - 1)
        self._length += displaced.count(-1)
        return displaced

    def find_leading(self, keys: Keys, flip: int = 0) -> BlockIds:
        """Return the ids of the leading keys, up to the first key that has none.

        Args:
            flip: bits to flip in each key's second half before looking it up.
        """
        heads, after = np.frombuffer(self._heads, np.int32), np.frombuffer(self._after, np.int32)
        found: list[npt.NDArray[np.int32]] = []
        elsewhere: list[npt.NDArray[np.intp]] = []  # keys whose home has another key first
        start, end, is_missing = 0, min(len(keys), _FIRST_PIECE), False
        while start < end and not is_missing:
            piece = _flipped(keys[start:end], flip)
            at = heads.take(self._homes(piece))
            if is_missing := not at.all():
                at = at[: int((at == 0).argmax())]
                piece = piece[: len(at)]
            found.append(at)
            elsewhere.append(np.flatnonzero(self._differ(at, piece)) + start)
            start, end = end, min(len(keys), end + min(_PIECE_GROWTH * end, _LARGEST_PIECE))
        if not found:
            return np.empty(0, np.int32)
        ids, open_ = np.concatenate(found), np.concatenate(elsewhere)
        # Go on to the next key of the same home until each key has found its entry or the end. All keys go together,
        # because the fixed cost of a round exceeds the work for a few keys.
        some = _flipped(keys.take(open_, axis=0), flip)
        there = ids.take(open_)
        while open_.size:
            ids[open_] = there = after.take(there)
            still = np.flatnonzero(self._differ(there, some) & (there != 0))
            open_, there, some = open_.take(still), there.take(still), some.take(still, axis=0)
        if not ids.all():
            ids = ids[: int((ids == 0).argmax())]
        ids -= 1
        return ids

    def _homes(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the home of each key."""
        # In place, because a long prompt has tens of thousands of keys.
        home = keys[:, 0] * np.uint64(self._factor)
        home >>= np.uint64(32)
        home *= np.uint64(self._capacity)
        home >>= np.uint64(32)
        return home.view(np.int64)

    def _differ(self, entries: npt.NDArray[np.int32], keys: Keys) -> npt.NDArray[np.bool_]:
        """Return which entries have a key other than the given one."""
        parts = np.frombuffer(cast(Any, self._keys), np.uint64).reshape(-1, self._halves).take(entries, axis=0)
        parts ^= keys
        differ: npt.NDArray[np.bool_] = (parts[:, 0] | parts[:, -1]) != 0
        return differ

    def check(self) -> Iterator[str]:
        """Yield every violation of the table's own invariants. O(capacity)."""
        ids = self.ids()
        if len(ids) != self._length:
            yield f"{len(ids)} ids have a key, {self._length} are counted"
        keys = np.frombuffer(cast(Any, self._keys), np.uint64).reshape(-1, self._halves).take(ids + 1, axis=0)
        while len(ids):
            found = self.find_leading(keys)
            lost = np.flatnonzero(found != ids[: len(found)]).tolist()
            if len(found) < len(ids):
                lost.append(len(found))
            yield from (f"id {i} is not found by its key" for i in ids[lost].tolist())
            ids, keys = ids[len(found) + 1 :], keys[len(found) + 1 :]


class LatestKeys(Generic[_Value]):
    """The latest keys with a value each, in a ring in flat memory. Keys with the same prefix count as one.

    Args:
        capacity: number of keys; the newest takes the place of the oldest.
        empty: a sequence of one value, which stands for none.
    """

    # A key's prefix, and two entries of 4 bytes in the index.
    BYTES_EACH = PREFIX_BYTES + 8

    def __init__(self, capacity: int, empty: MutableSequence[_Value]) -> None:
        self.capacity = capacity
        self._index = KeyIndex(capacity, PREFIX_BYTES)
        self._empty = empty[0]
        # Repeated, so that it takes no more than its values.
        self._values = cast(MutableSequence[_Value], cast(Any, empty) * capacity)
        self._next = 0

    def __len__(self) -> int:
        return len(self._index)

    def add(self, prefixes: Sequence[int], values: Sequence[_Value]) -> list[_Value]:
        """Add keys, the newest last; returns the values of those that they displace, as older or as equal ones."""
        start, size = self._next, self.capacity
        if len(prefixes) > size:
            return self.add(prefixes[:size], values[:size]) + self.add(prefixes[size:], values[size:])
        end = start + len(prefixes)
        places = range(start, end) if end <= size else [*range(start, size), *range(end - size)]
        self._next = end % size
        kept, empty = self._values, self._empty
        oldest = [place for place in places if kept[place] != empty]
        self._index.discard(oldest)
        displaced = [kept[place] for place in oldest]
        twins = self._index.replace(prefixes, places)
        for place, value in zip(places, values, strict=True):
            kept[place] = value
        for twin in twins:
            if twin >= 0:
                displaced.append(kept[twin])
                kept[twin] = empty
        return displaced

    def get(self, key: bytes) -> _Value | None:
        place = self._index.get(key)
        return None if place is None else self._values[place]

    def take(self, key: bytes) -> _Value | None:
        """Return the value of a key, which is forgotten; None if it is not there."""
        if (place := self._index.get(key)) is None:
            return None
        value, self._values[place] = self._values[place], self._empty
        self._index.discard((place,))
        return value

    def check(self) -> Iterator[str]:
        return self._index.check()


class Children:
    """The published blocks that continue each prefix, in flat memory.

        latest   the first 8 bytes of the prefix's key -> the block published last
        older    by block: the block with the same parent that was published before it, 0 for none
        newer    by block: the one that was published after it

    The blocks of all groups of layers that continue a prefix are in one list, because their keys begin alike. So are
    those of two prefixes whose keys collide in 8 bytes. Readers check the rest of the key where it matters.
    """

    BYTES_PER_ID = PREFIX_BYTES + 16

    def __init__(self, num_blocks: int) -> None:
        self._latest = KeyIndex(num_blocks, PREFIX_BYTES)
        self._older = array("i", [0]) * num_blocks
        self._newer = array("i", [0]) * num_blocks

    def add(self, block_ids: Sequence[BlockId], parents: Sequence[int]) -> None:
        """Add blocks that are published, each with the first 8 bytes of the key of the prefix that it continues."""
        for block_id, before in zip(block_ids, self._latest.replace(parents, block_ids), strict=True):
            if before >= 0:
                self._older[block_id], self._newer[before] = before, block_id

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """Remove blocks that are evicted."""
        older, newer, alone = self._older, self._newer, list[BlockId]()
        for block_id in block_ids:
            before, after = older[block_id], newer[block_id]
            if not before and not after:
                alone.append(block_id)
                continue
            older[block_id] = newer[block_id] = 0
            if before:
                newer[before] = after
            if after:
                older[after] = before
            else:
                self._latest.discard((block_id,))
                self._latest.put(self._latest.key(block_id), before)
        self._latest.discard(alone)

    def latest(self, key: bytes) -> BlockId | None:
        """Return the block published last after the prefix with this key; None if there is none."""
        return next(self.of(key), None)

    def of(self, key: bytes) -> Iterator[BlockId]:
        """Iterate over the blocks after the prefix with this key, the latest first."""
        block_id = self._latest.get(key) or NULL_BLOCK
        while block_id != NULL_BLOCK:
            yield BlockId(block_id)
            block_id = self._older[block_id]

    def check(self, published: npt.NDArray[np.intp]) -> Iterator[str]:
        """Yield every violation of the lists' own invariants, given all published blocks. O(blocks)."""
        yield from self._latest.check()
        ids, older = self._latest.ids(), np.frombuffer(cast(Any, self._older), np.int32)
        rounds = [ids]
        while ids.size and len(rounds) <= len(older):  # more rounds than blocks would mean a circle
            ids = older.take(ids)
            rounds.append(ids := ids[ids != NULL_BLOCK])
        # By counts, because sets of many blocks take numpy ten times as long.
        times, expected = np.bincount(np.concatenate(rounds), minlength=len(older)), np.zeros(len(older), np.intp)
        expected[published] = 1
        for block_id in np.flatnonzero((times != 0) != (expected != 0)).tolist():
            yield f"block {block_id} is published or listed with its parent's children, but not both"
        if (times > 1).any():
            yield "a block is listed twice among its parent's children"


def _flipped(keys: Keys, flip: int) -> Keys:
    return keys ^ np.array([0, flip], np.uint64) if flip else keys

"""Keys of the most recently evicted blocks, and when each was last used."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kvcache.hashing import DIGEST_BYTES
from octavo.kvcache.key_index import KeyIndex

_NONE = -1


class Ghost(NamedTuple):
    """When an evicted block was last used, and to which class it belonged (0 or 1)."""

    stamp: int
    kind: int


class GhostList:
    """A ring of evicted blocks in flat memory: the oldest makes room for the newest. O(1) an operation.

    Args:
        capacity: a power of two, so that the index needs two slots a key and no more.
    """

    # A key, two slots of 4 bytes, and a stamp whose lowest bit is the class.
    BYTES_EACH = DIGEST_BYTES + 8 + 8

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._index = KeyIndex(capacity)
        self._used = array("q", [_NONE]) * capacity
        self._next = 0

    def __len__(self) -> int:
        return len(self._index)

    def add(self, key: bytes, ghost: Ghost) -> Ghost | None:
        """Remember an evicted block; returns the one that had to make room."""
        displaced = self.take(key)
        place = self._next
        if (used := self._used[place]) != _NONE:
            displaced = Ghost(used >> 1, used & 1)
            self._index.remove(place)
        self._index.put(key, place)
        self._used[place] = ghost.stamp << 1 | ghost.kind
        self._next = (place + 1) % self.capacity
        return displaced

    def take(self, key: bytes) -> Ghost | None:
        """Find and forget a block."""
        place = self._index.get(key)
        if place is None:
            return None
        used = self._used[place]
        self._index.remove(place)
        self._used[place] = _NONE
        return Ghost(used >> 1, used & 1)

    def sample(self, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], float]:
        """Stamps and classes of about `most` of the ghosts, and how many each of them stands for."""
        step = max(1, self.capacity // most)
        used = np.array(self._used[::step], np.int64)
        used = used[used != _NONE]
        return used >> 1, used & 1, float(step)

"""Keys of the most recently evicted blocks, and when each was last used."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from octavo.kvcache.key_index import PREFIX_BYTES, KeyIndex

_NONE = (1 << 32) - 1


class Ghost(NamedTuple):
    """An evicted block: when it was last used, and its class (0 or 1)."""

    stamp: int
    kind: int


class GhostList:
    """A ring of evicted blocks in flat memory: the oldest makes room for the newest. O(1) per operation.

    Args:
        capacity: should be a power of two, so that the index needs only two slots per key.
    """

    # A key's prefix, two slots of 4 bytes, and a stamp whose lowest bit is the class.
    BYTES_EACH = PREFIX_BYTES + 8 + 4

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._index = KeyIndex(capacity, PREFIX_BYTES)
        self._used = array("I", [_NONE]) * capacity
        self._next = 0

    def __len__(self) -> int:
        return len(self._index)

    def add(self, key: bytes, ghost: Ghost) -> Ghost | None:
        """Remember an evicted block; returns the ghost that it displaced, if any."""
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
        """Find and forget a block; None if it is not remembered."""
        place = self._index.get(key)
        if place is None:
            return None
        used = self._used[place]
        self._index.remove(place)
        self._used[place] = _NONE
        return Ghost(used >> 1, used & 1)

    def set_back(self, uses: int) -> None:
        """Reduce all stamps by `uses`, but not below 0."""
        used = np.frombuffer(cast(Any, self._used), np.uint32)
        known = used != _NONE
        used[known] = np.maximum(used[known], 2 * uses + (used[known] & 1)) - 2 * uses

    def sample(self, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], float]:
        """Return stamps and classes of about `most` ghosts, and how many ghosts each stands for."""
        step = max(1, self.capacity // most)
        used = np.array(self._used[::step], np.int64)
        used = used[used != _NONE]
        return used >> 1, used & 1, float(step)

"""Keys of the most recently evicted blocks, and when each was last used."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from octavo.kvcache.hashing import PREFIX_BYTES, key_prefix
from octavo.kvcache.key_index import LatestKeys

_NONE = (1 << 32) - 1


class GhostList:
    """A ring of evicted blocks in flat memory: the oldest makes room for the newest. O(1) per operation.

    Of each block it knows the last use: when it was, times two, plus the block's class (0 or 1). A number rather than a
    pair, because a pair takes as long to make as all the rest.
    """

    # A key's prefix, two entries of 4 bytes in the index, and the last use.
    BYTES_EACH = PREFIX_BYTES + 8 + 4

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys = LatestKeys(capacity)
        self._used = array("I", [_NONE]) * capacity

    def __len__(self) -> int:
        return len(self._keys.index)

    def add(self, key: bytes, use: int) -> int | None:
        """Remember an evicted block; returns the last use of one that it displaced, if any."""
        displaced = self.add_all((key_prefix(key),), (use,))
        return displaced[-1] if displaced else None

    def add_all(self, prefixes: Sequence[int], uses: Sequence[int]) -> list[int]:
        """Remember evicted blocks by the prefixes of their keys; returns the last uses of those that they displaced."""
        if len(prefixes) > self.capacity:
            half = len(prefixes) // 2
            return self.add_all(prefixes[:half], uses[:half]) + self.add_all(prefixes[half:], uses[half:])
        used, displaced = self._used, list[int]()
        places, twins = self._keys.add_all(prefixes)
        for place, use in zip(places, uses, strict=True):
            if (before := used[place]) != _NONE:
                displaced.append(before)
            used[place] = use
        for twin in twins:
            if (before := used[twin]) != _NONE:
                displaced.append(before)
            used[twin] = _NONE
        return displaced

    def take(self, key: bytes) -> int | None:
        """Find and forget a block; returns its last use, or None if it is not remembered."""
        place = self._keys.index.get(key)
        if place is None:
            return None
        use = self._used[place]
        self._keys.index.remove(place)
        self._used[place] = _NONE
        return use

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

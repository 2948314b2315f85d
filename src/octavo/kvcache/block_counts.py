"""Reference counts of a set of blocks, in sorted arrays, because a dictionary would cost a microsecond per block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from octavo.kvcache.block import BlockId, BlockIds


class BlockCounts:
    """Blocks in ascending order, each with its number of references. Every operation takes many blocks at once.

    ids      [ 3 | 7 | 8 | … ]
    counts   [ 1 | 2 | 1 | … ]     never 0
    """

    __slots__ = ("_counts", "_ids")

    def __init__(self) -> None:
        self._ids: BlockIds = np.empty(0, np.int32)
        self._counts: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def __len__(self) -> int:
        """The number of different blocks."""
        return len(self._ids)

    def items(self) -> Iterator[tuple[BlockId, int]]:
        return zip(map(BlockId, self._ids.tolist()), self._counts.tolist(), strict=True)

    def add(self, blocks: BlockIds) -> None:
        """Count one more reference to each of these blocks, which must be distinct."""
        new = np.sort(blocks)
        if not len(self._ids):
            self._ids, self._counts = new, np.ones(len(new), np.int32)
            return
        places, known = self._find(new)
        self._counts[places[known]] += 1
        if not known.all():
            places, new = places[~known], new[~known]
            self._ids = np.insert(self._ids, places, new)
            self._counts = np.insert(self._counts, places, 1)

    def remove(self, blocks: BlockIds) -> None:
        """Drop a reference to each block; duplicates count. Raises KeyError, changing nothing, if one has too few."""
        gone, times = np.unique(blocks, return_counts=True)
        places, known = self._find(gone)
        if not known.all():
            raise KeyError(int(gone[~known][0]))
        left = self._counts[places] - times
        if left.min(initial=0) < 0:
            raise KeyError(int(gone[left < 0][0]))
        self._counts[places] = left
        if not left.all():
            kept = self._counts > 0
            self._ids, self._counts = self._ids[kept], self._counts[kept]

    def num_missing(self, blocks: BlockIds) -> int:
        """Return how many of these blocks are not in the set."""
        return len(blocks) - int(self._find(blocks)[1].sum())

    def _find(self, blocks: BlockIds) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the position of each block, or where it would be inserted, and whether it is in the set."""
        places = np.searchsorted(self._ids, blocks)
        if not len(self._ids):
            return places, np.zeros(len(blocks), np.bool_)
        return places, self._ids.take(places, mode="clip") == blocks

"""Evicts the block least likely to be used again soon, learning from evicted blocks that were."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.kvcache.block import BlockId, where
from octavo.kvcache.eviction.policies import LruEviction, SomeBlocks
from octavo.kvcache.hashing import PREFIX_BYTES, key_prefix
from octavo.kvcache.key_index import LatestKeys

_ONCE, _AGAIN = 0, 1
_RINGS = (-1, -2)  # by class
_GHOSTS_PER_BLOCK = 4
_SHORTEST_PERIOD = 256
_SAMPLE = 4096
# A block that came back precedes blocks of its sequence that did not, which are lost without it. So it is evicted
# before an older block that was used once only if its rate is less than half of that block's.
_ORPHANS = 0.5
_STAMPS = (1 << 31) - 1  # stamps are numbers of uses modulo this plus one, and so are differences of stamps
_NEVER = (1 << 32) - 1
_PER_OCTAVE = 3
_YOUNGEST = 32  # ages below pool / 32 are one bucket
_FORGETTING = 0.95  # factor on all counts after each fit
_COUNTED_AT_ONCE = 1024  # ends of rests
_ASSUMED = 4  # prior returns of each class, one per `num_blocks` uses, so that few observations have little effect

Ages = npt.NDArray[np.int64]
Kinds = npt.NDArray[np.int64]


class GhostList(LatestKeys[int]):
    """The last uses of evicted blocks, the oldest of which make room for the newest. O(1) per operation.

    A use is a number: when it was, times two, plus the block's class (0 or 1). A pair would take as long to make as all
    the rest.
    """

    BYTES_EACH = LatestKeys.BYTES_EACH + 4

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, array("I", [_NEVER]))

    def sample(self, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], float]:
        """Return stamps and classes of about `most` ghosts, and how many ghosts each stands for."""
        step = max(1, self.capacity // most)
        used = np.array(self._values[::step], np.int64)
        used = used[used != _NEVER]
        return used >> 1, used & 1, float(step)


class ReturnRates:
    """Estimates the best rate of hits that keeping a block can bring, by its class and age.

    A block's time at rest ends when it returns, or when it is forgotten. The model counts, by class and age, returns
    and the time that blocks spent at that age, including those still at rest. The rate of return of a block of age a is
    the Gittins index of its class,

        max over b > a of   returns between a and b / time between a and b

    which is the most hits per time that keeping it can bring (the hit density of LHD, Beckmann 2018, has b = infinity).
    Ages are counted in buckets, three per octave, and rates are interpolated linearly between them.

    Other features of a block (turn, think time, depth, lengths) did not help on requests outside the training set.

    Args:
        num_blocks: size of the pool. Ages are measured in uses of blocks, so all blocks could be used once in this
            time.
        oldest: ages above this share one bucket.

    Attributes:
        rates: by class and bucket; empty until the first fit.
    """

    def __init__(self, num_blocks: int, oldest: int) -> None:
        self._num_blocks = num_blocks
        youngest = max(1.0, num_blocks / _YOUNGEST)
        self._edges = [0.0]
        while self._edges[-1] < oldest:
            self._edges.append(youngest * 2 ** ((len(self._edges) - 1) / _PER_OCTAVE))
        self._returns, self._ends = np.zeros((2, len(self._edges))), np.zeros((2, len(self._edges)))
        self.rates: list[list[float]] = []
        # Rests that are not counted yet, each as twice the age less the class: many are counted faster together.
        self._returned: list[int] = []
        self._lost: list[int] = []

    def rate(self, kind: int, age: int) -> float:
        """Return the rate of a block of this class and age; only valid once fitted."""
        edges, rates = self._edges, self.rates[kind]
        bucket = bisect_right(edges, age) - 1
        if bucket + 1 == len(edges):
            return rates[bucket]
        step = (age - edges[bucket]) / (edges[bucket + 1] - edges[bucket])
        return rates[bucket] + step * (rates[bucket + 1] - rates[bucket])

    def note_returned(self, rests: Sequence[int]) -> None:
        """Record that blocks have returned: of each, twice its age less its class."""
        self._returned += rests
        if len(self._returned) >= _COUNTED_AT_ONCE:
            self._count_noted()

    def note_lost(self, uses: Sequence[int], now: int) -> None:
        """Record that blocks will not return, by their last uses."""
        self._lost += [2 * (now - (use >> 1) & _STAMPS) - (use & 1) for use in uses]
        if len(self._lost) >= _COUNTED_AT_ONCE:
            self._count_noted()

    def fit(self, waiting: Iterable[tuple[Kinds, Ages, float]]) -> None:
        """Fit the rates to times at rest that have ended, and to those that continue.

        Args:
            waiting: samples of the blocks still at rest: classes, ages, and how many blocks each entry stands for.
        """
        self._count_noted()
        ends = self._ends.copy()
        for kinds, ages, weight in waiting:
            ends += weight * self._count(kinds, ages)
        widths = np.diff(self._edges, append=2 * self._edges[-1])
        # A block whose rest ends in a bucket spent the full width of all younger ones and half of its own.
        reached = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1]
        spent = (reached - ends) * widths + ends * widths / 2
        assumed_time = _ASSUMED * self._num_blocks
        self.rates = [
            [
                float(((np.cumsum(returns[b:]) + _ASSUMED) / (np.cumsum(time[b:]) + assumed_time)).max())
                for b in range(len(widths))
            ]
            for returns, time in zip(self._returns, spent, strict=True)
        ]
        self._returns *= _FORGETTING
        self._ends *= _FORGETTING

    def _count_noted(self) -> None:
        returned, lost = (np.array(noted, np.int64) for noted in (self._returned, self._lost))
        returns = self._count(returned & 1, (returned + 1) >> 1)
        self._returns += returns
        self._ends += returns + self._count(lost & 1, (lost + 1) >> 1)
        self._returned.clear()
        self._lost.clear()

    def _count(self, kinds: npt.NDArray[np.integer[Any]], ages: Ages) -> npt.NDArray[Any]:
        """Return the number of blocks of each class and age."""
        buckets = np.searchsorted(self._edges, ages, side="right") - 1
        counts = np.bincount(kinds.astype(np.int64) * len(self._edges) + buckets, minlength=self._ends.size)
        return counts.reshape(self._ends.shape)


class AdaptiveEviction(LruEviction):
    """Evicts from two classes, blocks used once and blocks that came back, each in order of last use. The victim is the
    oldest block of the class with the lower rate of return.

        once   oldest <─> … <─> newest       ghosts: keys of evicted blocks, four times as many as blocks
        again  oldest <─> … <─> newest

    ARC (Megiddo and Modha 2003) moves a boundary between two such lists with every ghost that is hit. Here, ghosts
    complete the counts of returns by class and age (`ReturnRates`). Time is measured in uses of blocks, so that it does
    not depend on load. If both classes return alike, this is LRU; if most blocks are never used again, those used once
    are evicted early; and when old conversations end, blocks that came back are evicted too.

    The rates are recomputed from a sample after as many uses as there are blocks, so that each operation is O(1).
    """

    # Its place in a ring, a stamp, a key's prefix, a class, and the ghosts.
    BYTES_PER_BLOCK = LruEviction.BYTES_PER_BLOCK + 4 + PREFIX_BYTES + 1 + _GHOSTS_PER_BLOCK * GhostList.BYTES_EACH
    _NUM_RINGS = 2

    def __init__(self) -> None:
        super().__init__()
        self._kinds = bytearray()
        self._stamps = array("i")
        self._prefixes = array("Q")  # of keys
        self._clock = 0
        self._due = 0
        # From the first eviction on.
        self._ghosts: GhostList | None = None
        self._model: ReturnRates | None = None

    def reserve(self, num_blocks: int) -> None:
        super().reserve(num_blocks)
        if (missing := num_blocks - len(self._kinds)) > 0:
            # New arrays, because growing one may allocate more than that.
            self._kinds = self._kinds + bytes(missing)
            self._stamps = self._stamps + array("i", [0]) * missing
            self._prefixes = self._prefixes + array("Q", [0]) * missing

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        ghost = self._ghosts.take(key) if key and self._ghosts is not None else None
        if ghost is not None and self._model is not None:
            self._model.note_returned([2 * self._age(ghost >> 1) - (ghost & 1)])
        self._prefixes[block_id] = key_prefix(key)
        self._kinds[block_id] = _ONCE if ghost is None else _AGAIN
        self._clock += 1
        self._stamps[block_id] = self._clock & _STAMPS

    def hit(self, block_ids: SomeBlocks, priority: int) -> None:
        kinds, stamps, now, rests = self._kinds, self._stamps, self._clock, list[int]()
        self._clock += len(block_ids)
        if isinstance(block_ids, np.ndarray):
            kinds_array, stamps_array = np.frombuffer(kinds, np.uint8), np.frombuffer(stamps, np.int32)
            times = np.arange(now, self._clock)
            if self._model is not None:
                ages = times - stamps_array.take(block_ids) & _STAMPS
                rests = (2 * ages - kinds_array.take(block_ids)).tolist()
            kinds_array[block_ids], stamps_array[block_ids] = _AGAIN, times + 1 & _STAMPS
        else:
            for at, block_id in enumerate(block_ids, now):
                rests.append(2 * (at - stamps[block_id] & _STAMPS) - kinds[block_id])
                kinds[block_id], stamps[block_id] = _AGAIN, at + 1 & _STAMPS
        if self._model is not None:
            self._model.note_returned(rests)

    def add(self, block_ids: SomeBlocks) -> None:
        kinds, stamps, now = self._kinds, self._stamps, self._clock & _STAMPS
        if isinstance(block_ids, np.ndarray):
            again = np.frombuffer(kinds, np.uint8).take(block_ids) == _AGAIN
            np.frombuffer(stamps, np.int32)[block_ids] = now
            self._append(_RINGS[_ONCE], where(~again, block_ids))
            self._append(_RINGS[_AGAIN], where(again, block_ids))
            return
        for block_id in block_ids:
            stamps[block_id] = now
        self._append(_RINGS[_ONCE], [block_id for block_id in block_ids if kinds[block_id] == _ONCE])
        self._append(_RINGS[_AGAIN], [block_id for block_id in block_ids if kinds[block_id] == _AGAIN])

    def _evict(self, count: int) -> list[BlockId]:
        victims: list[BlockId] = []
        while len(victims) < count:
            # Once the rates are learned again, another choice may be better for the rest.
            some = self._choose(1 if self._clock >= self._due else count - len(victims))
            self._remember(some)
            if self._clock >= self._due:
                assert self._model is not None
                self._model.fit(self._waiting())
                self._due = self._clock + self._period
            victims += some
        return victims

    @property
    def _num_blocks(self) -> int:
        """The number of blocks that may be held: all but the null block."""
        return len(self._kinds) - 1

    def _age(self, stamp: int) -> int:
        return self._clock - stamp & _STAMPS

    def _choose(self, most: int) -> list[BlockId]:
        """Evict at most `most` blocks that leave first by the current rates."""
        once, again = (BlockId(self._next[end]) for end in _RINGS)
        if once < 0 or again < 0:  # the end of an empty ring
            return self._take(_RINGS[_AGAIN if once < 0 else _ONCE], most)
        oldest, end = (again, _RINGS[_AGAIN]) if self._leaves_first(again, once) else (once, _RINGS[_ONCE])
        # Blocks last used together, of the same class, are the same to the rates.
        stamps, stamp = self._stamps, self._stamps[oldest]
        together = takewhile(lambda block_id: stamps[block_id] == stamp, islice(self._ring(end), most))
        return self._take(end, sum(1 for _ in together))

    def _leaves_first(self, again: BlockId, once: BlockId) -> bool:
        """Whether the victim is `again` rather than `once`, the oldest blocks of the two classes."""
        age, other_age = self._age(self._stamps[again]), self._age(self._stamps[once])
        if self._model is not None and self._model.rates:
            ours, theirs = self._model.rate(_AGAIN, age), self._model.rate(_ONCE, other_age)
            if age <= other_age:
                return ours < _ORPHANS * theirs
            if ours != theirs:
                return ours < theirs
        return age > other_age

    def _remember(self, victims: list[BlockId]) -> None:
        ghosts = self._ghosts
        # It is rebuilt when the ids have grown by more than an eighth, as those of a disk do.
        if ghosts is None or ghosts.capacity * 9 < _GHOSTS_PER_BLOCK * self._num_blocks * 8:
            ghosts = self._begin()
        stamps, kinds, prefixes = self._stamps, self._kinds, self._prefixes
        forgotten = ghosts.add(
            [prefixes[block_id] for block_id in victims],
            [stamps[block_id] << 1 | kinds[block_id] for block_id in victims],
        )
        if forgotten:
            assert self._model is not None
            self._model.note_lost(forgotten, self._clock)

    def _begin(self) -> GhostList:
        """Start without observations, for a pool of the size known now."""
        num_ghosts = _GHOSTS_PER_BLOCK * self._num_blocks
        self._ghosts = GhostList(num_ghosts)
        self._model = ReturnRates(self._num_blocks, num_ghosts + 2 * self._num_blocks)
        self._due = self._clock + self._period
        return self._ghosts

    @property
    def _period(self) -> int:
        return max(_SHORTEST_PERIOD, self._num_blocks)

    def _waiting(self) -> Iterator[tuple[Kinds, Ages, float]]:
        """Yield classes and ages of samples of ghosts and of blocks, and how many blocks each entry stands for."""
        assert self._ghosts is not None
        stamps, kinds, weight = self._ghosts.sample(_SAMPLE)
        yield kinds, self._clock - stamps & _STAMPS, weight
        step = max(1, self._num_blocks // _SAMPLE)
        blocks = slice(1, len(self._kinds), step)
        kinds = np.frombuffer(self._kinds[blocks], np.uint8).astype(np.int64)
        yield kinds, self._clock - np.array(self._stamps[blocks], np.int64) & _STAMPS, float(step)

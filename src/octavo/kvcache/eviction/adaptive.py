"""Evicts the block least likely to be used again soon, learning from evicted blocks that were."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds, as_indices, where
from octavo.kvcache.eviction.ghosts import GhostList
from octavo.kvcache.eviction.recency import SPARE, LruEviction
from octavo.kvcache.eviction.return_rates import Ages, Kinds, ReturnRates
from octavo.kvcache.hashing import PREFIX_BYTES

_ONCE, _AGAIN = 0, 1
_GHOSTS_PER_BLOCK = 4
_SHORTEST_PERIOD = 256
_SAMPLE = 4096
# A block that came back precedes blocks of its sequence that did not, which are lost without it. So it is evicted
# before an older block that was used once only if its rate is less than half of that block's.
_ORPHANS = 0.5
_MANY = 32  # number of hits from which arrays are faster than a loop
_LATEST = 1 << 30


class AdaptiveEviction:
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

    # Two rings, a stamp, a key's prefix, a class, and the ghosts.
    BYTES_PER_BLOCK = 2 * LruEviction.BYTES_PER_BLOCK + 4 + PREFIX_BYTES + 1 + _GHOSTS_PER_BLOCK * GhostList.BYTES_EACH

    def __init__(self) -> None:
        self._rings = (LruEviction(), LruEviction())
        self._kinds = bytearray()
        self._stamps = array("i")
        self._prefixes = array("Q")  # of keys
        self._highest = 0  # highest block id: the pool's size, once anything is evicted
        self._clock = 0
        self._ghosts: GhostList | None = None
        self._due = 0
        self._model: ReturnRates | None = None  # from the first eviction on, like the ghosts

    def reserve(self, num_blocks: int) -> None:
        for ring in self._rings:
            ring.reserve(num_blocks)
        missing = num_blocks - len(self._kinds)
        if missing > 0:
            self._highest = num_blocks - 1
            # New arrays, because growing one may allocate more than that.
            self._kinds = self._kinds + bytes(missing)
            self._stamps = self._stamps + array("i", [0]) * missing
            self._prefixes = self._prefixes + array("Q", [0]) * missing

    def publish(self, block_id: BlockId, priority: int, key: bytes = b"") -> None:
        if block_id >= len(self._kinds):
            self._reserve(block_id)
        if self._clock >= _LATEST:
            self._keep_time()
        ghost = self._ghosts.take(key) if key and self._ghosts is not None else None
        if ghost is not None and self._model is not None:
            self._model.note_returned(ghost, self._clock)
        self._prefixes[block_id] = int.from_bytes(key[:PREFIX_BYTES], "little")
        self._kinds[block_id] = _ONCE if ghost is None else _AGAIN
        self._clock += 1
        self._stamps[block_id] = self._clock

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        self._keep_time()
        if len(block_ids) >= _MANY:
            self._hit_all(as_indices(block_ids))
            return
        kinds, stamps = self._kinds, self._stamps
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                if self._model is not None:
                    self._model.note_returned(stamps[block_id] << 1 | kinds[block_id], self._clock)
                kinds[block_id] = _AGAIN
                self._clock += 1
                stamps[block_id] = self._clock

    def add(self, block_id: BlockId) -> None:
        self._reserve(block_id)
        self._stamps[block_id] = self._clock
        self._rings[self._kinds[block_id]].add(block_id)

    def remove(self, block_id: BlockId) -> None:
        if block_id >= len(self._kinds):
            raise KeyError(block_id)
        self._rings[self._kinds[block_id]].remove(block_id)

    def add_all(self, block_ids: BlockIds) -> None:
        if block_ids.size:
            self._reserve(int(block_ids.max()))
            np.frombuffer(self._stamps, np.int32)[block_ids] = self._clock
            for ring, run in zip(self._rings, self._by_kind(block_ids), strict=True):
                ring.add_all(run)

    def remove_all(self, block_ids: BlockIds) -> None:
        if block_ids.size:
            self._reserve(int(block_ids.max()))
            for ring, run in zip(self._rings, self._by_kind(block_ids), strict=True):
                ring.remove_all(run)

    def evict(self) -> BlockId:
        return self.evict_many(1)[0]

    def evict_many(self, count: int) -> list[BlockId]:
        if count > len(self):
            raise KeyError(f"{count} blocks requested, {len(self)} held")
        victims: list[BlockId] = []
        while len(victims) < count:
            # Once the rates are learned again, another choice may be better for the rest.
            some = self._choose(1 if self._clock >= self._due else count - len(victims))
            self._remember(some)
            if self._clock >= self._due:
                self._learn()
            victims += some
        return victims

    def restore(self, block_id: BlockId) -> None:
        if self._ghosts is not None:
            self._ghosts.take(self._prefixes[block_id].to_bytes(PREFIX_BYTES, "little"))
        self._rings[self._kinds[block_id]].restore(block_id)

    def __len__(self) -> int:
        once, again = self._rings
        return len(once) + len(again)

    def __contains__(self, block_id: object) -> bool:
        return any(block_id in ring for ring in self._rings)

    def __iter__(self) -> Iterator[BlockId]:
        for ring in self._rings:
            yield from ring

    def _hit_all(self, block_ids: BlockIds) -> None:
        kinds, stamps = np.frombuffer(self._kinds, np.uint8), np.frombuffer(self._stamps, np.int32)
        now = np.arange(self._clock, self._clock + len(block_ids))
        if self._model is not None:
            self._model.note_returns(kinds.take(block_ids), now - stamps.take(block_ids))
        kinds[block_ids] = _AGAIN
        now += 1
        stamps[block_ids] = now
        self._clock += len(block_ids)

    def _keep_time(self) -> None:
        """Set the clock back before stamps exceed 4 bytes, which is once in 2^29 uses."""
        if self._clock < _LATEST:
            return
        uses = _LATEST // 2
        stamps = np.frombuffer(self._stamps, np.int32)
        np.maximum(stamps, uses, out=stamps)
        stamps -= uses
        if self._ghosts is not None:
            self._ghosts.set_back(uses)
        self._clock -= uses
        self._due -= uses

    def _choose(self, most: int) -> list[BlockId]:
        """Evict at most `most` blocks that leave first by the current rates."""
        once, again = self._rings
        if not len(once) or not len(again):
            ring = once if len(once) else again
            return ring.evict_many(min(most, len(ring)))
        ring = again if self._leaves_first(again.oldest, once.oldest) else once
        # Blocks last used together, of the same class, are the same to the rates.
        stamps, stamp = self._stamps, self._stamps[ring.oldest]
        together = takewhile(lambda block_id: stamps[block_id] == stamp, islice(ring, most))
        return ring.evict_many(sum(1 for _ in together))

    def _leaves_first(self, again: BlockId, once: BlockId) -> bool:
        """Whether the victim is `again` rather than `once`, the oldest blocks of the two classes."""
        stamps, now = self._stamps, self._clock
        if self._model is not None and self._model.is_fitted:
            ours, theirs = self._model.rate(_AGAIN, now - stamps[again]), self._model.rate(_ONCE, now - stamps[once])
            if stamps[again] >= stamps[once]:
                return ours < _ORPHANS * theirs
            if ours != theirs:
                return ours < theirs
        return stamps[again] < stamps[once]

    def _remember(self, victims: list[BlockId]) -> None:
        ghosts = self._ghosts
        # A pool reserves its size. Where ids only grow as they are used, a few more do not matter.
        if ghosts is None or ghosts.capacity * (SPARE + 1) < _GHOSTS_PER_BLOCK * self._highest * SPARE:
            ghosts = self._begin()
        stamps, kinds, prefixes = self._stamps, self._kinds, self._prefixes
        forgotten = ghosts.add_all(
            [prefixes[block_id] for block_id in victims],
            [stamps[block_id] << 1 | kinds[block_id] for block_id in victims],
        )
        if forgotten:
            assert self._model is not None
            self._model.note_lost(forgotten, self._clock)

    def _begin(self) -> GhostList:
        """Start without observations, for a pool of the size known now."""
        num_ghosts = _GHOSTS_PER_BLOCK * self._highest
        self._ghosts = GhostList(num_ghosts)
        self._model = ReturnRates(self._highest, num_ghosts + 2 * self._highest)
        self._due = self._clock + self._period
        return self._ghosts

    @property
    def _period(self) -> int:
        return max(_SHORTEST_PERIOD, self._highest)

    def _learn(self) -> None:
        assert self._model is not None
        self._model.fit(self._waiting())
        self._due = self._clock + self._period

    def _waiting(self) -> Iterator[tuple[Kinds, Ages, float]]:
        """Yield classes and ages of samples of ghosts and of blocks, and how many blocks each entry stands for."""
        assert self._ghosts is not None
        stamps, kinds, weight = self._ghosts.sample(_SAMPLE)
        yield kinds, self._clock - stamps, weight
        step = max(1, self._highest // _SAMPLE)
        blocks = slice(1, self._highest + 1, step)
        kinds = np.frombuffer(self._kinds[blocks], np.uint8).astype(np.int64)
        yield kinds, self._clock - np.array(self._stamps[blocks], np.int64), float(step)

    def _by_kind(self, block_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
        again = np.frombuffer(self._kinds, np.uint8).take(block_ids) == _AGAIN
        return where(~again, block_ids), where(again, block_ids)

    def _reserve(self, block_id: int) -> None:
        self._highest = max(self._highest, block_id)
        missing = block_id + 1 - len(self._kinds)
        if missing > 0:
            missing = max(missing, len(self._kinds) // SPARE)
            self._kinds.extend(bytes(missing))
            self._stamps.frombytes(bytes(4 * missing))
            self._prefixes.frombytes(bytes(PREFIX_BYTES * missing))

"""Evict the block least likely to be used again soon, learning from which evicted blocks were."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds
from octavo.kvcache.eviction.ghosts import Ghost, GhostList
from octavo.kvcache.eviction.recency import LruEviction
from octavo.kvcache.eviction.return_rates import Ages, Kinds, ReturnRates
from octavo.kvcache.hashing import DIGEST_BYTES

_ONCE, _AGAIN = 0, 1
_GHOSTS_PER_BLOCK = 4
_SHORTEST_PERIOD = 256
_SAMPLE = 4096
# A block that came back stands before those of its sequence that did not: without it they are lost too. So it leaves
# before an older block that was used once only where its rate is less than half of that one's.
_ORPHANS = 0.5
_MANY = 32  # hits at once, from which on arrays are quicker than a loop


class AdaptiveEviction:
    """Two classes, blocks used once and blocks that came back, each in order of last use; the victim is the oldest of
    one or of the other, whichever has the lower rate of return.

        once   oldest <─> … <─> newest       ghosts: keys of evicted blocks, about four times as many as blocks
        again  oldest <─> … <─> newest

    ARC (Megiddo and Modha 2003) moves a boundary between two such lists with every ghost that is hit. Here, ghosts
    complete a count, by class and age, of what returned (`ReturnRates`). Time is counted in uses of blocks, so that
    load does not matter. Where both classes return alike, this is LRU; where most blocks are never used again, those
    used once leave early; and where old conversations end, blocks that came back leave too.

    The rates are computed anew after as many uses as there are blocks, from a sample, so that an operation is O(1).
    """

    # Two rings, a stamp, a key and a class; arrays may have grown to twice what is needed. And the ghosts.
    BYTES_PER_BLOCK = 2 * (2 * LruEviction.BYTES_PER_BLOCK + 8 + DIGEST_BYTES + 1) + 6 * GhostList.BYTES_EACH

    def __init__(self) -> None:
        self._rings = (LruEviction(), LruEviction())
        self._kinds = bytearray()
        self._stamps = array("q")
        self._keys = bytearray()
        self._highest = 0  # block id: the pool's size, once anything is evicted
        self._clock = 0
        self._ghosts: GhostList | None = None
        self._due = 0
        self._model: ReturnRates | None = None  # from the first eviction on, as the ghosts

    def publish(self, block_id: BlockId, position: int, priority: int, key: bytes = b"") -> None:
        self._reserve(block_id)
        ghost = self._ghosts.take(key) if self._ghosts is not None else None
        if ghost is not None:
            self._note(ghost, returned=True)
        self._keys[block_id * DIGEST_BYTES : (block_id + 1) * DIGEST_BYTES] = key or bytes(DIGEST_BYTES)
        self._kinds[block_id] = _ONCE if ghost is None else _AGAIN
        self._clock += 1
        self._stamps[block_id] = self._clock

    def hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        if len(block_ids) >= _MANY:
            self._hit_all(np.array(block_ids, np.int32))
            return
        kinds, stamps = self._kinds, self._stamps
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                if self._model is not None:
                    self._note(Ghost(stamps[block_id], kinds[block_id]), returned=True)
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
            np.frombuffer(self._stamps, np.int64)[block_ids] = self._clock
            for ring, run in zip(self._rings, self._by_kind(block_ids), strict=True):
                ring.add_all(run)

    def remove_all(self, block_ids: BlockIds) -> None:
        if block_ids.size:
            self._reserve(int(block_ids.max()))
            for ring, run in zip(self._rings, self._by_kind(block_ids), strict=True):
                ring.remove_all(run)

    def evict(self) -> BlockId:
        once, again = self._rings
        if not len(once) or (len(again) and self._leaves_first(again.oldest, once.oldest)):
            victim = again.evict()
        else:
            victim = once.evict()
        self._remember(victim)
        if self._clock >= self._due:
            self._learn()
        return victim

    def restore(self, block_id: BlockId) -> None:
        if self._ghosts is not None:
            self._ghosts.take(self._key(block_id))
        self._rings[self._kinds[block_id]].restore(block_id)

    def __len__(self) -> int:
        return sum(map(len, self._rings))

    def __contains__(self, block_id: object) -> bool:
        return any(block_id in ring for ring in self._rings)

    def __iter__(self) -> Iterator[BlockId]:
        for ring in self._rings:
            yield from ring

    def _hit_all(self, block_ids: BlockIds) -> None:
        run = block_ids[block_ids != NULL_BLOCK]
        kinds, stamps = np.frombuffer(self._kinds, np.uint8), np.frombuffer(self._stamps, np.int64)
        now = self._clock + np.arange(len(run))
        if self._model is not None:
            self._model.note_returns(kinds[run], now - stamps[run])
        kinds[run] = _AGAIN
        stamps[run] = now + 1
        self._clock += len(run)

    def _leaves_first(self, again: BlockId, once: BlockId) -> bool:
        """Whether, of the oldest of both classes, the one that came back is the victim."""
        stamps, now = self._stamps, self._clock
        if self._model is not None and self._model.is_fitted:
            ours, theirs = self._model.rate(_AGAIN, now - stamps[again]), self._model.rate(_ONCE, now - stamps[once])
            if stamps[again] >= stamps[once]:
                return ours < _ORPHANS * theirs
            if ours != theirs:
                return ours < theirs
        return stamps[again] < stamps[once]

    def _remember(self, victim: BlockId) -> None:
        wanted = _power_of_two(_GHOSTS_PER_BLOCK * self._highest)
        if self._ghosts is None or self._ghosts.capacity < wanted:
            self._begin(wanted)
        assert self._ghosts is not None
        ghost = Ghost(self._stamps[victim], self._kinds[victim])
        if (forgotten := self._ghosts.add(self._key(victim), ghost)) is not None:
            self._note(forgotten, returned=False)

    def _begin(self, num_ghosts: int) -> None:
        """Nothing is known of a pool of this size."""
        self._ghosts = GhostList(num_ghosts)
        self._model = ReturnRates(self._highest, num_ghosts + 2 * self._highest)
        self._due = self._clock + self._period

    @property
    def _period(self) -> int:
        return max(_SHORTEST_PERIOD, self._highest)

    def _note(self, ghost: Ghost, *, returned: bool) -> None:
        assert self._model is not None
        self._model.note(ghost.kind, self._clock - ghost.stamp, returned=returned)

    def _learn(self) -> None:
        assert self._model is not None
        self._model.fit(self._waiting())
        self._due = self._clock + self._period

    def _waiting(self) -> Iterator[tuple[Kinds, Ages, float]]:
        """Classes and ages of ghosts and of blocks, a sample of each, and how many an entry stands for."""
        assert self._ghosts is not None
        stamps, kinds, weight = self._ghosts.sample(_SAMPLE)
        yield kinds, self._clock - stamps, weight
        step = max(1, self._highest // _SAMPLE)
        blocks = slice(1, self._highest + 1, step)
        kinds = np.frombuffer(self._kinds[blocks], np.uint8).astype(np.int64)
        yield kinds, self._clock - np.array(self._stamps[blocks], np.int64), float(step)

    def _by_kind(self, block_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
        again = np.frombuffer(self._kinds, np.uint8)[block_ids] == _AGAIN
        return block_ids[~again], block_ids[again]

    def _key(self, block_id: BlockId) -> bytes:
        return bytes(self._keys[block_id * DIGEST_BYTES : (block_id + 1) * DIGEST_BYTES])

    def _reserve(self, block_id: int) -> None:
        self._highest = max(self._highest, block_id)
        missing = block_id + 1 - len(self._kinds)
        if missing > 0:
            missing = max(missing, len(self._kinds))
            self._kinds.extend(bytes(missing))
            self._stamps.frombytes(bytes(8 * missing))
            self._keys.extend(bytes(DIGEST_BYTES * missing))


def _power_of_two(number: int) -> int:
    """The nearest, by ratio."""
    below = 1 << max(1, number).bit_length() - 1
    return below if number * number < 2 * below * below else 2 * below

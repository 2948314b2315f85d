"""The block pool: reference counts, free blocks and evictable blocks. O(1) per operation and block."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from octavo.errors import CacheError
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockIds, BlockState, BlockTable, as_array, as_indices, where
from octavo.kvcache.eviction.base import EvictionPolicy

# With more blocks than this, counts are updated as whole arrays, whose fixed cost is that of some 30 blocks in a loop.
_MANY = 64


class BlockPool:
    """Reference counts, and two sources of blocks: the free stack first, then eviction.

        allocate ──> active ──release──> free       (holds nothing)
                       ^   └──release──> cached     (published: a prefix hit could use it)
                       ├────acquire────────┘ └──evict──> allocate
                       │                 pin ↓ ↑ unpin
                       └────acquire───── pinned     (published and protected: the policy does not hold it)

    A block with a pin is active while it is referenced, and pinned again after its last release.

    Free blocks form a stack, because the memory of the block freed last is most likely still in the processor's cache.

    Attributes:
        owners: counts of blocks in use by tenant, if enabled by `count_owners`; else None.
        num_cached: number of unreferenced, unpinned blocks that a prefix hit could use.
        num_with_pins: number of blocks with a pin, referenced or not.
        num_freed: how often a block became available since the start.
        num_published_ever: how often a block was published since the start.
    """

    def __init__(
        self, num_blocks: int, eviction: EvictionPolicy, on_evict: Callable[[Sequence[BlockId]], None]
    ) -> None:
        if num_blocks < 2:
            raise CacheError(f"a pool needs the null block and at least one other, got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = array("i", [0]) * num_blocks
        self.owners: BlockOwners | None = None
        self.num_freed = 0
        self.num_published_ever = 0
        self.num_cached = 0
        self.num_with_pins = 0
        self._num_pinned = 0
        self._pins = array("i", [0]) * num_blocks
        self._published = bytearray(num_blocks)
        self._free = array("i", range(num_blocks - 1, 0, -1))
        self._eviction = eviction
        eviction.reserve(num_blocks)
        self._on_evict = on_evict
        # Array views of the same memory.
        self._count_of = np.frombuffer(cast(Any, self.ref_counts), np.int32)
        self._is_published = np.frombuffer(self._published, np.uint8)
        self._pins_of = np.frombuffer(cast(Any, self._pins), np.int32)

    @property
    def published_marks(self) -> npt.NDArray[np.uint8]:
        """By block, 1 if it is in the prefix cache; read-only."""
        return self._is_published

    @property
    def pin_counts(self) -> BlockIds:
        """By block, its number of pins; read-only."""
        return self._pins_of

    @property
    def num_free(self) -> int:
        """The number of blocks that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """The number of blocks that `allocate` can hand out: free ones, and cached ones by eviction."""
        return len(self._free) + self.num_cached

    @property
    def num_pinned(self) -> int:
        """The number of pinned blocks that are not referenced, which `allocate` cannot hand out."""
        return self._num_pinned

    @property
    def num_active(self) -> int:
        return self.num_blocks - 1 - self.num_available - self._num_pinned

    def count_owners(self, held: Iterable[tuple[str, BlockTable]]) -> None:
        """Start counting blocks in use by tenant; `held` must be all tables with their tenants."""
        self.owners = owners = BlockOwners(self.num_blocks)
        seen = bytearray(self.num_blocks)
        seen[NULL_BLOCK] = 1
        for tenant, table in held:
            owners.took((block for block in dict.fromkeys(table) if not seen[block]), tenant)
            for block in table:
                seen[block] = 1

    def allocate(self, count: int, tenant: str = "") -> list[BlockId]:
        """Take `count` blocks for a tenant, each with one reference; all or nothing.

        Raises:
            CacheError: fewer are available; callers must check `num_available` first.
        """
        if count > self.num_available:
            raise CacheError(f"{count} blocks requested, {self.num_available} available of {self.num_blocks - 1}")
        free = self._free
        taken: list[BlockId] = []
        if _MANY < count <= len(free):
            taken = cast(list[BlockId], free[: -count - 1 : -1].tolist())
            del free[-count:]
            self._count_of[taken] = 1
            if self.owners is not None:
                self.owners.took(taken, tenant)
            return taken
        counts = self.ref_counts
        for _ in range(min(count, len(free))):
            taken.append(BlockId(free.pop()))
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block_id in taken:
            counts[block_id] = 1
        if self.owners is not None:
            self.owners.took(taken, tenant)
        return taken

    def acquire(self, block_ids: Sequence[BlockId], tenant: str = "") -> None:
        """Add a tenant's reference to each active, cached or pinned block.

        Null blocks are skipped, the others distinct.

        Raises:
            CacheError: a block is free, and cannot be shared.
        """
        if len(block_ids) > _MANY:
            self._acquire_many(as_indices(block_ids), tenant)
            return
        counts = self.ref_counts
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if counts[block_id] == 0:
                if not self._published[block_id]:
                    raise CacheError(f"block {block_id} is {self.state(block_id).value} and cannot be shared")
                if self._pins[block_id]:
                    self._num_pinned -= 1
                else:
                    self._eviction.remove(block_id)
                    self.num_cached -= 1
                if self.owners is not None:
                    self.owners.took((block_id,), tenant)
            counts[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference to each block, the last first, so that a sequence's tail is evicted before its head.

        Null blocks are skipped, the others distinct.

        Raises:
            CacheError: a block has no reference left, because it was freed twice.
        """
        if len(block_ids) > _MANY:
            self._release_many(np.ascontiguousarray(as_indices(block_ids)[::-1]))
            return
        available, counts = self.num_available, self.ref_counts
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            if counts[block_id] < 1:
                raise CacheError(f"block {block_id} is freed twice (it is {self.state(block_id).value})")
            counts[block_id] -= 1
            if counts[block_id] == 0:
                if self.owners is not None:
                    self.owners.gave_back((block_id,))
                if not self._published[block_id]:
                    self._free.append(block_id)
                elif self._pins[block_id]:
                    self._num_pinned += 1
                else:
                    self._eviction.add(block_id)
                    self.num_cached += 1
        self.num_freed += self.num_available - available

    def pin(self, block_ids: Sequence[BlockId]) -> None:
        """Protect published blocks from eviction until each pin is removed; null blocks are skipped.

        Other blocks must be distinct.

        Raises:
            CacheError: a block is not published, so no prefix could find it; nothing has changed.
        """
        ids = as_indices(block_ids)
        if not (published := self._is_published.take(ids) != 0).all():
            block_id = BlockId(int(ids[~published][0]))
            raise CacheError(f"block {block_id} is {self.state(block_id).value} and cannot be pinned")
        pins = self._pins_of.take(ids)
        unused = ids[(self._count_of.take(ids) == 0) & (pins == 0)]
        self._eviction.remove_all(unused)
        self.num_cached -= len(unused)
        self._num_pinned += len(unused)
        self.num_with_pins += int((pins == 0).sum())
        self._pins_of[ids] = pins + 1

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Remove one pin from each block; null blocks are skipped. Without pins they are ordinary cached blocks.

        The first block is evicted first. Blocks other than null blocks must be distinct.

        Raises:
            CacheError: a block is not pinned; nothing has changed.
        """
        ids = as_indices(block_ids)
        pins = self._pins_of.take(ids)
        if not pins.all():
            raise CacheError(f"block {ids[pins == 0][0]} is unpinned more often than pinned")
        self._pins_of[ids] = pins - 1
        last = where(pins == 1, ids)
        self.num_with_pins -= len(last)
        cached = where(self._count_of.take(last) == 0, last)
        self._num_pinned -= len(cached)
        self.num_freed += len(cached)
        self._eviction.add_all(cached)
        self.num_cached += len(cached)

    def mark_published(self, block_id: BlockId, priority: int = 0, key: bytes = b"") -> None:
        """Mark an active block as published in the prefix cache: once unreferenced it is cached rather than free.

        Args:
            priority: priority of the request that computed it, for the eviction policy.
            key: key of its contents, for the eviction policy.
        """
        if self.ref_counts[block_id] < 1:
            raise CacheError(f"block {block_id} is {self.state(block_id).value} and cannot be published")
        self._published[block_id] = 1
        self.num_published_ever += 1
        self._eviction.publish(block_id, priority, key)

    def note_hit(self, block_ids: Sequence[BlockId], priority: int) -> None:
        """Note that a request of this priority acquired these blocks by a prefix hit; null blocks are skipped."""
        self._eviction.hit(block_ids, priority)

    def evict_all_cached(self) -> int:
        """Turn every cached block into a free one, and return their number."""
        count = self.num_cached
        if count:
            self._free.extend(self._evict(count))
        return count

    def state(self, block_id: BlockId) -> BlockState:
        if block_id == NULL_BLOCK:
            return BlockState.NULL
        if self.ref_counts[block_id] > 0:
            return BlockState.ACTIVE
        if not self._published[block_id]:
            return BlockState.FREE
        return BlockState.PINNED if self._pins[block_id] else BlockState.CACHED

    def num_evictable(self, block_ids: Sequence[BlockId]) -> int:
        """Return how many of a table's published blocks are in the cached state: neither referenced nor pinned."""
        ids = as_indices(block_ids)
        return len(self._unpinned(where(self._count_of.take(ids) == 0, ids)))

    def num_unpinned(self, block_ids: BlockIds) -> int:
        """Return how many of these blocks have no pin."""
        return int((self._pins_of.take(block_ids) == 0).sum())

    def are_published(self, block_ids: Sequence[BlockId]) -> bool:
        """Whether all of these blocks are published."""
        return bool(self._is_published.take(as_array(block_ids)).all())

    def is_published(self, block_id: BlockId) -> bool:
        return bool(self._published[block_id])

    def count_states(self) -> dict[BlockState, int]:
        """Return the number of blocks in each state that any block is in."""
        counts = {
            BlockState.NULL: 1,
            BlockState.FREE: self.num_free,
            BlockState.CACHED: self.num_cached,
            BlockState.PINNED: self.num_pinned,
            BlockState.ACTIVE: self.num_active,
        }
        return {state: count for state, count in counts.items() if count}

    def check(self) -> Iterator[str]:
        """Yield every violation of the pool's own invariants. O(blocks)."""
        free = _times(self._free, self.num_blocks)
        cached = _times(self._eviction, self.num_blocks)
        for name, times in (("free stack", free), ("eviction policy", cached)):
            yield from (f"block {i} stands twice in the {name}" for i in np.flatnonzero(times > 1))
        if self.ref_counts[NULL_BLOCK] or free[NULL_BLOCK] or cached[NULL_BLOCK]:
            yield "the null block is referenced, free or cached"
        unused, published, has_pins = self._count_of == 0, self._is_published != 0, self._pins_of != 0
        yield from (f"block {i} is pinned but not published" for i in np.flatnonzero(has_pins & ~published))
        if (num_with_pins := int(has_pins.sum())) != self.num_with_pins:
            yield f"{num_with_pins} blocks have pins, {self.num_with_pins} are counted"
        if (num_pinned := int((has_pins & unused).sum())) != self._num_pinned:
            yield f"{num_pinned} blocks are pinned, but {self._num_pinned} are counted"
        if len(self._eviction) != self.num_cached:
            yield f"the eviction policy holds {len(self._eviction)} blocks, but {self.num_cached} are counted"
        is_free, is_cached = unused & ~published, unused & published & ~has_pins
        is_free[NULL_BLOCK] = free[NULL_BLOCK] != 0
        for i in np.flatnonzero(((free != 0) != is_free) | ((cached != 0) != is_cached)).tolist():
            yield (
                f"block {i} is {self.state(BlockId(i)).value} by its counts (references {self.ref_counts[i]}), "
                f"but free stack: {bool(free[i])}, eviction policy: {bool(cached[i])}"
            )
        if self.owners is not None:
            yield from self.owners.check(self.ref_counts)

    def _unpinned(self, block_ids: BlockIds) -> BlockIds:
        """Return the blocks that have no pin."""
        return where(self._pins_of.take(block_ids) == 0, block_ids) if self.num_with_pins else block_ids

    def _acquire_many(self, ids: BlockIds, tenant: str) -> None:
        # Use `take` and whole arrays, because fancy indexing takes three times as long.
        counts = self._count_of.take(ids)
        unused = where(counts == 0, ids)
        if not (published := self._is_published.take(unused)).all():
            block_id = BlockId(int(unused[published == 0][0]))
            raise CacheError(f"block {block_id} is {self.state(block_id).value} and cannot be shared")
        unpinned = self._unpinned(unused)
        self._num_pinned -= len(unused) - len(unpinned)
        self._eviction.remove_all(unpinned)
        self.num_cached -= len(unpinned)
        if self.owners is not None:
            self.owners.took(unused.tolist(), tenant)
        self._count_of[ids] = counts + 1

    def _release_many(self, ids: BlockIds) -> None:
        counts = self._count_of.take(ids)
        if not counts.all():
            block_id = BlockId(int(ids[counts == 0][0]))
            raise CacheError(f"block {block_id} is freed twice (it is {self.state(block_id).value})")
        self._count_of[ids] = counts - 1
        last = where(counts == 1, ids)
        if self.owners is not None:
            self.owners.gave_back(last.tolist())
        published = self._is_published.take(last) != 0
        unpublished = where(~published, last)
        self._free.frombytes(unpublished.astype(np.int32).tobytes())
        published_ids = where(published, last)
        cached = self._unpinned(published_ids)
        self._num_pinned += len(published_ids) - len(cached)
        self._eviction.add_all(cached)
        self.num_cached += len(cached)
        self.num_freed += len(unpublished) + len(cached)

    def _evict(self, count: int) -> list[BlockId]:
        victims = self._eviction.evict_many(count)
        self.num_cached -= count
        for block_id in victims:
            self._published[block_id] = 0
        self._on_evict(victims)
        return victims


def check_references(
    pool: BlockPool, tables: Iterable[BlockTable], published_blocks: Iterable[BlockId]
) -> Iterator[str]:
    """Yield every block whose count differs from the tables' references, or its mark from the prefix index."""
    size = pool.num_blocks
    held = [as_array(table) for table in tables]
    references = np.bincount(np.concatenate(held), minlength=size) if held else np.zeros(size, np.int64)
    references[NULL_BLOCK] = 0
    for i in np.flatnonzero(np.array(pool.ref_counts) != references).tolist():
        yield f"block {i} counts {pool.ref_counts[i]} references, tables hold {references[i]}"
    for i in np.flatnonzero((pool.published_marks != 0) != (_times(published_blocks, size) != 0)).tolist():
        yield f"block {i}: the pool and the prefix cache disagree whether it is published"


def _times(block_ids: Iterable[int], num_blocks: int) -> npt.NDArray[np.intp]:
    """Return how often each block of a pool is among these, by id."""
    ids = np.fromiter(block_ids, np.int32)
    return np.bincount(ids[ids >= 0], minlength=num_blocks)


class BlockOwners:
    """Counts blocks in use by tenant. A block counts once, for the tenant that took it when it was not in use.

    So a block shared by several sequences of a tenant counts once, and a block shared by tenants of one cache group
    counts for one of them until none holds it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._owner = array("i", bytes(4 * num_blocks))
        self._index: dict[str, int] = {}
        self._held: list[int] = []

    def held(self, tenant: str) -> int:
        """Return the number of blocks in use that count for a tenant."""
        index = self._index.get(tenant)
        return 0 if index is None else self._held[index]

    def took(self, blocks: Iterable[int], tenant: str) -> None:
        """Count these blocks, which were not in use, for a tenant."""
        index = self._index.get(tenant)
        if index is None:
            index = self._index[tenant] = len(self._held)
            self._held.append(0)
        count = 0
        for block in blocks:
            self._owner[block] = index
            count += 1
        self._held[index] += count

    def gave_back(self, blocks: Iterable[int]) -> None:
        """Discount these blocks, which are no longer in use."""
        owner, held = self._owner, self._held
        for block in blocks:
            held[owner[block]] -= 1

    def check(self, ref_counts: array[int]) -> Iterator[str]:
        """Yield every tenant whose count does not match the blocks in use. O(blocks)."""
        in_use = np.array(self._owner)[np.array(ref_counts) != 0]
        found = np.bincount(in_use, minlength=len(self._held)).tolist()
        for tenant, index in self._index.items():
            if found[index] != self._held[index]:
                yield f"{found[index]} blocks count for tenant {tenant!r}, but {self._held[index]} are counted"

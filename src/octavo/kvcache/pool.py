"""The block pool: reference counts, free blocks and evictable blocks. O(1) per operation and block."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from octavo.errors import CacheError
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockState, BlockTable, as_array, as_indices, where
from octavo.kvcache.blocks import UNPUBLISHED, BlockRecords
from octavo.kvcache.eviction import EvictionPolicy
from octavo.kvcache.eviction.policies import SomeBlocks, as_list

# More blocks than this are handled as whole arrays, whose fixed cost is that of some 30 blocks in a loop.
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

    Args:
        eviction: policy that chooses which cached block to evict.
        on_evict: called in order with the blocks being evicted; must withdraw them from the prefix index.
        grows: whether there are no blocks until `grow` adds them.

    Attributes:
        owners: counts of blocks in use by tenant, if enabled by `count_owners`; else None.
        num_cached: number of unreferenced, unpinned blocks that a prefix hit could use.
        num_pinned: number of pinned blocks that are not referenced, which `allocate` cannot hand out.
        num_with_pins: number of blocks with a pin, referenced or not.
        num_freed: how often a block became available since the start.
        num_published_ever: how often a block was published since the start.
    """

    def __init__(
        self,
        blocks: BlockRecords,
        eviction: EvictionPolicy,
        on_evict: Sequence[Callable[[Sequence[BlockId]], object]],
        *,
        grows: bool = False,
    ) -> None:
        self.blocks = blocks
        self.num_blocks = blocks.num_blocks
        self.owners: BlockOwners | None = None
        self.num_freed = 0
        self.num_published_ever = 0
        self.num_cached = 0
        self.num_with_pins = 0
        self.num_pinned = 0
        self._free = array("i", () if grows else range(self.num_blocks - 1, 0, -1))
        self._eviction = eviction
        eviction.reserve(self.num_blocks)
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """The number of blocks that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """The number of blocks that `allocate` can hand out: free ones, and cached ones by eviction."""
        return len(self._free) + self.num_cached

    @property
    def num_active(self) -> int:
        return self.num_blocks - 1 - self.num_available - self.num_pinned

    def grow(self, block_ids: Iterable[int]) -> None:
        """Add free blocks; `allocate` hands out the last one first."""
        self._free.extend(block_ids)

    def count_owners(self, held: Iterable[tuple[str, BlockTable]]) -> None:
        """Start counting blocks in use by tenant; `held` must be all tables with their tenants."""
        self.owners = owners = BlockOwners(self.num_blocks)
        seen = {NULL_BLOCK}
        for tenant, table in held:
            owners.took([block for block in dict.fromkeys(table) if block not in seen], tenant)
            seen.update(table)

    def allocate(self, count: int, tenant: str = "") -> list[BlockId]:
        """Take `count` blocks for a tenant, each with one reference; all or nothing.

        Raises:
            CacheError: fewer are available; callers must check `num_available` first.
        """
        if count > self.num_available:
            raise CacheError(f"{count} blocks requested, {self.num_available} available of {self.num_blocks - 1}")
        free, counts = self._free, self.blocks.references
        start = max(0, len(free) - count)
        taken = cast(list[BlockId], free[start:].tolist())
        taken.reverse()
        del free[start:]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block_id in taken:
            counts[block_id] = 1
        if self.owners is not None:
            self.owners.took(taken, tenant)
        return taken

    def acquire(self, block_ids: Sequence[BlockId], tenant: str | None = None, hit_by: int | None = None) -> None:
        """Add a tenant's reference to each active, cached or pinned block.

        Null blocks are skipped, the others distinct.

        Args:
            tenant: whom blocks that were not in use count for; None for whom they counted for last.
            hit_by: priority of the request that found them as a prefix, if one did, for the eviction policy.

        Raises:
            CacheError: a block is free, and cannot be shared; nothing has changed.
        """
        ids = _without_null(block_ids)
        unused = _where(ids, self.blocks.references, 0)
        self._check_published(unused, "shared")
        self._add_references(ids, 1)
        cached = self.unpinned(unused)
        self._eviction.remove(cached)
        self.num_cached -= len(cached)
        self.num_pinned -= len(unused) - len(cached)
        if self.owners is not None:
            self.owners.took(unused, tenant)
        if hit_by is not None:
            self._eviction.hit(ids, hit_by)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference to each block, the last first, so that a sequence's tail is evicted before its head.

        Null blocks are skipped, the others distinct.

        Raises:
            CacheError: a block has no reference left, because it was freed twice.
        """
        ids, blocks = _without_null(block_ids)[::-1], self.blocks
        for block_id in _where(ids, blocks.references, 0):
            raise CacheError(f"block {block_id} is freed twice (it is {blocks.state(block_id).value})")
        last = _where(ids, blocks.references, 1)
        self._add_references(ids, -1)
        freed = _where(last, blocks.groups, UNPUBLISHED)
        published = _where(last, blocks.groups, UNPUBLISHED, equal=False) if len(freed) else last
        cached = self.unpinned(published)
        if self.owners is not None:
            self.owners.gave_back(last)
        self._free.extend(as_list(freed))
        self._eviction.add(cached)
        self.num_cached += len(cached)
        self.num_pinned += len(published) - len(cached)
        self.num_freed += len(freed) + len(cached)

    def pin(self, block_ids: Sequence[BlockId]) -> None:
        """Protect published blocks from eviction until each pin is removed; null blocks are skipped.

        Other blocks must be distinct.

        Raises:
            CacheError: a block is not published, so no prefix could find it; nothing has changed.
        """
        ids = as_indices(block_ids)
        self._check_published(ids, "pinned")
        pins = self.blocks.pins_array.take(ids)
        unused = ids[(self.blocks.references_array.take(ids) == 0) & (pins == 0)]
        self._eviction.remove(unused)
        self.num_cached -= len(unused)
        self.num_pinned += len(unused)
        self.num_with_pins += int((pins == 0).sum())
        self.blocks.pins_array[ids] = pins + 1

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Remove one pin from each block; null blocks are skipped. Without pins they are ordinary cached blocks.

        The first block is evicted first. Blocks other than null blocks must be distinct.

        Raises:
            CacheError: a block is not pinned; nothing has changed.
        """
        ids = as_indices(block_ids)
        pins = self.blocks.pins_array.take(ids)
        if not pins.all():
            raise CacheError(f"block {ids[pins == 0][0]} is unpinned more often than pinned")
        self.blocks.pins_array[ids] = pins - 1
        last = where(pins == 1, ids)
        self.num_with_pins -= len(last)
        cached = where(self.blocks.references_array.take(last) == 0, last)
        self.num_pinned -= len(cached)
        self.num_freed += len(cached)
        self._eviction.add(cached)
        self.num_cached += len(cached)

    def note_published(self, block_id: BlockId, priority: int, key: bytes) -> None:
        """Note that an active block is now in the prefix index: once unreferenced it is cached rather than free.

        Args:
            priority: priority of the request that computed it, for the eviction policy.
            key: key of its contents, for the eviction policy.
        """
        if not self.blocks.references[block_id]:
            raise CacheError(f"block {block_id} has no references and cannot be published")
        self.num_published_ever += 1
        self._eviction.publish(block_id, priority, key)

    def evict_all_cached(self) -> int:
        """Turn every cached block into a free one, and return their number."""
        count = self.num_cached
        if count:
            self._free.extend(self._evict(count))
        return count

    def num_evictable(self, block_ids: Sequence[BlockId]) -> int:
        """Return how many of a table's published blocks are in the cached state: neither referenced nor pinned."""
        return len(self.unpinned(_where(_without_null(block_ids), self.blocks.references, 0)))

    def unpinned(self, block_ids: SomeBlocks) -> SomeBlocks:
        """Return those of these blocks that have no pin."""
        return _where(block_ids, self.blocks.pins, 0) if self.num_with_pins else block_ids

    def count_states(self) -> dict[BlockState, int]:
        """Return the number of blocks in each state, without the null block."""
        free, cached, pinned = self.num_free, self.num_cached, self.num_pinned
        # The rest are active, so that all add up even if another thread reads them in the middle of a step.
        active = self.num_blocks - 1 - free - cached - pinned
        states = (BlockState.FREE, BlockState.CACHED, BlockState.PINNED, BlockState.ACTIVE)
        return dict(zip(states, (free, cached, pinned, active), strict=True))

    def move_to(self, block_id: BlockId, tenant: str) -> None:
        """Count a block in use for another tenant."""
        assert self.owners is not None
        self.owners.gave_back((block_id,))
        self.owners.took((block_id,), tenant)

    def by_tenant(self) -> dict[str, int]:
        """Return the number of blocks in use or cached by the tenant that they count for. O(blocks); for any thread."""
        assert self.owners is not None
        blocks = self.blocks
        return self.owners.count((blocks.references_array != 0) | (blocks.groups_array != UNPUBLISHED))

    def check(self) -> Iterator[str]:
        """Yield every violation of the pool's own invariants. O(blocks)."""
        free = _times(self._free, self.num_blocks)
        cached = _times(self._eviction, self.num_blocks)
        for name, times in (("free stack", free), ("eviction policy", cached)):
            yield from (f"block {i} stands twice in the {name}" for i in np.flatnonzero(times > 1))
        if self.blocks.references[NULL_BLOCK] or free[NULL_BLOCK] or cached[NULL_BLOCK]:
            yield "the null block is referenced, free or cached"
        unused, published, has_pins = (
            self.blocks.references_array == 0,
            self.blocks.groups_array != UNPUBLISHED,
            self.blocks.pins_array != 0,
        )
        yield from (f"block {i} is pinned but not published" for i in np.flatnonzero(has_pins & ~published))
        if (num_with_pins := int(has_pins.sum())) != self.num_with_pins:
            yield f"{num_with_pins} blocks have pins, {self.num_with_pins} are counted"
        if (num_pinned := int((has_pins & unused).sum())) != self.num_pinned:
            yield f"{num_pinned} blocks are pinned, but {self.num_pinned} are counted"
        if len(self._eviction) != self.num_cached:
            yield f"the eviction policy has {len(self._eviction)} blocks, but {self.num_cached} are counted"
        is_free, is_cached = unused & ~published, unused & published & ~has_pins
        is_free[NULL_BLOCK] = free[NULL_BLOCK] != 0
        for i in np.flatnonzero(((free != 0) != is_free) | ((cached != 0) != is_cached)).tolist():
            yield (
                f"block {i} is {self.blocks.state(BlockId(i)).value} by its counts "
                f"(references {self.blocks.references[i]}), "
                f"but free stack: {bool(free[i])}, eviction policy: {bool(cached[i])}"
            )
        if self.owners is not None:
            yield from self.owners.check(self.blocks.references_array != 0)

    def _add_references(self, block_ids: SomeBlocks, count: int) -> None:
        if isinstance(block_ids, np.ndarray):
            self.blocks.references_array[block_ids] += count
            return
        counts = self.blocks.references
        for block_id in block_ids:
            counts[block_id] += count

    def _check_published(self, block_ids: SomeBlocks, to_be: str) -> None:
        for block_id in _where(block_ids, self.blocks.groups, UNPUBLISHED):
            raise CacheError(f"block {block_id} is {self.blocks.state(block_id).value} and cannot be {to_be}")

    def _evict(self, count: int) -> list[BlockId]:
        victims = self._eviction.evict(count)
        self.num_cached -= count
        for note in self._on_evict:
            note(victims)
        return victims


def _without_null(block_ids: Sequence[BlockId]) -> SomeBlocks:
    """Return blocks without null blocks, as an array if they are many."""
    return as_indices(block_ids) if len(block_ids) > _MANY else [block for block in block_ids if block != NULL_BLOCK]


def _where(block_ids: SomeBlocks, field: array[int], value: int, *, equal: bool = True) -> SomeBlocks:
    """Return the blocks whose entry in a field is `value`, or those whose entry is not."""
    if isinstance(block_ids, np.ndarray):
        return where((np.frombuffer(field, field.typecode).take(block_ids) == value) == equal, block_ids)
    return [block_id for block_id in block_ids if (field[block_id] == value) is equal]


def check_references(blocks: BlockRecords, tables: Iterable[BlockTable]) -> Iterator[str]:
    """Yield every block whose count of references differs from the tables'."""
    held = [as_array(table) for table in tables]
    references = np.bincount(np.concatenate([*held, np.empty(0, np.int32)]), minlength=blocks.num_blocks)
    references[NULL_BLOCK] = 0
    for i in np.flatnonzero(blocks.references_array != references).tolist():
        yield f"block {i} counts {blocks.references[i]} references, tables hold {references[i]}"


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
        self._indices = {"": 0}
        self._tenants = [""]
        self._held = [0]

    def held(self, tenant: str) -> int:
        """Return the number of blocks in use that count for a tenant."""
        index = self._indices.get(tenant)
        return 0 if index is None else self._held[index]

    def of(self, block: int) -> str:
        """Return the tenant that a block counts for, or did when it was last in use."""
        return self._tenants[self._owner[block]]

    def took(self, blocks: SomeBlocks, tenant: str | None) -> None:
        """Count these blocks, which were not in use, for a tenant; for whom they counted for last if None."""
        owner, held = self._owner, self._held
        if tenant is not None:
            index = self._indices.setdefault(tenant, len(held))
            if index == len(held):
                self._tenants.append(tenant)
                held.append(0)
            for block in blocks:
                owner[block] = index
        for block in blocks:
            held[owner[block]] += 1

    def gave_back(self, blocks: SomeBlocks) -> None:
        """Discount these blocks, which are no longer in use."""
        owner, held = self._owner, self._held
        for block in blocks:
            held[owner[block]] -= 1

    def count(self, holds: npt.NDArray[np.bool_]) -> dict[str, int]:
        """Return how many of the blocks selected by a mask count for each tenant. O(blocks)."""
        counts = np.bincount(np.array(self._owner)[holds], minlength=len(self._tenants)).tolist()
        return {tenant: count for tenant, count in zip(self._tenants, counts, strict=False) if count}

    def check(self, in_use: npt.NDArray[np.bool_]) -> Iterator[str]:
        """Yield every tenant whose count does not match the blocks in use. O(blocks)."""
        found = self.count(in_use)
        for tenant, held in zip(self._tenants, self._held, strict=True):
            if found.get(tenant, 0) != held:
                yield f"{found.get(tenant, 0)} blocks count for tenant {tenant!r}, but {held} are counted"

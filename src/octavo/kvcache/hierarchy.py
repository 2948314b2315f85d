"""The tiers below the device, as the cache manager sees them: evicting demotes blocks, resuming matches them.

    manager ── published, hit, evicted ──store_prefix──> transfers of the next step <─┐
            ── leave, evicted ──────────────keep───────>                              │
            ── match ────> what a sequence left, else the device's blocks, then the host's
            ── load ──────────────────────────────────────────────────────────────────┘

    transfers ──> host memory <── stores (tiers/lower.py)

Demotion copies blocks of the device's prefix cache to host memory, as far as it has room for prefixes:

    on_evict         blocks that the device evicts
    on_second_use    the same, but only blocks used twice: found by a request, or computed again after an eviction
    all              all blocks, as soon as they are published

A sequence that is preempted gives back all its blocks. Those that the prefix cache has stay there, and are kept in host
memory if they are evicted; the others are copied to host memory at once. Full blocks have the key of their prefix,
wherever they are. A half-filled block, and every block without prefix caching, has a private key. The sequence resumes
like a prefix hit. If the swap space has no room for one of its blocks, it is given up, and matched like any other.

A hierarchy without host memory has zero slots, so no code needs a special case for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockTable, BlockTransfer, HostBlockId, as_array, new_table
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.eviction.adaptive import GhostList
from octavo.kvcache.hashing import Label, TokenChain, label_of, private_label
from octavo.kvcache.host_memory import HostMemory, Slot
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHit, PrefixIndex
from octavo.request import Sequence, SequenceId

_TIERS = ("device", "host", "disk", "neighbour", "remote")  # in the order in which they are asked


Demoted = tuple[BlockId, Label, str]
"""A block of the device that is to be stored in host memory, and the tenant that computed it."""


@dataclass(slots=True)
class SwapCounters:
    """Totals of preempted sequences since the start, and of the blocks kept for them in host memory.

    `blocks_out` is exactly `blocks_in` + `blocks_dropped` + the blocks that are still kept.
    """

    blocks_out: int = 0
    blocks_in: int = 0  # loaded back
    blocks_dropped: int = 0  # never loaded back: their sequence ended, was given up, or found the block on the device
    sequences_out: int = 0
    sequences_in: int = 0
    sequences_lost: int = 0  # given up, because there was no room for a block that the device evicted


@dataclass(slots=True)
class _Left:
    """The blocks a preempted sequence had computed, and where it finds them.

    Attributes:
        num_full: leading blocks that have the key of their prefix.
        lengths: lengths of its tables.
        blocks: what it needs by group and index, without null blocks.
        loading: slots of host memory that the next step loads, because the sequence resumes with it.
    """

    chain: TokenChain
    tenant: str
    num_tokens: int
    num_full: int
    lengths: list[int]
    blocks: dict[tuple[int, int], _Kept]
    loading: tuple[HostBlockId, ...] = ()


@dataclass(slots=True)
class _Kept:
    """A block that preempted sequences need.

    Attributes:
        key: key of its prefix, or a private one.
        slot: its slot of host memory, which is held once for all of them; None while only the device has it.
        is_back: whether one of them has loaded it.
    """

    key: bytes
    sequences: set[SequenceId] = field(default_factory=set)
    slot: HostBlockId | None = None
    is_back: bool = False


class CacheHierarchy:
    """Host memory, the policy for copying the device's blocks there, and the preempted sequences that can resume.

    Args:
        blocks, prefix_cache: those of the device.
        num_groups: groups of layers, each of which has its own block for the same tokens.
        demotion: `on_evict`, `on_second_use` or `all`.

    Attributes:
        swapped: totals of what was kept for preempted sequences.
        num_kept: number of slots that are held for preempted sequences.
    """

    def __init__(
        self,
        blocks: BlockRecords,
        prefix_cache: PrefixIndex,
        host: HostMemory,
        block_size: int,
        num_groups: int,
        demotion: str,
    ) -> None:
        self.host = host
        self._blocks = blocks
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._num_groups = num_groups
        self._demotes = demotion if host.num_prefix_slots else "never"
        by_use = self._demotes == "on_second_use"
        # By device block, whether it was used twice.
        self._used_again = bytearray(blocks.num_blocks) if by_use else None
        # Keys of evicted blocks that were used once; if one is published again, that is its second use.
        self._used_once = GhostList(4 * blocks.num_blocks if by_use else 1)
        # Without slots for prefixes, a sequence must not find blocks that others have left there.
        self._host_of_prefixes = host if host.num_prefix_slots else None
        self.swapped = SwapCounters()
        self.num_kept = 0
        self._left: dict[SequenceId, _Left] = {}
        self._kept: dict[bytes, _Kept] = {}  # by key: all that is left
        self._send_down: Callable[[BlockId, Label, str], object] = host.store_prefix

    # What happens to the device's blocks

    def published(self, block_ids: Seq[BlockId]) -> None:
        """Called when blocks have been published."""
        if self._used_again is not None:
            for block_id in block_ids:
                key = self._blocks.key(block_id)
                again = self._used_once.take(key) is not None or self.host.state(key) is Slot.READY
                self._used_again[block_id] = again
        if self._demotes == "all":
            self._demote(block_ids)

    def hit(self, table: BlockTable) -> None:
        """Called when a request has found these blocks on the device."""
        if self._used_again is not None:
            np.frombuffer(self._used_again, np.uint8)[as_array(table)] = 1

    def evicted(self, block_ids: Seq[BlockId]) -> None:
        """Called when cached blocks are evicted; their memory does not change before the next step."""
        if self._kept:
            for block_id in block_ids:
                if (kept := self._kept.get(self._blocks.key(block_id))) is not None and kept.slot is None:
                    self._keep_evicted(block_id, kept)
        if (again := self._used_again) is not None:
            once = [block_id for block_id in block_ids if not again[block_id]]
            # All at once: 26 together take a sixth of the time.
            self._used_once.add(self._blocks.keys.prefixes(once), [0] * len(once))
            block_ids = [block_id for block_id in block_ids if again[block_id]]
        elif self._demotes != "on_evict":
            return
        self._demote(block_ids)

    def evict_all(self, pool: BlockPool) -> list[Demoted]:
        """Evict every cached block, because the engine closes; returns those worth keeping, the most valuable first.

        Their memory does not change any more.
        """
        closing: list[Demoted] = []
        self._send_down = lambda *demoted: closing.append(demoted)
        pool.evict_all_cached()
        return closing[::-1]

    def _demote(self, block_ids: Seq[BlockId]) -> None:
        """Plan to store published blocks in host memory as prefixes, as far as there is room."""
        for block_id in block_ids:
            self._send_down(block_id, self._blocks.label(block_id), self._blocks.sources[block_id].tenant)

    # Preempted sequences

    def _keep(self, blocks: Seq[tuple[BlockId, Label]], tenant: str) -> Seq[HostBlockId] | None:
        """Hold a slot of the swap space for each block; None if it has no room for all of them."""
        if self.num_kept + len(blocks) > self.host.num_swap_slots:
            return None
        if (slots := self.host.keep(blocks, tenant)) is not None:
            self.num_kept += len(slots)
            self.swapped.blocks_out += len(slots)
        return slots

    def _keep_evicted(self, block_id: BlockId, kept: _Kept) -> None:
        tenant = self._left[min(kept.sequences)].tenant
        if (slots := self._keep([(block_id, self._blocks.label(block_id))], tenant)) is not None:
            (kept.slot,) = slots
            return
        for seq_id in list(kept.sequences):
            self.swapped.sequences_lost += 1
            self._give_up(seq_id)

    def _let_go(self, kept: _Kept) -> None:
        if kept.slot is not None:
            self.num_kept -= 1
            self.swapped.blocks_in += kept.is_back
            self.swapped.blocks_dropped += not kept.is_back
            self.host.release((kept.slot,))
            kept.slot = None

    def kept_slots(self) -> Iterator[HostBlockId]:
        """Iterate over the slots that are held for preempted sequences."""
        return (kept.slot for kept in self._kept.values() if kept.slot is not None)

    @property
    def num_preempted(self) -> int:
        """The number of preempted sequences that can resume."""
        return len(self._left)

    def can_resume(self, seq_id: SequenceId) -> bool:
        """Whether `match` finds everything that a preempted sequence had computed."""
        return seq_id in self._left

    def host_blocks(self, seq_id: SequenceId) -> list[HostBlockId]:
        """Return the slots that are kept for a preempted sequence, perhaps for others too."""
        left = self._left.get(seq_id)
        return [] if left is None else [kept.slot for kept in left.blocks.values() if kept.slot is not None]

    def leave(self, seq: Sequence, tables: list[BlockTable], chain: TokenChain) -> bool:
        """Keep the blocks of a sequence that is about to release them, so that it can resume.

        Returns:
            Whether the swap space has room for those that would be lost; if not, nothing has changed.
        """
        if (left := self._left.get(seq.seq_id)) is not None:
            # It was to resume with the step that is being planned, so everything is still where it was.
            left.loading = ()
            self.host.cancel_loads(seq.seq_id)
            return True
        if not self.host.num_swap_slots:
            return False
        num_full = min(len(chain), seq.num_computed // self._block_size)
        lengths = [len(table) for table in tables]
        left = _Left(chain, seq.request.tenant, seq.num_computed, num_full, lengths, {})
        cached = new_table()
        moved: list[tuple[BlockId, Label]] = []
        for group, table in enumerate(tables):
            for index, block in enumerate(table):
                if block == NULL_BLOCK:
                    continue
                is_full = index < num_full
                label = label_of(group, chain, index) if is_full else private_label(seq.seq_id, group, index)
                left.blocks[group, index] = kept = self._kept.get(label.key) or _Kept(label.key)
                if is_full and (published := self._prefix_cache.get(group, chain, index)) is not None:
                    cached.append(published)
                elif kept.slot is None:
                    moved.append((block, label))
        if (slots := self._keep(moved, left.tenant)) is None:
            return False
        self.host.cancel_loads(seq.seq_id)
        self.hit(cached)
        for kept in left.blocks.values():
            self._kept[kept.key] = kept
            kept.sequences.add(seq.seq_id)
        for (_, label), slot in zip(moved, slots, strict=True):
            self._kept[label.key].slot = slot
        self._left[seq.seq_id] = left
        self.swapped.sequences_out += 1
        return True

    def _find(self, left: _Left) -> PrefixHit | None:
        """Return everything that a preempted sequence had computed, as a hit; None if a failed step has lost some."""
        tables = tuple(new_table([NULL_BLOCK] * length) for length in left.lengths)
        loads: list[tuple[int, int, HostBlockId]] = []
        for (group, index), kept in left.blocks.items():
            block = self._prefix_cache.get(group, left.chain, index) if index < left.num_full else None
            if block is not None:
                tables[group][index] = block
            elif kept.slot is not None:
                loads.append((group, index, kept.slot))
            else:
                return None
        return PrefixHit(left.num_tokens, tables, tuple(loads))

    def _give_up(self, seq_id: SequenceId) -> None:
        """Forget what a preempted sequence left, and release what is kept for it."""
        if (left := self._left.pop(seq_id, None)) is None:
            return
        for (_, index), kept in left.blocks.items():
            kept.sequences.remove(seq_id)
            if not kept.sequences:
                if kept.slot is not None and index >= left.num_full:  # by its key the sequence may soon leave another
                    self.host.forget((kept.slot,))
                self._let_go(kept)
                del self._kept[kept.key]

    # Finding and loading blocks

    def match(self, seq: Sequence, chain: TokenChain, most: int) -> PrefixHit:
        """Return what a preempted sequence left, or the longest prefix of at most `most` blocks on device and host."""
        left = self._left.get(seq.seq_id)
        hit = None if left is None else self._find(left)
        if hit is not None:
            return hit
        return self._prefix_cache.longest(chain, most, self._host_of_prefixes)

    def missing(self, seq: Sequence, chain: TokenChain, most: int) -> Iterator[Label]:
        """Yield the labels of those of the first `most` blocks that neither device nor host has, in order."""
        if not self.host.num_prefix_slots:
            return
        for index in range(self.match(seq, chain, most).num_tokens // self._block_size, most):
            for group in range(self._num_groups):
                yield label_of(group, chain, index)

    def tokens_by_tier(self, hit: PrefixHit) -> dict[str, int]:
        """Return a hit's tokens by tier; a block that groups have in different tiers counts for the lowest of them."""
        if not hit.loads:
            return {"device": hit.num_tokens}
        depths: dict[int, int] = {}
        for _, index, slot in hit.loads:
            depths[index] = max(depths.get(index, 0), _TIERS.index(self.host.origin(slot)))
        size, by_tier = self._block_size, Counter(device=hit.num_tokens)
        for index, depth in depths.items():
            num_tokens = min(size, hit.num_tokens - index * size)
            by_tier[_TIERS[depth]] += num_tokens
            by_tier["device"] -= num_tokens
        return dict(by_tier)

    def load(self, seq: Sequence, tables: list[BlockTable], hit: PrefixHit, pool: BlockPool) -> None:
        """Allocate blocks in a sequence's tables for those blocks of a hit that the next step must load."""
        left = self._left.get(seq.seq_id)
        if hit.loads:
            # Hold the slots first, because allocating evicts blocks, which may take any slot that is not held.
            slots = tuple(slot for _, _, slot in hit.loads)
            self.host.hold(slots, to_load=left is None)
            blocks = pool.allocate(len(slots), seq.request.tenant)
            for (group, index, _), block in zip(hit.loads, blocks, strict=True):
                tables[group][index] = block
            self.host.plan_loads(slots, blocks, seq.seq_id)
            if left is not None:
                left.loading = slots
        elif left is not None:
            self._note_resumed(seq.seq_id)

    def forget(self, seq_id: SequenceId) -> None:
        """Give up a sequence's blocks, including those it left behind, and cancel loads that no step has taken."""
        self._give_up(seq_id)
        self.host.cancel_loads(seq_id)

    # With steps

    def take(self) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """Return the next step's stores and loads, which are in flight until `complete` or `fail`."""
        stores, loads = self.host.take()
        self.host.counters.loaded += len(loads)
        for seq_id, left in [(seq_id, left) for seq_id, left in self._left.items() if left.loading]:
            self.host.counters.loaded -= len(left.loading)
            for kept in left.blocks.values():
                kept.is_back |= kept.slot in left.loading
            self._note_resumed(seq_id)
        return stores, loads

    def complete(self) -> None:
        """Note that the step is done and all its transfers have arrived."""
        self.host.complete()

    def fail(self) -> None:
        """Note that the step failed: blocks it was to store are lost, and the sequences that need them start over."""
        if lost := set(self.host.fail()):
            for kept in self._kept.values():
                if kept.slot in lost:
                    self._let_go(kept)
            for seq_id, left in list(self._left.items()):
                if self._find(left) is None:
                    self.swapped.sequences_lost += 1
                    self._give_up(seq_id)

    def _note_resumed(self, seq_id: SequenceId) -> None:
        """Forget what a sequence left, once it has it back."""
        self.swapped.sequences_in += 1
        self._give_up(seq_id)

    def check(self) -> Iterator[str]:
        """Check all invariants. O(slots ever used + blocks of preempted sequences)."""
        slots = list(self.kept_slots())
        yield from self.host.check(slots)
        needs = Counter[bytes]()
        for seq_id, left in self._left.items():
            needs.update(kept.key for kept in left.blocks.values())
            if any(seq_id not in kept.sequences for kept in left.blocks.values()):
                yield f"sequence {seq_id} needs a block that is not noted as needed by it"
            if self._find(left) is None:
                yield f"sequence {seq_id} needs a block that is nowhere"
        if needs != (noted := {key: len(kept.sequences) for key, kept in self._kept.items()}):
            yield f"{sum(noted.values())} needs of preempted sequences are noted, they have {needs.total()}"
        if len(slots) != self.num_kept or self.num_kept > self.host.num_swap_slots:
            yield f"{len(slots)} slots are kept, {self.num_kept} counted, {self.host.num_swap_slots} may be"
        swapped = self.swapped
        if swapped.blocks_out != swapped.blocks_in + swapped.blocks_dropped + self.num_kept:
            yield (
                f"{swapped.blocks_out} blocks were moved out, but {swapped.blocks_in} back, "
                f"{swapped.blocks_dropped} were dropped and {self.num_kept} are kept"
            )

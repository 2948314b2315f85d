"""The blocks that sequences hold: their block tables and hash chains, and what taking them away would cost and gain.

The manager alone changes them; everybody else reads.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, cast

from octavo.kvcache.attended import AttendedBlocks, Places
from octavo.kvcache.block import NULL_BLOCK, BlockTable, new_table
from octavo.kvcache.hashing import FullBlocks, Source, TokenChain
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixIndex
from octavo.kvcache.spec import KVCacheSpec, Window
from octavo.request import Request, Sequence


class RestoreCost(NamedTuple):
    """The cost and gain of taking a sequence's blocks away.

    Attributes:
        tokens: tokens to recompute, not counting those in leading blocks that other sequences share.
        blocks: blocks that no other sequence holds, which become available, and are moved both ways if swapped.
    """

    tokens: int
    blocks: int


@dataclass(slots=True)
class Holding:
    """The blocks and hash chain of one sequence.

    Attributes:
        windows: what each group keeps; None for everything.
        attended: decides by attention what groups without a window keep; None if they keep everything.
        num_slid: leading table entries that a window has slid past, per group, among them the first blocks that stay.
        num_published: full blocks offered to the prefix cache so far.
        next_full: number of computed tokens at which the next block is full.
        capacity: tokens for which the tables have unshared blocks; the sequence may grow to this length without more.
    """

    tables: list[BlockTable]
    chain: TokenChain
    windows: Seq[Window | None]
    num_slid: list[int]
    attended: AttendedBlocks | None = None
    num_published: int = 0
    next_full: int = 0
    capacity: int = 0

    @classmethod
    def empty(cls, chain: TokenChain, windows: Seq[Window | None], attended: AttendedBlocks | None = None) -> Holding:
        """Return the holding of a sequence without blocks."""
        return cls([new_table() for _ in windows], chain, windows, [0] * len(windows), attended)

    def fork(self) -> Holding:
        """Return a holding of the same blocks; the next write of either must check whether its block is shared."""
        self.capacity = 0
        tables = [table[:] for table in self.tables]
        attended = None if self.attended is None else self.attended.copy()
        return Holding(tables, self.chain.copy(), self.windows, self.num_slid.copy(), attended, self.num_published)

    def slide(self, num_computed: int, block_size: int) -> Iterator[BlockTable]:
        """Replace the blocks that windows have slid past by null blocks, and yield them, to be released."""
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            table, slid = self.tables[group], max(self.num_slid[group], window.sink_blocks)
            first = min(window.passed(num_computed, block_size), len(table))
            if first > slid:
                passed = table[slid:first]
                table[slid:first] = new_table([NULL_BLOCK] * (first - slid))
                self.num_slid[group] = first
                yield passed

    def let_go(self, num_computed: int) -> tuple[Places, list[BlockTable]]:
        """Replace the blocks that attention decides against by null blocks.

        Returns:
            The places of these blocks among those that each group kept, and the blocks, to be released.
        """
        if self.attended is None or not (gone := self.attended.let_go(num_computed)):
            return (), []
        released = []
        for table, (_, indices) in zip(self.tables, gone, strict=True):
            released.append(new_table([table[index] for index in indices]))
            for index in indices:
                table[index] = NULL_BLOCK
        return tuple(places for places, _ in gone), released

    def places_let_go(self) -> Places:
        """Return for each group the places in its table of blocks that attention has decided against."""
        return () if self.attended is None else self.attended.places_let_go()

    def empty_tables(self) -> list[BlockTable]:
        """Take the blocks out, and return the tables that they stood in; the chain is kept."""
        tables, num_groups = self.tables, len(self.tables)
        self.tables = [new_table() for _ in range(num_groups)]
        self.num_slid = [0] * num_groups
        self.num_published = self.next_full = self.capacity = 0
        return tables


class Holdings(dict[Sequence, Holding]):
    """The holdings of all sequences that were matched or admitted and are not forgotten yet.

    Args:
        pool, prefix_cache: those of the device.
        spec: shape of the cache, with a table per sequence for each group.
    """

    def __init__(self, pool: BlockPool, prefix_cache: PrefixIndex, spec: KVCacheSpec) -> None:
        super().__init__()
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._spec = spec
        self._block_size = spec.block_size
        self._windows = spec.windows()

    def begin(self, seq: Sequence) -> Holding:
        """Return a sequence's holding; it begins without blocks, and with the chain of the prompt's full blocks."""
        holding = self.get(seq)
        if holding is None:
            budget = seq.request.params.kv_budget
            windows = self._windows if budget is None else self._spec.windows(budget)
            holding = self[seq] = Holding.empty(self.prompt_chain(seq.request), windows, self.attended(seq))
            holding.chain.source = Source(seq.request.tenant, seq.request.cache_scope, seq.request.request_id)
        return holding

    def attended(self, seq: Sequence) -> AttendedBlocks | None:
        """Return what decides by attention which blocks a sequence keeps, before any has been measured."""
        if seq.measured_from is None:
            return None
        budget = seq.request.params.kv_budget
        assert budget is not None
        return AttendedBlocks(budget, self._windows, self._block_size, seq.num_prompt_tokens)

    def hash_prompt(self, request: Request) -> None:
        """Pack and hash a request's prompt. Thread-safe."""
        request.full_blocks = self._prefix_cache.full_blocks(request.prompt_token_ids, request.cache_scope)

    def prompt_chain(self, request: Request) -> TokenChain:
        """Return a chain that starts with the full blocks of the prompt, which are hashed here if not done before."""
        if not isinstance(request.full_blocks, FullBlocks):
            self.hash_prompt(request)
        budget = request.params.kv_budget
        most = sys.maxsize
        if budget is not None:
            most = budget.reads_all_before(len(request.prompt_token_ids), self._block_size) // self._block_size
        return self._prefix_cache.chain(request.cache_scope, cast(FullBlocks, request.full_blocks), most)

    def matchable(self, seq: Sequence) -> tuple[TokenChain, int]:
        """Return a sequence's chain, and how many of its blocks a hit may cover, which excludes its last token, and
        those whose attention must be measured.
        """
        chain = self.begin(seq).chain
        chain.grow(seq.num_tokens, seq.tokens)
        first = seq.measured_from
        most = seq.num_tokens - 1 if first is None else min(first, seq.num_tokens - 1)
        return chain, min(len(chain), most // self._block_size)

    def tables(self) -> Iterator[BlockTable]:
        """Iterate over the tables of all sequences."""
        return (table for holding in self.values() for table in holding.tables)

    def of(self, requests: Iterable[Request]) -> Iterator[tuple[Sequence, Holding]]:
        """Iterate over the sequences of these requests that have a holding."""
        for request in requests:
            for seq in request.sequences:
                if (holding := self.get(seq)) is not None:
                    yield seq, holding

    def num_freed_by(self, sequences: Iterable[Sequence]) -> int:
        """Return how many blocks would become available if all of these sequences released theirs. O(their blocks)."""
        counts, pins = self._pool.blocks.references, self._pool.blocks.pins
        held = Counter(block for seq in sequences for table in self[seq].tables for block in table)
        held.pop(NULL_BLOCK, None)
        return sum(counts[block] == references and not pins[block] for block, references in held.items())

    def restore_cost(self, seq: Sequence) -> RestoreCost:
        """Return the cost of preempting a sequence and the blocks it would free. O(blocks of the sequence)."""
        counts, tables = self._pool.blocks.references, self[seq].tables
        blocks = sum(block != NULL_BLOCK and counts[block] == 1 for table in tables for block in table)
        # Lost are the first block that no other sequence holds or that a window has slid past, and all after it.
        kept = min(next((i for i, block in enumerate(table) if counts[block] <= 1), len(table)) for table in tables)
        return RestoreCost(max(0, seq.num_computed - kept * self._block_size), blocks)

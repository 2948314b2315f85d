"""The blocks that sequences hold: their block tables and hash chains, and what taking them away would cost and gain.

The manager alone changes them; everybody else reads.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, cast

from octavo.kvcache.attended import AttendedBlocks, Mass
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockTable, new_table
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


class Retention(Protocol):
    """Decides which blocks of one group a sequence keeps: `Window` by position, `AttendedBlocks` by attention.

    Attributes:
        leaves_out: whether the runner's table has no entries for the blocks that are gone.
    """

    @property
    def leaves_out(self) -> bool: ...

    def let_go(self, table: Seq[int], num_computed: int, block_size: int) -> Seq[int]:
        """Choose and forget the blocks that no token after the first `num_computed` reads.

        Returns:
            Their indices in the group's table.
        """

    def due_at(self, num_computed: int, block_size: int) -> int:
        """Return the number of computed tokens at which `let_go` may choose blocks again."""

    def add(self, mass: Mass) -> None:
        """Note the attention that some rows paid to the blocks it keeps: [blocks]."""

    def copy(self) -> Self:
        """Return a copy for a fork."""


_EVERYTHING = Window(sys.maxsize)


@dataclass(slots=True)
class Holding:
    """The blocks and hash chain of one sequence.

    Attributes:
        retained: what each group keeps; empty if all groups keep everything.
        num_published: full blocks offered to the prefix cache so far.
        capacity: tokens for which the tables have unshared blocks; the sequence may grow to this length without more.
        cached_length, cached_at: tokens of a waiting sequence that are cached, where the order of admission depends on
            that, and the number of changes of the cache until then; -1 if it was not looked up.
    """

    tables: list[BlockTable]
    chain: TokenChain
    retained: Seq[Retention]
    num_published: int = 0
    capacity: int = 0
    cached_length: int = 0
    cached_at: int = -1

    def fork(self) -> Holding:
        """Return a holding of the same blocks; the next write of either must check whether its block is shared."""
        self.capacity = 0
        tables, retained = [table[:] for table in self.tables], [each.copy() for each in self.retained]
        return Holding(tables, self.chain.copy(), retained, self.num_published)

    def let_go(self, num_computed: int, block_size: int) -> tuple[list[BlockTable], bool]:
        """Replace the blocks that are not kept by null blocks.

        Returns:
            The blocks, to be released; and whether the runner's tables leave any of them out.
        """
        released, any_left_out = [], False
        for table, retention in zip(self.tables, self.retained, strict=False):
            if indices := retention.let_go(table, num_computed, block_size):
                released.append(new_table([table[index] for index in indices]))
                for index in indices:
                    table[index] = NULL_BLOCK
                any_left_out |= retention.leaves_out
        return released, any_left_out

    def entries(self, first: int) -> tuple[tuple[tuple[BlockId, ...], ...], tuple[int, ...]]:
        """Return the entries of each table from `first` on, and how many blocks are left out of them, if any is."""
        tables = tuple([tuple(table[first:]) for table in self.tables])
        if not any(each.leaves_out for each in self.retained):
            return tables, ()
        kept = tuple(
            tuple(filter(None, table)) if each.leaves_out else table
            for table, each in zip(tables, self.retained, strict=True)
        )
        return kept, tuple(len(table) - len(left) for table, left in zip(tables, kept, strict=True))

    def commit_at(self, num_computed: int, block_size: int) -> int:
        """Return the number of computed tokens at which a block is full, or some may be released."""
        full = num_computed - num_computed % block_size + block_size
        return min([full, *(each.due_at(num_computed, block_size) for each in self.retained)])

    def empty_tables(self) -> list[BlockTable]:
        """Remove the blocks, and return their tables; the chain is kept."""
        tables, num_groups = self.tables, len(self.tables)
        self.tables = [new_table() for _ in range(num_groups)]
        self.num_published = self.capacity = 0
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
        windows = spec.windows()
        self._windows: Seq[Retention] = [window or _EVERYTHING for window in windows] if any(windows) else ()

    def begin(self, seq: Sequence) -> Holding:
        """Return a sequence's holding; it begins without blocks, and with the chain of the prompt's full blocks."""
        holding = self.get(seq)
        if holding is None:
            tables = [new_table() for _ in self._spec.groups]
            holding = self[seq] = Holding(tables, self.prompt_chain(seq.request), self.retained(seq))
            holding.chain.source = Source(seq.request.tenant, seq.request.cache_scope, seq.request.request_id)
        return holding

    def retained(self, seq: Sequence) -> Seq[Retention]:
        """Return the retention of each group, for a sequence without blocks."""
        budget = seq.request.params.kv_budget
        if budget is None or not budget.evicts or (budget.measures and seq.measured_from is None):
            return self._windows
        kept = self._spec.blocks_kept(budget)
        return [
            window or AttendedBlocks(budget, num_blocks, self._block_size, seq.num_prompt_tokens)
            for window, num_blocks in zip(self._spec.windows(budget), kept, strict=True)
        ]

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

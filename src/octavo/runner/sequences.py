"""The runner's state of running sequences, in one row each, which persists between steps."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from octavo.grammar.compiler import GrammarCompiler
from octavo.kv_budget import KVBudget
from octavo.request import SequenceId
from octavo.sampling.batch import MASK_64, NO_DRAFT, RECORD, SamplingBatch, SamplingState, record_of
from octavo.scheduler.plan import SamplingSnapshot, SequenceForked, StepPlan, TableDelta
from octavo.storage.device_copy import to_device

Rows = npt.NDArray[np.int64]

# Of a sequence's budget: the tokens that it keeps if it slides (0: all), how many of the blocks that it reads are the
# most recent ones (0: it reads all), the first position that reads few, the leading blocks whose bounds are known, and
# the first position whose attention is measured (0: none).
BUDGET = np.dtype([("kept", "i4"), ("recent", "i4"), ("sparse_from", "i8"), ("bounded", "i8"), ("measured_from", "i8")])
BudgetRow = tuple[int, int, int, int, int]
_NO_BUDGET: BudgetRow = (0, 0, 0, 0, 0)


class SequenceTable:
    """Block tables and sampling state of the sequences of one runner, updated by each plan.

        row    block tables, one array per group        sampling
        0      | 12  4 31  .  .  . |                    seq 7's parameters and token counts
        1      |  9 17  .  .  .  . |                    seq 3's
        2      |  .  .  .  .  .  . |  free

    A row's entries past the end of its table are meaningless.

    Args:
        max_rows: maximum number of sequences known at once.
        max_blocks: maximum length of a block table.
        mirrored: whether the device has its own memory; by default, if it is not a CPU.
        block_size: tokens per block.
        num_bounded: number of layers with bounds of keys.
        windowed: groups with a sliding window.

    Attributes:
        tables: int32 [max_rows, max_blocks], one per group. Blocks that attention decided against are left out.
        num_let_go: int32 [groups, max_rows], the number of these.
        grammars: compiler of grammars for structured outputs; None if there are none.
        planned_rows: int64 [rows]; the row of each sequence of the last applied plan.
        budgets: BUDGET [max_rows]; zeros for a sequence without one.
        blocks_read: int32 [num_bounded, max_rows], of a row whose budget reads few.
        num_budgets: number of sequences with a budget.
        device_tables: the tables as tensors: on a CPU the same memory, otherwise a copy that each plan updates.
    """

    def __init__(
        self,
        num_groups: int,
        max_rows: int,
        max_blocks: int,
        device: torch.device | str = "cpu",
        mirrored: bool | None = None,
        block_size: int = 16,
        num_bounded: int = 0,
        windowed: Seq[int] = (),
    ) -> None:
        self.block_size, self.device, self.windowed = block_size, torch.device(device), list(windowed)
        # Zeros are mapped on first touch, so unused rows cost no memory.
        self.tables = [np.zeros((max_rows, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self.mirrored = self.device.type != "cpu" if mirrored is None else mirrored
        self.device_tables = [
            torch.zeros(table.shape, dtype=torch.int32, device=device) if self.mirrored else torch.from_numpy(table)
            for table in self.tables
        ]
        self._written: list[tuple[int, int, int]] = []  # (row, first, end) that the copies lack
        self._records = np.zeros(max_rows, dtype=RECORD)
        self._following = np.zeros(max_rows, dtype=np.bool_)  # whether tokens must be counted, or followed by a grammar
        self._states: list[SamplingState | None] = [None] * max_rows
        # By row that verifies a draft and must be sent its tokens: the number of tokens before the draft, the draft,
        # and the state before each of its tokens and after the last. The next step's start says which of them holds.
        self._along: dict[int, tuple[int, Seq[int], list[SamplingState]]] = {}
        self.budgets = np.zeros(max_rows, BUDGET)
        self.blocks_read = np.zeros((num_bounded, max_rows), np.int32)
        self.num_let_go = np.zeros((num_groups, max_rows), np.int32)
        self.num_budgets = 0
        self.grammars: GrammarCompiler | None = None
        self._lengths = [0] * max_rows  # of each row's tables, at most
        self._rows: dict[SequenceId, int] = {}
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._planned: tuple[SequenceId, ...] = ()  # by the previous plan
        self.planned_rows: Rows = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, plan: StepPlan) -> Rows:
        """Apply a plan's changes to its sequences; returns the row of each sequence that it computes: int64 [rows].

        If nothing but tables has changed since the previous plan, it is the same array object.
        """
        same_rows = plan.seq_ids == self._planned and not (plan.reset or plan.changes or plan.new)
        if plan.reset:
            for seq_id in list(self._rows):
                self._drop(seq_id)
        for change in plan.changes:
            if isinstance(change, SequenceForked):
                self._fork(change)
            else:
                self._drop(change.seq_id)
        for new in plan.new:
            row = self._take_row(new.seq_id)
            state = SamplingState.of(new.sampling, np.frombuffer(new.token_ids, dtype=np.int32), self.grammars)
            self._records[row], self._states[row] = record_of(state.snapshot), state
            self._following[row] = state.counts is not None or state.grammar is not None
            if (budget := new.sampling.params.kv_budget) is not None:
                self._set_budget(row, self._budget_of(budget, new.sampling))
                if not budget.evicts:
                    self.blocks_read[:, row] = budget.blocks_read(self.block_size)
        row_of = self._rows
        for delta in plan.tables:
            self._write(row_of[plan.seq_ids[delta.row]], delta)
        if self.mirrored:
            self._mirror()
        if not same_rows:
            self._planned = plan.seq_ids
            self.planned_rows = np.fromiter((row_of[seq_id] for seq_id in plan.seq_ids), np.int64, len(plan.seq_ids))
        return self.planned_rows

    def follows_tokens(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether any of these sequences' tokens must be passed to `follow_tokens`."""
        return bool(self._following[rows].any())

    def follow_tokens(
        self,
        rows: npt.NDArray[np.int64],
        starts: Seq[int],
        bounds: npt.NDArray[np.int32],
        token_ids: Seq[int],
        num_drafted: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Count a step's tokens for penalties, and let grammars follow them; tokens already known are skipped.

        Args:
            starts: position of each row's first token.
            bounds: row i has token_ids[bounds[i] : bounds[i + 1]].
            num_drafted: int64 [rows]; the last tokens of each row that are unverified. None if none is.
        """
        for i in np.flatnonzero(self._following[rows]).tolist():
            row = int(rows[i])
            if (along := self._along.pop(row, None)) is not None:
                first, _, states = along
                self._states[row] = states[starts[i] - first]
            state = self._state(row)
            begin, end = int(bounds[i]), int(bounds[i + 1])
            drafted = token_ids[end - int(num_drafted[i]) : end] if num_drafted is not None else ()
            end -= len(drafted)
            if (counts := state.counts) is not None:
                for token_id in token_ids[begin + counts.num_tokens - starts[i] : end]:
                    counts.append(token_id)
            if (grammar := state.grammar) is not None:
                of_prompt = max(0, state.snapshot.num_prompt_tokens - starts[i])
                if begin + of_prompt < end:
                    first = starts[i] + of_prompt - state.snapshot.num_prompt_tokens
                    grammar.follow(first, token_ids[begin + of_prompt : end])
            if drafted:
                num_tokens = starts[i] + end - begin
                if grammar is not None:  # a fork's has followed what was forced after its parent's token
                    grammar.return_to(num_tokens - state.snapshot.num_prompt_tokens)
                self._along[row] = num_tokens, drafted, _states_along(state, drafted)

    def draws(
        self, rows: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64], seeds: Iterable[tuple[int, int]] = ()
    ) -> SamplingBatch:
        """Return the draws from these rows, in order.

        Args:
            num_tokens: int64 [draws]; number of tokens of the sequence before the one being drawn.
            seeds: (draw, seed) of draws that do not use the seed of their row.
        """
        records = self._records[rows]
        for draw, seed in seeds:
            records[draw]["seed"] = seed & MASK_64
        states = [self._state(row) for row in rows.tolist()]
        drafted = np.full(len(rows), NO_DRAFT)
        if self._along:
            for draw, (row, count) in enumerate(zip(rows.tolist(), num_tokens.tolist(), strict=True)):
                if (along := self._along.get(row)) is not None:
                    first, draft, following = along
                    states[draw] = following[count - first]
                    if count - first < len(draft):
                        drafted[draw] = draft[count - first]
        return SamplingBatch(records, num_tokens - records["num_prompt_tokens"], states, drafted)

    def _state(self, row: int) -> SamplingState:
        state = self._states[row]
        assert state is not None, f"row {row} holds no sequence"
        return state

    def _take_row(self, seq_id: SequenceId) -> int:
        row = self._rows[seq_id] = self._free_rows.pop()
        return row

    def _drop(self, seq_id: SequenceId) -> None:
        row = self._rows.pop(seq_id)
        self._following[row], self._states[row] = False, None
        self._along.pop(row, None)
        self._set_budget(row, _NO_BUDGET)
        self.num_let_go[:, row] = 0
        self._free_rows.append(row)

    def _fork(self, fork: SequenceForked) -> None:
        parent, child = self._rows[fork.parent], self._take_row(fork.child)
        self._states[child], self._following[child] = self._state(parent).fork(), self._following[parent]
        self._records[child] = self._records[parent]
        self._records[child]["seed"] = fork.seed & MASK_64
        self._set_budget(child, self.budgets[parent].item())
        self.blocks_read[:, child] = self.blocks_read[:, parent]
        self.num_let_go[:, child] = self.num_let_go[:, parent]
        length = self._lengths[child] = self._lengths[parent]
        for table in self.tables:
            table[child, :length] = table[parent, :length]
        self._note_written(child, 0, length)

    def _budget_of(self, budget: KVBudget, sampling: SamplingSnapshot) -> BudgetRow:
        size, num_prompt = self.block_size, sampling.num_prompt_tokens
        if budget.slides:
            return (budget.tokens, 0, 0, 0, 0)
        if budget.measures:
            first = budget.measured_from(num_prompt, sampling.params.max_tokens or 1)
            # The first token attends to itself alone, which says nothing.
            return _NO_BUDGET if first is None else (0, 0, 0, 0, max(1, first))
        return (0, budget.num_recent(size), budget.reads_all_before(num_prompt, size), 0, 0)

    def _set_budget(self, row: int, budget: BudgetRow) -> None:
        self.num_budgets += int(budget != _NO_BUDGET) - int(self.budgets[row].item() != _NO_BUDGET)
        self.budgets[row] = budget

    def _write(self, row: int, delta: TableDelta) -> None:
        if not delta.first:
            self.num_let_go[:, row] = delta.num_let_go or 0
        before = self.num_let_go[:, row].tolist() if delta.first else [0] * len(self.tables)
        for table, run, gone in zip(self.tables, delta.blocks, before, strict=True):
            table[row, delta.first - gone : delta.first - gone + len(run)] = run
        end = self._lengths[row] = delta.first + max(map(len, delta.blocks))
        self._note_written(row, delta.first - max(before), end)

    def _note_written(self, row: int, first: int, end: int) -> None:
        if self.mirrored:
            self._written.append((row, first, end))

    def _mirror(self) -> None:
        """Update the device's copies, in two transfers per group."""
        written, self._written = self._written, []
        if not written:
            return
        rows = np.repeat([row for row, _, _ in written], [end - first for _, first, end in written])
        columns = np.concatenate([np.arange(first, end) for _, first, end in written])
        for table, on_device in zip(self.tables, self.device_tables, strict=True):
            places = to_device(rows * table.shape[1] + columns, on_device.device)
            on_device.view(-1).index_copy_(0, places, to_device(table[rows, columns], on_device.device))


def _states_along(state: SamplingState, drafted: Iterable[int]) -> list[SamplingState]:
    """Return the state before each drafted token, and after the last.

    A token that the grammar refuses is not drawn, so the draws after it are dropped; any state serves for them.
    """
    states, is_valid = [state], True
    for token_id in drafted:
        state = states[-1].fork()
        states.append(state)
        if state.counts is not None:
            state.counts.append(token_id)
        if state.grammar is not None and is_valid:
            is_valid = state.grammar.follow_draft(token_id)
    return states

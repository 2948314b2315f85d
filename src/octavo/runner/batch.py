"""Builds a step's tensors from its plan; the only place where slots are computed.

plan ──> StepBatch    which tokens, queries and draws there are; stays while the same rows compute as many
           └ write    a step's numbers ──> StepInputs (`inputs.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

import numpy as np
import numpy.typing as npt
import torch

from octavo.attention.base import MeasuredRows, SinkReads, SparseReads
from octavo.kvcache.attended import Masses
from octavo.runner.inputs import InputViews, StepInputs, padded_size
from octavo.runner.sequences import Rows, SequenceTable
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.sampler import PlainDraw
from octavo.scheduler.plan import DRAWN, PromptPool, PromptScores, StepPlan
from octavo.storage.device_copy import to_device

_NO_ROWS: Rows = np.empty(0, np.int64)
_NO_DRAWS = SamplingBatch.of((), ())
_MOST_BATCHES = 32  # kept; a stream that verifies drafts of up to 8 tokens has 9
_LEAST_TOKENS = 512  # for which the buffers of prompts have room


class StepBatch:
    """One step's inputs. Usually the next step has the same tokens, queries and draws: only its numbers are written.

        plan        | row 4: 3 tokens, 2 draws | row 7: 4 tokens, 1 draw |    row 4 is a decode that verifies a token
        queries     | 4 | 4 | 4                | 7                       |
        draws             ^   ^                                        ^

    Each token of a decode, or one that reads few blocks under a budget, is a separate query. All keys and values of a
    step are written before any is read, so such a query reads those of the tokens before it.

    Right after a model has read all its weights, each call of another function costs microseconds, however little it
    does, so steps of decodes make few.

    Args:
        rows: the table row of each of the plan's rows.
        inputs: the buffers that steps write, and the device reads.
        in_graphs: whether graphs read these buffers.

    Attributes:
        token_ids: int64 [num_tokens]
        logits_indices: int64 [outputs]; tokens whose logits or hidden states are needed: first those to sample from,
            then those to score, then those to pool.
        sampling: the draws.
        sample_rows: the logits row of each draw; None if row i belongs to draw i.
        num_sample_rows: number of rows to sample from.
        scores: (first row, positions to score) for prompt logprobs.
        pools: (first row, positions to pool) for embeddings.
        fits_graphs: whether all its tokens are decodes, in `BatchBuilder.inputs`.
        is_plain: whether it draws tokens, and nothing but their ids is wanted.
        draw: what `Sampler.prepare` has returned for `sampling`, if `is_plain`; None if it has not been called.
        drawing_rows: int64 [draws], the table row of each.
    """

    def __init__(
        self, plan: StepPlan, rows: Rows, table: SequenceTable, inputs: StepInputs, *, in_graphs: bool
    ) -> None:
        self._rows, self._table, self._inputs, self._block_size = rows, table, inputs, table.block_size
        self._follows_tokens = table.follows_tokens(rows)
        self._sum_of_starts = self._steps_left = 0  # steps before some token enters its row's next block
        lengths, num_tokens = np.array(plan.lengths, dtype=np.int64), len(plan.token_ids)
        self._bounds = _bounds(lengths)
        self._row = np.repeat(np.arange(len(rows)), lengths)  # of each token, and its place in it
        self._place = np.arange(num_tokens) - self._bounds[self._row]
        self._token_rows = self._query_rows = self.drawing_rows = rows[self._row]
        self._row_of_query = self._row
        self._last: Rows | None = None  # token of each query; None if each token is a query
        self._drawn: Rows | None = None  # the token before each draw; None if each token has one
        self._num_drafted: Rows | None = None  # the last tokens of each row that are unverified
        self._seeds: list[tuple[int, int]] = []
        self.sample_rows: list[int] | None = None
        self.scores: list[tuple[int, PromptScores]] = []
        self.pools: list[tuple[int, PromptPool]] = []
        self.sampling, self.is_plain = _NO_DRAWS, False
        self.draw: PlainDraw | None = None
        # By the plan's row, for each of its queries: where its mass begins, and how many blocks each group has.
        self._measured: dict[int, list[tuple[int, list[int]]]] = {}
        self.fits_graphs = in_graphs and _each_draws(plan)
        views = self._decodes(lengths) if _each_draws(plan) else self._ragged(plan, lengths)
        self.token_ids, self.attention, self.logits_indices = views
        self._positions, self._ends = inputs.positions[:num_tokens], inputs.lengths[: len(self._query_rows)]
        self._places = inputs.places[:, :num_tokens]  # positions and slots

    def _decodes(self, lengths: np.ndarray) -> InputViews:
        """Return the inputs of a step in which each token is a query, and draws."""
        self.num_sample_rows = count = len(self._row)
        if count > len(lengths):
            self._num_drafted = lengths - 1
        if not self.fits_graphs:  # buffers that other steps divide into longer queries
            self._inputs.bounds[: count + 1] = self._inputs.indices[: count + 1] = np.arange(count + 1)
        return self._inputs.decodes(count)

    def _ragged(self, plan: StepPlan, lengths: np.ndarray) -> InputViews:
        own = np.array(plan.draws, dtype=np.int64)  # at the last positions of each row; siblings draw at the very last
        for row, siblings in plan.sibling_seeds.items():
            own[row] -= len(siblings)
        if own.max() > 1:
            self._num_drafted = np.maximum(own - 1, 0)
        # The first tokens of each row, which are one query.
        together = np.where(np.arange(len(lengths)) < plan.num_decodes, 0, lengths)
        # Of these, the first ones whose attention is not measured are one query, and the others another.
        unmeasured = together
        if self._table.num_budgets:
            budgets, starts = self._table.budgets[self._rows], np.array(plan.starts, dtype=np.int64)
            together = np.where(budgets["recent"] > 0, np.clip(budgets["sparse_from"] - starts, 0, together), together)
            before = np.clip(budgets["measured_from"] - starts, 0, together)
            unmeasured = np.where(budgets["measured_from"] > 0, before, together)
        parts = np.stack((unmeasured, together - unmeasured, np.ones_like(lengths)), axis=1)
        counts = np.stack((parts[:, 0] > 0, parts[:, 1] > 0, lengths - together), axis=1)
        self._row_of_query = query_row = np.repeat(np.arange(len(lengths)), counts.sum(axis=1))
        query_lengths = np.repeat(parts.ravel(), counts.ravel())
        query_start = _bounds(query_lengths)
        self._query_rows, self._last = self._rows[query_row], np.cumsum(query_lengths) - 1
        self._drawn = outputs = np.flatnonzero(lengths[self._row] - self._place <= own[self._row])
        self.num_sample_rows = num_outputs = len(outputs)
        if plan.sibling_seeds:
            times, last_own = np.ones(num_outputs, dtype=np.int64), np.cumsum(own) - 1
            for row, siblings in plan.sibling_seeds.items():
                times[last_own[row]] += len(siblings)
            end = np.cumsum(times)  # of the draws from each row of logits
            for row, siblings in plan.sibling_seeds.items():
                self._seeds += enumerate(siblings, start=int(end[last_own[row]]) - len(siblings))
            sample_rows = np.repeat(np.arange(num_outputs), times)
            self.sample_rows, self._drawn = sample_rows.tolist(), outputs[sample_rows]
        self.drawing_rows = self._token_rows[self._drawn]
        pieces = [outputs]
        for score in plan.scores:
            self.scores.append((num_outputs, score))
            pieces.append(self._tokens(plan, score.row, score.first, len(score.targets)))
            num_outputs += len(score.targets)
        for pool in plan.pools:
            self.pools.append((num_outputs, pool))
            pieces.append(self._tokens(plan, pool.row, pool.first, pool.num_tokens))
            num_outputs += pool.num_tokens
        self._inputs.bounds[: len(query_start)] = query_start
        self._inputs.indices[:num_outputs] = np.concatenate(pieces)
        views = self._inputs.views(len(query_row), len(self._row), num_outputs)
        views.attention.max_query_len = int(query_lengths.max())
        self._singles = np.flatnonzero(query_lengths == 1)
        return views

    def _tokens(self, plan: StepPlan, row: int, position: int, count: int) -> Rows:
        first = int(self._bounds[row]) + position - plan.starts[row]
        return np.arange(first, first + count)

    def begin(self) -> None:
        """Switch back to these inputs after others were used."""
        self._inputs.pad(len(self._positions))
        self._inputs.rows[: len(self._query_rows)] = self._query_rows
        self._steps_left = 0
        if self._follows_tokens:
            self.sampling = _NO_DRAWS  # states were replaced if another step has verified drafts

    def write(self, plan: StepPlan) -> None:
        """Write a step's numbers."""
        table, attention = self._table, self.attention
        if self._follows_tokens:
            table.follow_tokens(self._rows, plan.starts, self._bounds, plan.token_ids, self._num_drafted)
        self._inputs.token_ids[: len(plan.token_ids)] = plan.token_ids
        total, before = sum(plan.starts), self._sum_of_starts
        self._sum_of_starts = total
        if self._steps_left and not plan.tables and total == before + len(self._rows):
            # Usually each row is one token further in the block that it was in.
            for numbers in (self._places, self._ends, self.sampling.positions):
                numbers += 1  # in place
            attention.max_context_len += 1
            attention.total_decode_len += len(self._ends)
            self._steps_left -= 1
        else:
            self._write_places(plan)
        attention.sinks, attention.sparse = (self._sinks(), self._sparse()) if table.num_budgets else (None, None)
        if table.num_budgets or attention.measured is not None:
            self._measure()
        self._inputs.push()

    def _write_places(self, plan: StepPlan) -> None:
        attention, positions, ends = self.attention, self._positions, self._ends
        np.add(np.array(plan.starts, dtype=np.int64)[self._row], self._place, out=positions)
        np.add(positions if self._last is None else positions[self._last], 1, out=ends, casting="same_kind")
        blocks, offsets = np.divmod(positions, self._block_size)
        gone = self._table.num_let_go[:, self._token_rows] if self._table.num_budgets else None
        for group, (table, slots) in enumerate(zip(self._table.tables, self._places[1:], strict=True)):
            in_table = blocks if gone is None else blocks - gone[group]
            np.multiply(table[self._token_rows, in_table], self._block_size, out=slots)
            slots += offsets
        attention.max_context_len = max(map(add, plan.starts, plan.lengths))
        attention.total_decode_len = int((ends if self._last is None else ends[self._singles]).sum())
        drawn = positions if self._drawn is None else positions[self._drawn]
        depends = self._follows_tokens and self._num_drafted is not None  # each draw of a row has its own state
        if self.sampling is _NO_DRAWS or depends:
            self.sampling, self.draw = self._table.draws(self.drawing_rows, drawn + 1, self._seeds), None
            self.is_plain = len(drawn) > 0 and self.sampling.is_plain and not (self.scores or self.pools)
            self._not_output = self.sampling.records["num_prompt_tokens"] - 1
        else:
            np.subtract(drawn, self._not_output, out=self.sampling.positions)
        self._steps_left = 0 if depends else self._block_size - 1 - int(offsets.max())

    def mass(self) -> dict[int, tuple[Masses, ...]]:
        """Return the mass of each row's blocks, for `StepResult.mass`, once the step is computed."""
        if self.attention.measured is None:
            return {}
        mass = self.attention.measured.mass.cpu().numpy()
        return {
            row: tuple(
                tuple(of_group[begin : begin + count] for of_group, count in zip(mass, counts, strict=True))
                for begin, counts in queries
            )
            for row, queries in self._measured.items()
        }

    def _measure(self) -> None:
        """Note which tokens queries see of sequences that have evicted blocks, and make room for the blocks' mass."""
        attention, size, device = self.attention, self._block_size, self.token_ids.device
        gone = self._table.num_let_go[:, self._query_rows]
        kept = self._ends - gone * size
        for group, (of_group, of_table) in enumerate(zip(attention.groups, gone, strict=True)):
            of_group.context_lens = to_device(kept[group].astype(np.int32), device) if of_table.any() else None
        firsts = self._table.budgets["measured_from"][self._query_rows]
        measured = np.flatnonzero((firsts > 0) & (self._ends > firsts))
        self._measured = {}
        if not len(measured):
            attention.measured = None
            return
        blocks = -(-kept[:, measured] // size)
        blocks[self._table.windowed] = 0  # they are not measured
        ends = np.cumsum(blocks.max(axis=0))
        begins = np.full(len(self._query_rows), -1, dtype=np.int64)
        begins[measured] = ends - blocks.max(axis=0)
        mass = torch.zeros(len(kept), int(ends[-1]), dtype=torch.int64, device=device)
        attention.measured = MeasuredRows(to_device(begins, device), mass)
        rows = self._row_of_query[measured].tolist()
        for row, begin, counts in zip(rows, begins[measured].tolist(), blocks.T.tolist(), strict=True):
            self._measured.setdefault(row, []).append((begin, counts))

    def _sinks(self) -> SinkReads | None:
        """Return which tokens are visible of sequences that have evicted some under a budget; None if none has."""
        kept = self._table.budgets["kept"]
        budgets, of_tokens = kept[self._query_rows], kept[self._token_rows]
        if not ((self._ends > budgets) & (budgets > 0)).any():
            return None
        seen_from = np.where(of_tokens > 0, np.minimum(self._positions, of_tokens - 1), self._positions)
        device = self.token_ids.device
        return SinkReads(to_device(budgets, device), self._block_size, to_device(seen_from, device))

    def _sparse(self) -> SparseReads | None:
        """Return which queries read few blocks, and the blocks whose bounds such queries of this step or of later ones
        need; None if there are none.
        """
        table, positions = self._table, self._ends.astype(np.int64) - 1
        if not len(table.blocks_read):
            return None  # no layer reads sparsely
        # A block filled by a draft that was refused is written again, from the row's first token on.
        starts = self._positions[self._bounds[:-1]] // self._block_size
        table.budgets["bounded"][self._rows] = np.minimum(table.budgets["bounded"][self._rows], starts)
        budgets = table.budgets[self._query_rows]
        is_sparse = (budgets["recent"] > 0) & (positions >= budgets["sparse_from"])
        # They choose among full blocks, whose keys are written by now or before any layer of this step reads them. A
        # prompt's blocks follow as they fill once it exceeds the budget, so that the first answer's step is no longer.
        ends = positions // self._block_size + 1 - budgets["recent"]
        fewest = table.blocks_read[:, self._query_rows].min(axis=0)
        exceeds = (budgets["recent"] > 0) & (positions >= fewest.astype(np.int64) * self._block_size)
        completed: list[list[np.ndarray]] = [[np.empty(0, np.int32)] for _ in table.tables]
        for i in np.flatnonzero(exceeds & (ends > budgets["bounded"])).tolist():
            row, end = int(self._query_rows[i]), int(ends[i])
            first = int(table.budgets["bounded"][row])  # or an earlier query of the row has them
            for blocks, of_group in zip(completed, table.tables, strict=True):
                blocks.append(of_group[row, first:end])
            table.budgets["bounded"][row] = max(first, end)
        if len(completed[0]) == 1 and not is_sparse.any():
            return None
        device = self.token_ids.device
        return SparseReads(
            num_read=to_device(np.where(is_sparse, table.blocks_read[:, self._query_rows], 0).astype(np.int32), device),
            num_recent=to_device(np.where(is_sparse, budgets["recent"], 0).astype(np.int32), device),
            completed=[to_device(np.unique(np.concatenate(blocks)), device) for blocks in completed],
        )


class BatchBuilder:
    """Builds each step's `StepBatch`, from its plan and from what earlier plans have sent of its sequences.

    Attributes:
        inputs: the buffers of steps of up to `padded_size(max_rows)` decodes; other steps have larger ones.
    """

    def __init__(self, sequences: SequenceTable) -> None:
        self.sequences = sequences
        self.inputs = self._new_inputs(padded_size(len(sequences.budgets)))
        self._large_inputs = self._new_inputs(_LEAST_TOKENS)
        self._batch: StepBatch | None = None  # of the last plan
        self._batches: dict[tuple[int, ...], StepBatch] = {}  # of decodes of these rows, by the rows' lengths
        self._rows = _NO_ROWS
        self._drawn: torch.Tensor | Sequence[int] = ()  # by the last plan

    def build(self, plan: StepPlan) -> StepBatch:
        """Build a plan's batch, with what the step before drew in place of `DRAWN`. It is valid until the next."""
        rows = self.sequences.apply(plan)
        pending, places = self._pending(plan)
        draws = self._draws_of(rows[pending]) if len(pending) else None
        follows = draws is not None and self.sequences.follows_tokens(rows[pending])
        if draws is not None and (follows or not isinstance(self._drawn, torch.Tensor)):
            # Penalties count the tokens on the host, for which a device is waited for.
            drawn = self._drawn.tolist() if isinstance(self._drawn, torch.Tensor) else self._drawn
            token_ids = list(plan.token_ids)
            for place, draw in zip(places.tolist(), draws.tolist(), strict=True):
                token_ids[place] = drawn[draw]
            plan, draws = plan._replace(token_ids=tuple(token_ids)), None
        batch = self._batch_of(plan, rows)
        batch.write(plan)
        if draws is not None:
            self._write_drawn(batch.token_ids, places, draws)
        return batch

    @staticmethod
    def _pending(plan: StepPlan) -> tuple[Rows, Rows]:
        """Return the rows of a plan whose last token is pending, and that token's index: int64 [pending] each."""
        if not plan.ahead:
            return _NO_ROWS, _NO_ROWS
        last = np.cumsum(plan.lengths, dtype=np.int64) - 1
        pending = np.flatnonzero(np.array(plan.token_ids, dtype=np.int64)[last] == DRAWN)
        return pending, last[pending]

    def _draws_of(self, rows: Rows) -> Rows:
        """Return the draw of the last plan from each of these rows, of several from one row the first: int64 [rows]."""
        drawing = _NO_ROWS if self._batch is None else self._batch.drawing_rows
        if rows.shape == drawing.shape and (rows == drawing).all():
            return np.arange(len(rows))
        draw_of = {row: draw for draw, row in reversed(list(enumerate(drawing.tolist())))}
        return np.array([draw_of[row] for row in rows.tolist()], dtype=np.int64)

    def _write_drawn(self, token_ids: torch.Tensor, places: Rows, draws: Rows) -> None:
        """Write tokens that only the device knows yet, where they are to be computed."""
        assert isinstance(self._drawn, torch.Tensor)
        drawn = self._drawn
        if not np.array_equal(draws, np.arange(len(drawn))):  # sequences have ended, or stand in another order
            drawn = drawn[to_device(draws, drawn.device)]
        if len(places) == len(token_ids):
            token_ids.copy_(drawn)
        else:
            token_ids.index_copy_(0, to_device(places, token_ids.device), drawn)

    def note_drawn(self, token_ids: torch.Tensor | Sequence[int]) -> None:
        """Note the tokens that the last step drew, one for each of its draws, or int64 [draws] on the device.

        A plan made ahead, before the scheduler has them, continues with them.
        """
        self._drawn = token_ids

    def forget(self, plan: StepPlan) -> None:
        """Apply a plan without rows, which only drops sequences."""
        self.sequences.apply(plan)
        self._batch = None
        self._batches.clear()

    def _batch_of(self, plan: StepPlan, rows: Rows) -> StepBatch:
        if rows is not self._rows:
            self._batches.clear()
            self._rows = rows
        each_draws = _each_draws(plan)
        batch = self._batches.get(plan.lengths) if each_draws else None
        if batch is None:
            # A row may need logits and a hidden state of its last token.
            most = len(plan.token_ids) + (0 if each_draws else len(rows))
            is_usual = each_draws and most <= self.inputs.capacity
            if not is_usual and most > self._large_inputs.capacity:
                self._large_inputs = self._new_inputs(1 << (most - 1).bit_length())
            inputs = self.inputs if is_usual else self._large_inputs
            batch = StepBatch(plan, rows, self.sequences, inputs, in_graphs=is_usual)
            if is_usual and len(self._batches) < _MOST_BATCHES:
                self._batches[plan.lengths] = batch
        if batch is not self._batch:
            batch.begin()
            self._batch = batch
        return batch

    def _new_inputs(self, capacity: int) -> StepInputs:
        tables = self.sequences
        return StepInputs(capacity, tables.device_tables, tables.device, mirrored=tables.mirrored)


def _each_draws(plan: StepPlan) -> bool:
    """Whether every token of a plan is computed only to draw the next."""
    if plan.num_streams == len(plan.seq_ids):
        return True
    return plan.is_decodes and plan.lengths == plan.draws and not (plan.sibling_seeds or plan.scores or plan.pools)


def _bounds(lengths: np.ndarray) -> npt.NDArray[np.int32]:
    """Return the index of each row's first token, and the number of all tokens: int32 [rows + 1]."""
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds

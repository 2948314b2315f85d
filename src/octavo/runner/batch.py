"""Builds a step's tensors from its plan; the only place where slots are computed.

A step of decodes alone is written into `StepInputs`, whose addresses stay the same, as a CUDA graph requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.attention.base import AttentionBatch, GroupBatch, SinkReads
from octavo.runner.sequences import Rows, SequenceTable
from octavo.sampling.batch import SamplingBatch
from octavo.scheduler.plan import DRAWN, PromptPool, PromptScores, StepPlan
from octavo.storage.device_copy import to_device, write_to_device

_TOKENS, _ROWS, _LENGTHS, _POSITIONS, _SLOTS = range(5)
_NO_ROWS: Rows = np.empty(0, np.int64)


def padded_size(num_seqs: int) -> int:
    """Round up to 1, 2, 4, 8, then to multiples of 8 up to 64, of 16 up to 256, and of 32 beyond."""
    if num_seqs <= 8:
        return 1 << (num_seqs - 1).bit_length()
    step = 8 if num_seqs <= 64 else 16 if num_seqs <= 256 else 32
    return -(-num_seqs // step) * step


class StepInputs:
    """The inputs of up to `capacity` sequences with one token each, written on the host and copied in one transfer.

        host           | token ids | rows | lengths | positions | slots of group 0 | slots of group 1 | …
                             └── one transfer ──> the same on the device

    On a CPU both are the same memory. Entries after the sequences of a step are padding: token 0 at position 0 of a
    sequence of one token, whose key and value go to the null block.

    Args:
        device_tables: each group's block tables on the device.
        mirrored: whether the device has its own memory.

    Attributes:
        token_ids, positions, rows: int64 [capacity], on the host.
        lengths: int32 [capacity], on the host.
        slots: int64 [capacity] per group, on the host.
        places: int64 [1 + groups, capacity], the positions and the slots, on the host.
    """

    def __init__(
        self, capacity: int, device_tables: Sequence[torch.Tensor], device: torch.device, *, mirrored: bool
    ) -> None:
        num_groups = len(device_tables)
        self._host = torch.zeros(_SLOTS + num_groups, capacity, dtype=torch.int64)
        self._device = torch.zeros_like(self._host, device=device) if mirrored else self._host
        self._tables = device_tables
        self._query_start = torch.arange(capacity + 1, dtype=torch.int32, device=device)
        self._indices = torch.arange(capacity, device=device)
        fields = self._host.numpy()
        self.token_ids, self.positions, self.rows = fields[_TOKENS], fields[_POSITIONS], fields[_ROWS]
        self.lengths: npt.NDArray[np.int32] = fields[_LENGTHS].view(np.int32)[:capacity]
        self.places = fields[_POSITIONS:]
        self.slots = [fields[_SLOTS + group] for group in range(num_groups)]

    @property
    def capacity(self) -> int:
        return self._host.shape[1]

    def pad(self, count: int) -> None:
        """Fill all entries from `count` on with padding."""
        for field in (self.token_ids, self.positions, self.rows, *self.slots):
            field[count:] = 0
        self.lengths[count:] = 1

    def push(self) -> None:
        """Update the device's copy; the host's may be overwritten at once."""
        if self._device is not self._host:
            write_to_device(self._host.numpy(), self._device)

    def device_token_ids(self, count: int) -> torch.Tensor:
        return self._device[_TOKENS, :count]

    def logits_indices(self, count: int) -> torch.Tensor:
        return self._indices[:count]

    def batch(self, count: int, max_context_len: int, total_len: int) -> AttentionBatch:
        """Return the attention inputs of the first `count` sequences, on the device.

        Args:
            max_context_len, total_len: the largest of their contexts, and the sum, or more.
        """
        return AttentionBatch(
            query_start=self._query_start[: count + 1],
            context_lens=self._device[_LENGTHS].view(torch.int32)[:count],
            table_rows=self._device[_ROWS, :count],
            positions=self._device[_POSITIONS, :count],
            groups=tuple(
                GroupBatch(table, self._device[_SLOTS + group, :count]) for group, table in enumerate(self._tables)
            ),
            num_seqs=count,
            num_tokens=count,
            max_query_len=1,
            max_context_len=max_context_len,
            total_decode_len=total_len,
        )


@dataclass(slots=True)
class StepBatch:
    """One step's inputs.

    Attributes:
        token_ids: int64 [num_tokens]
        logits_indices: int64 [rows]; tokens whose logits or hidden states are needed: first those to sample from, then
            those to score, then those to pool.
        sampling: the draws; `sample_rows[i]` is the logits row of draw i.
        num_sample_rows: number of rows to sample from.
        num_logits: number of rows that need logits, which are all but the pooled ones.
        scores: (first row, positions to score) for prompt logprobs.
        pools: (first row, positions to pool) for embeddings.
        inputs: the buffers of a pure decode step, in which every sequence computes one token and draws one; else None.
        is_plain: whether it draws tokens, and nothing but their ids is wanted.
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    logits_indices: torch.Tensor
    sampling: SamplingBatch
    sample_rows: list[int]
    num_sample_rows: int
    num_logits: int
    scores: list[tuple[int, PromptScores]]
    pools: list[tuple[int, PromptPool]]
    inputs: StepInputs | None = None
    is_plain: bool = False


class _Streams:
    """The batch of consecutive steps in which the same sequences compute one token each and draw one: most steps.

    Row i is token i and draw i. The batch is built once, and each step only writes its numbers into it: right after a
    model has read all its weights, each call of another function costs microseconds, however little it does.

    Args:
        rows: table rows of the sequences.
        sampling: inputs of the draws from these rows; each step overwrites its positions.
        tables: the block tables on the host.
        inputs: the buffers that steps write, and the device reads.

    Attributes:
        follows_tokens: whether a penalty or a grammar follows the tokens of any sequence.
    """

    def __init__(self, rows: Rows, sampling: SamplingBatch, tables: list[np.ndarray], inputs: StepInputs) -> None:
        count = len(rows)
        self.rows = rows
        self.follows_tokens = False
        self._tables = tables
        self._num_prompt_tokens = sampling.records["num_prompt_tokens"].copy()
        self._inputs = inputs
        inputs.pad(count)
        inputs.rows[:count] = rows
        self._token_ids, self._positions = inputs.token_ids[:count], inputs.positions[:count]
        self._ends = inputs.lengths[:count]
        self._counting = (inputs.places[:, :count], self._ends, sampling.positions)
        self._steps_left = 0  # before some row enters its next block
        self._slots = [slots[:count] for slots in inputs.slots]

        self.batch = StepBatch(
            token_ids=inputs.device_token_ids(count),
            attention=inputs.batch(count, max_context_len=0, total_len=0),
            logits_indices=inputs.logits_indices(count),
            sampling=sampling,
            sample_rows=list(range(count)),
            num_sample_rows=count,
            num_logits=count,
            scores=[],
            pools=[],
            inputs=inputs,
            is_plain=sampling.is_plain,
        )

    def write(self, plan: StepPlan, block_size: int) -> None:
        """Write a step's numbers."""
        self._token_ids[:] = plan.token_ids
        attention, total = self.batch.attention, sum(plan.starts)
        if self._steps_left and not plan.tables and total == attention.total_decode_len:
            # Usually each row is one token further in the block that it was in.
            for numbers in self._counting:
                numbers += 1  # in place
            attention.max_context_len += 1
            self._steps_left -= 1
        else:
            self._write_places(plan, block_size)
        attention.total_decode_len = total + len(self.rows)
        self._inputs.push()

    def _write_places(self, plan: StepPlan, block_size: int) -> None:
        positions, ends = self._positions, self._ends
        positions[:] = plan.starts
        np.add(positions, 1, out=ends, casting="same_kind")
        np.subtract(ends, self._num_prompt_tokens, out=self.batch.sampling.positions)
        blocks, offsets = np.divmod(positions, block_size)
        self._steps_left = block_size - 1 - int(offsets.max())
        for table, slots in zip(self._tables, self._slots, strict=True):
            # slot = table entry * block_size + offset = (table entry - block index) * block_size + position
            np.subtract(table[self.rows, blocks], blocks, out=slots)
            slots *= block_size
            slots += positions
        self.batch.attention.max_context_len = max(plan.starts) + 1


class BatchBuilder:
    """Builds each step's `StepBatch`, from its plan and what earlier plans said about its sequences.

    Args:
        num_groups: number of groups of layers, each with its own block tables.
        block_size: tokens per block.
        max_rows: maximum number of sequences known at once.
        max_blocks: maximum length of a block table.
        mirrored: whether the device has its own memory; by default, if it is not a CPU.

    Attributes:
        inputs: buffers shared by all decode steps, padded for the largest; None on a CPU, where each batch has its own.
    """

    def __init__(
        self,
        num_groups: int,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        device: torch.device | str = "cpu",
        mirrored: bool | None = None,
    ) -> None:
        self._block_size = block_size
        self._device = torch.device(device)
        self.sequences = SequenceTable(num_groups, max_rows, max_blocks, self._device, mirrored)
        self.inputs = self._new_inputs(padded_size(max_rows)) if self.sequences.mirrored else None
        self._streams: _Streams | None = None
        self._drawing_rows = _NO_ROWS  # of the draws of the last plan
        self._drawn: torch.Tensor | Sequence[int] = ()  # by them

    def build(self, plan: StepPlan) -> StepBatch:
        """Build a plan's batch, with what the step before drew in place of `DRAWN`."""
        rows = self.sequences.apply(plan)
        pending, places = self._pending(plan)
        draws = self._draws_of(rows[pending]) if len(pending) else None
        follows = draws is not None and self.sequences.sampling.follows(rows[pending])
        if draws is not None and (follows or not isinstance(self._drawn, torch.Tensor)):
            # Penalties count the tokens on the host, for which a device is waited for.
            drawn = self._drawn.tolist() if isinstance(self._drawn, torch.Tensor) else self._drawn
            token_ids = list(plan.token_ids)
            for place, draw in zip(places.tolist(), draws.tolist(), strict=True):
                token_ids[place] = drawn[draw]
            plan, draws = plan._replace(token_ids=tuple(token_ids)), None
        batch = self._build_streams(plan, rows) if plan.num_streams == len(rows) else self._build_ragged(plan, rows)
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
        if rows.shape == self._drawing_rows.shape and (rows == self._drawing_rows).all():
            return np.arange(len(rows))
        draw_of = {row: draw for draw, row in reversed(list(enumerate(self._drawing_rows.tolist())))}
        return np.array([draw_of[row] for row in rows.tolist()], dtype=np.int64)

    def _write_drawn(self, token_ids: torch.Tensor, places: Rows, draws: Rows) -> None:
        """Write tokens that only the device knows yet, where they are to be computed."""
        assert isinstance(self._drawn, torch.Tensor)
        drawn = self._drawn if len(draws) == len(self._drawn) else self._drawn[to_device(draws, self._drawn.device)]
        if len(places) == len(token_ids):
            token_ids.copy_(drawn)
        else:
            token_ids.index_copy_(0, to_device(places, token_ids.device), drawn)

    def note_drawn(self, token_ids: torch.Tensor | Sequence[int]) -> None:
        """Note the tokens that the last step drew, one for each of its draws, or int64 [draws] on the device.

        A plan made ahead, before the scheduler has them, continues with them.
        """
        self._drawn = token_ids

    def _build_ragged(self, plan: StepPlan, rows: Rows) -> StepBatch:
        self._streams = None
        starts = np.array(plan.starts, dtype=np.int64)
        lengths = np.array(plan.lengths, dtype=np.int64)
        own = np.array(plan.draws, dtype=np.int64)  # at the last positions of each row; siblings draw at the very last
        for row, siblings in plan.sibling_seeds.items():
            own[row] -= len(siblings)
        query_start = _bounds(lengths)
        is_verified = own > 1
        num_drafted = np.where(is_verified, lengths - 1, 0)
        self.sequences.sampling.count(rows, plan.starts, query_start, plan.token_ids, num_drafted)
        attention = (rows, starts, lengths, query_start)
        if is_verified.any():
            attention = _one_by_one(*attention, is_verified)
        return self._with_rows_to_sample(
            plan, rows, own, starts + lengths, query_start, self._attention_batch(*attention)
        )

    def forget(self, plan: StepPlan) -> None:
        """Apply a plan without rows, which only makes the runner forget sequences."""
        self.sequences.apply(plan)
        self._streams = None

    def _build_streams(self, plan: StepPlan, rows: Rows) -> StepBatch:
        same, table = self._streams, self.sequences
        is_new = same is None or same.rows is not rows
        follows = table.sampling.follows(rows) if same is None or is_new else same.follows_tokens
        if follows:
            table.sampling.count(rows, plan.starts, np.arange(len(rows) + 1, dtype=np.int32), plan.token_ids)
        if same is None or is_new:
            sampling = table.sampling.batch(rows, np.zeros(len(rows), np.int64))
            same = self._streams = _Streams(rows, sampling, table.tables, self.inputs or self._new_inputs(len(rows)))
            same.follows_tokens = follows
        same.write(plan, self._block_size)
        if table.num_budgets:
            starts = np.array(plan.starts, dtype=np.int64)
            same.batch.attention.sinks = self._sink_reads(rows, starts + 1, starts, rows)
        self._drawing_rows = rows
        return same.batch

    def _new_inputs(self, capacity: int) -> StepInputs:
        tables = self.sequences
        return StepInputs(capacity, tables.device_tables, self._device, mirrored=tables.mirrored)

    def _attention_batch(
        self, rows: Rows, starts: np.ndarray, lengths: np.ndarray, query_start: np.ndarray
    ) -> AttentionBatch:
        num_seqs, num_tokens = len(rows), int(query_start[-1])
        context_lens = starts + lengths
        max_context, max_query = int(context_lens.max()), int(lengths.max())
        if num_tokens == num_seqs:
            positions, token_rows = starts, rows
        else:
            positions = np.repeat(starts - query_start[:-1], lengths) + np.arange(num_tokens)
            token_rows = np.repeat(rows, lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        groups = tuple(
            GroupBatch(
                block_tables=on_device,
                slot_mapping=self._tensor(table[token_rows, blocks].astype(np.int64) * self._block_size + offsets),
            )
            for table, on_device in zip(self.sequences.tables, self.sequences.device_tables, strict=True)
        )
        return AttentionBatch(
            query_start=self._tensor(query_start),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            table_rows=self._tensor(rows),
            positions=self._tensor(positions),
            groups=groups,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=max_query,
            max_context_len=max_context,
            total_decode_len=int(context_lens[lengths == 1].sum()),
            sinks=self._sink_reads(rows, context_lens, positions, token_rows) if self.sequences.num_budgets else None,
        )

    def _sink_reads(
        self, rows: Rows, context_lens: np.ndarray, positions: np.ndarray, token_rows: Rows
    ) -> SinkReads | None:
        """Return what sequences see that have evicted tokens under their budget; None if none has."""
        budgets, of_tokens = self.sequences.budgets[rows], self.sequences.budgets[token_rows]
        if not ((context_lens > budgets) & (budgets > 0)).any():
            return None
        seen_from = np.where(of_tokens > 0, np.minimum(positions, of_tokens - 1), positions)
        return SinkReads(self._tensor(budgets), self._block_size, self._tensor(seen_from))

    def _with_rows_to_sample(
        self,
        plan: StepPlan,
        rows: Rows,
        own: np.ndarray,
        ends: np.ndarray,
        query_start: np.ndarray,
        attention: AttentionBatch,
    ) -> StepBatch:
        draws = np.array(plan.draws, dtype=np.int64)
        first_draw = np.cumsum(draws) - draws
        seeds = []
        for row, siblings in plan.sibling_seeds.items():
            seeds += [(int(first_draw[row] + own[row]) + place, seed) for place, seed in enumerate(siblings)]
        first_index = np.cumsum(own) - own
        indices = np.repeat(query_start[1:] - own - first_index, own) + np.arange(own.sum())
        # For each draw, its row in the plan, and which of the row's own positions it is from.
        drawn_from = np.repeat(np.arange(len(rows)), draws)
        self._drawing_rows = rows[drawn_from]
        place = np.minimum(np.arange(len(drawn_from)) - first_draw[drawn_from], own[drawn_from] - 1)
        sample_rows = first_index[drawn_from] + place
        num_tokens = (ends - own + 1)[drawn_from] + place
        scores: list[tuple[int, PromptScores]] = []
        num_rows = len(indices)
        pieces = [indices]
        for score in plan.scores:
            scores.append((num_rows, score))
            begin = int(query_start[score.row]) + score.first - plan.starts[score.row]
            pieces.append(np.arange(begin, begin + len(score.targets)))
            num_rows += len(score.targets)
        num_logits = num_rows
        pools: list[tuple[int, PromptPool]] = []
        for pool in plan.pools:
            pools.append((num_rows, pool))
            begin = int(query_start[pool.row]) + pool.first - plan.starts[pool.row]
            pieces.append(np.arange(begin, begin + pool.num_tokens))
            num_rows += pool.num_tokens
        sampling = self.sequences.sampling.batch(self._drawing_rows, num_tokens, seeds)
        return StepBatch(
            token_ids=self._tensor(np.array(plan.token_ids, dtype=np.int64)),
            attention=attention,
            logits_indices=self._tensor(np.concatenate(pieces) if scores or pools else indices),
            sampling=sampling,
            sample_rows=sample_rows.tolist(),
            num_sample_rows=len(indices),
            num_logits=num_logits,
            scores=scores,
            pools=pools,
            is_plain=len(sampling) > 0 and sampling.is_plain,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self._device)


def _bounds(lengths: np.ndarray) -> npt.NDArray[np.int32]:
    """Return the index of each row's first token, and the number of all tokens: int32 [rows + 1]."""
    bounds = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _one_by_one(
    rows: Rows, starts: np.ndarray, lengths: np.ndarray, query_start: np.ndarray, is_verified: np.ndarray
) -> tuple[Rows, np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows for attention, in which each token of a row that verifies a draft is a row of its own.

        rows      | 4: 4 tokens from 10 | 7: 1 from 30 |        row 4 verifies 3 tokens
        returned  | 4: 1 from 10 | 4: 1 from 11 | 4: 1 from 12 | 4: 1 from 13 | 7: 1 from 30 |

    All keys and values of a step are written before any is read, so such a row reads those of the tokens before it.
    """
    num_parts = np.where(is_verified, lengths, 1)
    first = np.cumsum(num_parts) - num_parts
    place = np.arange(num_parts.sum()) - np.repeat(first, num_parts)
    part_lengths = np.repeat(np.where(is_verified, 1, lengths), num_parts)
    return np.repeat(rows, num_parts), np.repeat(starts, num_parts) + place, part_lengths, _bounds(part_lengths)

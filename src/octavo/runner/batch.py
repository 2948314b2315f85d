"""From a step plan to tensors: the only place where slots are computed.

The block tables of running sequences are kept as rows of one array and only their new tail is written each step:

    rows   seq 7  | 12  4 31  0  0 |      gathered in the plan's order into
           seq 3  |  9 17  0  0  0 |      AttentionBatch.groups[g].block_tables
           (free) |                |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.kvcache.block import BlockId
from octavo.request import Sequence, SequenceId
from octavo.scheduler.plan import ScheduledSequence, StepPlan


@dataclass(slots=True)
class StepBatch:
    """One step's inputs.

    Attributes:
        token_ids: int64 [num_tokens]
        logits_indices: int64 [rows]; tokens whose logits are needed: first the sampled ones, then the scored ones.
        sampled: sequences that draw a token; `sample_rows[i]` is the logits row of `sampled[i]`.
        scored: (index in the plan, first row, prompt token ids to score) for prompt logprobs.
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    logits_indices: torch.Tensor
    sampled: list[Sequence]
    sample_rows: list[int]
    num_sample_rows: int
    scored: list[tuple[int, int, list[int]]]


class _TableRows:
    """One group's block tables as rows of an int32 array [rows, max_blocks], kept from step to step."""

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        # Zeros are mapped on first touch: a row that is never used costs no memory.
        self.array = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._filled = [0] * max_rows

    def clear(self, row: int) -> None:
        self._filled[row] = 0

    def write(self, row: int, table: list[BlockId], first_changed: int) -> None:
        """Bring a row up to date; entries before block `first_changed` cannot have changed since the last step."""
        start, end = min(self._filled[row], first_changed), len(table)
        if end - start == 1:
            self.array[row, start] = table[start]
        else:
            self.array[row, start:end] = table[start:]
        self._filled[row] = end


class BatchBuilder:
    """Builds each step's `StepBatch`.

    Args:
        num_groups: groups of layers, each with its own block tables.
        block_size: tokens per block.
        max_rows: most sequences in one step.
        max_blocks: longest block table.
    """

    def __init__(
        self, num_groups: int, block_size: int, max_rows: int, max_blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        self._block_size = block_size
        self._device = torch.device(device)
        self._tables = [_TableRows(max_rows, max_blocks) for _ in range(num_groups)]
        self._rows: dict[SequenceId, int] = {}
        self._free_rows = list(range(max_rows - 1, -1, -1))

    def build(self, plan: StepPlan) -> StepBatch:
        items = plan.scheduled
        rows = self._assign_rows(items)
        token_ids: list[int] = []
        for item in items:
            token_ids.extend(item.seq.tokens(item.start, item.start + item.num_tokens))
        starts = np.array([item.start for item in items], dtype=np.int64)
        lengths = np.array([item.num_tokens for item in items], dtype=np.int64)
        attention = self._attention_batch(rows, starts, lengths)
        return self._with_rows_to_sample(items, token_ids, attention, lengths)

    def _assign_rows(self, items: list[ScheduledSequence]) -> np.ndarray:
        """Each scheduled sequence's row, up to date; rows of sequences that are not scheduled are given up."""
        previous, self._rows = self._rows, {}
        for item in items:
            row = previous.pop(item.seq.seq_id, None)
            if row is not None:
                self._rows[item.seq.seq_id] = row
        for row in previous.values():
            self._free_rows.append(row)
        rows = np.empty(len(items), dtype=np.int64)
        for index, item in enumerate(items):
            row = self._rows.get(item.seq.seq_id)
            if row is None:
                row = self._rows[item.seq.seq_id] = self._free_rows.pop()
                fresh = True
            else:
                fresh = item.fresh
            if fresh:
                for group in self._tables:
                    group.clear(row)
            # A copy-on-write or a new block changes the table from the first written block on, never before it.
            first_changed = item.start // self._block_size
            for group, table in zip(self._tables, item.block_tables, strict=True):
                group.write(row, table, first_changed)
            rows[index] = row
        return rows

    def _attention_batch(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> AttentionBatch:
        num_seqs = len(rows)
        query_start = np.zeros(num_seqs + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start[1:])
        num_tokens = int(query_start[-1])
        context_lens = starts + lengths
        max_context, max_query = int(context_lens.max()), int(lengths.max())
        if num_tokens == num_seqs:
            positions, token_rows = starts, rows
        else:
            positions = np.repeat(starts - query_start[:-1], lengths) + np.arange(num_tokens)
            token_rows = np.repeat(rows, lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        width = -(-max_context // self._block_size)
        groups = tuple(
            GroupBatch(
                block_tables=self._tensor(group.array[rows, :width]),
                slot_mapping=self._tensor(
                    group.array[token_rows, blocks].astype(np.int64) * self._block_size + offsets
                ),
            )
            for group in self._tables
        )
        return AttentionBatch(
            query_start=self._tensor(query_start),
            context_lens=self._tensor(context_lens.astype(np.int32)),
            positions=self._tensor(positions),
            groups=groups,
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=max_query,
            max_context_len=max_context,
        )

    def _with_rows_to_sample(
        self, items: list[ScheduledSequence], token_ids: list[int], attention: AttentionBatch, lengths: np.ndarray
    ) -> StepBatch:
        ends = np.cumsum(lengths).tolist()
        indices: list[int] = []
        sampled: list[Sequence] = []
        sample_rows: list[int] = []
        for item, end in zip(items, ends, strict=True):
            if item.samples:
                sampled.extend(item.samples)
                sample_rows.extend([len(indices)] * len(item.samples))
                indices.append(end - 1)
        num_sample_rows = len(indices)
        scored: list[tuple[int, int, list[int]]] = []
        for index, item in enumerate(items):
            if item.prompt_logprobs is not None:
                first, last = item.prompt_logprobs
                offset = ends[index] - item.num_tokens - item.start
                scored.append((index, len(indices), item.seq.tokens(first + 1, last + 1)))
                indices.extend(range(first + offset, last + offset))
        return StepBatch(
            token_ids=self._tensor(np.array(token_ids, dtype=np.int64)),
            attention=attention,
            logits_indices=self._tensor(np.array(indices, dtype=np.int64)),
            sampled=sampled,
            sample_rows=sample_rows,
            num_sample_rows=num_sample_rows,
            scored=scored,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)

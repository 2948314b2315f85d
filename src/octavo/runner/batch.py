"""Build a step's tensors from its plan: the only place where slots are computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.runner.sequences import Rows, SequenceTable
from octavo.sampling.batch import SamplingBatch
from octavo.scheduler.plan import PromptScores, StepPlan


@dataclass(slots=True)
class StepBatch:
    """One step's inputs.

    Attributes:
        token_ids: int64 [num_tokens]
        logits_indices: int64 [rows]; tokens whose logits are needed: first the sampled ones, then the scored ones.
        sampling: the draws; `sample_rows[i]` is the logits row of draw i.
        num_sample_rows: how many of the rows are drawn from.
        scores: (first row, what to score) for prompt logprobs.
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    logits_indices: torch.Tensor
    sampling: SamplingBatch
    sample_rows: list[int]
    num_sample_rows: int
    scores: list[tuple[int, PromptScores]]


class BatchBuilder:
    """Builds each step's `StepBatch`, from the plan and what earlier plans said of its sequences.

    Args:
        num_groups: groups of layers, each with its own block tables.
        block_size: tokens per block.
        max_rows: most sequences known at once.
        max_blocks: longest block table.
    """

    def __init__(
        self, num_groups: int, block_size: int, max_rows: int, max_blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        self._block_size = block_size
        self._device = torch.device(device)
        self.sequences = SequenceTable(num_groups, max_rows, max_blocks, self._device)

    def build(self, plan: StepPlan) -> StepBatch:
        rows = self.sequences.apply(plan)
        starts = np.array(plan.starts, dtype=np.int64)
        lengths = np.array(plan.lengths, dtype=np.int64)
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start[1:])
        self.sequences.sampling.count(rows, plan.starts, query_start, plan.token_ids)
        return self._with_rows_to_sample(
            plan,
            rows,
            starts + lengths,
            query_start,
            self._attention_batch(rows, starts, lengths, query_start),
        )

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
        )

    def _with_rows_to_sample(
        self, plan: StepPlan, rows: Rows, ends: np.ndarray, query_start: np.ndarray, attention: AttentionBatch
    ) -> StepBatch:
        draws = np.array(plan.draws, dtype=np.int64)
        sampled = np.flatnonzero(draws)
        indices = query_start[1:][sampled].astype(np.int64) - 1
        # Of each draw: the place of its row among those sampled, and its row in the plan.
        sample_rows = np.repeat(np.arange(len(sampled)), draws[sampled])
        drawn_from = sampled[sample_rows]
        seeds = []
        if plan.sibling_seeds:
            first_draw = np.cumsum(draws) - draws
            seeds = [
                (int(first_draw[row]) + place, seed)
                for row, siblings in plan.sibling_seeds.items()
                for place, seed in enumerate(siblings, start=1)
            ]
        scores: list[tuple[int, PromptScores]] = []
        num_rows = len(indices)
        pieces = [indices]
        for score in plan.scores:
            scores.append((num_rows, score))
            begin = int(query_start[score.row]) + score.first - plan.starts[score.row]
            pieces.append(np.arange(begin, begin + len(score.targets)))
            num_rows += len(score.targets)
        return StepBatch(
            token_ids=self._tensor(np.array(plan.token_ids, dtype=np.int64)),
            attention=attention,
            logits_indices=self._tensor(np.concatenate(pieces) if scores else indices),
            sampling=self.sequences.sampling.batch(rows[drawn_from], ends[drawn_from], seeds),
            sample_rows=sample_rows.tolist(),
            num_sample_rows=len(sampled),
            scores=scores,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)

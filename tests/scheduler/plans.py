"""Reading plans: whose rows they are, and what a runner that was told of them knows."""

from __future__ import annotations

import io
import pickle
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np

from octavo.kvcache.attended import Masses
from octavo.kvcache.block import NULL_BLOCK
from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence, SequenceId
from octavo.scheduler.plan import DRAWN, SamplingSnapshot, SequenceForked, StepPlan
from octavo.scheduler.scheduler import Scheduler


class Row(NamedTuple):
    """One row of a plan."""

    seq_id: SequenceId
    start: int
    num_tokens: int
    num_draws: int
    token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def rows_of(plan: StepPlan) -> Iterator[Row]:
    first = 0
    for seq_id, start, length, draws in zip(plan.seq_ids, plan.starts, plan.lengths, plan.draws, strict=True):
        yield Row(seq_id, start, length, draws, plan.token_ids[first : first + length])
        first += length


_SEQUENCES: dict[SequenceId, Sequence] = {}


def _remember() -> None:
    """From now on `sequences` and `shares` know whom any scheduler's plans speak of."""
    schedule = Scheduler.schedule

    def remembering(self: Scheduler) -> StepPlan:
        plan = schedule(self)
        if plan:
            _SEQUENCES.update(zip(plan.seq_ids, self.builder._in_flight[-1].sequences, strict=True))
        return plan

    Scheduler.schedule = remembering


_remember()


def sequences(plan: StepPlan) -> list[Sequence]:
    return [_SEQUENCES[seq_id] for seq_id in plan.seq_ids]


def shares(plan: StepPlan) -> dict[str, int]:
    """Tokens of each request in a step."""
    return {seq.request.request_id: n for seq, n in zip(sequences(plan), plan.lengths, strict=True)}


# What a plan is made of, besides numbers, strings and tuples.
PLAIN = {
    *(("array", name) for name in ("array", "_array_reconstructor")),
    ("octavo.kvcache.block", "BlockCopy"),
    ("octavo.kvcache.block", "BlockTransfer"),
    ("octavo.kv_budget", "KVBudget"),
    ("octavo.sampling_params", "SamplingParams"),
    *(
        ("octavo.scheduler.plan", name)
        for name in ("NewSequence", "PromptScores", "PromptPool", "SamplingSnapshot", "SequenceDropped")
    ),
    *(("octavo.scheduler.plan", name) for name in ("SequenceForked", "StepPlan", "TableDelta")),
}


class PlainUnpickler(pickle.Unpickler):
    """Refuses what is no plain value: a live sequence, a request, a view of a table."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in PLAIN, f"a plan holds a {name} of {module}"
        return super().find_class(module, name)


class ToldRunner:
    """What a runner knows that keeps no more than plans say; every plan reaches it through a pickle.

    Attributes:
        tables: of each sequence, with null blocks where it has let go of some.
        kept: the indices of the others.
    """

    def __init__(self) -> None:
        self.tables: dict[SequenceId, list[list[int]]] = {}
        self.kept: dict[SequenceId, list[list[int]]] = {}
        self.sampling: dict[SequenceId, SamplingSnapshot] = {}
        self.counted: dict[SequenceId, list[int]] = {}

    def apply(self, plan: StepPlan, planned: Seq[Sequence] = (), kv: KVCacheManager | None = None) -> None:
        """Apply a plan; where a token was pending, `planned` has it by now, unless its sequence has ended."""
        copied = PlainUnpickler(io.BytesIO(pickle.dumps(plan))).load()
        assert copied == plan
        plan = copied
        if plan.reset:
            self.__init__()  # type: ignore[misc]
        for change in plan.changes:
            if isinstance(change, SequenceForked):
                self.tables[change.child] = [table.copy() for table in self.tables[change.parent]]
                self.kept[change.child] = [kept.copy() for kept in self.kept[change.parent]]
                self.counted[change.child] = self.counted[change.parent].copy()
                parent = self.sampling[change.parent]
                self.sampling[change.child] = SamplingSnapshot(
                    parent.request_id,
                    parent.params,
                    change.seed,
                    parent.num_prompt_tokens,
                    parent.eos_token_ids,
                    parent.num_candidates,
                )
            else:
                for known in (self.tables, self.kept, self.sampling, self.counted):
                    del known[change.seq_id]
        for new in plan.new:
            assert new.seq_id not in self.tables, "known already"
            (delta,) = (delta for delta in plan.tables if plan.seq_ids[delta.row] == new.seq_id)
            self.tables[new.seq_id] = [[] for _ in delta.blocks]
            self.kept[new.seq_id] = [[] for _ in delta.blocks]
            self.sampling[new.seq_id] = new.sampling
            self.counted[new.seq_id] = list(array("i", new.token_ids))
        for delta in plan.tables:
            seq_id = plan.seq_ids[delta.row]
            num_let_go = delta.num_let_go or (0,) * len(delta.blocks)
            assert not delta.first or not any(num_let_go), "blocks go from whole tables"
            groups = zip(self.tables[seq_id], self.kept[seq_id], delta.blocks, num_let_go, strict=True)
            for group, (table, kept, blocks, gone) in enumerate(groups):
                assert delta.first <= len(table), "no gap"
                places = list(range(delta.first, delta.first + len(blocks)))
                if gone:  # a runner is not told which
                    assert kv is not None
                    places = [i for i, block in enumerate(kv.tables(planned[delta.row])[group]) if block != NULL_BLOCK]
                table[delta.first :] = [NULL_BLOCK] * (len(blocks) + gone)
                for place, block in zip(places, blocks, strict=True):
                    table[place] = block
                kept[:] = [*(i for i in kept if i < delta.first), *places]
        for number, row in enumerate(rows_of(plan)):
            counted = self.counted[row.seq_id]
            if self.sampling[row.seq_id].params.counts_tokens:
                token_ids = list(row.token_ids)
                if token_ids[-1] == DRAWN:
                    assert plan.ahead
                    token_ids[-1:] = planned[number].token_ids[row.end - 1 : row.end]
                counted += token_ids[max(0, len(counted) - row.start) :]

    def mass(self, plan: StepPlan, planned: list[Sequence], block_size: int) -> dict[int, tuple[Masses, ...]]:
        """A mass of attention of each block that depends on nothing but the position and the block's index."""
        found: dict[int, tuple[Masses, ...]] = {}
        for number, (row, seq) in enumerate(zip(rows_of(plan), planned, strict=True)):
            first, masses = seq.measured_from, []
            for position in range(max(row.start, first or 0), row.end) if first is not None else ():
                kept = [[i for i in of_group if i * block_size <= position] for of_group in self.kept[row.seq_id]]
                # Groups with a window let go of none, so they keep more blocks than those that are measured.
                width = min(map(len, kept))
                mass = np.array([[(position * 7 + i * 5) % 11 for i in indices[:width]] for indices in kept], np.int64)
                masses.append(mass)
            if masses and number >= plan.num_decodes:  # together
                total = np.zeros_like(masses[-1])
                for mass in masses:
                    total[:, : mass.shape[1]] += mass
                masses = [total]
            if masses:
                found[number] = tuple(tuple(of_groups) for of_groups in masses)
        return found

    def check(self, plan: StepPlan, planned: list[Sequence]) -> None:
        """What it knows of a plan's rows is what they are."""
        for row, seq in zip(rows_of(plan), planned, strict=True):
            sampling = self.sampling[row.seq_id]
            assert sampling.request_id == seq.request.request_id
            assert (sampling.params, sampling.seed) == (seq.request.params, seq.seed)
            known, is_pending = list(seq.token_ids[row.start : row.end]), row.token_ids[-1] == DRAWN
            assert list(row.token_ids) == ([*known[: row.num_tokens - 1], DRAWN] if is_pending else known)
            if sampling.params.counts_tokens and row.num_draws:
                assert self.counted[row.seq_id] == list(seq.token_ids), "whoever draws has all its tokens counted"

"""A step's tensors say what its plan says, whatever was in the batch the step before."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.kvcache.block import BlockId
from octavo.kvcache.spec import LayerKVSpec
from octavo.request import RequestId, SequenceId
from octavo.runner.batch import BatchBuilder, StepBatch
from octavo.runner.sequences import SequenceTable
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import DRAWN, NewSequence, SamplingSnapshot, StepPlan, TableDelta
from tests.kvcache.caches import FULL, sliding
from tests.scheduler.kit import Harness
from tests.scheduler.plans import rows_of

BLOCK = 4
MAX_SEQS = 8


def make_builder(num_groups: int = 1) -> BatchBuilder:
    return BatchBuilder(SequenceTable(num_groups, MAX_SEQS, 50, block_size=BLOCK))


def assert_says_what_is_planned(batch: StepBatch, plan: StepPlan, engine: Harness) -> None:
    """Hold a batch to what was planned, token by token; the result of the plan is not yet taken in."""
    windows = [group.sliding_window for group in engine.kv.spec.groups]
    attention = batch.attention
    tokens, positions, starts, queries = [], [], [0], []
    slots: list[list[int]] = [[] for _ in windows]
    for row, (item, seq) in enumerate(zip(rows_of(plan), engine.scheduler.planned, strict=True)):
        tables = engine.kv.tables(seq)
        for position in range(item.start, item.end):
            tokens.append(seq.token_ids[position])
            positions.append(position)
            for group, table in enumerate(tables):
                slots[group].append(table[position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(len(tokens))
        # As (row, context, tokens): each token of a decode is a query of its own.
        is_decode = row < plan.num_decodes
        queries += (
            [(row, p + 1, 1) for p in range(item.start, item.end)]
            if is_decode
            else [(row, item.end, item.end - item.start)]
        )
        for group, (table, window) in enumerate(zip(tables, windows, strict=True)):
            first = 0 if window is None else max(0, item.start - window + 1) // BLOCK
            last = (item.end - 1) // BLOCK + 1
            table_row = attention.table_rows[next(i for i, query in enumerate(queries) if query[0] == row)]
            got = attention.groups[group].block_tables[table_row, first:last].tolist()
            assert got == list(table[first:last]), "every block that one of the step's tokens attends to"
    assert batch.token_ids.tolist() == tokens
    assert attention.positions.tolist() == positions
    assert attention.query_start.tolist() == [0, *accumulate(n for _, _, n in queries)]
    assert attention.context_lens.tolist() == [context for _, context, _ in queries]
    assert [group.slot_mapping.tolist() for group in attention.groups] == slots
    assert (attention.num_seqs, attention.num_tokens) == (len(queries), sum(plan.lengths))
    assert attention.max_query_len == max(n for _, _, n in queries)
    assert attention.max_context_len == max(context for _, context, _ in queries)
    assert attention.total_decode_len == sum(context for _, context, n in queries if n == 1)
    assert_rows_are_wanted(batch, plan, engine, starts)


def assert_rows_are_wanted(batch: StepBatch, plan: StepPlan, engine: Harness, starts: list[int]) -> None:
    wanted = [starts[i + 1] - 1 for i, draws in enumerate(plan.draws) for _ in range(draws)]
    rows = batch.logits_indices.tolist()
    sample_rows = list(range(plan.num_draws)) if batch.sample_rows is None else batch.sample_rows
    assert [rows[row] for row in sample_rows] == wanted
    drawing = engine.scheduler.drawing
    assert batch.sampling.records["seed"].tolist() == [seq.seed for seq in drawing]
    # A sibling that has not begun draws as the one does that computes its prompt.
    computing = [seq for seq, draws in zip(engine.scheduler.planned, plan.draws, strict=True) for _ in range(draws)]
    assert batch.sampling.positions.tolist() == [seq.num_output_tokens for seq in computing]
    for state, seq in zip(batch.sampling.states, computing, strict=True):
        assert state.snapshot.params == seq.request.params
        if state.counts is not None:
            output = Counter(seq.output_token_ids)
            counts = dict(zip(state.counts.output_ids.tolist(), state.counts.output_counts.tolist(), strict=True))
            assert counts == output
            assert state.counts.prompt_ids.tolist() == sorted(set(seq.request.prompt_token_ids))
    assert max(sample_rows, default=-1) + 1 == batch.num_sample_rows, "the sampled rows come first"
    assert [scores for _, scores in batch.scores] == list(plan.scores)
    for first_row, scores in batch.scores:
        begin, count = starts[scores.row] + scores.first - plan.starts[scores.row], len(scores.targets)
        assert rows[first_row : first_row + count] == list(range(begin, begin + count))
        seq = engine.scheduler.planned[scores.row]
        assert list(scores.targets) == seq.token_ids[scores.first + 1 : scores.first + count + 1]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_course_of_arrivals_chunks_forks_windows_and_preemptions(data: st.DataObject) -> None:
    layers: tuple[LayerKVSpec, ...] = data.draw(st.sampled_from([(FULL,), (sliding(5),), (FULL, sliding(3))]))
    engine = Harness(
        num_blocks=data.draw(st.integers(12, 40)),
        max_num_seqs=data.draw(st.integers(1, MAX_SEQS)),
        max_num_batched_tokens=data.draw(st.integers(1, 40)),
        layers=layers,
    )
    builder = make_builder(len(engine.kv.spec.groups))
    for step in range(60):
        if data.draw(st.integers(0, 3)) == 0:
            try:
                engine.add(
                    data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30)),
                    n=data.draw(st.integers(1, 3)),
                    priority=data.draw(st.integers(0, 1)),
                    prompt_logprobs=data.draw(st.sampled_from([None, 0])),
                    presence_penalty=data.draw(st.sampled_from([0.0, 1.0])),
                    ignore_eos=True,
                )
            except RequestError:
                continue
        plan = engine.scheduler.schedule()
        if plan:
            assert_says_what_is_planned(builder.build(plan), plan, engine)
            if data.draw(st.integers(0, 9)) == 0:
                engine.scheduler.abandon_step()
                continue
            engine.finish_step(plan, draw=lambda seq, step=step: step + seq.index)  # type: ignore[misc]


def test_tensors_have_the_types_that_the_kernels_read() -> None:
    engine = Harness()
    engine.add(5)
    engine.add(3)
    batch = make_builder().build(engine.scheduler.schedule())
    attention = batch.attention
    assert batch.token_ids.dtype == batch.logits_indices.dtype == attention.positions.dtype == torch.int64
    assert attention.query_start.dtype == attention.context_lens.dtype == torch.int32
    (group,) = attention.groups
    assert attention.table_rows.dtype == torch.int64
    assert (group.block_tables.dtype, group.slot_mapping.dtype) == (torch.int32, torch.int64)
    assert all(t.is_contiguous() for t in (group.block_tables, group.slot_mapping, attention.positions))


def test_no_step_copies_block_tables() -> None:
    """What a step costs does not depend on the longest table in it."""
    engine = Harness()
    engine.add(9)
    engine.add(21)
    builder = make_builder()
    plan = engine.scheduler.schedule()
    first = builder.build(plan).attention.groups[0].block_tables
    engine.finish_step(plan)
    second = builder.build(engine.scheduler.schedule()).attention.groups[0].block_tables
    assert first.data_ptr() == second.data_ptr() == builder.sequences.tables[0].ctypes.data


def test_a_decode_step_writes_one_entry_of_a_row_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Harness()
    engine.add(40, max_tokens=20)
    builder = make_builder()
    plan = engine.scheduler.schedule()
    builder.build(plan)
    engine.finish_step(plan)
    (table,) = builder.sequences.tables
    table[0, :9] = 99  # were they written again, it would show
    builder.build(engine.scheduler.schedule())
    assert np.array_equal(table[0, :9], [99] * 9)
    assert table[0, 10] != 99


def test_rows_of_those_that_left_are_used_again() -> None:
    engine = Harness(num_blocks=200, max_num_seqs=MAX_SEQS)
    builder = make_builder()
    for _ in range(5 * MAX_SEQS):
        engine.add(3, max_tokens=2)
    steps = 0
    while plan := engine.scheduler.schedule():
        assert_says_what_is_planned(builder.build(plan), plan, engine)
        engine.finish_step(plan)
        steps += 1
    assert steps == 10


def test_a_sequence_that_missed_a_step_goes_on_where_it_was() -> None:
    engine = Harness(max_num_batched_tokens=4)
    first, second = engine.add(4), engine.add(4, priority=1)
    builder = make_builder()
    for urgent in (False, False, True, False, False, False, False):
        if urgent:
            engine.add(12, priority=-1)  # takes every step's tokens for a while
        plan = engine.scheduler.schedule()
        assert_says_what_is_planned(builder.build(plan), plan, engine)
        engine.finish_step(plan)
    assert first.sequences[0].num_output_tokens
    assert second.sequences[0].num_output_tokens


def test_a_row_draws_after_each_of_its_last_positions() -> None:
    """As a sequence does that brings several tokens to be verified."""
    sampling = SamplingSnapshot(RequestId("r"), SamplingParams(), seed=7, num_prompt_tokens=2)
    plan = StepPlan(
        step=1,
        seq_ids=(SequenceId(1), SequenceId(2)),
        starts=(4, 0),
        lengths=(3, 2),
        draws=(3, 2),
        num_decodes=1,
        token_ids=(10, 11, 12, 13, 14),
        sibling_seeds={1: (8,)},
        new=tuple(NewSequence(SequenceId(i), sampling) for i in (1, 2)),
        tables=tuple(TableDelta(i - 1, 0, ((BlockId(i), BlockId(i + 2)),)) for i in (1, 2)),
    )
    batch = make_builder().build(plan)
    assert batch.logits_indices.tolist() == [0, 1, 2, 4]
    assert batch.sample_rows == [0, 1, 2, 3, 3]
    assert batch.sampling.positions.tolist() == [3, 4, 5, 0, 0]
    assert batch.sampling.records["seed"].tolist() == [7, 7, 7, 7, 8]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=2, max_size=12), data=st.data())
def test_steps_that_verify_drafts_of_any_lengths_in_any_order(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each token is a query at its own position, whichever layouts came before, and in buffers of prompts too."""
    builder, seq_ids = make_builder(), (SequenceId(1), SequenceId(2))
    params = SamplingParams(presence_penalty=data.draw(st.sampled_from([0.0, 1.0])))
    sampling = SamplingSnapshot(RequestId("r"), params, seed=7, num_prompt_tokens=2)
    tables = {i: [BlockId(40 * i + place) for place in range(40)] for i in (1, 2)}
    prompt = np.arange(2, dtype=np.int32).tobytes()
    builder.build(
        StepPlan(
            step=1,
            seq_ids=seq_ids,
            starts=(0, 0),
            lengths=(2, 2),
            draws=(1, 1),
            token_ids=(0, 0, 0, 0),
            new=tuple(NewSequence(i, sampling, prompt) for i in seq_ids),
            tables=tuple(TableDelta(i - 1, 0, (tuple(tables[i]),)) for i in seq_ids),
        )
    )
    starts = [2, 2]
    for number, step in enumerate(lengths, start=2):
        plan = StepPlan(
            step=number,
            seq_ids=seq_ids,
            starts=tuple(starts),
            lengths=step,
            draws=step,
            num_decodes=2,
            token_ids=tuple(range(sum(step))),
        )
        batch = builder.build(plan)
        places = [(i, p) for i, s, n in zip(seq_ids, starts, step, strict=True) for p in range(s, s + n)]
        positions, (group,) = [p for _, p in places], batch.attention.groups
        assert batch.token_ids.tolist() == batch.logits_indices.tolist() == list(range(len(places)))
        assert batch.attention.positions.tolist() == positions
        assert batch.attention.query_start.tolist() == list(range(len(places) + 1))
        assert batch.attention.context_lens.tolist() == [p + 1 for p in positions]
        assert group.slot_mapping.tolist() == [tables[i][p // BLOCK] * BLOCK + p % BLOCK for i, p in places]
        assert [group.block_tables[row, 0] for row in batch.attention.table_rows] == [tables[i][0] for i, _ in places]
        assert batch.sampling.positions.tolist() == [p - 1 for p in positions]
        assert batch.attention.max_context_len == max(positions) + 1
        if params.counts_tokens:
            assert [state.counted.num_tokens for state in batch.sampling.states] == [p + 1 for p in positions]
        starts = [s + data.draw(st.integers(1, n)) for s, n in zip(starts, step, strict=True)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1,)])
def test_a_step_ahead_goes_on_with_each_sequences_own_token(order: tuple[int, ...]) -> None:
    builder, ids = make_builder(), [SequenceId(0), SequenceId(1)]
    snapshot = SamplingSnapshot(RequestId("r"), SamplingParams(), 0, 1, frozenset(), 0)
    sizes: dict[str, Any] = {"starts": (0, 0), "lengths": (1, 1), "draws": (1, 1), "num_streams": 2, "num_decodes": 2}
    new = tuple(NewSequence(seq_id, snapshot) for seq_id in ids)
    tables = tuple(TableDelta(row, 0, ((BlockId(row + 1),),)) for row in range(2))
    builder.build(StepPlan(step=1, seq_ids=tuple(ids), token_ids=(3, 4), reset=True, new=new, tables=tables, **sizes))
    builder.note_drawn(torch.tensor([7, 8]))
    count = len(order)
    sizes = {"starts": (1,) * count, "lengths": (1,) * count, "draws": (1,) * count, "num_streams": count}
    seq_ids = tuple(ids[place] for place in order)
    batch = builder.build(
        StepPlan(step=2, seq_ids=seq_ids, token_ids=(DRAWN,) * count, num_decodes=count, ahead=True, **sizes)
    )
    assert batch.token_ids.tolist() == [(7, 8)[place] for place in order]

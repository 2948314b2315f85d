"""A draft model drafts what it would after the sequence's own tokens, whatever its cache held before."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest

from octavo.request import Sequence, SequenceId
from octavo.scheduler.draft_model import DraftModel
from octavo.scheduler.drafts import DraftMethod
from octavo.scheduler.plan import SequenceDropped, StepPlan, StepResult
from octavo.scheduler.speculation import Speculator
from tests.scheduler.test_speculation import Server, sequence

VOCAB, BLOCK = 50, 4


def next_token(token_ids: Seq[int]) -> int:
    return hash(tuple(token_ids)) % VOCAB


class Device:
    """Draws from a hash of what it reads in the slots of a sequence's tables, as attention reads keys and values."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int, int], int] = {}  # by group, block and offset
        self.tables: dict[SequenceId, list[list[int]]] = {}
        self.num_steps = 0
        self.fails = False

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fails:
            raise RuntimeError("out of memory")
        self.num_steps += 1
        if plan.reset:
            self.tables.clear()
        for change in plan.changes:
            assert isinstance(change, SequenceDropped)
            del self.tables[change.seq_id]
        for new in plan.new:
            assert new.seq_id not in self.tables
            self.tables[new.seq_id] = []
        for delta in plan.tables:
            tables = self.tables[plan.seq_ids[delta.row]]
            tables[:] = tables or [[] for _ in delta.blocks]
            for table, blocks in zip(tables, delta.blocks, strict=True):
                table[delta.first :] = blocks
        held = [block for tables in self.tables.values() for table in tables for block in table]
        assert len(held) == len(set(held))
        assert 0 not in held
        tokens, drawn = iter(plan.token_ids), []
        for seq_id, start, length, draws in zip(plan.seq_ids, plan.starts, plan.lengths, plan.draws, strict=True):
            tables = self.tables[seq_id]
            for position in range(start, start + length):
                token_id = next(tokens)
                for group, table in enumerate(tables):
                    self.slots[group, table[position // BLOCK], position % BLOCK] = token_id
            if draws:
                read = [
                    [self.slots[group, table[at // BLOCK], at % BLOCK] for at in range(start + length)]
                    for group, table in enumerate(tables)
                ]
                assert all(each == read[0] for each in read)
                drawn.append(next_token(read[0]))
        return StepResult(tuple(drawn))


def model_on(device: Device, num_blocks: int = 1000, num_groups: int = 1) -> DraftModel:
    return DraftModel(
        device.execute,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_groups=num_groups,
        max_num_seqs=3,
        max_model_len=60,
        vocab_size=VOCAB,
    )


@pytest.mark.parametrize(("num_blocks", "num_groups"), [(1000, 1), (24, 1), (50, 2)])
def test_drafts_follow_a_sequences_own_tokens_whatever_was_refuted_or_evicted(num_blocks: int, num_groups: int) -> None:
    rng, device = random.Random(num_blocks), Device()
    model = model_on(device, num_blocks, num_groups)
    seqs = [sequence(*(rng.randrange(VOCAB) for _ in range(rng.randint(2, 20)))) for _ in range(5)]
    num_drafts = num_without = 0
    for _ in range(400):
        asked = rng.sample(seqs, rng.randint(1, 3))
        for seq in asked:
            lacking = model.num_lacking(seq)
            assert (lacking == 0) == (seq.num_tokens >= 59)
            if lacking > 4 and rng.random() < 0.5:
                model.catch_up(seq, lacking // 2)
                assert model.num_lacking(seq) in (lacking, lacking - lacking // 2)
        asked = [seq for seq in asked if model.num_lacking(seq)]
        length = rng.randint(1, 5)
        for seq, draft in zip(asked, model.draft(asked, length), strict=True):
            expected = [*seq.tokens(0, seq.num_tokens)]
            for token_id in draft:
                assert token_id == next_token(expected)
                expected.append(token_id)
            num_drafts, num_without = num_drafts + bool(draft), num_without + (not draft)
            if draft:
                assert len(draft) == min(length, 60 - seq.num_tokens)
            seq.output_token_ids += draft[: rng.randint(0, len(draft))]
            seq.output_token_ids.append(rng.randrange(VOCAB))
            if seq.num_tokens >= 59:
                model.forget(seq.seq_id)
                seqs[seqs.index(seq)] = sequence(*(rng.randrange(VOCAB) for _ in range(rng.randint(2, 20))))
    assert num_drafts > 300
    assert (num_without > 0) == (num_blocks < 1000)
    model.forget_all()
    assert sorted(model._free) == list(range(1, num_blocks))


def test_a_failed_draft_model_rests_and_starts_afresh() -> None:
    device = Device()
    model, seq = model_on(device), sequence(1, 2, 3)
    assert model.num_lacking(seq) == 3
    assert model.draft([seq], 2) == [(next_token((1, 2, 3)), next_token((1, 2, 3, next_token((1, 2, 3)))))]
    device.fails = True
    assert model.draft([seq], 2) == [()]
    device.fails = False
    lacking = [model.num_lacking(seq) for _ in range(1024)]
    assert set(lacking[:-1]) == {0}
    assert lacking[-1] == 3
    assert len(model.draft([seq], 2)[0]) == 2


class Modelled(Server):
    """As `Server`, whose drafts come from a model that is always right or always wrong, and takes no time."""

    def __init__(self, *, right: bool, per_row: float, count: int = 1) -> None:
        super().__init__(right=right, per_row=per_row, count=count)
        self.num_steps_of_model = 0
        self.speculator = Speculator(DraftMethod(2, 8), 4, 10_000, self._model())
        self.drawn = 1

    def _model(self) -> DraftModel:
        def execute(plan: StepPlan) -> StepResult:
            self.num_steps_of_model += 1
            return StepResult((self.token_id if self.token_id == 1 else 3,) * len(plan.seq_ids))

        return DraftModel(
            execute,
            num_blocks=5000,
            block_size=16,
            num_groups=1,
            max_num_seqs=8,
            max_model_len=10_000,
            vocab_size=VOCAB,
        )


def test_a_step_without_streams_has_no_drafts() -> None:
    # All requests wait for blocks from a store, for example.
    server = Modelled(right=True, per_row=0.02)
    assert server.speculator.choose([], 16) == {}
    assert server.num_steps_of_model == 0


@pytest.mark.parametrize("count", [1, 4])
def test_a_model_that_is_right_drafts_for_all_streams(count: int) -> None:
    server = Modelled(right=True, per_row=0.02, count=count)
    server.speculator._method.draft = lambda seq, most: None
    assert server.steps(60)[-40:].count(4) > 30
    assert server.speculator.counters.saved_seconds > 60


def test_a_model_that_is_wrong_is_hardly_asked() -> None:
    server = Modelled(right=False, per_row=0.02)
    server.speculator._method.draft = lambda seq, most: None
    lengths = server.steps(1000)
    assert sum(lengths) < 120
    assert server.num_steps_of_model < 130
    assert sum(lengths[-100:]) <= 12


def test_text_that_is_more_likely_right_goes_first() -> None:
    server = Modelled(right=True, per_row=0.02)
    server.steps(100)
    before = server.num_steps_of_model
    assert server.steps(40).count(4) > 30
    assert server.num_steps_of_model - before < 40
    assert server.speculator.acceptance.rates["copy"][32].tried > 20


def test_other_streams_hardly_wait_for_a_model_that_catches_up() -> None:
    server = Modelled(right=True, per_row=0.02, count=2)
    server.speculator._method.draft = lambda seq, most: None
    server.steps(20)
    newcomer = sequence(*([5] * 400))
    server.streams.append(newcomer)
    server.speculator._model._seconds_of = lambda rows, context: rows * 1e-3
    caught_up: list[int] = []
    catch_up = server.speculator._model.catch_up

    def noting(seq: Sequence, count: int) -> None:
        caught_up.append(count)
        catch_up(seq, count)

    server.speculator._model.catch_up = noting
    server.steps(30)
    assert caught_up
    assert max(caught_up) <= 64
    assert newcomer.state.followed.draft is not None or newcomer.num_tokens > 460

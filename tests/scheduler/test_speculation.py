"""Drafts are found in the text, and verified only where that is faster."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.request import GAP, FinishReason, Request, RequestId, Sequence
from octavo.sampling_params import SamplingParams
from octavo.scheduler.acceptance_rates import Acceptance, Followed, Rate
from octavo.scheduler.drafts import Draft, DraftMethod, TokenIndex
from octavo.scheduler.plan import SequenceUpdate, StepPlan
from octavo.scheduler.speculation import Drafts, Speculator
from tests.kvcache.caches import make_manager
from tests.scheduler.kit import Harness
from tests.scheduler.results import Draw, result_of


def sequence(*token_ids: int, max_tokens: int = 1000) -> Sequence:
    """A sequence whose last token is its output."""
    request = Request(RequestId("r"), token_ids[:-1], SamplingParams(max_tokens=max_tokens))
    (seq,) = request.sequences
    seq.output_token_ids.append(token_ids[-1])
    return seq


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(2, 4), st.integers(4, 9))
def test_the_index_finds_a_longest_match_among_the_latest(token_ids: list[int], width: int, most: int) -> None:
    index = TokenIndex(width)
    assert index.extend(sequence(*token_ids))
    end = len(token_ids) - 1

    def match(place: int) -> int:
        length = 0
        while length < most and length <= place and token_ids[place - length] == token_ids[end - length]:
            length += 1
        return length

    latest = [place for place in range(end - 1, -1, -1) if match(place) >= width][:8]
    length, place = index.longest_match(index.tokens, most)
    if not latest:
        assert length == 0
    else:
        longest = max(map(match, latest))
        assert (length, place) == (longest, next(p for p in latest if match(p) == longest))


def test_a_draft_goes_on_as_a_repetition() -> None:
    method = DraftMethod(2, 8)
    assert method.draft(sequence(1, 2, 3, 4, 9, 2, 3), 3) == Draft((4, 9, 2), "ngram", 2)
    assert method.draft(sequence(7, 8, 7, 8, 7, 8), 3) == Draft((7, 8, 7), "ngram", 4)
    assert method.draft(sequence(1, 2, 3), 8) is None


def test_nothing_is_drafted_before_the_first_token_where_nothing_is_predicted() -> None:
    seq = sequence(1, 2, 30)
    seq.output_token_ids.clear()
    assert DraftMethod(2, 8).draft(seq, 4) is None


def test_a_prediction_is_drafted_from_its_beginning_and_after_each_difference() -> None:
    method, seq = DraftMethod(2, 8), sequence(1, 2, 30)
    seq.request.predicted_ids = (30, 31, 32, 33, 34, 35, 36)
    assert method.draft(seq, 3) == Draft((31, 32, 33), "prediction", 9)
    seq.output_token_ids += [40]  # in place of 31, it may be
    assert method.draft(seq, 3) == Draft((32, 33, 34), "replaced", 6)
    seq.output_token_ids += [32]
    assert method.draft(seq, 3) == Draft((33, 34, 35), "prediction", 5)
    seq.output_token_ids += [41, 42]
    assert method.draft(seq, 3) is None


def test_what_stands_for_a_gap_replaces_no_token_of_a_prediction() -> None:
    for predicted in ((30, GAP, 31, 32), (30, 31, GAP, 32)):
        method, seq = DraftMethod(2, 8), sequence(1, 2, 30)
        seq.request.predicted_ids = predicted
        seq.output_token_ids += [*predicted[1 : predicted.index(GAP)], 40]
        assert method.draft(seq, 3) is None


def test_a_quoted_name_is_drafted_and_the_prediction_goes_on_after_it() -> None:
    method, seq = DraftMethod(2, 8), sequence(1, 2, 30)
    seq.request.predicted_ids = (30, 9, GAP, 9, 31, 9, GAP, *range(70, 80), GAP)
    seq.request.quoted_ids = (9, 50, 51, 52, GAP, 9, 60, GAP)
    seq.output_token_ids += [9, 50]
    assert method.draft(seq, 4) == Draft((51, 52), "quoted", 2)
    seq.output_token_ids += [51, 52]
    assert method.draft(seq, 4) is None
    seq.output_token_ids += [9]
    assert method.draft(seq, 4) == Draft((31, 9), "prediction", 11)


def test_a_prediction_is_followed_through_its_gaps() -> None:
    method, seq = DraftMethod(2, 8), sequence(1, 2, 30)
    seq.request.predicted_ids = (30, 31, GAP, 32, 33, GAP, 34)
    assert method.draft(seq, 3) == Draft((31,), "prediction", 9)
    seq.output_token_ids += [31, 50, 51]
    assert method.draft(seq, 3) is None
    seq.output_token_ids += [32]
    assert method.draft(seq, 3) == Draft((33,), "prediction", 11)
    seq.output_token_ids += [33, 34]  # nothing stands for the gap
    assert method.draft(seq, 3) is None


def test_a_prediction_goes_on_where_it_agrees_with_the_last_tokens() -> None:
    method, seq = DraftMethod(2, 8), sequence(1, 2, 30)
    seq.request.predicted_ids = (*range(30, 40), GAP, 30, 9, 31, 9, 32, GAP)  # on one line, and on several
    assert method.draft(seq, 3) == Draft((31, 32, 33), "prediction", 9)
    seq.output_token_ids += [9]
    assert method.draft(seq, 3) == Draft((31, 9, 32), "prediction", 10)
    seq.output_token_ids += [31, 9]
    assert method.draft(seq, 3) == Draft((32,), "prediction", 12)


@pytest.mark.parametrize("changed", [[40], [40, 41], [], [40, 5]])
def test_a_copy_is_followed_through_a_change(changed: list[int]) -> None:
    method, seq = DraftMethod(2, 8), sequence(1, 2, 3, 4, 5, 6, 7, 8, 9, 2)
    seq.output_token_ids += [3, 4]
    assert method.draft(seq, 3) == Draft((5, 6, 7), "ngram", 3)
    seq.output_token_ids += [*changed, 6]
    draft = method.draft(seq, 3)
    assert draft is not None
    assert (draft.token_ids, draft.source) == ((7, 8, 9), "copy")


def test_what_a_copy_inserts_after_a_token_is_expected_after_it_again() -> None:
    method, seq = DraftMethod(2, 8), sequence(1, 2, 30)
    seq.request.predicted_ids = (30, 31, 9, 32, 33, 9, 34, 35)
    seq.output_token_ids += [31, 9, 70, 71]  # a line break and an indentation, say
    assert method.draft(seq, 4) is None
    seq.output_token_ids += [32]
    assert method.draft(seq, 4) == Draft((33, 9, 70, 71), "prediction", 12)
    seq.output_token_ids += [33, 9, 34]  # no more
    seq.request.predicted_ids = ()
    assert method.draft(seq, 4) == Draft((35,), "prediction", 15)
    assert not seq.state.token_index.copies["prediction"].inserted


def ended(*token_ids: int, prompt: int = 2, salt: str = "") -> Sequence:
    request = Request(RequestId("e"), token_ids[:prompt], SamplingParams(max_tokens=9000), cache_salt=salt)
    (seq,) = request.sequences
    seq.output_token_ids += token_ids[prompt:]
    return seq


def test_a_draft_goes_on_as_a_recent_output_of_the_same_scope_did() -> None:
    method = DraftMethod(2, 8, make_manager(prefix_caching=False))
    method.remember(ended(1, 2, 3, 4, 5, 6))
    method.remember(ended(9, 9, 7, 8, salt="other"))
    assert method.draft(sequence(20, 3, 4), 8) == Draft((5, 6), "recent", 2)  # not beyond the end of that output
    assert method.draft(sequence(20, 1, 2), 1) == Draft((3,), "recent", 2)  # also from its first token
    assert method.draft(sequence(20, 5, 6), 8) is None
    assert method.draft(sequence(20, 9, 7), 8) is None, "another scope's"
    assert method.draft(sequence(3, 4, 30, 3, 4), 1) == Draft((30,), "ngram", 2), "its own text's, of equal length"
    method.forget()
    assert method.draft(sequence(20, 3, 4), 8) is None


def test_only_the_latest_outputs_and_scopes_are_kept() -> None:
    method = DraftMethod(2, 8, make_manager(prefix_caching=False))
    method.remember(ended(1, 2, 3, 4))
    for _ in range(5):
        method.remember(ended(*range(100, 4300)))
    assert method.draft(sequence(20, 1, 2), 1) is None
    assert sum(len(index.tokens) for index in method._outputs[""]._indexes) < 25_000
    for number in range(40):
        method.remember(ended(1, 2, 3, salt=str(number)))
    assert len(method._outputs) == 32


class Oracle(DraftMethod):
    """Drafts 1, 1, 1, …"""

    def draft(self, seq: Sequence, most: int) -> Draft | None:
        return Draft((1,) * most, "oracle", 4)


class Server:
    """Computes steps that take 1 s and `per_row` for each row, in which all drafts are right or wrong."""

    def __init__(self, *, right: bool, per_row: float, count: int = 1) -> None:
        self.speculator, self.per_row, self.token_id = Speculator(Oracle(2, 8), 4, 10_000), per_row, 1 if right else 2
        self.streams = [sequence(5, 6, 7) for _ in range(count)]

    def step(self) -> Drafts:
        for seq in self.streams:
            seq.num_computed = seq.num_tokens - 1
        drafts = self.speculator.choose(self.streams, 100)
        rows, draws, updates, starts = 0, [], [], []
        for seq in self.streams:
            _, draft = drafts.get(seq.seq_id, (seq, ()))
            drawn = [self.token_id] * (1 + len(draft) * (self.token_id == 1))
            starts.append(seq.num_tokens - 1)
            seq.output_token_ids += drawn
            draws.append(1 + len(draft))
            updates.append(SequenceUpdate(seq, tuple(drawn)))
        self.speculator.learn({seq.seq_id: draft for seq, draft in drafts.values()}, updates)
        rows = sum(draws)
        plan = StepPlan(
            seq_ids=tuple(seq.seq_id for seq in self.streams),
            starts=tuple(starts),
            draws=tuple(draws),
            token_ids=(0,) * rows,
        )
        self.speculator.observe(plan, 1 + self.per_row * rows)
        return drafts

    def steps(self, count: int) -> list[int]:
        """Return the lengths of the drafts that the last stream verifies in so many steps."""
        lengths = []
        for _ in range(count):
            _, draft = self.step().get(self.streams[-1].seq_id, (None, ()))
            lengths.append(len(draft))
        return lengths


def test_right_drafts_are_verified_where_rows_are_cheap() -> None:
    server = Server(right=True, per_row=0.05)
    assert server.steps(60)[-40:].count(4) > 30
    assert server.speculator.counters.saved_seconds > 60
    assert [
        len(draft) for _, draft in server.speculator.choose(server.streams, server.streams[0].num_missing + 2).values()
    ] == [2]


def test_few_drafts_are_verified_that_are_wrong_and_none_where_rows_cost_as_much_as_steps() -> None:
    assert sum(map(bool, Server(right=False, per_row=0.05).steps(100))) <= 3
    assert sum(map(bool, Server(right=True, per_row=30.0, count=4).steps(400))) <= 8


def test_after_losses_only_drafts_that_promise_much_are_verified() -> None:
    server = Server(right=True, per_row=0.4)
    server.steps(60)
    server.speculator._balance = -3.0
    assert server.step()
    for rate in server.speculator.acceptance.rates["oracle"]:
        rate.accepted = 0.4 * rate.tried
    server.streams[0].state.followed.rate = Rate(40.0, 100.0)  # a row that takes 0.4 s promises 0.4 tokens
    server.streams[0].state.followed.expected = 40.0
    server.speculator._balance = 0.0
    assert server.step()
    server.speculator._balance = -3.0
    assert not server.step()


def test_a_draft_delays_a_stream_without_one_by_little() -> None:
    server = Server(right=True, per_row=0.2, count=2)
    server.steps(30)
    assert server.step()
    server.streams[0].state.followed.look_at = 10_000
    server.streams[0].state.followed.draft = None
    assert not server.step()


def test_a_sequence_without_drafts_is_looked_at_less_often() -> None:
    looked = []

    class Nothing(DraftMethod):
        def draft(self, seq: Sequence, most: int) -> None:
            looked.append(seq.num_tokens)

    server = Server(right=True, per_row=0.05)
    server.speculator._method = Nothing(2, 8)
    server.steps(100)
    assert 25 <= len(looked) <= 35
    assert looked[:4] == [3, 4, 5, 6]
    looked.clear()
    server.streams[0].request.predicted_ids = (7, GAP, 8)
    server.steps(40)
    assert len(looked) >= 35


def test_a_chance_is_relative_to_what_was_to_be_expected_of_a_sequences_drafts() -> None:
    acceptance = Acceptance()
    for rates, share in (("good", 0.9), ("bad", 0.3)):
        for rate in acceptance.rates_of(rates):
            rate.accepted, rate.tried = 900 * share, 900.0
    usual, worse = Followed(), Followed()
    usual.rate, usual.expected = Rate(6.0, 20.0), 6.0  # it drafted from the bad source, and so it fared
    worse.rate, worse.expected = Rate(6.0, 20.0), 18.0
    assert acceptance.chance("good", 8, usual) == pytest.approx(0.9, abs=0.03)
    assert acceptance.chance("bad", 8, usual) == pytest.approx(0.3, abs=0.06)
    assert acceptance.chance("good", 8, worse) < 0.75
    assert acceptance.chance("bad", 8, worse) == 0.0


def test_a_draft_ends_before_the_last_token_that_may_be_drawn() -> None:
    chosen = Server(right=True, per_row=0.05).speculator
    assert chosen._num_left(sequence(1, 2, 3, max_tokens=2)) == 0
    assert chosen._num_left(sequence(1, 2, 3, max_tokens=4)) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[", "must be a JSON object"),
        ([1], "must be a table of values by name"),
        ({"method": "eagle"}, "one of ngram, suffix, draft_model"),
        ({"method": "draft_model"}, "model None"),
        ({"method": "suffix", "model": "smollm2"}, "model 'smollm2'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "between 1 and 64"),
        ({"method": "ngram", "tokens": 3}, "unknown option 'tokens'"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "prompt_lookup_max"),
    ],
)
def test_a_wrong_configuration_is_refused(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(speculative_config=given)  # type: ignore[arg-type]


def test_an_output_is_remembered_however_its_request_ends_but_not_beams() -> None:
    remembered: list[tuple[int, ...]] = []

    class Remembering(DraftMethod):
        def remember(self, seq: Sequence) -> None:
            remembered.append(tuple(seq.output_token_ids))

    engine = Harness(speculator=Speculator(Remembering(2, 8), 4, 1000))
    engine.add(5, max_tokens=2)
    stopped = engine.add(5)
    beams = engine.add(5, max_tokens=3, width=2)
    engine.steps(2)
    engine.scheduler.finish(stopped.sequences[0], FinishReason.STOP)
    engine.run()
    assert beams.finished
    assert remembered == [(7, 7), (7, 7)]


class Verifying(Speculator):
    """Verifies two tokens of every sequence, whatever they cost."""

    def choose(self, streams: Seq[Sequence], most_rows: int) -> Drafts:
        return {seq.seq_id: (seq, (7, 7)) for seq in streams if seq.output_token_ids}


def test_what_a_grammar_forces_is_computed_as_decodes_in_one_row_with_the_draft_after_it() -> None:
    engine = Harness()
    forced, other = engine.add(5), engine.add(5)
    engine.scheduler._composer._speculator = engine.scheduler.speculator = Verifying(DraftMethod(2, 8), 4, 200)
    plan = engine.scheduler.schedule()
    engine.scheduler.update(plan, result_of([Draw(50, forced=(51, 52)), 60]))
    plan = engine.scheduler.schedule()
    rows = dict(zip(plan.seq_ids, zip(plan.starts, plan.lengths, plan.draws, strict=True), strict=True))
    assert rows == {forced.sequences[0].seq_id: (5, 5, 3), other.sequences[0].seq_id: (5, 3, 3)}
    assert plan.num_decodes == 2
    assert plan.is_decodes
    # Of the first, 7 is right once; of the second, never.
    drawn = {forced.sequences[0].seq_id: (7, 8, 9), other.sequences[0].seq_id: (61, 62, 63)}
    engine.scheduler.update(plan, result_of([token_id for seq_id in plan.seq_ids for token_id in drawn[seq_id]]))
    assert forced.sequences[0].output_token_ids == [50, 51, 52, 7, 8]
    assert other.sequences[0].output_token_ids == [60, 61]
    assert [request.sequences[0].num_missing for request in (forced, other)] == [1, 1]
    engine.kv.audit()

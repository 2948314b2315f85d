"""Drafts are found in the text, and verified only where that is faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.request import Request, RequestId, Sequence
from octavo.sampling_params import SamplingParams
from octavo.scheduler.drafts import Draft, DraftMethod, NgramMethod, TokenIndex
from octavo.scheduler.plan import SequenceUpdate
from octavo.scheduler.speculation import Speculator, StepCosts
from octavo.speculative_config import SpeculativeConfig


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
    length, place = index.longest_match(most)
    if not latest:
        assert length == 0
    else:
        longest = max(map(match, latest))
        assert (length, place) == (longest, next(p for p in latest if match(p) == longest))


def test_a_draft_is_no_longer_than_its_match_and_goes_on_as_a_repetition() -> None:
    method = NgramMethod(2, 8)
    assert method.draft(sequence(1, 2, 3, 4, 9, 2, 3), 8) == Draft((4, 9), "ngram", 2)
    assert method.draft(sequence(7, 8, 7, 8, 7, 8), 3) == Draft((7, 8, 7), "ngram", 4)
    assert method.draft(sequence(1, 2, 3), 8) is None


class Oracle(DraftMethod):
    """Drafts 1, 1, 1, …"""

    def draft(self, seq: Sequence, most: int) -> Draft | None:
        return Draft((1,) * most, "oracle", most)


def speculator(*, right: bool, per_row: float, count: int = 1) -> tuple[Speculator, list[Sequence]]:
    """One whose drafts were right or wrong for 20 steps, and whose steps take 1 s and `per_row` for each row."""
    chosen = Speculator(Oracle(), 4, 10_000)
    streams = [sequence(5, 6, 7) for _ in range(count)]
    for rows in range(1, count + 9):
        for _ in range(5):
            chosen.observe(rows, 3 * count, 1 + per_row * rows)
    for _ in range(20):
        chosen.choose(streams, 100)
        for seq in streams:
            token_id = 1 if right else 2
            seq.output_token_ids.append(token_id)
            chosen.learn((), [SequenceUpdate(seq, (token_id,))])
    return chosen, streams


def test_right_drafts_are_verified_where_rows_are_cheap() -> None:
    chosen, streams = speculator(right=True, per_row=0.05)
    assert [tokens for _, tokens in chosen.choose(streams, 100).values()] == [(1, 1, 1, 1)]
    assert [tokens for _, tokens in chosen.choose(streams, 2).values()] == [(1, 1)]


def test_no_draft_is_verified_where_rows_cost_as_much_as_steps_or_drafts_are_wrong() -> None:
    for right, per_row in ((True, 30.0), (False, 0.05)):
        chosen, streams = speculator(right=right, per_row=per_row)
        assert chosen.choose(streams, 100) == {}


def test_a_new_sequence_is_observed_first() -> None:
    chosen, _ = speculator(right=True, per_row=0.05)
    newcomer = sequence(5, 6, 7)
    for _ in range(3):
        assert chosen.choose([newcomer], 100) == {}
        newcomer.output_token_ids.append(1)
        chosen.learn((), [SequenceUpdate(newcomer, (1,))])
    assert chosen.choose([newcomer], 100)


def test_a_draft_delays_a_stream_without_one_by_little() -> None:
    chosen, streams = speculator(right=True, per_row=0.2, count=2)
    newcomer = sequence(5, 6, 7)
    assert chosen.choose(streams, 100)
    assert chosen.choose([streams[0], newcomer], 100) == {}


def test_a_number_of_rows_is_forgotten_when_its_times_are_stale_and_can_be_measured_again() -> None:
    costs = StepCosts().table(100)
    for rows in (1, 2):
        for _ in range(3):
            costs.observe(rows, 1.0 + rows)
    for _ in range(4):  # once for each measurement of two rows, and once more
        for _ in range(600):
            costs.observe(1, 2.0)
        costs.seconds(2)
    assert costs.seconds(2) == pytest.approx(2.0, rel=0.05), "it counts as cheap again"
    for _ in range(3):
        costs.observe(2, 3.0)
    assert costs.seconds(2) == pytest.approx(3.0, rel=0.05)


def test_a_draft_ends_before_the_last_token_that_may_be_drawn() -> None:
    chosen, _ = speculator(right=True, per_row=0.05)
    assert chosen._draft(sequence(1, 2, 3, max_tokens=2)) is None
    assert chosen._draft(sequence(1, 2, 3, max_tokens=4)) == Draft((1, 1), "oracle", 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[", "must be a JSON object"),
        ([1], "must be a JSON object"),
        ({"method": "eagle"}, "one of ngram, suffix"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "tokens": 3}, "has no 'tokens'"),
        ({"method": "ngram", "prompt_lookup_min": 9}, "prompt_lookup_max"),
    ],
)
def test_a_wrong_configuration_is_refused(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SpeculativeConfig.parse(given)  # type: ignore[arg-type]

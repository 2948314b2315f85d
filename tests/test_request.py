"""Requests, their sequences, and what is kept of log-probabilities."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from octavo.logprobs import TokenLogprobs, TopLogprobs
from octavo.request import Request, RequestId, Sequence, SequenceStatus
from octavo.sampling_params import SamplingParams


class Looks(list[Sequence]):
    """Counts how many of its items were looked at."""

    num_looks = 0

    def __iter__(self) -> Iterator[Sequence]:
        for seq in super().__iter__():
            self.num_looks += 1
            yield seq

    def __getitem__(self, place: int) -> Sequence:  # type: ignore[override]
        self.num_looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("backwards", [False, True])
def test_whether_all_sequences_have_ended_costs_one_look_at_each_however_often_it_is_asked(backwards: bool) -> None:
    request = Request(RequestId("r"), [1], SamplingParams(n=64))
    looks = request.sequences = Looks(request.sequences)
    for seq in list(reversed(looks) if backwards else looks):
        assert not request.finished
        seq.status = SequenceStatus.FINISHED
    assert request.finished
    assert looks.num_looks < 4 * 64


def test_the_most_likely_tokens_are_a_sequence_of_pairs_in_two_arrays() -> None:
    pairs = ((7, -0.25), (3, -1.5), (9, -4.0))
    top = TopLogprobs((7, 3, 9), (-0.25, -1.5, -4.0))
    assert top == pairs
    assert top == TopLogprobs([7, 3, 9], [-0.25, -1.5, -4.0])
    assert top != pairs[:2]
    assert (len(top), list(top), top[1], top[:2], repr(top)) == (3, list(pairs), pairs[1], pairs[:2], repr(pairs))
    known = TokenLogprobs(-1.5, 2, top)
    assert pickle.loads(pickle.dumps(known)) == known
    assert hash(known) == hash(TokenLogprobs(-1.5, 2, pairs))


def test_each_sequence_has_a_seed_of_its_own_and_the_first_has_the_requests() -> None:
    def seeds(seed: int, n: int) -> list[int]:
        return [seq.seed for seq in Request(RequestId("r"), [1], SamplingParams(n=n), seed=seed).sequences]

    assert seeds(7, 1) == seeds(7, 4)[:1] == [7]
    assert seeds(7, 4) == seeds(7, 4)
    neighbours = [seed for first in range(-3, 20) for seed in seeds(first, 8)]
    assert len(set(neighbours)) == len(neighbours)
    assert all(0 <= seed < 2**64 for seed in neighbours)

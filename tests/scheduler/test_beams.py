"""How the beams of a request share their blocks, wait for each other and make room; the model is a rule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import CapacityError
from octavo.request import FinishReason, Request, SequenceStatus
from octavo.sampling_params import SamplingParams
from octavo.scheduler.beam import Beam, BeamSearch
from octavo.scheduler.lifecycle import DEFAULT_HEADROOM_TOKENS
from octavo.scheduler.plan import Candidate
from tests.kvcache.caches import make_request, sliding
from tests.scheduler import beams
from tests.scheduler.kit import Harness
from tests.scheduler.results import Draw, result_of


def harness(num_blocks: int = 200, headroom_tokens: int = DEFAULT_HEADROOM_TOKENS, **options: Any) -> Harness:
    return Harness(num_blocks, headroom_tokens=headroom_tokens, **options)


def outputs(request: Request) -> list[list[int]]:
    return [seq.output_token_ids for seq in request.sequences]


def test_beams_share_their_prompt_and_only_the_block_that_diverges_is_copied() -> None:
    engine = harness()
    engine.add(list(range(10)), ignore_eos=True, width=4)
    engine.step()
    assert (engine.scheduler.num_running, engine.kv.pool.num_active) == (4, 3), "ten tokens, three blocks, four beams"
    plan = engine.scheduler.schedule()
    assert len(plan.copies) == 3, "the last to write has the block to itself"
    assert len({copy.source for copy in plan.copies}) == 1
    assert engine.kv.pool.num_active == 2 + 4
    engine.finish_step(plan)
    engine.run()


def test_a_beam_that_is_not_continued_gives_its_blocks_back_at_once() -> None:
    engine = harness()
    request = engine.add([1, 2, 3], width=2, ignore_eos=True)
    engine.step()
    for _ in range(8):
        engine.step()
        tables = [engine.kv.tables(seq)[0] for seq in request.sequences]
        assert engine.kv.pool.num_active == len({block for table in tables for block in table})
    engine.run()


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [9, 12, 20, 200])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [8, 64])
def test_little_room_changes_no_search(num_blocks: int, prefix_caching: bool, budget: int) -> None:
    engine = harness(num_blocks, max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    requests = [
        engine.add([7 * i + j for j in range(6 + i)], width=width, n=2, max_tokens=18, length_penalty=0.5)
        for i, width in enumerate((2, 4, 8))
    ]
    engine.run()
    assert [outputs(r) for r in requests] == [beams.search_alone(r) for r in requests]
    if num_blocks < 12:
        assert engine.scheduler.counters.num_preemptions > 0


@pytest.mark.parametrize("num_blocks", [11, 15])
@pytest.mark.parametrize("num_others", [0, 2])
def test_beams_that_wait_never_keep_their_siblings_from_being_computed(num_blocks: int, num_others: int) -> None:
    # Those that have their candidates hold most of a pool in which the last of them must be computed anew, a few tokens
    # a step. It was preempted for want of a block after each of its first tokens, for ever.
    engine = harness(
        num_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=5,
        block_size=1,
        headroom_tokens=0,
        layers=(sliding(5),),
        prefix_caching=False,
    )
    requests = [engine.add([i, 1, 2], width=5, n=1, max_tokens=9) for i in range(1 + num_others)]
    engine.run()
    assert [outputs(r)[0] for r in requests] == [beams.search_alone(r)[0] for r in requests]


def test_a_waiting_beam_makes_room_for_its_siblings_and_still_takes_part() -> None:
    engine = harness(num_blocks=1 + 6, prefix_caching=False)
    request = engine.add(list(range(12)), width=2, max_tokens=12, ignore_eos=True)
    parked = False
    while not request.finished:
        plan = engine.scheduler.schedule()
        parked |= any(seq.status is SequenceStatus.PARKED for seq in request.sequences)
        engine.finish_step(plan)
    assert parked
    assert outputs(request) == beams.search_alone(request)
    assert engine.kv.pool.num_active == 0


def test_an_abort_at_any_step_leaves_nothing() -> None:
    for num_blocks in (9, 200):
        for num_steps in range(20):
            engine = harness(num_blocks, max_num_batched_tokens=6)
            request = engine.add(list(range(9)), ignore_eos=True, max_tokens=20, width=4)
            for _ in range(num_steps):
                engine.step()
            engine.scheduler.end_request(request.request_id)
            assert {seq.finish_reason for seq in request.sequences} <= {FinishReason.ABORT, FinishReason.LENGTH}
            engine.kv.audit()
            assert (
                engine.kv.pool.num_active == engine.scheduler.running.num_promised == engine.scheduler.num_waiting == 0
            )


def test_more_beams_than_run_at_once_are_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match="best_of is 9, but at most 8 sequences run at once"):
        harness().add([1], width=9)


def search_of(width: int, max_tokens: int, *eos_token_ids: int, **params: Any) -> BeamSearch:
    request = make_request([1], n=width, best_of=width, use_beam_search=True, max_tokens=max_tokens, **params)
    request.eos_token_ids = frozenset(eos_token_ids)
    return BeamSearch(request)


def test_masked_candidates_are_none() -> None:
    search = search_of(2, 3)
    beam = Beam([], 0.0, (), [Candidate(1, -1.0), Candidate(2, float("-inf")), Candidate(3, float("-inf"))])
    assert [e.candidate.token_id for e in search.advance([beam])] == [1]


def test_a_search_that_finds_less_than_is_asked_for_ends_all_the_same() -> None:
    engine = harness()
    request = engine.add([1, 2], width=3, max_tokens=2)
    while not request.finished:
        plan = engine.scheduler.schedule()
        only = Draw(4, candidates=(Candidate(4, -1.0),))
        engine.scheduler.update(plan, result_of([only] * plan.num_draws))
        engine.kv.audit()
    assert outputs(request) == [[4, 4], [], []]
    assert [s.finish_reason for s in request.sequences] == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP]
    assert engine.scheduler.running.num_promised == engine.kv.pool.num_active == 0


@pytest.mark.parametrize("num_blocks", [200, 12])
@pytest.mark.parametrize("continuations", [(1, 12), (2, 3, 12), (12, 1, 12), (3, 12, 2, 1, 12)])
def test_a_step_with_fewer_continuations_than_beams_narrows_the_search_only_for_a_while(
    continuations: tuple[int, ...], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the rest of the vocabulary is masked down to, by the number of tokens so far; the last stays."""
    unmasked = beams.candidates

    def masked(request: Request, token_ids: list[int]) -> tuple[Candidate, ...]:
        place = len(token_ids) - len(request.prompt_token_ids)
        return unmasked(request, token_ids)[: continuations[min(place, len(continuations) - 1)]]

    monkeypatch.setattr(beams, "candidates", masked)
    engine = harness(num_blocks=num_blocks, max_num_seqs=6)
    searches = [engine.add([1, 2, 3], width=5, max_tokens=8), engine.add([4, 5], width=4, ignore_eos=True)]
    engine.run()
    for request in searches:
        assert outputs(request) == beams.search_alone(request)
        ended = [seq.output_token_ids[-1] == beams.EOS and not request.params.ignore_eos for seq in request.sequences]
        expected = [FinishReason.STOP if end else FinishReason.LENGTH for end in ended]
        assert [seq.finish_reason for seq in request.sequences] == expected
    assert engine.scheduler.running.num_promised == 0


def test_the_end_is_kept_only_among_the_best() -> None:
    """Of the first `width` candidates those that end are hypotheses; an end further down is passed over."""
    search = search_of(2, 9, 9, stop_token_ids=(8,))
    first = [Candidate(9, -1.0), Candidate(1, -2.0), Candidate(8, -3.0), Candidate(2, -4.0)]
    going = search.advance([Beam([], 0.0, (), first)])
    assert [(e.candidate.token_id, e.score) for e in going] == [(1, -2.0), (2, -4.0)]
    assert [(h.token_ids, h.finish_reason, h.stop_reason) for h in search.hypotheses] == [
        ([9], FinishReason.STOP, None)
    ]


def test_a_request_has_as_many_sequences_as_it_has_beams() -> None:
    rng = random.Random(0)
    for _ in range(5):
        width = rng.randint(1, 8)
        assert SamplingParams(use_beam_search=True, best_of=width).num_sequences == width


def test_of_the_candidates_of_many_beams_few_are_looked_at() -> None:
    looked_at = 0

    class Candidates(tuple[Candidate, ...]):
        def __iter__(self) -> Iterator[Candidate]:
            nonlocal looked_at
            for candidate in super().__iter__():
                looked_at += 1
                yield candidate

    width = 64
    search = search_of(width, 1)
    rng = random.Random(0)
    found = [[Candidate(token, -rng.random()) for token in range(2 * width)] for _ in range(width)]
    ranked = [Candidates(sorted(each, key=lambda candidate: -candidate.logprob)) for each in found]
    beams = [Beam([], -rng.random(), (), candidates) for candidates in ranked]
    assert not search.advance(beams)
    assert looked_at <= 3 * width
    best = sorted((b.score + c.logprob for b in beams for c in b.candidates), reverse=True)[:width]
    assert [hypothesis.score for hypothesis in search.hypotheses] == best

"""The sampler against exact distributions, a slow oracle, and transformers' logits processors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from octavo import kernels
from octavo.errors import LogitsError
from octavo.request import RequestId, Sequence
from octavo.sampling.batch import BadWords, SamplingBatch, SamplingState
from octavo.sampling.choice import Choice, NativeChoice, token_logprobs
from octavo.sampling.draw import random_streams, uniforms
from octavo.sampling.penalties import adjust
from octavo.sampling.sampler import Sampler
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import SamplingSnapshot, StepResult
from tests.sampling.draws import batch_of, make_sequence
from tests.scheduler.results import Draw, draws_of

CHOICES: list[Choice] = [Choice(), *([NativeChoice()] if kernels.available() else [])]
each_choice = pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: type(choice).__name__)


def sample(
    logits: torch.Tensor,
    sequences: Iterable[Sequence],
    row_of: list[int] | None = None,
    choices: list[Choice] = CHOICES,
) -> list[Draw]:
    """What torch's operations find; the library's kernels must find the same, or fail alike."""
    batch = batch_of(sequences)
    first, *others = (_attempt(choice, logits, batch, row_of) for choice in choices)
    for other in others:
        if isinstance(first, LogitsError):
            assert isinstance(other, LogitsError)
            assert other.request_ids == first.request_ids
        else:
            assert not isinstance(other, LogitsError)
            require_same(other, first)
    if isinstance(first, LogitsError):
        raise first
    return first


def _attempt(
    choice: Choice, logits: torch.Tensor, batch: SamplingBatch, row_of: list[int] | None
) -> list[Draw] | LogitsError:
    try:
        return draws_of(Sampler(choice).sample(logits, batch, row_of))
    except LogitsError as error:
        return error


def require_same(found: list[Draw], expected: list[Draw]) -> None:
    assert [each.token_id for each in found] == [each.token_id for each in expected]
    for each, other in zip(found, expected, strict=True):
        assert (each.logprobs is None) == (other.logprobs is None)
        if each.logprobs is not None and other.logprobs is not None:
            assert each.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=2e-5)
            assert each.logprobs.rank == other.logprobs.rank
            assert [token_id for token_id, _ in each.logprobs.top] == [token_id for token_id, _ in other.logprobs.top]


def draw(logits: torch.Tensor, sequences: list[Sequence], row_of: list[int] | None = None) -> list[int]:
    return [result.token_id for result in sample(logits, sequences, row_of)]


def oracle_probs(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, bool]:
    """What may be drawn with which probability, one token at a time in float64; and whether a cut was a close call."""
    x = logits.astype(np.float32) / np.float32(params.temperature)
    kept = list(np.lexsort((np.arange(len(x)), -x)))
    mass = np.exp((x - x.max()).astype(np.float64))
    close = bool(np.any(np.abs(mass - params.min_p) < 1e-5 * params.min_p))
    kept = [t for t in kept if mass[t] >= params.min_p]
    if params.top_k and params.top_k < len(kept):
        kth = x[kept[params.top_k - 1]]
        kept = [t for t in kept if x[t] >= kth]
    if params.top_p < 1:
        wanted, so_far, nucleus = params.top_p * sum(mass[kept]), 0.0, []
        for t in kept:
            close |= abs(so_far - wanted) < 1e-5 * wanted
            if so_far >= wanted:
                break
            nucleus.append(t)
            so_far += mass[t]
        kept = nucleus
    probs = np.zeros(len(x))
    probs[kept] = mass[kept] / sum(mass[kept])
    return probs, close


def oracle_token(probs: np.ndarray, seq: Sequence) -> tuple[int, bool]:
    [u] = uniforms(random_streams(np.array([seq.seed], np.uint64)), np.array([seq.num_output_tokens]))
    cumulative = np.cumsum(probs)
    return int(np.searchsorted(cumulative, u, side="right")), bool(np.min(np.abs(cumulative - u)) < 1e-5)


temperatures = st.sampled_from([0.3, 0.7, 1.0, 1.5, 4.0])
filters = st.fixed_dictionaries(
    {
        "temperature": temperatures,
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
        "top_k": st.one_of(st.just(0), st.integers(1, 400)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    }
)


@st.composite
def logit_rows(draw_from: Callable[..., Any], rows: int = 1) -> torch.Tensor:
    """Normal, flat, peaked, and coarse (hence full of equal values) logits, of vocabularies on both sides of the
    sizes at which chunks begin."""
    vocab = draw_from(st.sampled_from([2, 7, 100, 600, 5003]))
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    x = rng.normal(size=(rows, vocab)) * draw_from(st.sampled_from([0.01, 1.0, 6.0]))
    if draw_from(st.booleans()):
        x = np.round(x * 2) / 2
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(logits=logit_rows(), params=filters, seed=st.integers(0, 2**64 - 1))
def test_a_draw_agrees_with_the_oracle(logits: torch.Tensor, params: dict[str, Any], seed: int) -> None:
    seq = make_sequence(seed=seed, **params)
    probs, close = oracle_probs(logits[0].numpy(), seq.request.params)
    token, boundary = oracle_token(probs, seq)
    assume(not close and not boundary)
    assert draw(logits, [seq]) == [token]


def test_top_p_is_a_share_of_all_equals_of_the_k_th_largest() -> None:
    # Five tokens above 995 equals: top_k 46 keeps them all, and there are more of them than are looked at first.
    logits = torch.zeros(1, 1000)
    logits[0, ::200] = 3.0
    sequences = [make_sequence(seed=seed, top_k=46, top_p=0.5) for seed in range(64)]
    probs, _ = oracle_probs(logits[0].numpy(), sequences[0].request.params)
    assert np.count_nonzero(probs) > 400
    assert draw(logits, sequences, [0] * 64) == [oracle_token(probs, seq)[0] for seq in sequences]


@pytest.mark.slow
@each_choice
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_gives_the_same_token_alone_and_in_a_batch(choice: Choice, data: st.DataObject) -> None:
    logits = data.draw(logit_rows(rows=8))
    options: st.SearchStrategy[dict[str, Any]] = st.one_of(
        filters, st.just({"temperature": 0.0}), st.builds(dict, temperature=temperatures)
    )
    penalties: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [{}, {"repetition_penalty": 1.3}, {"presence_penalty": 1.0, "logprobs": 3}]
    )
    sequences = [
        make_sequence(prompt=[0, 1], output=[1, 0, 1][:i], seed=i, **data.draw(options), **data.draw(penalties))
        for i in range(8)
    ]
    together = sample(logits, sequences, choices=[choice])
    alone = [sample(logits[i : i + 1], [seq], choices=[choice])[0] for i, seq in enumerate(sequences)]
    assert together == alone


def test_a_batch_drawn_in_slices_draws_what_it_draws_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(24, 300)).astype(np.float32) * 3)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.9}, {"top_p": 0.8, "top_k": 20}]
    sequences = [make_sequence(seed=i, logprobs=i % 4 or None, **kinds[i // 2 % 3]) for i in range(24)]
    at_once = sample(logits, sequences)
    monkeypatch.setattr("octavo.sampling.choice._AT_ONCE", 3 * 300)
    assert sample(logits, sequences) == at_once


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_frequencies_match_the_exact_probabilities(params: dict[str, Any]) -> None:
    draws = 10_000
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(1, 12)).astype(np.float32) * 2)
    sequences = [make_sequence(seed=seed, **params) for seed in range(draws)]
    tokens = [each.token_id for each in sample(logits, sequences, [0] * draws, CHOICES[-1:])]
    counts = np.bincount(tokens, minlength=12)
    probs, _ = oracle_probs(logits[0].numpy(), sequences[0].request.params)
    assert not counts[probs == 0].any()
    expected = probs[probs > 0] * draws
    chi_square = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    # The 99.9th percentile of chi-square with 11 degrees of freedom; the seeds are fixed.
    assert chi_square < 31.3


@pytest.mark.slow
def test_positions_of_one_sequence_are_as_independent_as_sequences() -> None:
    logits = torch.zeros(1, 10)
    sequences = [make_sequence(output=[0] * position, seed=7) for position in range(2000)]
    tokens = np.array(draw(logits, sequences, [0] * 2000))
    counts = np.bincount(tokens, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
    pairs = np.bincount(tokens[:-1] * 10 + tokens[1:], minlength=100)
    assert ((pairs - 19.99) ** 2 / 19.99).sum() < 148.2


def test_the_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 500)).astype(np.float32))
    first = make_sequence(prompt=[1, 2, 3], output=[4, 5], seed=11)
    second = make_sequence(prompt=[9], output=[8, 7], seed=11, request_id="other")
    assert draw(logits, [first]) == draw(logits, [second])


def test_uniforms_follow_the_published_splitmix64() -> None:
    # The first output of SplitMix64 seeded with mix(seed + golden): computed here with Python's integers.
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mix(golden) == 0xE220A8397B1DCDAF  # the well-known first output for seed 0
    seeds, positions = [0, 1, 2**64 - 1, 7], [0, 5, 10**6, 10**6]
    expected = [
        (mix((mix((s + golden) % 2**64) + (p + 1) * golden) % 2**64) >> 11) / 2**53
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert uniforms(random_streams(np.array(seeds, np.uint64)), np.array(positions)).tolist() == expected


@pytest.mark.parametrize("vocab", [5, 4096, 49153])
def test_greedy_takes_the_lowest_of_equals(vocab: int) -> None:
    logits = torch.full((3, vocab), -1.0)
    logits[0, [3, 4]] = 2.0
    logits[1, vocab - 1] = 2.0
    assert draw(logits, [make_sequence(temperature=0.0) for _ in range(3)]) == [3, vocab - 1, 0]


def test_several_sequences_may_share_a_row() -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    sequences = [make_sequence(temperature=0.0) for _ in range(4)]
    assert draw(logits, sequences, [0, 0, 1, 0]) == [1, 1, 2, 1]
    assert draw(logits, sequences[:1], [1]) == [2]


def test_a_shared_row_is_not_penalised_for_its_siblings() -> None:
    logits = torch.tensor([[1.0, 1.5]])
    penalised = make_sequence(output=[1], temperature=0.0, presence_penalty=1.0)
    plain = make_sequence(output=[1], temperature=0.0)
    assert draw(logits, [penalised, plain], [0, 0]) == [0, 1]
    assert logits.tolist() == [[1.0, 1.5]]


def test_bfloat16_logits_are_taken() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]], dtype=torch.bfloat16)
    [result] = sample(logits, [make_sequence(temperature=0.0, logprobs=1)])
    assert result.token_id == 1
    assert result.logprobs.logprob == pytest.approx(logits.float().log_softmax(-1)[0, 1].item())


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("vocab", [6, 5000])
def test_logits_without_a_distribution_name_their_request(params: dict[str, Any], value: float, vocab: int) -> None:
    logits = torch.zeros(2, vocab)
    logits[1, 3] = value
    sequences = [make_sequence(**params), make_sequence(request_id="the-bad-one", **params)]
    with pytest.raises(LogitsError, match="the-bad-one") as error:
        draw(logits, sequences)
    assert error.value.request_ids == ["the-bad-one"]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}])
def test_a_row_whose_every_token_is_masked_is_an_error(params: dict[str, Any]) -> None:
    with pytest.raises(LogitsError):
        draw(torch.full((1, 4), -torch.inf), [make_sequence(**params)])


def test_tokens_masked_by_the_model_are_never_drawn() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [17, 250]] = 0.0
    for params in ({}, {"top_k": 100}, {"top_p": 0.99}, {"min_p": 0.01}):
        sequences = [make_sequence(seed=seed, **params) for seed in range(40)]
        assert set(draw(logits, sequences, [0] * 40)) == {17, 250}


@each_choice
def test_the_nucleus_of_a_flat_row_is_found_without_its_sort(choice: Choice) -> None:
    # Equal values throughout: top_p keeps the first half by id, and no width of candidates can know that.
    logits = torch.zeros(1, 6000)
    sequences = [make_sequence(top_p=0.5, seed=seed) for seed in range(200)]
    tokens = [each.token_id for each in sample(logits, sequences, [0] * 200, [choice])]
    assert max(tokens) < 3000
    assert max(tokens) > 2900


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1e300}, {"temperature": 1.1e-5}, {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}],
)
def test_extreme_parameters_still_draw_a_token_that_is_not_masked(params: dict[str, Any]) -> None:
    seq = make_sequence(prompt=[1, 2], eos=[1], min_tokens=1, **params)
    assert draw(torch.tensor([[0.5, 9.0, 2.0, -3.0]]), [seq])[0] != 1


def test_equals_of_the_kth_stay() -> None:
    logits = torch.tensor([[5.0, 1.0, 1.0, 1.0, 0.0]])
    sequences = [make_sequence(top_k=2, temperature=4.0, seed=seed) for seed in range(200)]
    assert set(draw(logits, sequences, [0] * 200)) == {0, 1, 2, 3}


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' warpers in Octavo's order."""
    x = logits / params.temperature
    nothing = torch.zeros(len(logits), 1, dtype=torch.int64)
    if params.min_p:
        x = MinPLogitsWarper(params.min_p)(nothing, x)
    if params.top_k:
        x = TopKLogitsWarper(params.top_k)(nothing, x)
    if params.top_p < 1:
        x = TopPLogitsWarper(params.top_p)(nothing, x)
    return x


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), params=filters)
def test_the_oracle_keeps_what_transformers_keeps(seed: int, params: dict[str, Any]) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 200)).astype(np.float32)) * 3
    options = SamplingParams(**params)
    probs, close = oracle_probs(logits[0].numpy(), options)
    assume(not close)
    expected = warped(logits, options).softmax(-1)[0].numpy()
    np.testing.assert_allclose(probs, expected, atol=2e-6)


def adjusted(logits: torch.Tensor, *sequences: Sequence) -> torch.Tensor:
    changed = logits.clone()
    adjust(changed, batch_of(sequences))
    return changed


@pytest.mark.slow
def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 30)).astype(np.float32))
    sequences = [
        make_sequence(prompt=[1, 2, 2, 3], output=[4, 1, 7], repetition_penalty=1.7),
        make_sequence(prompt=[9], output=[9, 9, 11], repetition_penalty=0.6),
    ]
    got = adjusted(logits, *sequences)
    for i, seq in enumerate(sequences):
        processor = RepetitionPenaltyLogitsProcessor(seq.request.params.repetition_penalty)
        expected = processor(torch.tensor([seq.token_ids]), logits[i : i + 1].clone())
        torch.testing.assert_close(got[i : i + 1], expected, rtol=0, atol=0)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    seq = make_sequence(prompt=[0, 1, 1], output=[1, 2, 2, 2], presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted(torch.zeros(1, 4), seq).tolist() == [[0.0, -0.75, -1.25, 0.0]]


def test_logit_bias_is_added_and_may_name_tokens_outside_the_vocabulary() -> None:
    seq = make_sequence(logit_bias={1: 5.0, 3: -100.0, 99: 7.0})
    assert adjusted(torch.ones(1, 4), seq).tolist() == [[1.0, 6.0, 1.0, -99.0]]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_nothing_ends_the_output_before_min_tokens(ignore_eos: bool) -> None:
    options: dict[str, Any] = {"eos": [1], "stop_token_ids": [2, 50], "min_tokens": 2, "ignore_eos": ignore_eos}
    for num_output, masked in ((0, True), (1, True), (2, False)):
        changed = adjusted(torch.zeros(1, 4), make_sequence(output=[0] * num_output, **options))
        assert torch.isinf(changed).tolist() == [[False, masked, masked, False]]


def test_a_bias_does_not_lift_what_min_tokens_masks() -> None:
    seq = make_sequence(eos=[1], min_tokens=1, logit_bias={1: 100.0}, temperature=0.0)
    assert draw(torch.zeros(1, 3), [seq]) == [0]


def test_each_row_is_adjusted_by_its_own_request_only() -> None:
    plain, biased = make_sequence(), make_sequence(logit_bias={0: 1.0}, repetition_penalty=2.0, prompt=[1])
    assert adjusted(torch.ones(3, 2), plain, biased, plain).tolist() == [[1.0, 1.0], [2.0, 0.5], [1.0, 1.0]]


@each_choice
@settings(max_examples=60, deadline=None)
@given(logits=logit_rows(rows=3), num_top=st.integers(0, 20), data=st.data())
def test_scores_are_the_log_softmax_and_the_place_by_it(
    choice: Choice, logits: torch.Tensor, num_top: int, data: st.DataObject
) -> None:
    vocab = logits.shape[1]
    targets = data.draw(st.lists(st.integers(0, vocab - 1), min_size=3, max_size=3))
    logprobs = logits.log_softmax(-1).numpy()
    for row, got in enumerate(Sampler(choice).score(logits, targets, num_top)):
        assert got.logprob == pytest.approx(float(logprobs[row, targets[row]]), abs=1e-5)
        assert got.rank == 1 + int((logits[row] > logits[row, targets[row]]).sum())
        order = np.lexsort((np.arange(vocab), -logits[row].numpy()))[:num_top]
        assert [token for token, _ in got.top] == order.tolist()
        np.testing.assert_allclose([p for _, p in got.top], logprobs[row, order], atol=1e-5)


def test_scoring_goes_through_more_rows_than_it_holds_at_once() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(150, 9)).astype(np.float32))
    targets = [i % 9 for i in range(150)]
    scored = Sampler().score(logits, targets, 2)
    expected = logits.log_softmax(-1)[torch.arange(150), torch.tensor(targets)]
    torch.testing.assert_close(torch.tensor([s.logprob for s in scored]), expected)


def test_logprobs_are_the_models_own_before_penalties_and_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    seq = make_sequence(output=[0], temperature=0.0, presence_penalty=2.0, logprobs=2)
    [result] = sample(logits, [seq])
    raw = logits.log_softmax(-1)[0].tolist()
    assert result.token_id == 1
    assert result.logprobs.rank == 2
    assert result.logprobs.logprob == pytest.approx(raw[1])
    assert result.logprobs.top == ((0, pytest.approx(raw[0])), (1, pytest.approx(raw[1])))


def test_logprobs_come_only_where_asked_for() -> None:
    sequences = [make_sequence(temperature=0.0, logprobs=n) for n in (None, 0, 3)]
    results = sample(torch.arange(5.0).repeat(3, 1), sequences)
    assert results[0].logprobs is None
    assert results[1].logprobs.top == ()
    assert [token for token, _ in results[2].logprobs.top] == [4, 3, 2]


def test_a_step_that_samples_nothing_gives_nothing() -> None:
    assert Sampler().sample(torch.zeros(0, 5), batch_of([])) == StepResult()


def test_only_allowed_tokens_are_drawn_whatever_their_logits() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 8.0], [9.0, 1.0, 2.0, 8.0]])
    seqs = [make_sequence(temperature=0.0, allowed_token_ids=[1, 2, 99]), make_sequence(temperature=0.0)]
    assert draw(logits, seqs) == [2, 0]


@pytest.mark.parametrize(
    ("output", "expected"),
    [([], 2), ([3], 2), ([1], 0), ([0, 1], 0), ([3, 1], 1), ([1, 3], 2)],
)
def test_a_bad_words_last_token_is_masked_where_the_output_has_the_others(output: list[int], expected: int) -> None:
    """Bad words are [1, 2], [3, 1, 0] and [3]; token 3 is the likeliest, then 2, 0, 1."""
    snapshot = SamplingSnapshot(
        RequestId("r"),
        SamplingParams(temperature=0.0, bad_words=["…"]),
        seed=0,
        num_prompt_tokens=2,
        bad_word_ids=((1, 2), (3, 1, 0), (3,)),
    )
    # The prompt ends in the first word's beginning, which does not count.
    state = SamplingState.of(snapshot, np.array([0, 1, *output]))
    batch = SamplingBatch.of([state], [len(output)])
    assert Sampler().sample(torch.tensor([[2.0, 1.0, 3.0, 4.0]]), batch).token_ids == (expected,)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 3), (2, 2)])
def test_a_bad_word_of_several_tokens_is_allowed_where_no_other_token_is_left(min_tokens: int, expected: int) -> None:
    """Bad words are [1, 2], [1, 0] and [1]; token 3 ends the output, which `min_tokens` forbids."""
    snapshot = SamplingSnapshot(
        RequestId("r"),
        SamplingParams(temperature=0.0, bad_words=["…"], stop_token_ids=[3], min_tokens=min_tokens),
        seed=0,
        num_prompt_tokens=0,
        bad_word_ids=((1, 2), (1, 0), (1,)),
    )
    state = SamplingState.of(snapshot, np.array([1]))
    assert Sampler().sample(torch.tensor([[2.0, 4.0, 3.0, 1.0]]), SamplingBatch.of([state], [1])).token_ids == (
        expected,
    )


@each_choice
def test_beams_are_ranked_after_penalties_and_report_what_the_model_said(choice: Choice) -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)) * 3
    output = logits.topk(7).indices[:, :7]  # most of what the model finds likeliest was said before
    params = SamplingParams(use_beam_search=True, n=4, temperature=0.0, logprobs=3, repetition_penalty=1.5)
    states = []
    for row in output.tolist():
        snapshot = SamplingSnapshot(RequestId("r"), params, seed=0, num_prompt_tokens=0, num_candidates=8)
        states.append(SamplingState.of(snapshot, np.array(row)))
    batch = SamplingBatch.of(states, [7, 7])
    result = Sampler(choice).sample(logits, batch)
    ranked = logits.log_softmax(-1)
    adjust(ranked, batch)
    for i, best in enumerate(ranked.sort(descending=True).indices[:, :4]):
        candidates = result.candidates[i]
        assert [candidate.token_id for candidate in candidates] == best.tolist()
        assert [candidate.logprob for candidate in candidates] == pytest.approx(ranked[i, best].tolist(), abs=1e-4)
        expected = token_logprobs(logits[i].expand(4, -1), best, [3] * 4)
        for candidate, known in zip(candidates, expected, strict=True):
            assert candidate.logprobs is not None
            assert candidate.logprobs.rank == known.rank
            assert [token_id for token_id, _ in candidate.logprobs.top] == [token_id for token_id, _ in known.top]
            assert candidate.logprobs.logprob == pytest.approx(known.logprob, abs=1e-4)


@each_choice
@pytest.mark.parametrize("neighbour", [{"logit_bias": {5: 1.0}}, {"repetition_penalty": 1.5}, {"min_tokens": 20}])
def test_a_beams_candidates_do_not_depend_on_adjusted_neighbours(choice: Choice, neighbour: dict[str, Any]) -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)) * 3
    states = []
    for adjustments in ({}, neighbour):
        params = SamplingParams(use_beam_search=True, n=4, temperature=0.0, max_tokens=40, logprobs=3, **adjustments)
        snapshot = SamplingSnapshot(RequestId("r"), params, 0, 0, eos_token_ids=frozenset({1}), num_candidates=8)
        states.append(SamplingState.of(snapshot, np.array([5, 6])))
    sampler = Sampler(choice)
    alone = [sampler.sample(logits[i : i + 1], SamplingBatch.of([states[i]], [2])) for i in range(2)]
    together = sampler.sample(logits, SamplingBatch.of(states, [2, 2]))
    assert draws_of(together) == [draw for result in alone for draw in draws_of(result)]


def test_bad_words_are_found_by_the_token_before_their_last() -> None:
    words = BadWords.of([(7,), *((i, 100 + i, 3) for i in range(128)), (5, 6)])
    assert words.forbidden([]) == [7]
    assert words.forbidden([1, 2, 3]) == [7]
    assert words.forbidden([4, 104]) == [7, 3]
    assert words.forbidden([5, 104]) == [7]
    assert words.forbidden([5]) == [7, 6]


@each_choice
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "min_tokens": 2}])
def test_a_draw_prepared_once_draws_what_one_prepared_for_each_position_does(
    choice: Choice, params: dict[str, Any]
) -> None:
    sampler, vocab = Sampler(choice), 300
    snapshot = SamplingSnapshot(RequestId("r"), SamplingParams(**params, stop_token_ids=[3, 5]), 7, num_prompt_tokens=0)
    state = SamplingState.of(snapshot, np.zeros(0, np.int32))
    batch = SamplingBatch.of([state], [0])
    draw = sampler.prepare(batch, vocab)
    for position in range(5):
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(position))
        logits[0, [3, 5]] += 9.0 - 3.0 * position
        batch.positions[:] = position
        batch.numbers()
        token_ids, collect = draw(logits)
        expected = sampler.sample(logits, SamplingBatch.of([state], [position])).token_ids
        assert tuple(token_ids.tolist()) == collect().token_ids == expected

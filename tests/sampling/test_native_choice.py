"""The library's draws against torch's: the same tokens, but where a number falls onto a boundary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import kernels
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.choice import Choice, DrawMasks, NativeChoice, with_limits
from octavo.sampling.draw import random_streams, uniforms
from octavo.sampling.penalties import add_amounts, adjust, penalise_repetition
from tests.levels import LEVELS
from tests.sampling.draws import batch_of, make_sequence
from tests.sampling.test_sampler import filters, oracle_probs

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not compiled")

# How far from a boundary, as a part of a row's mass, a number must fall for the tokens to be the same.
TOLERANCE = 2e-6

vocabularies = st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 5003])
options: st.SearchStrategy[dict[str, Any]] = st.one_of(
    filters,
    st.just({"temperature": 0.0}),
    st.builds(dict, temperature=st.sampled_from([0.01, 0.3, 1.0, 2.0, 1e30])),
    st.builds(dict, top_p=st.floats(0.01, 0.999)),
    st.builds(dict, top_k=st.integers(1, 6000)),
)


def some_logits(vocab: int, seed: int) -> torch.Tensor:
    """Peaked, flat or coarse ones, some of them -inf."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(1, vocab)) * rng.choice([0.01, 1.0, 8.0])).astype(np.float32)
    if seed % 3 == 0:
        x = np.round(x * 2).astype(np.float32) / 2
    if seed % 4 == 0:
        x[0, rng.random(vocab) < 0.5] = -np.inf
    return torch.from_numpy(x)


def is_close_call(logits: torch.Tensor, batch: SamplingBatch, again: bool) -> bool:
    """Whether the number lies at a boundary of the distribution, or a cut of a filter at a token."""
    params = batch.states[0].snapshot.params
    row = logits[0].numpy()
    kept = row > -np.inf
    probs, close = oracle_probs(row[kept], params)
    [u] = uniforms(random_streams(batch.records["seed"], again=again), batch.positions)
    return close or bool(np.min(np.abs(np.cumsum(probs) - u)) < TOLERANCE)


def require_same_draw(logits: torch.Tensor, params: dict[str, Any], seed: int, words: np.ndarray | None) -> None:
    batch = batch_of([make_sequence(seed=seed, **params)])
    again = words is not None and seed % 2 == 1
    found = []
    for choice in (Choice(), NativeChoice()):
        if words is None:
            token_ids, valid = choice.choose(logits, batch)
        elif again:
            token_ids, valid = choice.choose(logits, batch, DrawMasks(words, np.array([0])), np.array([0]), again=True)
        else:
            token_ids, valid = choice.choose(logits, batch, DrawMasks(words, np.array([0])))
        found.append((int(token_ids[0]) if bool(valid[0]) else None, bool(valid[0])))
    if found[0] == found[1]:
        return
    looked_at = logits.clone()
    if words is not None:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=logits.shape[1])
        looked_at[0, torch.from_numpy(bits == 0)] = -torch.inf
    assert found[0][1] == found[1][1]
    assert params.get("temperature", 1.0) > 0
    assert is_close_call(looked_at, batch, bool(again))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(vocab=vocabularies, row=st.integers(0, 2**32), params=options, seed=st.integers(0, 2**64 - 1))
def test_the_kernel_draws_the_token_that_torch_draws(vocab: int, row: int, params: dict[str, Any], seed: int) -> None:
    require_same_draw(some_logits(vocab, row), params, seed, None)


MANY: list[dict[str, Any]] = [
    {"top_k": 8999, "top_p": 0.999, "min_p": 1e-30},
    {"top_k": 6000, "temperature": 2.0},
    {"top_k": 5000, "top_p": 0.5},
    {"min_p": 1e-9, "temperature": 5.0},
    {"min_p": 1e-9, "top_p": 0.97},
]


@pytest.mark.parametrize("params", MANY)
def test_filters_that_keep_most_of_the_vocabulary_draw_what_they_draw_in_torch(params: dict[str, Any]) -> None:
    for row in range(12):
        require_same_draw(some_logits(9001, row), params, 100 + row, None)


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.9, 0.999995])
def test_top_p_draws_what_it_draws_in_torch_where_likely_tokens_have_half_of_the_mass(top_p: float) -> None:
    for row in range(12):
        logits = some_logits(20_011, 3 * row + 1).clamp(-1, 1)
        logits[0, 70 * row : 70 * row + 40] += 8.0
        require_same_draw(logits, {"top_p": top_p}, 100 + row, None)


@settings(max_examples=100, deadline=None)
@given(
    vocab=vocabularies,
    row=st.integers(0, 2**32),
    params=options,
    seed=st.integers(0, 2**64 - 1),
    share=st.sampled_from([0.0, 0.003, 0.5, 0.997, 1.0]),
)
def test_a_mask_leaves_the_tokens_that_it_leaves_in_torch(
    vocab: int, row: int, params: dict[str, Any], seed: int, share: float
) -> None:
    allowed = np.random.default_rng(row).random(vocab) < share
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[:vocab] = allowed
    words = np.packbits(bits, bitorder="little").view(np.uint32).reshape(1, -1)
    require_same_draw(some_logits(vocab, row), params, seed, words)


@settings(max_examples=60, deadline=None)
@given(vocab=vocabularies, row=st.integers(0, 2**32), params=options, seed=st.integers(0, 2**64 - 1))
def test_allowed_tokens_are_those_of_logits_that_forbid_all_others(
    vocab: int, row: int, params: dict[str, Any], seed: int
) -> None:
    rng, logits = np.random.default_rng(row), some_logits(vocab, row).repeat(3, 1)
    allowed = sorted({int(token_id) for token_id in rng.integers(0, vocab + 40, rng.integers(1, 60))})
    bias = {allowed[0]: 1.5}
    limited = make_sequence(seed=seed, allowed_token_ids=allowed, logit_bias=bias, **params)
    batch = batch_of([make_sequence(seed=1), limited, make_sequence(seed=2)])
    found = []
    for choice in (Choice(), NativeChoice()):
        adjusted = logits.clone()
        adjust(adjusted, batch)
        token_ids, valid = choice.choose(adjusted, batch)
        found.append([int(t) if ok else None for t, ok in zip(token_ids, valid, strict=True)])
    assert found[1][1] is None or found[1][1] in allowed
    if found[0] != found[1]:
        adjust(logits, batch)
        limits = with_limits(None, batch, vocab)
        assert limits is not None
        limits.apply(logits, np.arange(3))
        close = [is_close_call(logits[i : i + 1], batch.select(np.array([i])), again=False) for i in range(3)]
        assert all(each or a == b for each, a, b in zip(close, *found, strict=True))


@pytest.mark.parametrize(("vocab", "num_top"), [(1, 1), (257, 8), (5003, 20), (5003, 5003)])
def test_the_likeliest_tokens_are_those_of_torch(vocab: int, num_top: int) -> None:
    logits = torch.cat([some_logits(vocab, seed) for seed in range(6)])
    (values, ids), (expected, expected_ids) = (each.likeliest(logits, num_top) for each in (NativeChoice(), Choice()))
    torch.testing.assert_close(values, expected, atol=2e-6, rtol=0.0, equal_nan=True)
    # Which of equals comes first, or at the end is left out, depends on rounding.
    torch.testing.assert_close(logits.gather(1, ids), logits.gather(1, expected_ids), atol=2e-6, rtol=0.0)


@pytest.mark.parametrize("isa", LEVELS)
def test_every_instruction_set_draws_what_torch_draws(isa: str) -> None:
    before = kernels.isa()
    kernels.force_isa(isa)
    try:
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 0.4}]
        for seed, params in enumerate([*kinds, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}]):
            require_same_draw(some_logits(1000, seed), params, seed, None)
    finally:
        kernels.force_isa(before)


@pytest.mark.parametrize("make_choice", [Choice, NativeChoice])
def test_draws_with_masks_without_and_with_limits_of_their_own_are_drawn_as_alone(
    make_choice: type[Choice] | type[NativeChoice],
) -> None:
    choice, logits = make_choice(), some_logits(320, 5).repeat(6, 1)
    limits: list[dict[str, Any]] = [{}, {}, {"allowed_token_ids": [3, 70, 319]}, {}, {"temperature": 0.0}, {}]
    batch = batch_of([make_sequence(seed=i, **limit) for i, limit in enumerate(limits)])
    words = np.random.default_rng(1).integers(0, 2**32, (2, 10), dtype=np.uint32)
    masks = DrawMasks(words, np.array([1, -1, -1, 0, 1, -1]))
    adjusted = logits.clone()
    adjust(adjusted, batch)
    together, valid = choice.choose(adjusted, batch, masks)
    assert bool(valid.all())
    alone = []
    for i, row in enumerate(masks.mask_of.tolist()):
        mask = None if row < 0 else DrawMasks(words[row : row + 1], np.array([0]))
        alone.append(int(choice.choose(adjusted[i : i + 1], batch.select(np.array([i])), mask)[0]))
    assert together.tolist() == alone
    assert alone[2] in (3, 70, 319)
    assert all(words[row, alone[i] // 32] >> alone[i] % 32 & 1 for i, row in ((0, 1), (3, 0), (4, 1)))


def test_bits_past_the_vocabulary_allow_nothing() -> None:
    words = np.array([[0xFFFFFFFF]], dtype=np.uint32)
    masks = DrawMasks(words, np.array([0]))
    token_ids, valid = NativeChoice().choose(torch.zeros(1, 3), batch_of([make_sequence(seed=9)]), masks)
    assert bool(valid[0])
    assert int(token_ids[0]) < 3


MASK: dict[str, Any] = {"allowed": torch.zeros(1, 1, dtype=torch.int32), "mask_of": torch.tensor([0])}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.bfloat16)}, "logits must be float32"),
        ({"logits": torch.zeros(2, 0)}, "no columns"),
        ({"rows": torch.tensor([2])}, r"rows\[0\] is 2, must be in \[0, 2\)"),
        ({"numbers": torch.zeros(1, 4, dtype=torch.float64)}, r"numbers must have shape \[\*, 5\]"),
        ({"numbers": torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)}, r"numbers\[0\] must be"),
        ({"numbers": torch.tensor([[0.5, float("nan"), 0.0, 1.0, 0.0]], dtype=torch.float64)}, r"numbers\[0\] must"),
        (MASK | {"allowed": torch.zeros(1, 2, dtype=torch.int32)}, r"allowed must have shape \[\*, 1\]"),
        (MASK | {"mask_of": torch.tensor([1])}, r"mask_of\[0\] is 1, must be in \[-1, 1\)"),
        (MASK | {"mask_of": None}, "allowed and mask_of come together"),
        ({"token_ids": torch.zeros(2, dtype=torch.int64)}, r"token_ids must have shape"),
    ],
)
def test_a_bad_argument_of_a_draw_is_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "token_ids": torch.zeros(1, dtype=torch.int64),
        "valid": torch.zeros(1, dtype=torch.uint8),
        "logits": torch.zeros(2, 5),
        "rows": torch.tensor([1]),
        "numbers": torch.tensor([[0.5, 1.0, 0.0, 1.0, 0.0]], dtype=torch.float64),
    }
    with pytest.raises(ValueError, match=message):
        kernels.draw_tokens(**{**given, **changed})


@settings(max_examples=40, deadline=None)
@given(vocab=vocabularies, seed=st.integers(0, 2**32), num_rows=st.integers(1, 5))
def test_the_kernel_penalises_repetition_as_torch_does(vocab: int, seed: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [np.unique(rng.integers(0, vocab + 3, rng.integers(0, 40))) for _ in range(num_rows)]
    outputs = [rng.permutation(vocab + 3)[: rng.integers(0, 20)] for _ in range(num_rows)]
    lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
    given = (
        torch.from_numpy(np.sort(rng.permutation(num_rows + 2)[:num_rows])),
        torch.tensor([0, *np.cumsum(lengths).tolist()]),
        torch.tensor([len(prompt) for prompt in prompts]),
        torch.from_numpy(np.concatenate([ids for pair in zip(prompts, outputs, strict=True) for ids in pair])),
        torch.from_numpy(rng.choice(np.array([1e-30, 0.5, 1.1, 2.0, 1e30], dtype=np.float32), num_rows)),
    )
    logits = torch.randn(num_rows + 2, vocab, generator=torch.Generator().manual_seed(seed % 2**31))
    expected = logits.clone()
    penalise_repetition(expected, *given)
    kernels.penalise_repetition(logits, *given)
    assert torch.equal(logits, expected)


@settings(max_examples=30, deadline=None)
@given(vocab=vocabularies, seed=st.integers(0, 2**32), num_rows=st.integers(0, 5))
def test_the_kernel_adds_amounts_as_torch_does(vocab: int, seed: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    ids = [rng.permutation(vocab + 3)[: rng.integers(0, 30)] for _ in range(num_rows)]
    given = (
        torch.from_numpy(np.sort(rng.permutation(num_rows + 2)[:num_rows])),
        torch.tensor([0, *np.cumsum([len(each) for each in ids]).tolist()], dtype=torch.int64),
        torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *ids])),
        torch.randn(sum(map(len, ids)), generator=torch.Generator().manual_seed(seed % 2**31)),
    )
    logits = torch.randn(num_rows + 2, vocab, generator=torch.Generator().manual_seed(seed % 2**31))
    expected = logits.clone()
    add_amounts(expected, *given)
    kernels.add_amounts(logits, *given)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": torch.tensor([1, 0])}, "rows must rise"),
        ({"rows": torch.tensor([0, 2])}, r"rows\[1\] is 2"),
        ({"bounds": torch.tensor([2, 1, 3])}, "bounds must rise"),
        ({"bounds": torch.tensor([0, 1, 4])}, r"bounds\[2\] is 4, must be in \[0, 4\)"),
        ({"amounts": torch.zeros(2)}, r"amounts must have shape \[3\]"),
    ],
)
def test_a_bad_argument_of_an_addition_is_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "logits": torch.zeros(2, 5),
        "rows": torch.tensor([0, 1]),
        "bounds": torch.tensor([0, 1, 3]),
        "token_ids": torch.tensor([4, 0, 3]),
        "amounts": torch.ones(3),
    }
    with pytest.raises(ValueError, match=message):
        kernels.add_amounts(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": torch.tensor([1, 0])}, "rows must rise"),
        ({"bounds": torch.tensor([0, 1, 4])}, r"bounds\[2\] is 4, must be in \[0, 4\)"),
        ({"bounds": torch.tensor([2, 1, 3])}, "bounds must rise"),
        ({"num_sorted": torch.tensor([1, 3])}, r"num_sorted\[1\] is 3 of 2"),
    ],
)
def test_a_bad_argument_of_a_penalty_is_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "logits": torch.zeros(2, 5),
        "rows": torch.tensor([0, 1]),
        "bounds": torch.tensor([0, 1, 3]),
        "num_sorted": torch.tensor([1, 1]),
        "token_ids": torch.tensor([4, 0, 3]),
        "penalties": torch.tensor([1.5, 2.0]),
    }
    with pytest.raises(ValueError, match=message):
        kernels.penalise_repetition(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids": torch.tensor([5])}, r"token_ids\[0\] is 5, must be in \[0, 5\)"),
        ({"num_top": torch.tensor([6])}, r"num_top\[0\] is 6, must be in \[0, 6\)"),
        ({"rows": torch.tensor([-1])}, r"rows\[0\] is -1"),
    ],
)
def test_a_bad_argument_of_a_score_is_refused(changed: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "logits": torch.zeros(2, 5),
        "rows": torch.tensor([1]),
        "token_ids": torch.tensor([4]),
        "num_top": torch.tensor([5]),
    }
    with pytest.raises(ValueError, match=message):
        kernels.score_tokens(**{**given, **changed})

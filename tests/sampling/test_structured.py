"""Draws that are asked for first and masked only where that is needed: the same as if every row had its mask."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.checkpoint.model_source import resolve_model
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.state import GrammarState
from octavo.request import RequestId
from octavo.sampling import structured
from octavo.sampling.batch import SamplingBatch, SamplingState
from octavo.sampling.choice import Choice
from octavo.sampling.sampler import Sampler
from octavo.sampling.structured import StructuredDraws
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import SamplingSnapshot
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.tokenizer import Tokenizer
from tests.engine.tiny_engine import VOCAB_SIZE, tiny_model

# Rows of logits, some of them beyond the tokenizer's vocabulary.
VOCAB = VOCAB_SIZE + 9
ENDS = frozenset({1, 2})
WANTED = [
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}),
    StructuredOutputsParams(json={"enum": ["one of these", "one of those", 12]}, disable_any_whitespace=True),
    StructuredOutputsParams(regex="[a-f]{2,8}-[0-9]{3}( and the rest)?"),
    StructuredOutputsParams(choice=["no", "not", "none of these"]),
    StructuredOutputsParams(grammar='start: "(" start ")" | "x" | "é🦉" start'),
]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_source(resolve_model(str(tiny_model())))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, ENDS, 10_000)


def state_of(wanted: StructuredOutputsParams, **params: object) -> SamplingState:
    snapshot = SamplingSnapshot(
        request_id=RequestId("r"),
        params=SamplingParams(structured_outputs=wanted, **params),  # type: ignore[arg-type]
        seed=int(params.get("seed", 0)),  # type: ignore[call-overload]
        num_prompt_tokens=0,
        eos_token_ids=ENDS,
    )
    return SamplingState.of(snapshot, np.zeros(0, dtype=np.int64), compiler())


def allowed_by_mask(state: SamplingState) -> set[int]:
    assert state.grammar is not None
    words = StructuredDraws(Choice()).fill([state], [len(state.grammar.token_ids)], VOCAB)
    bits = np.unpackbits(words[0].view(np.uint8), bitorder="little", count=VOCAB)
    return set(np.flatnonzero(bits).tolist())


def test_many_masks_which_threads_fill_equal_each_alone() -> None:
    states = [state_of(wanted, max_tokens=50) for wanted in WANTED * 3]
    for number, state in enumerate(states):
        for position in range(number):
            if (token_id := min(allowed_by_mask(state))) in ENDS:
                break
            state.followed.follow(position, [token_id])
    positions = [len(state.followed.token_ids) for state in states]
    together = StructuredDraws(Choice()).fill(states, positions, VOCAB)
    for state, mask in zip(states, together, strict=True):
        alone = StructuredDraws(Choice()).fill([made_anew(state)], [len(state.followed.token_ids)], VOCAB)
        assert mask.tolist() == alone[0].tolist()


def made_anew(state: SamplingState) -> SamplingState:
    """The same output, told to a grammar that has followed nothing of it."""
    assert state.grammar is not None
    wanted = state.snapshot.params.structured_outputs
    assert wanted is not None
    return replace(state, grammar=GrammarState(compiler().begin(wanted), state.grammar.token_ids))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(wanted=st.sampled_from(WANTED), choices=st.lists(st.integers(0, 10**6), max_size=12), looks=st.booleans())
def test_what_a_grammar_says_of_the_next_token_depends_on_the_output_alone(
    wanted: StructuredOutputsParams, choices: list[int], looks: bool
) -> None:
    state, masks = state_of(wanted, max_tokens=50), StructuredDraws(Choice())
    grammar = state.grammar
    assert isinstance(grammar, GrammarState)
    for choice in [*choices, 0]:
        anew = made_anew(state)
        assert anew.grammar is not None
        assert grammar.in_free_text == anew.grammar.in_free_text
        allowed = allowed_by_mask(anew)
        assert allowed_by_mask(state) == allowed
        if grammar.in_free_text:
            assert {token_id for token_id in range(VOCAB) if grammar.takes(token_id, follow=False)} == allowed
        token_id = sorted(allowed)[choice % len(allowed)]
        if token_id in grammar.eos_token_ids:
            return
        position = len(grammar.token_ids)
        if looks:
            forced = masks.go_on([state], [token_id], [False], VOCAB)
            assert grammar.token_ids[position:] == [token_id, *forced.get(0, ())]
            if forced and forced[0][-1] in grammar.eos_token_ids:
                return
            assert (grammar.mask is None) == grammar.in_free_text
        else:
            grammar.follow(position, [token_id])


@pytest.mark.slow
def test_free_text_is_drawn_without_a_mask_and_names_under_one() -> None:
    wanted = StructuredOutputsParams(regex="(name|age)=[a-z]*")
    state = state_of(wanted)
    grammar = state.grammar
    assert isinstance(grammar, GrammarState)
    assert not grammar.in_free_text
    state = SamplingState.of(
        state.snapshot, np.array(tokenizer().encode("name=", add_special_tokens=False)), compiler()
    )
    assert state.grammar is not None
    assert state.grammar.in_free_text


@pytest.mark.parametrize("count", [2, 3])
def test_what_grammars_force_is_known_at_once_for_few_draws_only(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_MOST_TO_FORCE", 2)
    states = [state_of(StructuredOutputsParams(choice=["none of these"])) for _ in range(count)]
    first = [min(allowed_by_mask(state)) for state in states]
    forced = StructuredDraws(Choice()).go_on(states, first, [False] * count, VOCAB)
    assert set(forced) == (set(range(count)) if count == 2 else set())


def drawn(state: SamplingState, logits: torch.Tensor) -> int:
    return Sampler().sample(logits.unsqueeze(0), SamplingBatch.of([state], [0])).token_ids[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_only_the_first_draw_that_refutes_a_draft_goes_on(num_right: int) -> None:
    encoded = [tokenizer().encode(text, add_special_tokens=False) for text in "bcd"]
    (right,), (other,), (last,) = encoded
    states, positions, drawn = [state_of(StructuredOutputsParams(regex="b*[cd]xyz"))], [0, 1, 2], [right] * 3
    draft = [*[right] * num_right, *[other] * (2 - num_right)]
    for token_id in draft:
        states.append(states[-1].fork())
        states[-1].followed.follow_draft(token_id)
    drawn[num_right] = last
    followed = [list(state.followed.token_ids) for state in states]
    logits = torch.zeros(3, VOCAB)
    logits[range(3), drawn] = 9.0
    batch = SamplingBatch.of(states, positions)
    batch.drafted[:2] = draft
    result = Sampler().sample(logits, batch)
    assert list(result.token_ids[: num_right + 1]) == [*[right] * num_right, last]
    assert list(result.forced) == [num_right]
    has_gone_on = [state.followed.token_ids != before for state, before in zip(states, followed, strict=True)]
    assert has_gone_on == [draw == num_right for draw in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("regex", ["[a-h]x", "[a-z]x"])
def test_draws_have_the_distribution_of_the_masked_logits(regex: str) -> None:
    wanted = StructuredOutputsParams(regex=regex)
    logits = torch.linspace(0, 3, VOCAB)[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))]
    allowed = sorted(allowed_by_mask(state_of(wanted)))
    logits[allowed[:3]] += 4.0  # so that a good part is allowed at once, and a good part is not
    expected = logits[allowed].softmax(-1)
    draws = 2000
    batch = SamplingBatch.of([state_of(wanted, seed=seed) for seed in range(draws)], [0] * draws)
    counts = Counter(Sampler().sample(logits.repeat(draws, 1), batch).token_ids)
    assert set(counts) <= set(allowed)
    for token_id, share in zip(allowed, expected.tolist(), strict=True):
        assert counts[token_id] / draws == pytest.approx(share, abs=4 * (share / draws) ** 0.5 + 0.001)


@settings(max_examples=20, deadline=None)
@given(wanted=st.sampled_from(WANTED), seed=st.integers(0, 2**32))
def test_greedy_draws_are_the_largest_allowed_logit(wanted: StructuredOutputsParams, seed: int) -> None:
    state = state_of(wanted, temperature=0.0)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    allowed = sorted(allowed_by_mask(state))
    assert drawn(state, logits) == allowed[int(logits[allowed].argmax())]


@pytest.mark.parametrize("how", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_filters_choose_among_what_the_grammar_leaves(how: dict[str, float]) -> None:
    wanted = StructuredOutputsParams(regex="[a-h]x")
    logits = torch.linspace(0, 9, VOCAB)
    allowed = sorted(allowed_by_mask(state_of(wanted)))
    masked = torch.full_like(logits, -torch.inf)
    masked[allowed] = logits[allowed]
    for seed in range(20):
        free = SamplingParams(seed=seed, **how)  # type: ignore[arg-type]
        snapshot = SamplingSnapshot(RequestId("r"), free, seed, 0, ENDS)
        plain = SamplingState.of(snapshot, np.zeros(0, dtype=np.int64))
        assert drawn(state_of(wanted, seed=seed, **how), logits) == drawn(plain, masked)


def test_a_second_number_is_another_and_as_reproducible() -> None:
    from octavo.sampling.draw import random_streams, uniforms

    seeds, positions = np.arange(64, dtype=np.uint64), np.zeros(64, dtype=np.int64)
    first = uniforms(random_streams(seeds), positions)
    again = uniforms(random_streams(seeds, again=True), positions)
    assert (again != first).all()
    assert (again == uniforms(random_streams(seeds, again=True), positions)).all()
    assert abs(np.corrcoef(again, first)[0, 1]) < 0.3


@pytest.mark.parametrize(
    ("wanted", "output", "goes_on"),
    [
        ({"type": "number"}, "1" * 39, True),
        ({"type": "number"}, "-" + "1" * 40, False),
        ({"type": "number", "minimum": 0, "maximum": 9}, "5." + "3" * 40, False),
        ({"type": "number"}, "1" * 30 + "." + "1" * 30, True),
        ({"type": "string"}, '"' + "1" * 40, True),
        ({"type": "string", "pattern": "^[0-9]{64}$"}, '"' + "1" * 40, True),
        ({"type": "string", "pattern": "^[0-9]*$"}, '"' + "1" * 40, True),
    ],
)
def test_a_number_ends_after_many_digits_where_it_may(wanted: dict[str, object], output: str, goes_on: bool) -> None:
    snapshot = state_of(StructuredOutputsParams(json=wanted)).snapshot
    written = np.array(tokenizer().encode(output, add_special_tokens=False))
    allowed = allowed_by_mask(SamplingState.of(snapshot, written, compiler()))
    digits = {tokenizer().encode(digit, add_special_tokens=False)[0] for digit in "0123456789"}
    assert bool(allowed & digits) == goes_on
    assert allowed


def test_digits_of_other_grammars_have_no_end() -> None:
    snapshot = state_of(StructuredOutputsParams(regex="[0-9]+")).snapshot
    written = np.array(tokenizer().encode("1" * 60, add_special_tokens=False))
    allowed = allowed_by_mask(SamplingState.of(snapshot, written, compiler()))
    assert tokenizer().encode("1", add_special_tokens=False)[0] in allowed

"""What may be drawn at all, and what ends an output and stays in it, through the whole engine."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.core import EngineCore
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from tests.engine.tiny_engine import VOCAB_SIZE, assert_drained, tiny_core


def complete(core: EngineCore, **params: Any) -> list[CompletionOutput]:
    """One request's completions, with seed 1 at a temperature that makes the tiny model ramble."""
    request = core.inputs.make([1, 2, 3], SamplingParams(**{"ignore_eos": True, "max_tokens": 24, "seed": 1, **params}))
    core.add(request)
    while core.has_work:
        for output in core.step():
            if output.finished:
                assert_drained(core)
                return output.outputs
    raise AssertionError("it never ended")


def test_only_allowed_tokens_come_out() -> None:
    with tiny_core() as core:
        allowed = [5, 7, 11]
        for completion in complete(core, allowed_token_ids=allowed, n=2):
            assert set(completion.token_ids) <= set(allowed)
            assert len(completion.token_ids) == 24


def letters(core: EngineCore) -> list[int]:
    """The tokens of four letters, so that words of them come up again and again."""
    return [core.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcd"]


def test_a_bad_word_never_comes_out_and_its_tokens_alone_may() -> None:
    with tiny_core() as core:
        allowed = letters(core)
        before = complete(core, allowed_token_ids=allowed, max_tokens=60)[0].text
        words = [before[10:13], before[20:22]]
        after = complete(core, allowed_token_ids=allowed, max_tokens=60, bad_words=words)[0].text
        assert len(after) == 60
        assert not any(word in after for word in words)
        assert any(word[-1] in after for word in words)


@pytest.mark.parametrize(
    "params",
    [{"n": 2}, {"use_beam_search": True, "n": 2, "temperature": 0.0}, {"logprobs": 1}, {"min_tokens": 4}],
    ids=["samples", "beams", "logprobs", "min_tokens"],
)
def test_a_bad_word_of_two_tokens_may_come_where_no_other_token_is_left(params: dict[str, Any]) -> None:
    with tiny_core() as core:
        only, end, *_ = letters(core)
        allowed = [only, end] if "min_tokens" in params else [only]
        stops = [end] if "min_tokens" in params else []
        completions = complete(
            core, allowed_token_ids=allowed, stop_token_ids=stops, bad_words=["aa"], max_tokens=4, **params
        )
        assert completions[0].token_ids == [only] * 4
        assert completions[0].finish_reason == "length"


def test_bad_words_hold_after_a_preemption() -> None:
    """Few blocks: sequences are preempted and come back, with their tails."""
    with tiny_core() as roomy:
        allowed = letters(roomy)
        word = complete(roomy, allowed_token_ids=allowed, max_tokens=60)[0].text[20:22]
        params = SamplingParams(ignore_eos=True, max_tokens=60, seed=1, allowed_token_ids=allowed, bad_words=[word])
        expected = complete(roomy, allowed_token_ids=allowed, max_tokens=60, bad_words=[word])[0].token_ids
    with tiny_core(num_blocks=8, enable_prefix_caching=False) as core:
        requests = [core.inputs.make([1, 2, 3], params) for _ in range(6)]
        for request in requests:
            core.add(request)
        found: dict[str, RequestOutput] = {}
        while core.has_work:
            found |= {output.request_id: output for output in core.step() if output.finished}
        assert core.stats.gauges().num_preemptions > 0
        assert [found[request.request_id].outputs[0].token_ids for request in requests] == [expected] * 6
        assert_drained(core)


@pytest.mark.parametrize(
    ("params", "param", "says"),
    [
        (
            {"allowed_token_ids": [5, 999]},
            "allowed_token_ids",
            "must contain token ids from 0 to 319, got 999",
        ),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 1}, "allowed_token_ids", "rule them all out"),
        ({"bad_words": ["x" * 65]}, "bad_words", "65 characters in one entry, but at most 64"),
        ({"bad_words": ["x"] * 129}, "bad_words", "129 entries, but at most 128"),
        ({"allowed_token_ids": list(range(300))}, "allowed_token_ids", "300 entries, but at most 256"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(params: dict[str, Any], param: str, says: str) -> None:
    with tiny_core(limits={"max_allowed_token_ids": 256}) as core:
        with pytest.raises(RequestError, match=says) as refusal:
            core.inputs.make([1], SamplingParams(**params))
        assert refusal.value.param == param
        assert_drained(core)


def test_a_bad_word_and_min_tokens_that_rule_out_the_whole_vocabulary_are_refused() -> None:
    with tiny_core(limits={"max_stop_token_ids": VOCAB_SIZE}) as core:
        stops = set(range(VOCAB_SIZE)).difference(letters(core)[:1])
        for words in ["b"], ["aa"]:
            core.inputs.make([1], SamplingParams(stop_token_ids=stops, bad_words=words, min_tokens=1))
        with pytest.raises(RequestError, match="none of the 320 tokens of the vocabulary") as refusal:
            core.inputs.make([1], SamplingParams(stop_token_ids=stops, bad_words=["a"], min_tokens=1))
        assert refusal.value.param == "stop_token_ids"


def test_a_stop_string_may_stay_in_the_text() -> None:
    with tiny_core() as core:
        whole = complete(core, temperature=0.0)[0].text
        stop = whole[3:6]
        assert complete(core, temperature=0.0, stop=[stop])[0].text == whole[: whole.index(stop)]
        kept = complete(core, temperature=0.0, stop=[stop], include_stop_str_in_output=True)[0]
        assert kept.text == whole[: whole.index(stop) + len(stop)]
        assert kept.stop_reason == stop


def test_the_token_that_ended_an_output_may_stay_in_the_text() -> None:
    with tiny_core() as core:
        whole = complete(core, temperature=0.0, max_tokens=8)[0]
        last = next(token_id for token_id in whole.token_ids[2:] if token_id not in whole.token_ids[:2])
        without = complete(core, temperature=0.0, stop_token_ids=[last])[0]
        kept = complete(core, temperature=0.0, stop_token_ids=[last], include_stop_str_in_output=True)[0]
        assert kept.token_ids == without.token_ids
        assert kept.text == core.tokenizer.decode(kept.token_ids)
        assert without.text == core.tokenizer.decode(without.token_ids[:-1])

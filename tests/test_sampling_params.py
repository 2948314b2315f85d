"""Sampling parameters: what is refused, by which field's name, and what is made of what is accepted."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams

REFUSED = [
    ("n", 0),
    ("n", True),
    ("n", "2"),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 10**400),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", -2.1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("stop", [""]),
    ("stop", ["a", 1]),
    ("stop", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("ignore_eos", "yes"),
    ("detokenize", 1),
    ("skip_special_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("logprobs", True),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {1.0: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [True]),
    ("bad_words", [""]),
    ("bad_words", [1]),
    ("include_stop_str_in_output", 1),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_bad_value_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.param is not None
    assert error.value.param.partition("[")[0] == field


@pytest.mark.parametrize(
    "params",
    [
        {"n": 64},
        {"temperature": 0},
        {"temperature": 1e4},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"min_p": 1},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"stop": None},
        {"stop_token_ids": None},
        {"logprobs": 0},
        {"logit_bias": {}},
        {"max_tokens": None, "min_tokens": 10**6},
    ],
)
def test_values_at_the_limits_are_accepted(params: dict[str, Any]) -> None:
    SamplingParams(**params)


def test_one_text_may_come_without_a_list() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(bad_words="word").bad_words == ("word",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_top_k_of_minus_one_is_off() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


def test_min_tokens_must_leave_room() -> None:
    with pytest.raises(RequestError, match=r"min_tokens \(5\) must not exceed max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize") as error:
        SamplingParams(stop="x", detokenize=False)
    assert error.value.param == "stop"


def test_very_small_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_a_definite_limit_keeps_the_rest() -> None:
    params = SamplingParams(max_tokens=None, min_tokens=9, stop=["x"], top_k=-1, seed=3)
    limited = params.with_max_tokens(5)
    assert (limited.max_tokens, limited.min_tokens, limited.stop, limited.seed) == (5, 5, ("x",), 3)


def test_parameters_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("b")
    assert params.stop == ("a",)


def test_the_callers_bias_may_change_afterwards() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1e9
    assert params.logit_bias == {1: 2.0}


def test_the_keys_of_a_bias_may_be_texts_as_in_json() -> None:
    biases: dict[Any, float] = {"1": 2.0, 2: 3.0}
    assert SamplingParams(logit_bias=biases).logit_bias == {1: 2.0, 2: 3.0}

"""What one request may ask for at most: each limit holds at its value, and its breach says the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError, OverloadedError, RequestError, shortened, shown
from octavo.option import Options, options_of
from octavo.request_limits import DEFAULT_LIMITS, RequestLimits
from octavo.sampling_params import SamplingParams, check_limits
from octavo.server.config import ServerLimits

DOCUMENT = Path(__file__).parents[1] / "docs" / "operate" / "limits.md"
SMALL = RequestLimits(
    max_stop_strings=3,
    max_stop_string_length=5,
    max_stop_bytes=8,
    max_stop_token_ids=4,
    max_logit_bias=2,
    max_allowed_token_ids=2,
    max_bad_words=2,
    max_bad_word_length=3,
    max_n=6,
    max_beam_width=3,
)


@pytest.mark.parametrize(
    ("fits", "too_much", "param", "says"),
    [
        ({"stop": ["a"] * 3}, {"stop": ["a"] * 4}, "stop", "4 entries, but at most 3 are allowed"),
        ({"stop": "abcde"}, {"stop": "abcdef"}, "stop", "6 characters in one entry, but at most 5"),
        (
            {"stop": ["éé", "abcd"]},
            {"stop": ["éé", "abcde"]},
            "stop",
            "9 bytes in all entries together, but at most 8",
        ),
        (
            {"stop_token_ids": [1, 2, 3, 4]},
            {"stop_token_ids": [1, 2, 3, 4, 5]},
            *("stop_token_ids", "5 entries, but at most 4"),
        ),
        ({"logit_bias": {1: 1, 2: 1}}, {"logit_bias": {1: 1, 2: 1, 3: 1}}, "logit_bias", "3 entries, but at most 2"),
        (
            {"allowed_token_ids": [1, 2]},
            {"allowed_token_ids": [1, 2, 3]},
            *("allowed_token_ids", "3 entries, but at most 2 are allowed"),
        ),
        (
            {"bad_words": ["a", "b"]},
            {"bad_words": ["a", "b", "c"]},
            "bad_words",
            "3 entries, but at most 2 are allowed",
        ),
        ({"bad_words": ["abc"]}, {"bad_words": ["abcd"]}, "bad_words", "4 characters in one entry, but at most 3"),
        ({"n": 6}, {"n": 7}, "n", "n must be at most 6 (--limits max_n), got 7"),
        ({"best_of": 6}, {"best_of": 7}, "best_of", "best_of must be at most 6 (--limits max_n), got 7"),
        ({"n": 3, "use_beam_search": True}, {"n": 4, "use_beam_search": True}, "n", "4 beams, but at most 3"),
        (
            {"best_of": 3, "use_beam_search": True},
            {"best_of": 4, "use_beam_search": True},
            *("best_of", "4 beams, but at most 3 are allowed (--limits max_beam_width)"),
        ),
    ],
)
def test_what_is_over_a_limit_is_refused_with_the_numbers(
    fits: dict[str, Any], too_much: dict[str, Any], param: str, says: str
) -> None:
    check_limits(SamplingParams(**fits), SMALL)
    with pytest.raises(RequestError) as refusal:
        check_limits(SamplingParams(**too_much), SMALL)
    assert refusal.value.param == param
    assert says in str(refusal.value)
    assert "--limits max_" in str(refusal.value)


def test_a_priority_lies_in_its_range() -> None:
    for priority in (-1000, 0, 1000):
        DEFAULT_LIMITS.check_context(priority, "")
    for priority in (-1001, 1001, -(10**9)):
        with pytest.raises(RequestError, match=r"between -1000 and 1000 \(--limits max_priority\), got -?1"):
            DEFAULT_LIMITS.check_context(priority, "")


def test_a_cache_salt_has_a_limit() -> None:
    DEFAULT_LIMITS.check_context(0, "s" * 256)
    with pytest.raises(RequestError, match="cache_salt has 257 characters, but at most 256"):
        DEFAULT_LIMITS.check_context(0, "s" * 257)


def test_prompts_count_with_their_width() -> None:
    DEFAULT_LIMITS.check_prompts(16, 64, "n")
    with pytest.raises(RequestError, match="17 prompts with n=64 are 1088 completions, but one body may ask"):
        DEFAULT_LIMITS.check_prompts(17, 64, "n")
    with pytest.raises(RequestError, match="1025 prompts, but at most 1024 are allowed"):
        DEFAULT_LIMITS.check_prompts(1025, 1, "n")


def test_more_prompts_than_may_ever_wait_are_refused_for_good() -> None:
    with pytest.raises(RequestError, match=r"5 prompts, but at most 4 are allowed \(--limits max_waiting_requests\)"):
        RequestLimits(max_waiting_requests=4).check_prompts(5, 1, "n")


def test_a_full_queue_says_its_limit_and_not_what_others_wait_for() -> None:
    limits = RequestLimits(max_waiting_requests=2, max_waiting_tokens=100)
    limits.check_room(waiting_requests=1, waiting_tokens=60, num_tokens=40)
    with pytest.raises(OverloadedError, match=r"2 requests are waiting, the maximum \(--limits max"):
        limits.check_room(waiting_requests=2, waiting_tokens=2, num_tokens=1)
    with pytest.raises(
        OverloadedError, match=r"41 prompt tokens would exceed the maximum of 100 .*\(--limits max"
    ) as refused:
        limits.check_room(waiting_requests=1, waiting_tokens=60, num_tokens=41)
    assert "60" not in str(refused.value)


def test_an_empty_queue_has_room_for_a_prompt_of_any_length() -> None:
    RequestLimits(max_waiting_tokens=100).check_room(waiting_requests=0, waiting_tokens=0, num_tokens=1000)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_n": 0}, "max_n must be at least 1, got 0"),
        ({"max_stop_strings": -1}, "max_stop_strings must be at least 0, got -1"),
        ({"max_logit_bias": 1.5}, "max_logit_bias must be an integer, got 1.5"),
        ({"max_bad_word_length": 257}, "max_bad_word_length must be between 0 and 256, got 257"),
        ({"max_priority": True}, "max_priority must be an integer, got True"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RequestLimits(**options)
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_options({"limits": options})


@pytest.mark.parametrize("given", [{"max_n": 3}, "max_n=3", '{"max_n": 3}', RequestLimits(max_n=3)])
def test_each_limit_is_raised_singly_in_the_table_of_the_engine(given: Any) -> None:
    assert EngineConfig.from_options({"limits": given}).limits == RequestLimits(max_n=3)


@pytest.mark.parametrize("given", [{"max_nn": 3}, "max_nn=3"])
def test_a_limit_that_there_is_not_is_refused_with_the_nearest(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"limits: unknown option 'max_nn'; did you mean max_n\?"):
        EngineConfig.from_options({"limits": given})


def test_a_limit_that_was_an_option_is_refused_with_its_new_place() -> None:
    with pytest.raises(ConfigError, match=r"'max_n'; it was removed: it is an entry of --limits, as in max_n="):
        EngineConfig.from_options({"max_n": 3})


@pytest.mark.parametrize("limits", [RequestLimits, ServerLimits])
def test_the_tables_of_limits_are_the_declarations(limits: type[Options]) -> None:
    rows = [f"| `{limit.name}` | {limit.default} | {limit.help} |" for limit in options_of(limits).values()]
    table = "\n".join(["| limit | default | what it limits |", "|---|---:|---|", *rows])
    assert table in DOCUMENT.read_text(), f"docs/operate/limits.md has another table than:\n{table}"


@pytest.mark.parametrize(
    "value", ["x" * 10_000_000, ["x" * 1000] * 100_000, {"k" * 1000: "v" * 1000}, 10**4000, 1.5, None, b"b" * 1000]
)
def test_an_error_shows_no_more_than_a_little_of_a_value(value: Any) -> None:
    assert 0 < len(shown(value)) <= 66


def test_short_values_are_shown_whole() -> None:
    assert shown("x" * 60) == repr("x" * 60)
    assert shown(2**70) == str(2**70)
    assert shown([1, 2, 3]) == "[1, 2, 3]"
    assert shortened("gpt-4") == "gpt-4"
    assert shortened("m" * 65) == "m" * 63 + "…"


@pytest.mark.parametrize("name", ["n", "temperature", "stop", "stop_token_ids", "logit_bias", "seed", "early_stopping"])
def test_sampling_params_repeat_no_long_value_of_a_client(name: str) -> None:
    values: list[Any] = ["x" * 1_000_000, [["y" * 1_000_000]], {"z" * 1_000_000: 1}]
    for value in values:
        if name == "stop" and not isinstance(value, list):
            continue  # text and what holds text are stop strings, of which the limits speak
        with pytest.raises(RequestError) as refusal:
            SamplingParams(**{name: value})
        assert len(str(refusal.value)) < 200
        assert refusal.value.param in (name, f"{name}[0]")

"""What the real engine refuses itself, with nothing left behind. `bodies/test_bad_requests.py`: what it never sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.tiny_engine import MAX_MODEL_LEN, VOCAB_SIZE
from tests.server.real_engine import RealServer, error_of, real_server, sse_objects

MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture(scope="module")
def cramped() -> Iterator[RealServer]:
    """A pool of 9 blocks, of which one is the null block: room for 128 tokens."""
    with real_server(num_blocks=9, max_num_seqs=4) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (
            {"prompt": [5] * MAX_MODEL_LEN},
            *("prompt", "maximum context length is 1024 tokens, but 1040 were requested: 1024 in the prompt"),
        ),
        (
            {"prompt": [5] * 1000, "max_tokens": 25},
            *("max_tokens", "1025 were requested: 1000 in the prompt and 25 for the completion"),
        ),
        (
            {"prompt": [5] * MAX_MODEL_LEN, "max_tokens": None},
            "prompt",
            "1024 tokens, but the prompt alone has 1024",
        ),
        ({"prompt": [5], "max_tokens": 10**12}, "max_tokens", "1000000000001 were requested"),
    ],
)
def test_a_completion_over_the_context_is_refused_with_the_numbers(
    server: RealServer, body: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    error = server.error("/v1/completions", {**body, "stream": stream}, 400)
    assert error["param"] == param
    assert says in error["message"]


def test_a_chat_over_the_context_is_refused_with_the_numbers(server: RealServer) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 2000}]}
    assert "the prompt alone has" in server.error("/v1/chat/completions", body, 400)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 200}, "max_tokens", "need 13 KV blocks of 16 tokens, but the cache has 8 in all"),
        ({"max_tokens": 2, "n": 5}, "n", "n is 5, but at most 4 sequences run at once"),
    ],
)
def test_what_the_machine_can_never_hold_is_refused_with_the_numbers(
    cramped: RealServer, fields: dict[str, Any], param: str, says: str
) -> None:
    error = cramped.error("/v1/completions", {"prompt": [5], **fields}, 400)
    assert (error["code"], error["param"]) == ("capacity_exceeded", param)
    assert says in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_without_max_tokens_an_answer_may_fill_a_pool_that_is_smaller_than_the_model(
    cramped: RealServer, stream: bool
) -> None:
    """8 blocks of 16 tokens; the last token needs no place."""
    body = {"prompt": [5] * 9, "max_tokens": None, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    if stream:
        events = sse_objects(cramped.events("/v1/completions", body))
        assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 120
    else:
        assert cramped.complete([5] * 9, max_tokens=None)["usage"]["completion_tokens"] == 120
    cramped.assert_nothing_runs()


def test_a_chat_without_max_tokens_is_answered_from_a_small_pool(cramped: RealServer) -> None:
    response = cramped.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] <= 129
    cramped.assert_nothing_runs()


def test_without_max_tokens_a_prompt_that_fills_the_pool_is_refused_with_the_numbers(cramped: RealServer) -> None:
    error = cramped.error("/v1/completions", {"prompt": [5] * 129, "max_tokens": None}, 400)
    assert error["code"] == "capacity_exceeded"
    assert (
        "129 prompt tokens and 1 output tokens need 9 KV blocks of 16 tokens, but the cache has 8" in error["message"]
    )
    assert cramped.complete([5] * 128, max_tokens=None)["usage"]["completion_tokens"] == 1


def test_what_just_fits_is_served(server: RealServer, cramped: RealServer) -> None:
    """The other side of every limit above."""
    assert len(server.complete([5] * 1023, max_tokens=1)["choices"]) == 1
    assert server.complete([5] * 1000, max_tokens=None)["usage"]["completion_tokens"] == 24
    assert server.complete([VOCAB_SIZE - 1], max_tokens=1)["usage"]["prompt_tokens"] == 1
    assert cramped.complete([5], max_tokens=128)["usage"]["completion_tokens"] == 128
    assert len(cramped.complete([5], max_tokens=2, n=4)["choices"]) == 4
    cramped.assert_nothing_runs()


def test_a_text_of_megabytes_is_refused_while_others_are_served(server: RealServer) -> None:
    """Within the limit of bytes, far over the context: it is tokenised off the event loop, then refused."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as caller:
        large = caller.submit(server.post, "/v1/completions", {"prompt": "the blocks " * (2 * MIB // 11)})
        while not large.done():
            assert server.complete([5], max_tokens=1)["usage"]["completion_tokens"] == 1
    assert error_of(large.result())["code"] == "context_length_exceeded"
    server.assert_nothing_runs()


def test_no_refusal_counts_as_a_request(server: RealServer) -> None:
    before = server.counters()
    server.error("/v1/completions", {"prompt": [5] * MAX_MODEL_LEN}, 400)
    after = server.counters()
    assert {name: value for name, value in after.items() if name.startswith("vllm:") and before[name] != value} == {}

"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from octavo.request_limits import RequestLimits
from tests.server.conftest import Running, running_server
from tests.server.fake_engine import BOS, FakeEngine
from tests.server.real_engine import error_of, real_server

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    """A server that takes at most three prompts in a body."""
    with running_server(FakeEngine(limits=RequestLimits(max_body_prompts=3)), shutdown_timeout=0) as running:
        yield running


def test_each_input_has_its_embedding_in_order(server: Running) -> None:
    answer = server.post(PATH, {"model": "fake", "input": ["abc", "abcdefg"], "user": "u"}).json()
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    assert [entry["embedding"] for entry in answer["data"]] == [[0.5, 0.1, -0.5, 0.0], [1.0, 0.1, -0.5, 0.0]]
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    assert (answer["object"], answer["model"]) == ("list", "fake")
    tokens = {"prompt_tokens": 12, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == tokens


@pytest.mark.parametrize("given", ["ab", [BOS, 97, 98], ["ab"], [[BOS, 97, 98]]])
def test_inputs_come_in_every_form_that_openai_has(given: Any, server: Running) -> None:
    answer = server.post(PATH, {"input": given, "encoding_format": "base64", "dimensions": 4}).json()
    packed = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack("<4f", packed) == pytest.approx([0.375, 0.1, -0.5, 0.0])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input is required"),
        ({"input": ""}, "input", "input must not be empty"),
        ({"input": []}, "input", "input must not be empty"),
        ({"input": ["a", ""]}, "input", "input must not be empty"),
        ({"input": [1, "a"]}, "input", "input must be a string, a list of strings"),
        ({"input": [258]}, "input", "must contain token ids from 0 to 257, got 258"),
        ({"input": "a" * 5000}, "input", "maximum context length is 4096 tokens"),
        ({"input": ["a"] * 4}, "input", "has 4 prompts, but at most 3"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "one of float, base64"),
        ({"input": "a", "dimensions": 2}, "dimensions", "dimensions must be 4, got 2"),
        ({"input": "a", "priority": 5000}, "priority", "priority must be between"),
        ({"input": "a", "model": "other"}, "model", "does not exist"),
    ],
)
def test_what_cannot_be_embedded_is_refused(fields: Any, param: str, message: str, narrow: Running) -> None:
    response = narrow.post(PATH, fields)
    assert response.status_code == (404 if param == "model" else 400)
    assert error_of(response)["param"] == param
    assert message in error_of(response)["message"]


def test_a_long_input_is_cut_where_the_client_says_so(server: Running) -> None:
    cut = server.post(PATH, {"input": "a" * 5000, "truncate_prompt_tokens": 99}).json()
    assert cut["usage"]["total_tokens"] == 99


def test_the_openai_client_gets_unit_vectors_of_a_real_engine() -> None:
    with real_server(max_model_len=64) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        full: dict[str, Any] = {"model": "tiny", "input": [[7] * 64, [5, 6]]}
        # Where nobody says so, the client asks for base64, and decodes it.
        answers = [client.embeddings.create(**full, encoding_format="float"), client.embeddings.create(**full)]
        for answer in answers:
            assert answer.usage.prompt_tokens == 66
            for entry in answer.data:
                assert len(entry.embedding) == server.core.info.hidden_size
                assert sum(x * x for x in entry.embedding) == pytest.approx(1)
        assert answers[0].data[0].embedding == pytest.approx(answers[1].data[0].embedding)
        # Of the last token: the second time the first three blocks come from the cache.
        assert server.post(PATH, full).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
        server.assert_nothing_runs()

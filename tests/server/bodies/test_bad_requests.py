"""Every refusal: its status, its message, and that nothing of it keeps running."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from octavo.request_limits import DEFAULT_LIMITS
from tests.server.conftest import Running
from tests.server.fake_engine import VOCAB_SIZE, FakeEngine

PATH = "/v1/completions"
HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "prompt is required"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
        ({"prompt": [[1], []]}, "prompt", "must not be empty"),
        ({"prompt": None}, "prompt", "must be a string, a list of strings"),
        ({"prompt": 5}, "prompt", "must be a string, a list of strings"),
        ({"prompt": [1, "a"]}, "prompt", "must be a string, a list of strings"),
        ({"prompt": [True]}, "prompt", "must be a string, a list of strings"),
        ({"prompt": [1.5]}, "prompt", "must be a string, a list of strings"),
        ({"prompt": ["a"] * (DEFAULT_LIMITS.max_body_prompts + 1)}, "prompt", "1025 prompts, but at most 1024"),
        (
            {"prompt": [1, VOCAB_SIZE]},
            "prompt",
            f"token ids from 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}",
        ),
        ({"prompt": [[1], [-1]]}, "prompt", "prompt must contain token ids from 0 to 257, got -1"),
        ({"prompt": [5, 2**70]}, "prompt", "prompt must contain token ids from 0 to 257, got 1180591620717411303424"),
        ({"prompt": "x", "temperature": -0.1}, "temperature", "must be at least 0, got -0.1"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "a number"),
        ({"prompt": "x", "n": 0}, "n", "at least 1, got 0"),
        ({"prompt": "x", "n": 0, "stream": True}, "n", "at least 1, got 0"),
        ({"prompt": "x", "n": 1.5}, "n", "an integer"),
        ({"prompt": "x", "n": True}, "n", "an integer"),
        ({"prompt": "x", "n": 1e300}, "n", "an integer"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "an integer"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens", "must not exceed max_tokens"),
        ({"prompt": "x", "top_p": 0}, "top_p", "must be above 0"),
        ({"prompt": "x", "stop": 5}, "stop", "stop must be a string or a list of strings, got 5"),
        ({"prompt": "x", "stop_token_ids": 5}, "stop_token_ids", "stop_token_ids must be a list of integers, got 5"),
        ({"prompt": "x", "stop": [1, 2]}, "stop[0]", "a string"),
        (
            {"prompt": "x", "stop_token_ids": [1, "a"]},
            "stop_token_ids[1]",
            "must be an integer",
        ),
        ({"prompt": "x", "stop": ""}, "stop", "must not be empty"),
        (
            {"prompt": "x", "stop": ["a"] * 17},
            "stop",
            "17 entries, but at most 16 are allowed",
        ),
        ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "must have token ids as keys"),
        (
            {"prompt": "x", "logit_bias": {"999": 1}},
            "logit_bias",
            "must contain token ids from 0 to 257, got 999",
        ),
        ({"prompt": "x", "logit_bias": {"9": 101}}, "logit_bias", "between -100 and 100"),
        ({"prompt": "x", "stop_token_ids": [999]}, "stop_token_ids", "got 999"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of", "best_of must be at least 3, got 2"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "stream", "cannot be combined with best_of above n"),
        ({"prompt": "x", "use_beam_search": True, "stream": True}, "stream", "cannot be combined with use_beam_search"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "suffix is not supported"),
        ({"prompt": "x", "use_beam_search": True, "top_k": 5}, "top_k", "top_k must be 0 with use_beam_search"),
        ({"prompt": "x", "early_stopping": "soon"}, "early_stopping", "true or false or never"),
        ({"prompt": "x", "length_penalty": 2}, "length_penalty", "length_penalty needs use_beam_search"),
        ({"prompt": "x", "logits_processors": ["p"]}, "logits_processors", "logits_processors is not supported"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "only allowed when stream is true"),
        ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "not available when stream"),
    ],
)
def test_a_body_that_cannot_be_used_is_a_400_that_names_the_field(
    server: Running, body: Any, param: str, says: str
) -> None:
    error = server.error(PATH, body, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_refused_with_the_numbers(server: Running, stream: bool) -> None:
    error = server.error(PATH, {"prompt": "x" * 4500, "stream": stream}, 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "4501" in error["message"]
    assert "4096" in error["message"]


def test_one_prompt_too_long_refuses_them_all(server: Running) -> None:
    error = server.error(PATH, {"prompt": ["x", "y" * 5000, "z"], "max_tokens": 2000}, 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must be valid JSON"),
        (b"{", "must be valid JSON"),
        (b'{"prompt": "x",}', "must be valid JSON"),
        (b'{"prompt": "\xff"}', "must be valid JSON"),
        (b'{"prompt": "\\ud800"}', "must be valid JSON"),
        (b"\xff\xfe", "must be valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (b"[" * 100_000, "must be nested at most 201 levels deep"),
        (b'"prompt"', "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(server: Running, content: bytes, says: str) -> None:
    response = server.client.post(PATH, content=content)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_a_404(server: Running, path: str) -> None:
    content = {
        PATH: {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }[path]
    error = server.error(path, {"model": "gpt-4", **content}, 404)  # type: ignore[dict-item]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "`gpt-4` does not exist" in error["message"]


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/nothing", "/v1/models/"])
def test_an_unknown_path_is_a_404(server: Running, path: str) -> None:
    response = server.client.post(path, json={})
    if path == "/v1/models/":
        response = server.client.get("/v2/models")
    assert response.status_code == 404
    assert response.json()["error"]["message"].startswith("Invalid URL (")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/completion", "/v1/completions"),
        ("/V1/models", "/v1/models"),
    ],
)
def test_a_misspelt_path_is_a_404_that_names_the_nearest(server: Running, path: str, nearest: str) -> None:
    response = server.client.post(path, json={})
    assert response.status_code == 404
    assert response.json()["error"]["message"].endswith(f". Did you mean {nearest}?")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/v1/messages", "Anthropic's clients add it themselves"),
        ("/chat/completions", "Use /v1/chat/completions."),
    ],
)
def test_clients_of_other_servers_are_told_what_to_use_instead(server: Running, path: str, says: str) -> None:
    assert says in server.error(path, {}, 404)["message"]


def test_a_wrong_method_is_a_405_that_says_which_is_right(server: Running) -> None:
    response = server.client.get(PATH)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == f"Method not allowed (GET {PATH})"


def assert_refused(connection: socket.socket) -> None:
    """A 413 arrives, body and all, although the request has not ended."""
    answer = b""
    while b"larger than 1024 bytes" not in answer:
        piece = connection.recv(65536)
        assert piece, answer
        answer += piece
    assert b" 413 " in answer.split(b"\r\n")[0]


class TestLargeBodies:
    """The limit holds while reading: what is over it is never held in memory."""

    @pytest.fixture
    def small(self, start_server: Callable[..., Running]) -> Running:
        return start_server(FakeEngine(), server_limits={"max_body_size": "1KiB"})

    def test_a_body_at_the_limit_is_read(self, small: Running) -> None:
        body = b'{"prompt":"x"}'
        assert small.client.post(PATH, content=body + b" " * (1024 - len(body))).status_code == 200

    def test_a_declared_length_over_the_limit_is_refused_before_it_is_sent(self, small: Running) -> None:
        with socket.create_connection(("127.0.0.1", small.port), timeout=60) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + HEADERS + b"Content-Length: 52428800\r\n\r\n")
            assert_refused(connection)

    def test_a_chunked_body_is_refused_as_soon_as_it_is_too_large(self, small: Running) -> None:
        with socket.create_connection(("127.0.0.1", small.port), timeout=60) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + HEADERS + b"Transfer-Encoding: chunked\r\n\r\n")
            connection.sendall(b"800\r\n" + b" " * 0x800 + b"\r\n")  # and no end
            assert_refused(connection)

    @pytest.mark.slow
    @pytest.mark.parametrize("chunked", [False, True])
    def test_fifty_megabytes_get_an_answer_and_leave_the_server_well(
        self, start_server: Callable[..., Running], chunked: bool
    ) -> None:
        server = start_server()

        def chunks() -> Iterator[bytes]:
            for _ in range(50):
                yield b" " * 1_000_000

        content: Any = chunks() if chunked else b" " * 50_000_000
        response = server.client.post(PATH, content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert server.post(PATH, {"prompt": "x"}).status_code == 200

    def test_a_large_prompt_within_the_limit_is_told_its_length(self, start_server: Callable[..., Running]) -> None:
        error = start_server().error(PATH, {"prompt": "x" * 1_000_000}, 400)
        assert error["code"] == "context_length_exceeded"
        assert "1000001" in error["message"]

    def test_millions_of_wrong_elements_are_one_error(self, start_server: Callable[..., Running]) -> None:
        error = start_server().error(PATH, {"prompt": "x", "stop": [1] * 1_000_000}, 400)
        assert len(error["message"]) < 200


class TestEngineFailures:
    """What the client hears when it is not the client's fault."""

    def test_an_unforeseen_error_is_a_500_that_keeps_its_insides_for_the_log(
        self, start_server: Callable[..., Running], caplog: pytest.LogCaptureFixture
    ) -> None:
        server = start_server(FakeEngine(breaks_after=0))
        with caplog.at_level(logging.ERROR, logger="octavo.server"):
            error = server.error(PATH, {"prompt": "x"}, 500)
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "secret" not in json.dumps(error)
        assert "secret insides" in caplog.text
        assert "Traceback" in caplog.text

    @pytest.mark.parametrize(
        ("engine", "code"), [({"dies_after": 3}, "engine_dead"), ({"breaks_after": 3}, "internal_error")]
    )
    @pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
    def test_an_error_after_the_first_token_is_an_event_of_the_stream(
        self, start_server: Callable[..., Running], engine: Any, code: str, path: str
    ) -> None:
        server = start_server(FakeEngine(**engine))
        content = {"prompt": "x"} if path == PATH else {"messages": [{"role": "user", "content": "x"}]}
        response = server.post(path, {**content, "max_tokens": 9, "stream": True})
        assert response.status_code == 200
        *_, last, done, _ = response.text.split("\n\n")
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == code
        assert "secret" not in error["message"]
        assert not server.engine.running

    def test_the_openai_client_raises_an_error_within_a_stream(self, start_server: Callable[..., Running]) -> None:
        server = start_server(FakeEngine(dies_after=3))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            stream = client.completions.create(model="fake", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="engine has stopped"):
                list(stream)

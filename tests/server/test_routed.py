"""Prompts that a router has tokenised: taken from it alone, and only if it tokenises as the server does."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from octavo.server.config import ServerConfig
from octavo.server.handling import Handling
from octavo.server.http.connection import InFlight
from octavo.server.keys import KeyRing
from tests.server.conftest import Running
from tests.server.fake_engine import BOS

HI = list(b"hi")


@pytest.fixture
def server(start_server: Callable[..., Running]) -> Running:
    return start_server(router_key="way", api_key=["mine"])


def fingerprint(server: Running) -> str:
    return Handling(server.engine, ServerConfig(), InFlight(), KeyRing({})).reader.prompt_fingerprint()


def sent(server: Running, path: str, body: Any, ids: list[int], key: str = "way", prompt: str | None = None) -> Any:
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer mine",
        "Octavo-Prompt": f"{fingerprint(server)} {len(ids)}" if prompt is None else prompt,
        "Octavo-Router-Key": key,
    }
    return server.client.post(path, content=json.dumps(body).encode() + array("i", ids).tobytes(), headers=headers)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "other text"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "other text"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "other text"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "other text", "store": False}),
    ],
)
def test_the_engine_gets_the_tokens_that_the_router_sent(server: Running, path: str, body: Any) -> None:
    answer = sent(server, path, {**body, "temperature": 0.5}, [BOS, *HI])
    assert answer.status_code == 200, answer.text
    (received,) = server.engine.received
    assert list(received["prompt"]) == [BOS, *HI]
    assert received["params"].temperature == 0.5, "the rest is as the body says"


@pytest.mark.parametrize(
    ("how", "status", "code"),
    [
        ({"key": "mine"}, 403, "not_the_router"),
        ({"key": ""}, 403, "not_the_router"),
        ({"prompt": f"{'0' * 32} 2"}, 409, "other_tokenizer"),
        ({"prompt": "x 2"}, 400, "invalid_prompt_header"),
        ({"prompt": f"{'0' * 32} 99999"}, 400, "invalid_prompt_header"),
    ],
)
def test_other_tokens_are_refused(server: Running, how: dict[str, str], status: int, code: str) -> None:
    answer = sent(server, "/v1/completions", {"prompt": "hi"}, HI, **how)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert server.engine.received == []


def test_a_hint_is_taken_from_the_router_only(server: Running) -> None:
    def hinted(key: str, hint: str) -> Any:
        headers = {"Authorization": "Bearer mine", "Octavo-Router-Key": key, "Octavo-KV-Hint": hint}
        return server.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}, headers=headers)

    for key, hint, status in (("mine", "h:9400", 403), ("way", "redis://h", 400), ("way", "h:1/0?x=y", 400)):
        assert hinted(key, hint).status_code == status
    assert server.engine.received == []
    for hint in ("10.0.0.7:9400", "[::1]:9400", "octavo-1.workers.svc:9400"):
        assert hinted("way", hint).status_code == 200
        assert server.engine.received[-1]["context"].kv_hint == hint


def test_an_id_that_is_no_token_is_refused_and_a_client_still_needs_its_key(server: Running) -> None:
    answer = sent(server, "/v1/completions", {"prompt": "hi"}, [10**6])
    assert answer.status_code == 400
    assert "prompt" in answer.json()["error"]["message"]
    without = server.client.post("/v1/completions", json={"prompt": "hi"}, headers={"Octavo-Router-Key": "way"})
    assert without.status_code == 401


def test_truncation_applies_to_the_tokens_that_were_sent(server: Running) -> None:
    sent(server, "/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 2, "max_tokens": 1}, [5, 6, 7, 8])
    assert list(server.engine.received[-1]["prompt"]) == [7, 8]

"""A full queue: who is too many is told so at once, and loses nobody else's place."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engine.tiny_engine import step_for_news
from tests.server.conftest import wait_until
from tests.server.http.test_disconnect import send
from tests.server.real_engine import RealServer, error_of, real_server

LONG = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def narrow() -> Iterator[RealServer]:
    """One sequence runs; two may wait, with 100 tokens in all."""
    with real_server(max_num_seqs=1, limits="max_waiting_requests=2,max_waiting_tokens=100") as running:
        yield running


def _waiting(server: RealServer, count: int) -> None:
    wait_until(lambda: server.core.scheduler.num_waiting == count)


@pytest.fixture
def crowded(narrow: RealServer) -> Iterator[RealServer]:
    """One runs, two wait; at the end they hurry."""
    hurry = step_for_news(narrow.engine)
    with ThreadPoolExecutor(3) as callers:
        calls = []
        for waiting in (0, 1, 2):
            calls.append(callers.submit(narrow.post, "/v1/completions", {**LONG, "stream": False, "max_tokens": 300}))
            wait_until(lambda: narrow.core.scheduler.num_running == 1)
            _waiting(narrow, waiting)
        yield narrow
        hurry()
        assert [call.result().status_code for call in calls] == [200] * 3
    narrow.assert_nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_one_more_than_may_wait_is_a_503(crowded: RealServer, stream: bool) -> None:
    response = crowded.post("/v1/completions", {**LONG, "stream": stream})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    error = error_of(response)
    assert (error["type"], error["code"]) == ("server_error", "queue_full")
    assert error["message"] == (
        "the queue is full: 2 requests are waiting, the maximum (--limits max_waiting_requests); try again later"
    )


@pytest.mark.slow
def test_the_openai_client_knows_a_full_queue(crowded: RealServer) -> None:
    with (
        openai.OpenAI(base_url=f"{crowded.url}/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="requests are waiting"),
    ):
        client.completions.create(model="tiny", prompt=[5])


def test_one_prompt_too_many_ends_its_whole_body(narrow: RealServer) -> None:
    """And a body of more prompts than may ever wait is a 400: it would never be served."""
    error = narrow.error("/v1/completions", {"prompt": [[5]] * 3, "max_tokens": 1}, 400)
    assert "3 prompts, but at most 2 are allowed (--limits max_waiting_requests)" in error["message"]


def test_tokens_that_wait_are_bounded_too(narrow: RealServer) -> None:
    def post(count: int) -> int:
        body = {"prompt": [5] * count, "max_tokens": 300, "ignore_eos": True}
        return narrow.post("/v1/completions", body).status_code

    hurry = step_for_news(narrow.engine)
    with ThreadPoolExecutor(2) as callers:
        running = callers.submit(post, 20)
        wait_until(lambda: narrow.core.scheduler.num_running == 1)
        waiting = callers.submit(post, 60)
        _waiting(narrow, 1)
        assert narrow.core.stats.waiting.total == (1, 60)
        response = narrow.post("/v1/completions", {"prompt": [5] * 41})
        assert response.status_code == 503
        assert (
            "this request's 41 prompt tokens would exceed the maximum of 100 waiting tokens"
            in error_of(response)["message"]
        )
        hurry()
        assert running.result() == waiting.result() == 200
    assert narrow.core.stats.waiting.total == (0, 0)
    narrow.assert_nothing_runs()


def test_a_prompt_longer_than_the_queue_is_served_when_nothing_waits(narrow: RealServer) -> None:
    assert narrow.complete([5] * 200, max_tokens=1)["usage"]["completion_tokens"] == 1


TENANTS = """
[tenants.ada]
keys = ["ada"]
max_waiting_requests = 2
max_waiting_tokens = 100

[tenants.bob]
keys = ["bob"]

[tenants.ops]
keys = ["ops"]
admin = true
"""


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "keys.toml"
    path.write_text(TENANTS)
    path.chmod(0o600)
    return {"keys_file": str(path)}


def post_as(server: RealServer, key: str, count: int, max_tokens: int = 300) -> httpx.Response:
    body = {"prompt": [5] * count, "max_tokens": max_tokens, "ignore_eos": True}
    return server.client.post("/v1/completions", json=body, headers={"x-api-key": key})


@pytest.mark.slow
def test_a_tenant_whose_queue_is_full_gets_a_429_and_another_is_taken_in(keys: dict[str, Any]) -> None:
    with real_server(keys, max_num_seqs=1) as server, ThreadPoolExecutor(4) as callers:
        hurry = step_for_news(server.engine)
        calls = []
        for waiting in (0, 1, 2):
            calls.append(callers.submit(post_as, server, "ada", 20))
            wait_until(lambda: server.core.scheduler.num_running == 1)
            _waiting(server, waiting)
        refused = post_as(server, "ada", 1)
        assert (refused.status_code, error_of(refused)["code"]) == (429, "tenant_queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert "this API key's tenant has 2 requests waiting, and the maximum is 2" in refused.text
        too_many = server.client.post("/v1/completions", json={"prompt": [[5]] * 3}, headers={"x-api-key": "ada"})
        assert (too_many.status_code, "at most 2 requests" in too_many.text) == (400, True)
        calls.append(callers.submit(post_as, server, "bob", 20, 5))
        _waiting(server, 3)
        assert server.core.stats.waiting.of("bob") == (1, 20)
        hurry()
        assert [call.result().status_code for call in calls] == [200] * 4
        assert server.core.stats.waiting.snapshot() == {}
        server.assert_nothing_runs()


@pytest.mark.slow
def test_a_tenants_waiting_tokens_are_bounded(keys: dict[str, Any]) -> None:
    with real_server(keys, max_num_seqs=1) as server, ThreadPoolExecutor(4) as callers:
        hurry = step_for_news(server.engine)
        calls = [callers.submit(post_as, server, "bob", 20)]
        wait_until(lambda: server.core.scheduler.num_running == 1)
        calls.append(callers.submit(post_as, server, "ada", 60))
        _waiting(server, 1)
        refused = post_as(server, "ada", 41)
        assert refused.status_code == 429
        assert "this API key's tenant has 60 prompt tokens waiting, and this request's 41" in refused.text
        hurry()
        assert [call.result().status_code for call in calls] == [200] * 2
        assert post_as(server, "ada", 200, 1).status_code == 200, "alone in the queue, a prompt may be longer"
        server.assert_nothing_runs()


@pytest.mark.slow
def test_no_tenant_may_fill_the_queue_that_all_share(keys: dict[str, Any]) -> None:
    with (
        real_server(keys, max_num_seqs=1, limits={"max_waiting_requests": 2}, tenant_share=0.5) as server,
        ThreadPoolExecutor(4) as callers,
    ):
        hurry = step_for_news(server.engine)
        calls = [callers.submit(post_as, server, "bob", 20)]
        wait_until(lambda: server.core.scheduler.num_running == 1)
        calls.append(callers.submit(post_as, server, "bob", 20))
        _waiting(server, 1)
        assert post_as(server, "bob", 20).status_code == 429
        calls.append(callers.submit(post_as, server, "ada", 20))
        _waiting(server, 2)
        full = post_as(server, "ops", 20)
        assert (full.status_code, error_of(full)["code"]) == (503, "queue_full")
        hurry()
        assert [call.result().status_code for call in calls] == [200] * 3
        server.assert_nothing_runs()


def test_a_client_that_leaves_while_it_waits_gives_its_tenants_place_back(keys: dict[str, Any]) -> None:
    with real_server(keys, max_num_seqs=1) as server, ThreadPoolExecutor(4) as callers:
        hurry = step_for_news(server.engine)
        running = callers.submit(post_as, server, "bob", 20)
        wait_until(lambda: server.core.scheduler.num_running == 1)
        body = {"prompt": [5], "stream": True}
        connection = send(server, "/v1/completions", body, "x-api-key: ada\r\n")
        wait_until(lambda: server.core.stats.waiting.of("ada") == (1, 1))
        connection.close()
        wait_until(lambda: server.core.stats.waiting.snapshot() == {})
        hurry()
        assert running.result().status_code == 200
        server.assert_nothing_runs()

"""A full queue: who is too many is told so at once, and loses nobody else's place."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.engine.tiny_engine import slow_down
from tests.server.conftest import wait_until
from tests.server.real_engine import RealServer, error_of, real_server

LONG = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture
def narrow() -> Iterator[RealServer]:
    """One sequence runs; two may wait, with 100 tokens in all."""
    with real_server(max_num_seqs=1, max_waiting_requests=2, max_waiting_tokens=100) as running:
        slow_down(running.core, 0.002)
        yield running


def _waiting(server: RealServer, count: int) -> None:
    wait_until(lambda: server.core.scheduler.num_waiting == count)


@pytest.fixture
def crowded(narrow: RealServer) -> Iterator[RealServer]:
    """One runs, two wait."""
    with ThreadPoolExecutor(3) as callers:
        calls = []
        for waiting in (0, 1, 2):
            calls.append(callers.submit(narrow.post, "/v1/completions", {**LONG, "stream": False, "max_tokens": 300}))
            wait_until(lambda: narrow.core.scheduler.num_running == 1)
            _waiting(narrow, waiting)
        yield narrow
        assert [call.result().status_code for call in calls] == [200] * 3
    narrow.assert_nothing_runs()


@pytest.mark.parametrize("stream", [False, True])
def test_one_more_than_may_wait_is_a_429(crowded: RealServer, stream: bool) -> None:
    response = crowded.post("/v1/completions", {**LONG, "stream": stream})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    error = error_of(response)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert error["message"] == (
        "2 requests are waiting, and no more than 2 may (--max-waiting-requests): try again later"
    )


def test_the_openai_client_knows_a_full_queue(crowded: RealServer) -> None:
    with (
        openai.OpenAI(base_url=f"{crowded.url}/v1", api_key="unused", max_retries=0) as client,
        pytest.raises(openai.RateLimitError, match="requests are waiting"),
    ):
        client.completions.create(model="tiny", prompt=[5])


def test_one_prompt_too_many_ends_its_whole_body(narrow: RealServer) -> None:
    """And a body of more prompts than may ever wait is a 400: it would never be served."""
    error = narrow.error("/v1/completions", {"prompt": [[5]] * 3, "max_tokens": 1}, 400)
    assert "3 prompts, but at most 2 are allowed (--max-waiting-requests)" in error["message"]


def test_tokens_that_wait_are_bounded_too(narrow: RealServer) -> None:
    def post(count: int) -> int:
        body = {"prompt": [5] * count, "max_tokens": 300, "ignore_eos": True}
        return narrow.post("/v1/completions", body).status_code

    with ThreadPoolExecutor(2) as callers:
        running = callers.submit(post, 20)
        wait_until(lambda: narrow.core.scheduler.num_running == 1)
        waiting = callers.submit(post, 60)
        _waiting(narrow, 1)
        assert narrow.core.scheduler.num_waiting_tokens == 60
        response = narrow.post("/v1/completions", {"prompt": [5] * 41})
        assert response.status_code == 429
        assert "60 prompt tokens are waiting, and this request's 41" in error_of(response)["message"]
        assert running.result() == waiting.result() == 200
    assert narrow.core.scheduler.num_waiting_tokens == 0
    narrow.assert_nothing_runs()


def test_a_prompt_longer_than_the_queue_is_served_when_nothing_waits(narrow: RealServer) -> None:
    assert narrow.complete([5] * 200, max_tokens=1)["usage"]["completion_tokens"] == 1

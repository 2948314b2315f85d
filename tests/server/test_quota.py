"""A tenant over its limits waits; others do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from octavo.server.answers.generation import Usage
from octavo.server.bodies.prompts import EncodedPrompt
from octavo.server.errors import ApiError
from octavo.server.keys import Client
from octavo.server.quotas import Bucket, Quotas
from tests.kvcache.caches import Clock
from tests.server.conftest import Running, wait_until
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def serve(quotas: Quotas, client: Client, prompt: int = 0, output: int = 0) -> None:
    charge = quotas.enter(client)
    spent = Usage([EncodedPrompt([1] * prompt)])
    charge.begin(spent)
    spent.completion_tokens = output
    charge.end()


def retry_after(quotas: Quotas, client: Client) -> int:
    with pytest.raises(ApiError) as refused:
        quotas.enter(client)
    return int((refused.value.headers or {})["Retry-After"])


def test_a_bucket_fills_evenly_and_no_further_than_a_minutes_worth() -> None:
    bucket = Bucket(60, now=0.0)
    bucket.take(60, 0.0)
    assert [bucket.seconds_until(1, now) for now in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
    bucket.take(90, 1000.0)
    assert bucket.seconds_until(1, 1000.0) == 31.0
    slow = Bucket(0.5, now=0.0)
    assert slow.seconds_until(1, 0.0) == 0.0, "full, though it never holds a whole request"
    slow.take(1, 0.0)
    assert slow.seconds_until(1, 0.0) == 120.0


def test_requests_over_the_rate_are_told_when_to_come_again(quotas: Quotas, clock: Clock) -> None:
    client = Client(tenant="ada", requests_per_minute=3)
    for _ in range(3):
        serve(quotas, client)
    assert retry_after(quotas, client) == 20
    serve(quotas, Client(tenant="bob", requests_per_minute=3))
    clock.now += 20
    serve(quotas, client)
    assert retry_after(quotas, client) == 20


def test_tokens_are_charged_for_prompts_at_once_and_outputs_at_the_end(quotas: Quotas, clock: Clock) -> None:
    client = Client(tenant="ada", tokens_per_minute=600)
    charge = quotas.enter(client)
    spent = Usage([EncodedPrompt([1] * 600)])
    charge.begin(spent)
    assert retry_after(quotas, client) == 1
    clock.now += 1
    quotas.enter(client).end()
    spent.completion_tokens = 300
    charge.end()
    assert retry_after(quotas, client) == 30, "the debt is paid first"


def test_a_prompt_larger_than_the_rate_is_served_and_paid_for(quotas: Quotas, clock: Clock) -> None:
    client = Client(tenant="ada", tokens_per_minute=60)
    serve(quotas, client, prompt=180)
    assert retry_after(quotas, client) == 121
    clock.now += 121
    serve(quotas, client, prompt=1)


def test_a_tenant_without_a_limit_leaves_connections_to_others(clock: Clock) -> None:
    quotas = Quotas(clock, max_requests=3)
    charges = [quotas.enter(Client(tenant="ada")) for _ in range(3)]
    assert retry_after(quotas, Client(tenant="ada")) == 1
    quotas.enter(Client(tenant="ben")).end()
    charges[0].end()
    quotas.enter(Client(tenant="ada"))
    for _ in range(5):
        quotas.enter(Client(tenant="eve", max_concurrency=5))


@pytest.mark.parametrize(("keys", "status"), [(["ada", "bob"], 429), (["ada"], 200)])
def test_one_of_several_tenants_may_have_half_as_many_requests_as_there_are_connections(
    start_server: Callable[..., Running], keys: list[str], status: int
) -> None:
    server = start_server(FakeEngine(step_seconds=0.02), api_key=keys, server_limits={"max_connections": 4})
    body = {"prompt": "x", "max_tokens": 4000, "stream": True}
    with ExitStack() as streams:
        held = []
        for _ in range(2):
            stream = server.client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "ada"})
            held.append(streams.enter_context(stream).iter_lines())
            next(held[-1])
        assert ask(server, "ada").status_code == status
        if status == 429:
            assert ask(server, "bob").status_code == 200


def test_a_reread_limit_counts_at_once(quotas: Quotas) -> None:
    serve(quotas, Client(tenant="ada", requests_per_minute=1))
    assert retry_after(quotas, Client(tenant="ada", requests_per_minute=1)) == 60
    serve(quotas, Client(tenant="ada", requests_per_minute=2))
    serve(quotas, Client(tenant="ada"))


KEYS = """
[tenants.ada]
keys = ["ada"]
requests_per_minute = 2
[tenants.bob]
keys = ["bob"]
max_concurrency = 1
[tenants.eve]
keys = ["eve"]
tokens_per_minute = 10
"""


@pytest.fixture
def limited(start_server: Callable[..., Running], tmp_path: Path) -> Running:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    return start_server(FakeEngine(step_seconds=0.02), keys_file=str(keys), admin_key="root")


def ask(server: Running, key: str, **fields: object) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 1, **fields}
    return server.client.post("/v1/completions", json=body, headers={"x-api-key": key})


def test_a_tenant_over_its_rate_gets_a_429_and_another_is_served(limited: Running) -> None:
    assert [ask(limited, "ada").status_code for _ in range(3)] == [200, 200, 429]
    refused = ask(limited, "ada")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "2 requests per minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert ask(limited, "bob").status_code == 200


@pytest.mark.slow
def test_a_stream_counts_until_its_end_and_its_tokens_are_charged(limited: Running) -> None:
    body = {"prompt": "x", "max_tokens": 3000, "stream": True}
    with limited.client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "bob"}) as response:
        lines = response.iter_lines()
        next(lines)
        assert ask(limited, "bob").status_code == 429
        limited.engine.step_seconds = 0.0
        list(lines)
    wait_until(lambda: ask(limited, "bob").status_code == 200)
    assert ask(limited, "eve", max_tokens=20, stream=True).status_code == 200
    assert "10 tokens per minute" in ask(limited, "eve").json()["error"]["message"]


def test_a_client_that_leaves_gives_its_place_back(limited: Running) -> None:
    body = {"prompt": "x", "max_tokens": 4000, "stream": True}
    with limited.client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "bob"}) as response:
        next(response.iter_lines())
    wait_until(lambda: ask(limited, "bob").status_code == 200)


def test_a_refused_body_gives_its_place_back(limited: Running) -> None:
    assert [ask(limited, "bob", temperature=-1).status_code for _ in range(3)] == [400] * 3
    assert ask(limited, "bob").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended_with_an_error(
    start_server: Callable[..., Running], stream: bool
) -> None:
    server = start_server(FakeEngine(step_seconds=0.02), request_timeout=0.4)
    response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 4000, "stream": stream})
    if stream and response.status_code == 200:  # else its time was over before its first token
        *_, last, done = [line for line in response.text.split("\n") if line]
        assert ('"code": "request_timeout"' in last, done) == (True, "data: [DONE]")
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    wait_until(lambda: not server.engine.running)

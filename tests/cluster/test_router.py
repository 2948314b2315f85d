"""A router in a process of its own, in front of two servers over tiny models."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from octavo.cluster.app import create_router_app
from octavo.cluster.config import RouterConfig
from octavo.cluster.connections import Receiver, ServerAnswer
from octavo.cluster.relayed_answer import EventTooLargeError, RelayedAnswer, WholeEvents, WorkerLostError
from octavo.cluster.router import RelayedRequest, Router
from octavo.cluster.selection import Selection, Ticket
from octavo.cluster.workers import RoutedPrompt
from octavo.server.access import AcceptedKeys
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.http.connection import InFlight
from octavo.server.http.transport import WRITE_CHUNK, GuardedConnection
from octavo.server.routers import HINT_HEADER, KEY_HEADER, PROMPT_HEADER, WORKER_PATH, RoutedPrompts, registered
from octavo.workloads.server_process import running_server
from tests.ports import free_port
from tests.server.real_engine import MODEL, RealServer, real_server, slowed_down

pytest.importorskip("dynamo.llm")
pytestmark = pytest.mark.integration

KEY = "way-to-the-servers"


@contextmanager
def worker(server_options: dict[str, Any] | None = None, **options: Any) -> Iterator[RealServer]:
    """A server that publishes its events."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    server_options = {"router_key": KEY, **(server_options or {})}
    with real_server(server_options, kv_events_config=events, **options) as running:
        yield running


class Routed:
    """A router's client."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self.client = client

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body)

    def counters(self) -> dict[str, float]:
        """Sums of its counters, by name and labels."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        return {
            "/".join((sample.name.removeprefix("octavo:router_"), *sorted(sample.labels.values()))): sample.value
            for family in families
            for sample in family.samples
        }

    def until(self, condition: Callable[[dict[str, float]], bool]) -> None:
        ends = time.monotonic() + 60
        while not condition(self.counters()):
            assert time.monotonic() < ends, self.counters()
            time.sleep(0.02)


@contextmanager
def router(*arguments: str, workers: int = 2) -> Iterator[Routed]:
    command = (sys.executable, "-m", "octavo", "route")
    given = ("--router-key", KEY, "--health-interval", "0.1", "--selection-timeout", "30", *arguments)
    with (
        running_server(given, command) as process,
        httpx.Client(base_url=process.base_url, timeout=120) as client,
    ):
        routed = Routed(process.base_url, client)
        routed.until(lambda counters: sum(up for name, up in counters.items() if "worker_up" in name) == workers)
        yield routed


def addresses(*servers: RealServer) -> list[str]:
    return [argument for server in servers for argument in ("--worker", server.url)]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RealServer, RealServer]]:
    with worker() as first, worker() as second:
        yield first, second


@pytest.fixture(scope="module")
def routed(pair: tuple[RealServer, RealServer]) -> Iterator[Routed]:
    with router(*addresses(*pair)) as found:
        yield found


def num_prompts(server: RealServer) -> float:
    return server.counters()["http_requests_total"]


def text_of(seed: int, words: int = 60) -> str:
    return " ".join(f"w{(seed * 31 + place * 7) % 97}" for place in range(words))


def test_a_prompt_returns_to_where_it_is_cached_and_is_tokenised_once(
    pair: tuple[RealServer, RealServer], routed: Routed
) -> None:
    for seed in range(4):
        first = routed.complete(text_of(seed)).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        time.sleep(0.2)  # until the event of its blocks has arrived
        again = routed.complete(text_of(seed)).json()
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 32
    for server in pair:
        server.assert_nothing_runs()
    routed.until(lambda counters: counters["reservations"] == 0)
    counters = routed.counters()
    assert counters["cached_tokens_total"] > 0
    assert not any(name.startswith(("retries", "fallbacks")) for name in counters)


def test_a_server_says_what_it_is_while_a_step_lasts(pair: tuple[RealServer, RealServer]) -> None:
    server, step_ends = pair[0], threading.Event()
    headers = {"Authorization": f"Bearer {KEY}"}
    known = server.client.get(WORKER_PATH, headers=headers).json()
    server.engine._send(step_ends.wait)
    try:
        assert server.client.get(WORKER_PATH, headers=headers, timeout=10).json() == known
    finally:
        step_ends.set()


def test_a_server_fetches_the_blocks_that_a_hint_names_and_answers_the_same() -> None:
    pytest.importorskip("redis")
    ports = [free_port() for _ in range(2)]
    more: dict[str, Any] = {
        "kv_demotion": "all",
        "kv_host_memory": "64MiB",
        "kv_remote_secret": "only our servers know",
    }
    with ExitStack() as stack:
        pair = [stack.enter_context(worker(kv_neighbours=f"127.0.0.1:{port}", **more)) for port in ports]
        routed = stack.enter_context(router(*addresses(*pair)))
        first = routed.complete(text_of(1, 200)).json()
        holder, other = sorted(pair, key=lambda server: -server.core.stats.host.stored)
        assert holder.core.stats.host.stored > 6
        headers = {KEY_HEADER: KEY, HINT_HEADER: f"127.0.0.1:{ports[pair.index(holder)]}"}
        body = {"prompt": text_of(1, 200), "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        answer = other.client.post("/v1/completions", json=body, headers=headers).json()
        assert answer["choices"] == first["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        store = other.core.stats.stores[0]
        assert store.counters.read.blocks * other.core.scheduler.kv.spec.block_size > 100
        for server in pair:
            server.assert_nothing_runs()


def test_a_server_for_prefill_computes_long_prompts_of_one_for_decode_which_fetches_them() -> None:
    pytest.importorskip("redis")
    more: dict[str, Any] = {
        "kv_demotion": "all",
        "kv_host_memory": "64MiB",
        "kv_remote_secret": "only our servers know",
    }
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(worker({"role": role}, kv_neighbours=f"127.0.0.1:{free_port()}", **more))
            for role in ("prefill", "decode")
        )
        routed = stack.enter_context(router(*addresses(prefill, decode), "--prefill-tokens", "100"))
        for seed in range(3):
            answer = routed.complete(text_of(seed, 200), cache_salt="s" * seed or None).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > answer["usage"]["prompt_tokens"] - 40
        assert routed.counters()["prefills_total/2xx"] == 3
        assert prefill.counters()["vllm:generation_tokens_total"] == 3, "one for each prompt"
        chat = {"messages": [{"role": "user", "content": text_of(7, 150)}], "max_tokens": 5, "temperature": 0}
        answer = routed.client.post("/v1/chat/completions", json=chat).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        again = routed.client.post("/v1/chat/completions", json=chat).json()
        assert again["choices"] == answer["choices"]
        routed.complete("a short one")
        assert routed.counters()["prefills_total/2xx"] == 4
        routed.until(lambda counters: counters["reservations"] == 0)
        alone = stack.enter_context(real_server())
        assert alone.post("/v1/chat/completions", chat).json()["choices"] == answer["choices"]
        for server in (prefill, decode):
            server.assert_nothing_runs()
        prefill.server.should_exit = True
        routed.until(lambda counters: counters[f"worker_up/{prefill.url}"] == 0)
        assert routed.complete(text_of(9, 200)).status_code == 200
        assert routed.counters()["prefills_total/2xx"] == 4


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_whose_server_is_lost_ends_with_an_error_event_or_unfinished_and_nothing_escapes(
    is_stream: bool,
) -> None:
    sent: list[dict[str, Any]] = []

    async def lose(send: Any) -> None:
        relayed._started, relayed._is_stream = True, is_stream
        raise WorkerLostError

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    anything: Any = SimpleNamespace(in_flight=InFlight())
    relayed = RelayedAnswer(anything, anything)
    relayed._run = lose
    asyncio.run(relayed({"type": "http", "path": "/v1/completions", "headers": [], "state": {}}, receive, send))
    assert [b"worker_lost" in message["body"] for message in sent] == [True] * is_stream


def test_half_an_event_of_a_server_that_is_lost_is_not_relayed() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    class Lost(ServerAnswer):
        status, headers = 200, ((b"content-type", b"text/event-stream; charset=utf-8"),)

        async def relay(self, take: Receiver) -> None:
            for chunk in (b"data: 1\n", b"\ndata: 2\n\nda", b"ta: 3"):
                await take(chunk, False)
            raise ConnectionResetError

    anything: Any = SimpleNamespace(in_flight=InFlight(), selection=Selection())
    relayed = RelayedAnswer(anything, job_of({}))
    with pytest.raises(ConnectionResetError):
        asyncio.run(relayed._relay(Lost(), Ticket(anything), send))
    assert b"".join(sent) == b"data: 1\n\ndata: 2\n\n"


def job_of(state: dict[str, Any], http_version: str = "1.1") -> Any:
    return SimpleNamespace(request=SimpleNamespace(scope={"http_version": http_version, "state": state}))


@pytest.mark.parametrize(
    ("http_version", "more_headers", "is_fast", "written"),
    [
        ("1.1", (), True, [b"data: 1\n\n", b"data: 2\n\n"]),
        ("1.1", (), False, []),
        ("1.0", (), True, []),
        ("1.1", ((b"content-length", b"36"),), True, []),
    ],
)
def test_chunks_are_written_to_the_connection_of_a_client_that_reads_them_and_is_not_slow(
    http_version: str, more_headers: Any, is_fast: bool, written: list[bytes]
) -> None:
    events, sent, direct = [b"data: %d\n\n" % number for number in (1, 2, 3)], list[bytes](), list[bytes]()

    class Stream(ServerAnswer):
        status, headers = 200, ((b"content-type", b"text/event-stream"), *more_headers)

        async def relay(self, take: Receiver) -> None:
            for number, event in enumerate(events):
                await take(event, number == 2)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    def write(chunk: bytes) -> bool:
        direct.extend([chunk] * is_fast)
        return is_fast

    anything: Any = SimpleNamespace(selection=Selection())
    relayed = RelayedAnswer(anything, job_of({WRITE_CHUNK: write}, http_version))
    asyncio.run(relayed._relay(Stream(), Ticket(anything), send))
    assert direct == written
    assert sent == [b"", *events[len(written) :]]


@pytest.mark.parametrize(("is_slow", "is_gone"), [(False, False), (True, False), (False, True)])
def test_a_connection_takes_no_chunk_for_a_client_that_is_slow_or_gone(is_slow: bool, is_gone: bool) -> None:
    written: list[bytes] = []
    transport = SimpleNamespace(is_closing=lambda: is_gone, write=written.append)
    connection: Any = SimpleNamespace(flow=SimpleNamespace(write_paused=is_slow), transport=transport)
    assert GuardedConnection.write_chunk(connection, b"data: 1234567\n\n") == (not is_slow and not is_gone)
    assert written == ([] if is_slow or is_gone else [b"f\r\ndata: 1234567\n\n\r\n"])


def test_an_event_without_an_end_is_given_up_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cluster.relayed_answer.MOST_EVENT_BYTES", 100)
    events = WholeEvents()
    assert events.feed(b"data: 1\n") == b""
    assert events.feed(b"\ndata: 2") == b"data: 1\n\n"
    assert events.feed(b"\n\n") == b"data: 2\n\n"
    for _ in range(10):
        assert events.feed(b"0123456789") == b""
    with pytest.raises(EventTooLargeError, match="more than 100 bytes"):
        events.feed(b"!")


def test_a_hint_goes_to_the_server_with_the_routers_key_and_a_clients_own_does_not() -> None:
    given = [(HINT_HEADER.encode(), b"10.6.6.6:1"), (KEY_HEADER.encode(), b"guessed"), (b"x", b"y")]
    scope = {"headers": given, "state": {"request_id": "r"}}
    anything: Any = SimpleNamespace(remove=None)
    made = Router(ServerConfig(router_key=KEY), anything, anything, anything, anything, anything, 512)
    request: Any = SimpleNamespace(scope=scope)
    target: Any = SimpleNamespace(facts={"fingerprint": "f"})
    prompt = RoutedPrompt((1, 2), "")
    for packed, hint in ((b"12345678", "10.0.0.7:9400"), (b"12345678", None), (b"", "10.0.0.7:9400")):
        job = RelayedRequest(request, b"{}", None, [target], prompt, packed)
        sent = dict(made.headers(job, Ticket(target, kv_hint=hint)))
        expected = (hint and hint.encode(), KEY.encode()) if packed else (None, None)
        assert (sent.get(HINT_HEADER.encode()), sent.get(KEY_HEADER.encode())) == expected
        assert sent[b"x"] == b"y"
    assert made.stats.hints == 1


def test_the_answer_is_the_servers_whatever_was_asked(pair: tuple[RealServer, RealServer], routed: Routed) -> None:
    chat = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4, "temperature": 0}
    for path, body, status in (
        ("/v1/chat/completions", chat, 200),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}, 200),
        ("/v1/completions", {"prompt": ["a b", "c d"], "max_tokens": 2, "temperature": 0}, 200),
        ("/tokenize", {"prompt": "a b"}, 200),
        ("/v1/completions", {"prompt": 5}, 400),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404),
        ("/v1/chat/completions", {"messages": []}, 400),
    ):
        direct, through = pair[0].post(path, body), routed.client.post(path, json=body)
        assert (through.status_code, through.headers["content-type"]) == (status, direct.headers["content-type"])
        for name in ("choices", "error", "tokens"):
            assert through.json().get(name) == direct.json().get(name)
    broken = routed.client.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
    assert broken.status_code == 400
    assert routed.client.post("/v1/embeddings", json={"input": "x"}).status_code == 200
    assert routed.client.get("/v1/responses/x").status_code in (404, 405)
    assert [model["id"] for model in routed.client.get("/v1/models").json()["data"]] == [MODEL]


def test_a_server_that_refuses_the_tokens_gets_the_body_alone(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = routed.complete(text_of(50)).json()["choices"]
    refused: list[str] = []

    def refuse(self: RoutedPrompts, headers: Headers, body: bytes) -> None:
        if (given := headers.get(PROMPT_HEADER)) is not None:
            refused.append(given)
            raise ApiError(409, "Another template since the router looked.", code="other_tokenizer")

    monkeypatch.setattr(RoutedPrompts, "token_bytes", refuse)
    before = routed.counters()
    assert routed.complete(text_of(50)).json()["choices"] == expected
    after = routed.counters()
    assert len(refused) == 1
    assert after["retries_total/other_tokenizer"] - before.get("retries_total/other_tokenizer", 0) == 1
    assert after["choices_total"] - before["choices_total"] == 1, "it stays at its server"


@pytest.mark.parametrize(
    ("path", "opened_by", "options"),
    [
        ("/metrics", "sk-admin", {"metrics_access": "admin", "admin_key": "sk-admin"}),
        ("/v1/models", "sk-ada", {"api_key": ("sk-ada",), "admin_key": "sk-admin"}),
    ],
)
def test_metrics_and_models_are_as_closed_as_a_servers(
    path: str, opened_by: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.cluster.app._Collector.collect", lambda self: iter(()))
    config = ServerConfig(**options, router_key=KEY)
    router_config = RouterConfig(worker=["http://127.0.0.1:1"])
    without_workers: Any = SimpleNamespace(workers=SimpleNamespace(healthy=list))
    app = create_router_app(without_workers, router_config, config, AcceptedKeys(config), InFlight(None))
    client = TestClient(app, base_url="http://localhost")
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer sk-other"}).status_code == 401
    assert client.get(path, headers={"Authorization": f"Bearer {opened_by}"}).status_code == 200


def test_a_stream_is_relayed_as_it_comes_and_one_id_names_it_everywhere(routed: Routed) -> None:
    body = {"prompt": text_of(9), "max_tokens": 5, "ignore_eos": True, "stream": True}
    with routed.client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine-1"}) as answer:
        assert answer.headers.get_list("x-request-id") == ["mine-1"]
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 5
    address = urlsplit(routed.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as old, old.makefile("rb") as received:
        text = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        old.sendall(head.encode() + text)
        plain = received.read().partition(b"\r\n\r\n")[2].split(b"\n\n")
    assert [line[:6] for line in plain] == [b"data: "] * (len(plain) - 1) + [b""]


def test_a_client_that_leaves_ends_its_request_at_the_server(
    pair: tuple[RealServer, RealServer], routed: Routed
) -> None:
    with slowed_down(pair[0]), slowed_down(pair[1]):
        body = {"prompt": text_of(11), "max_tokens": 500, "ignore_eos": True, "stream": True}
        with routed.client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        for server in pair:
            server.assert_nothing_runs()
    routed.until(lambda counters: counters["reservations"] == 0)


def test_a_tenants_prompts_are_looked_for_in_its_own_scope(tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.ada]\nkeys = ["a-key"]\n[tenants.bob]\nkeys = ["b-key"]\nrequests_per_minute = 2\n')
    keys.chmod(0o600)
    options = {"keys_file": str(keys)}
    with (
        worker(options) as first,
        worker(options) as second,
        router(*addresses(first, second), "--keys-file", str(keys)) as routed,
    ):

        def ask(key: str, prompt: str) -> httpx.Response:
            routed.client.headers["Authorization"] = f"Bearer {key}"
            return routed.complete(prompt)

        def cached(answer: httpx.Response) -> int:
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached(ask("a-key", text_of(1))) == 0
        time.sleep(0.3)
        assert cached(ask("a-key", text_of(1))) > 0
        before = routed.counters()["cached_tokens_total"]
        assert before > 0
        assert cached(ask("b-key", text_of(1))) == 0
        assert routed.counters()["cached_tokens_total"] == before, "the index has nothing of it for this tenant"
        # Keys and quotas are the servers' to check.
        assert ask("b-key", text_of(2)).status_code == 200
        statuses = [ask("b-key", text_of(seed)).status_code for seed in range(3, 9)]
        assert 429 in statuses
        unknown = ask("c-key", text_of(1))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "invalid_api_key")
        assert routed.counters()["fallbacks_total/no_tokens"] == 1


def test_servers_of_several_models_and_one_without_events() -> None:
    with (
        worker({"served_model_name": ["one"]}) as first,
        real_server({"router_key": KEY, "served_model_name": ["two"]}) as second,
        router(*addresses(first, second)) as routed,
    ):
        listed = {model["id"] for model in routed.client.get("/v1/models").json()["data"]}
        assert listed == {"one", "two"}
        for name in ("one", "two"):
            assert routed.complete(text_of(1), model=name).json()["model"] == name
        assert routed.counters()["fallbacks_total/no_events"] == 1
        assert routed.complete("x", model="three").json()["error"]["code"] == "model_not_found"


def test_servers_register_with_the_key_and_get_requests_until_they_leave_and_no_server_is_a_503() -> None:
    with worker() as server, router("--accept-workers", workers=0) as routed, socket.socket() as listener:
        up = f"worker_up/{server.url}"
        answer = routed.complete("x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        assert "retry-after" in answer.headers
        assert routed.client.get("/ready").status_code == 503
        for key, status in (("wrong", 401), (KEY, 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert routed.client.post("/workers", json={"url": server.url}, headers=headers).status_code == status
        routed.until(lambda counters: counters.get(up) == 1)
        assert routed.complete("x").status_code == 200
        body = json.dumps({"url": server.url}).encode()
        assert routed.client.request("DELETE", "/workers", content=body, headers=headers).status_code == 200
        routed.until(lambda counters: up not in counters)

        async def serve() -> None:
            config = ServerConfig(register_with=[routed.url], router_key=KEY, advertised_url=server.url)
            async with registered(config, listener):
                await asyncio.to_thread(routed.until, lambda counters: counters.get(up) == 1)
                answer = await asyncio.to_thread(routed.complete, "x")
                assert answer.status_code == 200
            await asyncio.to_thread(routed.until, lambda counters: up not in counters)

        asyncio.run(serve())

"""A real server on a free loopback port, in a thread of its own, over a `FakeEngine` or a real one."""

from __future__ import annotations

import asyncio
import pickle
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import httpx
import pytest

from octavo.server.app import create_app
from octavo.server.bodies import reader_pool
from octavo.server.bodies.body_reader import BodyReader
from octavo.server.bodies.reader_pool import ReaderPool, ReaderProcess
from octavo.server.config import ServerConfig
from octavo.server.http.connection import InFlight
from octavo.server.http.listening import bound
from octavo.server.run import Server
from tests.server.fake_engine import FakeEngine

if TYPE_CHECKING:
    import openai


@dataclass
class Running:
    """A server that answers, and the engine behind it."""

    url: str
    port: int
    engine: Any
    client: httpx.Client
    server: Server

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def error(self, path: str, body: Any, status: int) -> dict[str, Any]:
        """The error object of a request that must fail with `status`; checks that nothing of it still runs."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        assert list(response.json()) == ["error"]
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        self.assert_nothing_runs()
        return error

    def assert_nothing_runs(self) -> None:
        assert not self.engine.running


def rendered(server: Running) -> str:
    """The prompt the engine received last, as text."""
    return server.engine.tokenizer.decode(server.engine.received[-1]["prompt"], False)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until `condition` holds; fails when it takes longer than any busy machine would."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "still not so"
        time.sleep(0.005)


class _Hasty:
    """asyncio, as uvicorn sees it: it looks whether it is to stop after its sleeps, of a tenth of a second each."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


patch("uvicorn.server.asyncio", _Hasty()).start()

# What httpx waits where a test does not say: its five seconds may be too few on a busy machine.
for _kind in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _kind, 120.0)

# Every client would load the system's certificates, which takes longer than to start a server over a `FakeEngine`.
patch("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context)).start()


class InlineWorker:
    """Stands in for a process that reads bodies: the same results, pickled as ever, read in this process."""

    is_alive = True
    is_bloated = False

    def __init__(self, reader: bytes) -> None:
        self._reader = pickle.loads(reader)

    def read(self, method: str, parts: Sequence[bytes], seconds: float, *, is_niced: bool = False) -> Any:
        succeeded, value = pickle.loads(reader_pool._answer(self._reader, method, b"".join(parts)))
        if succeeded:
            return value
        raise value


class InlinePool(ReaderPool):
    """For servers without a model: starting a process takes a second, and test_reading.py is about those."""

    def _take(self) -> Any:
        return self._idle.pop() if self._idle else InlineWorker(pickle.dumps(self._reader))


_kept_workers: dict[tuple[bytes, int], list[ReaderProcess]] = {}


class KeptPool(ReaderPool):
    """Servers of one configuration take over each other's processes for bodies: starting one takes a second."""

    def __init__(self, reader: BodyReader, seconds: float, memory: int) -> None:
        super().__init__(reader, seconds, memory)
        key = (pickle.dumps(reader), memory)
        while len(_kept_workers) > 4 and key not in _kept_workers:
            idle = _kept_workers.pop(next(iter(_kept_workers)))  # its servers start others
            while idle:
                idle.pop().close()
        self._idle = _kept_workers.setdefault(key, [])


@contextmanager
def running_server(engine: Any, **options: Any) -> Iterator[Running]:
    config = ServerConfig(**{"port": 0, **options})
    with bound(config) as listener:
        yield from _serving(engine, config, listener)


def _serving(engine: Any, config: ServerConfig, listener: socket.socket) -> Iterator[Running]:
    port = 0 if config.uds is not None else listener.getsockname()[1]
    in_flight = InFlight(config.request_timeout)
    pool = InlinePool if isinstance(engine, FakeEngine) else KeptPool
    with patch("octavo.server.handling.ReaderPool", pool):
        app = create_app(engine, config, in_flight)
    server = Server(app, config, in_flight, engine.info.model_name)

    async def run() -> None:
        await engine.start()
        try:
            await server.serve(sockets=[listener])
        finally:
            await engine.shutdown(0)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    wait_until(lambda: server.started)
    connection: dict[str, Any] = {}
    url = f"http://127.0.0.1:{port}"
    if config.uds is not None:
        url, connection = "http://localhost", {"transport": httpx.HTTPTransport(uds=config.uds)}
    elif config.ssl_certfile is not None:
        # The certificate is its own authority.
        context = ssl.create_default_context(cafile=config.ssl_certfile)
        url, connection = f"https://127.0.0.1:{port}", {"verify": context}
    try:
        # For bodies that are given as bytes; a test may say otherwise.
        headers = {"Content-Type": "application/json"}
        with httpx.Client(base_url=url, timeout=120, headers=headers, **connection) as client:
            yield Running(url, port, engine, client, server)
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for the tests of a module that need nothing special."""
    with running_server(FakeEngine(), shutdown_timeout=0) as running:
        yield running


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    """A server over a real engine with a small cache, for the tests of a module that need nothing special."""
    from tests.server.real_engine import real_server  # which imports this module

    with real_server(num_blocks=65) as running:
        yield running
        running.assert_nothing_runs()


def openai_client(server: Running, key: str = "unused") -> openai.OpenAI:
    import openai  # takes most of a second, which tests without it need not wait for

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.fixture
def start_server() -> Iterator[Callable[..., Running]]:
    """Starts servers of the test's own: `start_server(FakeEngine(...), option=...)`."""
    with ExitStack() as stack:
        yield lambda engine=None, **options: stack.enter_context(
            running_server(engine or FakeEngine(), **{"shutdown_timeout": 0, **options})
        )

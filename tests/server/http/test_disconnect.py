"""A client that leaves takes its work with it, seen over real sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Running, wait_until
from tests.server.fake_engine import FakeEngine

STEP = 0.02
HEADERS = "Host: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def slow(start_server: Callable[..., Running]) -> Running:
    return start_server(FakeEngine(step_seconds=STEP))


def send(server: Running, path: str, body: dict[str, Any], headers: str = "") -> socket.socket:
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\n{HEADERS}{headers}Content-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def leave(connection: socket.socket) -> None:
    """As a killed process does: a reset, where a polite close could hide that nobody reads any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


@pytest.mark.parametrize("polite", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_request_is_aborted_as_soon_as_its_client_leaves(
    slow: Running, stream: bool, prompts: int, polite: bool
) -> None:
    body = {"prompt": ["x"] * prompts, "max_tokens": 1000, "stream": stream, "n": 2}
    connection = send(slow, "/v1/completions", body)
    if stream:
        assert b"200 OK" in connection.recv(65536)
    wait_until(lambda: len(slow.engine.running) == prompts)
    connection.close() if polite else leave(connection)
    wait_until(lambda: not slow.engine.running)
    assert len(slow.engine.aborted) == prompts, "long before their end"


@pytest.mark.slow
def test_a_client_that_stops_reading_does_not_stop_the_others(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine(max_model_len=40_000))
    body = {"prompt": "x", "max_tokens": 30_000, "stream": True, "n": 2}
    connection = send(server, "/v1/completions", body)
    connection.recv(100)
    for _ in range(3):
        assert server.post("/v1/completions", {"prompt": "y"}).status_code == 200
    assert len(server.engine.running) == 1
    leave(connection)
    wait_until(lambda: not server.engine.running)


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind(slow: Running) -> None:
    with socket.create_connection(("127.0.0.1", slow.port), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\n{HEADERS}Content-Length: 100\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt":')
    assert slow.post("/v1/completions", {"prompt": "y", "max_tokens": 1}).status_code == 200
    assert slow.engine.aborted == []
    wait_until(lambda: len(slow.server.server_state.tasks) == 0)


def test_a_finished_request_is_not_aborted(slow: Running) -> None:
    for stream in (False, True):
        slow.post("/v1/completions", {"prompt": "y", "max_tokens": 3, "stream": stream})
    assert slow.engine.aborted == []

"""Connections that would be held for nothing are ended, seen over raw sockets; those beside them go on."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.server.http import transport
from octavo.server.http.transport import _BODY_AT_ONCE, _LINES_AT_ONCE, MAX_HEADER_BYTES, GuardedConnection
from tests.server.conftest import Running, wait_until
from tests.server.fake_engine import FakeEngine

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
# Only where the time is to run out: a busy machine may take longer for anything.
SHORT = 0.5


@pytest.fixture
def start(start_server: Callable[..., Running]) -> Callable[..., Running]:
    def start(engine: FakeEngine | None = None, **options: object) -> Running:
        return start_server(engine, **options)

    return start


def limit(server: Running, **seconds: float) -> None:
    """Shorten the times that the server allows from now on."""
    protocol: Any = server.server.config.http_protocol_class
    protocol.limits = dataclasses.replace(protocol.limits, **seconds)


def trickle(connection: socket.socket, piece: bytes) -> None:
    """Send a few pieces, for as long as the server takes them."""
    with suppress(ConnectionError):
        for _ in range(3):
            time.sleep(SHORT / 4)
            connection.sendall(piece)


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


def ask(connection: socket.socket, body: bytes = BODY) -> bytes:
    """The whole answer to a request."""
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return answer_of(connection)


def answer_of(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += (came := connection.recv(65536))
        assert came, "the server has closed the connection"
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return head


def error_code(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return json.loads(body)["error"]["code"]


@pytest.mark.slow
def test_a_header_that_trickles_ends_in_a_408(start: Callable[..., Running]) -> None:
    server = start(server_limits={"header_timeout": SHORT})
    with connect(server) as connection:
        connection.sendall(HEAD)
        trickle(connection, b"X-Slow: 1\r\n")
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_code(answer) == "header_timeout"
    assert server.server.connections.slow_header == 1


@pytest.mark.slow
def test_a_connection_that_asks_nothing_is_closed_without_a_word(start: Callable[..., Running]) -> None:
    server = start(server_limits={"header_timeout": SHORT})
    with connect(server) as connection:
        assert rest(connection) == b""


@pytest.mark.slow
def test_a_connection_that_was_used_is_kept_for_its_own_time(start: Callable[..., Running]) -> None:
    server = start(server_limits={"keep_alive_timeout": 600})
    with connect(server) as connection:
        assert ask(connection).startswith(b"HTTP/1.1 200 ")
        limit(server, header_timeout=SHORT)
        time.sleep(1.5 * SHORT)
        assert ask(connection).startswith(b"HTTP/1.1 200 ")
    with connect(start(server_limits={"keep_alive_timeout": SHORT})) as connection:
        assert ask(connection).startswith(b"HTTP/1.1 200 ")
        assert rest(connection) == b""


@pytest.mark.slow
def test_a_second_request_on_a_kept_connection_has_its_own_time_for_a_header(start: Callable[..., Running]) -> None:
    server = start()
    with connect(server) as connection:
        assert ask(connection).startswith(b"HTTP/1.1 200 ")
        limit(server, header_timeout=SHORT)
        connection.sendall(b"POST /v1/comp")
        assert rest(connection).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
@pytest.mark.parametrize("trickles", [False, True])
def test_a_body_that_stalls_or_trickles_ends_in_a_408(start: Callable[..., Running], trickles: bool) -> None:
    server = start(server_limits={"body_timeout": SHORT})
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
        if trickles:
            trickle(connection, b" ")
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_code(answer) == "body_timeout"
    wait_until(lambda: not server.server.server_state.tasks)
    assert server.engine.received == []


@pytest.mark.slow
def test_a_large_body_has_the_time_that_its_size_takes(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MIN_BODY_RATE", 1024)
    server = start(server_limits={"body_timeout": SHORT})
    body = BODY + b" " * (256 * 1024)
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    with connect(server) as connection:
        for start_at in range(0, len(body), 64 * 1024):
            connection.sendall(head + body[start_at : start_at + 64 * 1024])
            head = b""
            time.sleep(SHORT / 2)
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is handed to h11, in parts."""
    parts: list[bytes] = []
    receive = H11Protocol.data_received

    def noted(protocol: H11Protocol, data: bytes) -> None:
        parts.append(data)
        receive(protocol, data)

    monkeypatch.setattr(H11Protocol, "data_received", noted)
    return parts


@pytest.mark.slow
def test_a_body_in_chunks_of_a_byte_is_parsed_a_few_lines_at_a_time(
    start: Callable[..., Running], parsed: list[bytes]
) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 20_000) + b"0\r\n\r\n"
    with connect(start()) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
        # One that was sent ahead, behind a body of many parts.
        connection.sendall((HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks) * 2)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 2:
            received += connection.recv(65536)
    assert max(part.count(b"\n") for part in parsed) <= _LINES_AT_ONCE
    assert sum(map(len, parsed)) > 3 * len(chunks)


def test_a_body_of_known_length_is_parsed_in_large_parts(
    start: Callable[..., Running], parsed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[bytes] = []
    take = GuardedConnection.data_received

    def noted(connection: GuardedConnection, data: bytes) -> None:
        received.append(data)
        take(connection, data)

    monkeypatch.setattr(GuardedConnection, "data_received", noted)
    body = BODY + b" " * 2_000_000
    with connect(start()) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
    assert max(map(len, parsed)) <= _BODY_AT_ONCE
    assert sum(map(len, parsed)) == sum(map(len, received))
    # The header has at most one part more, and what a socket gave ends in a shorter one.
    assert len(parsed) <= len(body) // _BODY_AT_ONCE + len(received) + 2


def close_turnstile(
    server: Running, monkeypatch: pytest.MonkeyPatch, name: str = "turnstile"
) -> list[Callable[[], object]]:
    """Let every connection wait for its turn; returns what lets each go on."""
    waiting: list[Callable[[], object]] = []
    protocol = server.server.config.http_protocol_class
    assert issubclass(protocol, GuardedConnection)

    def queue(goes_on: Callable[[], None], size: int = 1) -> None:
        loop = asyncio.get_running_loop()
        waiting.append(lambda: loop.call_soon_threadsafe(goes_on))

    turnstile = getattr(protocol, name)
    monkeypatch.setattr(turnstile, "passes", lambda size=1: False)
    monkeypatch.setattr(turnstile, "queue", queue)
    return waiting


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_time_for_which_a_request_waits_its_turn_is_not_the_clients(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    server = start(server_limits={"header_timeout": SHORT, "keep_alive_timeout": SHORT})
    with connect(server) as connection:
        if is_kept:
            assert ask(connection).startswith(b"HTTP/1.1 200 ")
        waiting = close_turnstile(server, monkeypatch)
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        wait_until(lambda: bool(waiting))
        time.sleep(3 * SHORT)
        waiting.pop()()
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
    assert server.server.connections.slow_header == 0


@pytest.mark.slow
def test_a_header_that_trickles_while_its_start_waits_for_a_turn_ends_in_time(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(server_limits={"header_timeout": SHORT})
    close_turnstile(server, monkeypatch)
    with connect(server) as connection:
        connection.sendall(HEAD)
        assert rest(connection).startswith(b"HTTP/1.1 408 ")
    assert server.server.connections.slow_header == 1


@pytest.mark.slow
def test_the_time_for_which_a_body_waits_to_be_parsed_is_not_the_clients(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(server_limits={"body_timeout": SHORT})
    waiting = close_turnstile(server, monkeypatch, "parsing")
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 1_000) + b"0\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        wait_until(lambda: not idle_of(server))
        connection.sendall(chunks)
        wait_until(lambda: bool(waiting))
        time.sleep(3 * SHORT)
        monkeypatch.undo()
        waiting.pop()()
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


def test_a_probe_does_not_wait_behind_requests_with_bodies(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    waiting = close_turnstile(server, monkeypatch)
    with connect(server) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        wait_until(lambda: bool(waiting))
        with connect(server) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer_of(probe).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_of_a_body_in_chunks_of_a_byte_whose_client_leaves_the_rest_is_not_parsed(
    start: Callable[..., Running], parsed: list[bytes]
) -> None:
    server = start()
    sent = 0
    with connect(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.setblocking(False)
        with suppress(BlockingIOError):
            while sent < 10_000_000:
                sent += connection.send(b"1\r\n \r\n" * 10_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(lambda: not server.server.server_state.connections)
    assert sum(map(len, parsed)) < sent


def test_a_header_of_many_lines_is_refused_by_its_size(start: Callable[..., Running]) -> None:
    with connect(start()) as connection:
        connection.sendall(HEAD + b"A:\r\n" * (MAX_HEADER_BYTES // 4) + b"\r\n")
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_code(answer) == "invalid_http"


def test_what_is_no_http_is_told_so_in_an_error_object(start: Callable[..., Running]) -> None:
    with connect(start()) as connection:
        connection.sendall(b"GET /\r\n\r\n")
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_code(answer) == "invalid_http"


@pytest.mark.slow
def test_an_answer_that_takes_long_is_not_the_clients_fault(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(step_seconds=0.02))
    with connect(server) as connection:
        limit(server, header_timeout=SHORT, body_timeout=SHORT, write_timeout=SHORT)
        assert ask(connection, b'{"prompt": "x", "max_tokens": 50}').startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
def test_an_unread_stream_is_cut_and_its_request_ended(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(max_model_len=30_000), server_limits={"write_timeout": SHORT})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        body = json.dumps({"prompt": "x", "max_tokens": 25_000, "stream": True, "logprobs": 5}).encode()
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: server.server.connections.unread == 1)
        wait_until(lambda: not server.engine.running)
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_a_connection_that_was_reset_is_freed_without_a_garbage_collection(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is never idle collects no garbage: each kept its buffers, and its last request with its prompts."""
    made: list[weakref.ref[GuardedConnection]] = []
    begin = GuardedConnection.connection_made

    def noted(connection: GuardedConnection, transport: asyncio.Transport) -> None:
        made.append(weakref.ref(connection))
        begin(connection, transport)

    monkeypatch.setattr(GuardedConnection, "connection_made", noted)
    server = start(server_limits={"keep_alive_timeout": SHORT})
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            with connect(server) as connection:
                assert ask(connection).startswith(b"HTTP/1.1 200 ")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wait_until(lambda: len(made) >= 5 and not any(one() for one in made[-5:]))
    finally:
        gc.enable()


def test_connections_over_the_limit_are_told_to_come_again(start: Callable[..., Running]) -> None:
    server = start(server_limits={"max_connections": 3})
    held = [connect(server) for _ in range(3)]
    try:
        for connection in held:
            connection.sendall(HEAD + b"Content-Length: 5\r\n\r\n")
        wait_until(lambda: len(server.server.server_state.connections) == 3 and not idle_of(server))
        with connect(server) as connection:
            answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert error_code(answer) == "too_many_connections"
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: not server.server.server_state.connections)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_where_all_connections_are_taken_a_new_one_closes_the_longest_idle(start: Callable[..., Running]) -> None:
    server = start(server_limits={"max_connections": 3})
    working, kept, fresh = connect(server), connect(server), connect(server)
    try:
        working.sendall(HEAD + b"Content-Length: 5\r\n\r\n")
        fresh.sendall(b"GET /hea")  # waits for longer than the one that is kept after its answer
        wait_until(lambda: len(idle_of(server)) == 2)
        assert ask(kept).startswith(b"HTTP/1.1 200 ")
        with connect(server) as other:
            assert ask(other).startswith(b"HTTP/1.1 200 ")
            assert gone(fresh)
            with connect(server) as another:
                assert ask(another).startswith(b"HTTP/1.1 200 ")
                assert gone(kept)
                assert len(server.server.server_state.connections) == 3
        working.sendall(b"{}   ")
        assert answer_of(working).startswith(b"HTTP/1.1 4")
        assert server.server.connections.displaced == 2
    finally:
        for connection in (working, kept, fresh):
            connection.close()
    wait_until(lambda: not idle_of(server))


def test_bodies_without_a_key_that_stall_keep_nobody_out(start: Callable[..., Running]) -> None:
    server = start(api_key=["ada"], server_limits={"max_connections": 3})
    held = [connect(server) for _ in range(3)]
    try:
        for connection in held:
            connection.sendall(HEAD + b"Content-Length: 5\r\n\r\n")
        assert all(answer_of(connection).startswith(b"HTTP/1.1 401 ") for connection in held)
        wait_until(lambda: len(idle_of(server)) == 3)
        with connect(server) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
    finally:
        for connection in held:
            connection.close()


def idle_of(server: Running) -> dict[GuardedConnection, None]:
    """The connections that wait for a request."""
    protocol: Any = server.server.config.http
    idle: dict[GuardedConnection, None] = protocol.idle
    return idle


def gone(connection: socket.socket) -> bool:
    """Whether the server closes a connection without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.slow
def test_a_hundred_stalled_headers_do_not_keep_others_waiting(start: Callable[..., Running]) -> None:
    server = start()
    assert server.client.get("/health").status_code == 200  # over a connection that is kept
    limit(server, header_timeout=2 * SHORT)
    held = [connect(server) for _ in range(100)]
    try:
        for connection in held:
            connection.sendall(HEAD)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert all(rest(connection).startswith(b"HTTP/1.1 408 ") for connection in held)
    finally:
        for connection in held:
            connection.close()


def test_connections_that_come_all_at_once_are_accepted_a_few_at_a_time(start: Callable[..., Running]) -> None:
    server = start()
    # asyncio accepts as many in one go.
    assert server.server.config.backlog <= 16
    held = [connect(server) for _ in range(300)]
    try:
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert all(answer_of(connection).startswith(b"HTTP/1.1 200 ") for connection in held)
    finally:
        for connection in held:
            connection.close()

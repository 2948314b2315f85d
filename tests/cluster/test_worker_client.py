"""The router's client against servers that are a few lines long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.cluster.router import MOST_EVENT_BYTES, EventTooLargeError, _WholeEvents
from octavo.cluster.worker_client import WorkerClient
from octavo.workloads.http import MAX_HEAD_BYTES

OK = b"HTTP/1.1 200 OK\r\n"
EMPTY = OK + b"content-length: 0\r\n\r\n"


def against(serve: Callable[[Any, Any], Awaitable[None]], use: Callable[[WorkerClient], Awaitable[None]]) -> int:
    """Run a client against a server, and return how many connections it has made."""
    connections: list[Any] = []

    async def connected(reader: Any, writer: Any) -> None:
        connections.append(writer)
        await serve(reader, writer)

    async def run() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        client = WorkerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            async with asyncio.timeout(60):
                await use(client)
        finally:
            await client.close()
            for writer in connections:
                writer.close()
            server.close()

    asyncio.run(run())
    return len(connections)


async def get(client: WorkerClient) -> tuple[int, bytes]:
    async with client.send("GET", "/x") as answer:
        return answer.status, await answer.read()


def answering(*answers: bytes, closes: bool = False) -> Callable[[Any, Any], Awaitable[None]]:
    """A server that answers the requests of a connection in turn."""

    async def serve(reader: Any, writer: Any) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        if closes:
            writer.close()
        else:
            await reader.read()

    return serve


def test_a_connection_is_used_again_once_its_answer_is_whole() -> None:
    async def use(client: WorkerClient) -> None:
        assert await get(client) == (200, b"abcd")
        assert await get(client) == (204, b"")
        assert await get(client) == (404, b"no")

    chunked = OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"
    plain = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno"
    assert against(answering(chunked, b"HTTP/1.1 204 No Content\r\n\r\n", plain), use) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(OK + b"connection: close\r\ncontent-length: 2\r\n\r\nok", id="the server closes it"),
        pytest.param(OK + b"content-length: 2\r\n\r\nok!", id="more follows than the answer"),
    ],
)
def test_a_connection_that_cannot_be_kept_is_not_used_again(answer: bytes) -> None:
    async def use(client: WorkerClient) -> None:
        for _ in range(2):
            assert await get(client) == (200, b"ok")

    assert against(answering(answer), use) == 2


def test_an_answer_that_was_left_half_read_closes_its_connection() -> None:
    async def use(client: WorkerClient) -> None:
        async with client.send("GET", "/x") as answer:
            assert answer.status == 200
        assert await get(client) == (200, b"ab")

    half = OK + b"content-length: 2\r\n\r\na"

    async def serve(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(half)
        if not await reader.read(1):
            served.append(1)

    served: list[int] = []
    first = iter([serve])
    both = answering(half + b"b")

    async def either(reader: Any, writer: Any) -> None:
        await next(first, both)(reader, writer)

    assert against(either, use) == 2


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def use(client: WorkerClient) -> None:
        assert await get(client) == (200, b"all of it")

    against(answering(OK + b"\r\nall of it", closes=True), use)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(OK + b"content-length: 5\r\n\r\nab", id="half a body"),
        pytest.param(OK + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n", id="half of the chunks"),
        pytest.param(b"SSH-2.0-x\r\n\r\n", id="another protocol"),
        pytest.param(OK + b"content-length: x\r\n\r\n", id="a length that is none"),
        pytest.param(OK + b"x: " + b"y" * 2 * MAX_HEAD_BYTES, id="a head without an end"),
    ],
)
def test_an_answer_that_is_cut_off_or_is_none_is_an_error_of_the_connection(answer: bytes) -> None:
    async def use(client: WorkerClient) -> None:
        with pytest.raises(OSError, match=r"."):
            await get(client)

    against(answering(answer, closes=True), use)


def test_closing_the_client_ends_requests_that_wait() -> None:
    async def use(client: WorkerClient) -> None:
        waiting = asyncio.ensure_future(get(client))
        await arrived.wait()
        await client.close()
        with pytest.raises(ConnectionAbortedError):
            await waiting

    async def serve(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()

    arrived = asyncio.Event()
    against(serve, use)


def test_a_slow_reader_stops_the_server() -> None:
    size = 64 * 1024 * 1024
    written: list[int] = []

    async def serve(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        for _ in range(size // 65536):
            writer.write(bytes(65536))
            await writer.drain()
            written.append(65536)

    async def use(client: WorkerClient) -> None:
        async with client.send("GET", "/x") as answer:
            before = -1
            while before != (before := len(written)):  # until it is stopped
                await asyncio.sleep(0.2)
            assert sum(written) < size
            assert len(await answer.read()) == size

    against(serve, use)


def test_a_request_has_its_headers_and_its_body() -> None:
    async def serve(reader: Any, writer: Any) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /a?b=c HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx: y\r\ncontent-length: 3\r\n\r\n" in head
        assert await reader.readexactly(3) == b"abc"
        writer.write(EMPTY)

    async def use(client: WorkerClient) -> None:
        async with client.send("POST", "/a?b=c", [(b"x", b"y")], b"abc") as answer:
            assert answer.status == 200

    against(serve, use)


def test_an_event_without_an_end_is_given_up_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cluster.router.MOST_EVENT_BYTES", 100)
    events = _WholeEvents()
    assert events.feed(b"data: 1\n") == b""
    assert events.feed(b"\ndata: 2") == b"data: 1\n\n"
    assert events.feed(b"\n\n") == b"data: 2\n\n"
    for _ in range(10):
        assert events.feed(b"0123456789") == b""
    with pytest.raises(EventTooLargeError, match="more than 100 bytes"):
        events.feed(b"!")
    assert MOST_EVENT_BYTES > 100

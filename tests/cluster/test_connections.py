"""What a router's connections make of servers' answers, well-formed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from typing import Any

import pytest

from octavo.cluster.connections import Connections

OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Length: 2\r\n\r\nhi"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class Server:
    """Answers each request with the bytes that are next, in packets, or ends the connection for `None`."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers = list(answers)
        self.num_connections = 0
        self.received: list[bytes] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with suppress(OSError, asyncio.IncompleteReadError), closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                self.received.append(head + await reader.readexactly(int(length or 0)))
                for packet in self.answers.pop(0):
                    if packet is None:
                        return
                    writer.write(packet)
                    await writer.drain()
                    await asyncio.sleep(0.001)

    def run(self, use: Callable[[Connections], Coroutine[Any, Any, None]]) -> None:
        tasks: list[asyncio.Task[None]] = []

        async def serve() -> None:
            server = await asyncio.start_server(
                lambda *streams: tasks.append(asyncio.ensure_future(self._serve(*streams))), "127.0.0.1", 0
            )
            connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            async with asyncio.timeout(60):
                await use(connections)
                connections.close()
                server.close()
                await asyncio.gather(*tasks)

        asyncio.run(serve())


@pytest.mark.parametrize(
    ("packets", "body", "is_kept"),
    [
        ([WHOLE], b"hi", True),
        ([WHOLE[:9], WHOLE[9:-1], WHOLE[-1:]], b"hi", True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE], b"hi", True),
        ([CHUNKED + b"1\r\nh\r\n1\r\ni\r", b"\n0\r\n\r\n"], b"hi", True),
        ([OK + b"content-length: 0\r\n\r\n"], b"", True),
        ([OK + b"connection: close\r\ncontent-length: 2\r\n\r\nhi"], b"hi", False),
        ([OK + b"\r\nh", b"i", None], b"hi", False),
        ([WHOLE + b"more"], b"hi", False),
        ([CHUNKED + b"1\r\nh\r\n", None], None, False),
        ([OK + b"content-length: 2\r\n\r\nh", None], None, False),
        ([CHUNKED + b"1\r\nh\r\nnonsense\r\n"], None, False),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], None, False),
        ([None], None, False),
    ],
)
def test_an_answer_is_read_to_its_end_or_is_an_error(packets: list[bytes | None], body: Any, is_kept: bool) -> None:
    server = Server(packets, [WHOLE])

    async def use(connections: Connections) -> None:
        if body is None:
            with pytest.raises(OSError):
                await connections.get("/")
        else:
            assert await connections.get("/") == (200, body)
        await asyncio.sleep(0.05)
        async with connections.request("POST", "/x?y=1", [(b"a", b"b")], b"sent") as answer:
            assert answer.headers[0] == (b"content-length", b"2")
            assert await answer.read() == b"hi"

    server.run(use)
    assert server.num_connections == (1 if is_kept else 2)
    assert server.received[1].startswith(b"POST /x?y=1 HTTP/1.1\r\n")
    assert server.received[1].endswith(b"\r\na: b\r\ncontent-length: 4\r\n\r\nsent")


def test_a_connection_is_kept_for_a_while_and_not_after_a_request_was_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server([CHUNKED + b"1\r\nh\r\n"], [WHOLE], [WHOLE], [WHOLE])

    async def use(connections: Connections) -> None:
        async with connections.request("GET", "/") as answer:
            assert answer.status == 200
        for number in (2, 2, 3):
            if number == 3:
                monkeypatch.setattr("octavo.cluster.connections._KEPT_SECONDS", 0.0)
            await connections.get("/")
            assert server.num_connections == number

    server.run(use)


def test_closing_ends_what_waits_for_an_answer_or_its_rest_and_connections_are_made_again() -> None:
    server = Server([], [CHUNKED + b"1\r\nh\r\n"], [WHOLE])

    async def use(connections: Connections) -> None:
        waiting = [asyncio.ensure_future(connections.get("/")) for _ in range(2)]
        while len(server.received) < 2:
            await asyncio.sleep(0.01)
        connections.close()
        for ended in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(ended, OSError)
        assert await connections.get("/") == (200, b"hi")

    server.run(use)


def test_little_is_received_while_a_slow_client_takes_a_piece_in_and_its_error_ends_the_answer() -> None:
    size, taken, limit = 100 * 400_000, list[int](), 2 * 1024 * 1024
    server = Server([CHUNKED, *[b"%x\r\n%b\r\n" % (400_000, b"x" * 400_000)] * 100, b"0\r\n\r\n"], [WHOLE])

    async def use(connections: Connections) -> None:
        ends = False

        async def take(received: bytes, is_last: bool) -> None:
            nonlocal ends
            taken.append(len(received))
            await asyncio.sleep(0.001)
            assert not ends
            ends = is_last

        async def refuse(received: bytes, is_last: bool) -> None:
            await asyncio.sleep(0.001)
            raise ValueError("the client is gone")

        async with connections.request("GET", "/") as answer:
            await answer.relay(take)
        assert ends
        async with connections.request("GET", "/") as answer:
            with pytest.raises(ValueError, match="gone"):
                await answer.relay(refuse)

    server.run(use)
    assert sum(taken) == size
    assert max(taken) < limit

"""Connections to the servers, over HTTP/1.1: an answer's bytes are passed on in the callback that receives them.

request ──> a connection that is idle, or a new one ──> ServerAnswer: status, headers
                                             bytes ──> take ──> the client;  while it is slow, nothing is read
"""

from __future__ import annotations

import asyncio
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import coroutine
from typing import Any
from urllib.parse import urlsplit

import httptools

Headers = Sequence[tuple[bytes, bytes]]

Receiver = Callable[[bytes, bool], Coroutine[Any, Any, None]]
"""Takes in bytes of a body, and whether they are the last; nothing more is received until it returns."""

_CONNECT_SECONDS = 2.0
# Less than a server's keep_alive_timeout, so that it does not close a connection just as a request is sent over it.
_KEPT_SECONDS = 4.0
_MOST_HEAD_BYTES = 64 * 1024
# Without any of these headers, a body ends with the connection.
_DELIMITING = {b"content-length", b"transfer-encoding"}
_CLOSED = "the server has closed the connection"


class ServerAnswer(ABC):
    """A server's answer, whose status and headers have been received.

    Attributes:
        headers: names are in lower case.
    """

    status = 0
    headers: Headers = ()

    @abstractmethod
    async def relay(self, take: Receiver) -> None:
        """Pass on the body as it comes, to its end.

        Raises:
            OSError: the connection was lost before.
        """

    async def read(self) -> bytes:
        """Return the whole body; raises `OSError` if the connection is lost before its end."""
        pieces: list[bytes] = []

        async def take(piece: bytes, is_last: bool) -> None:
            pieces.append(piece)

        await self.relay(take)
        return b"".join(pieces)


class Connections:
    """The connections to one server, which are kept for later requests."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        is_encrypted = parts.scheme == "https"
        self._address = parts.hostname or "", parts.port or (443 if is_encrypted else 80)
        self._host = parts.netloc.rpartition("@")[2].encode()
        self._ssl = ssl.create_default_context() if is_encrypted else None
        self._busy = set[_Connection]()
        self._idle: dict[_Connection, float] = {}  # since when

    @asynccontextmanager
    async def request(
        self, method: str, target: str, headers: Headers = (), body: bytes = b""
    ) -> AsyncIterator[ServerAnswer]:
        """Send a request, and wait for the head of its answer; if the body is not read to its end, it is broken off.

        Raises:
            OSError: the server cannot be reached, or the connection was lost.
        """
        connection = self._kept() or await self._connected()
        self._busy.add(connection)
        try:
            await connection.ask(method, target, [(b"host", self._host), *headers], body)
            yield connection
        finally:
            self._busy.discard(connection)
            if connection.may_be_kept:
                self._idle[connection] = time.monotonic()
            else:
                connection.abort()

    async def get(self, target: str, headers: Headers = ()) -> tuple[int, bytes]:
        """Return the status and the body of a small answer; raises `OSError`."""
        async with self.request("GET", target, headers) as answer:
            return answer.status, await answer.read()

    def close(self) -> None:
        """End all connections, and every request that waits for its answer; new requests make new ones."""
        for connection in (*self._busy, *self._idle):
            connection.abort()
        self._idle.clear()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection, since = self._idle.popitem()
            if connection.may_be_kept and time.monotonic() - since < _KEPT_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connected(self) -> _Connection:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self._lost), *self._address, ssl=self._ssl
            )
        return connection

    def _lost(self, connection: _Connection) -> None:
        self._idle.pop(connection, None)


class _Connection(asyncio.Protocol, ServerAnswer):
    """One connection, which has one request at a time and is its answer."""

    def __init__(self, on_lost: Callable[[_Connection], None]) -> None:
        self._on_lost = on_lost
        self._take: Receiver | None = None  # while the body is relayed
        self._taking: asyncio.Task[None] | None = None  # while that waits
        self._begin()
        self._waiter.cancel()  # nobody waits yet

    def _begin(self) -> None:
        """Get ready for an answer."""
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # for the head, then the end
        self._has_head = self._is_whole = self._stays = False
        self._error: Exception | None = None
        self._head_bytes = 0
        self._received: list[bytes] = []  # of the body

    @property
    def may_be_kept(self) -> bool:
        """Whether another request may use it, because the last answer has been received to its end."""
        return self._is_whole and self._stays and self._error is None and not self._transport.is_closing()

    async def ask(self, method: str, target: str, headers: Headers, body: bytes) -> None:
        """Send a request, and wait for the head of the answer; raises `OSError`."""
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target.encode("latin-1"))]
        lines += [b"%b: %b" % header for header in headers]
        head = b"\r\n".join((*lines, b"content-length: %d\r\n\r\n" % len(body)))
        if head.count(b"\n") != len(lines) + 2:
            raise ConnectionError("a header to be sent has a line break")
        if self._transport.is_closing():
            raise ConnectionResetError(_CLOSED)
        self._begin()
        self._transport.resume_reading()
        self._transport.write(head + body)
        await self._waiter

    async def relay(self, take: Receiver) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        self._take = take
        self._go_on()
        try:
            await self._waiter
        finally:
            self._take = None
            if self._taking is not None:
                self._taking.cancel()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._error = self._error or error
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self._error = ConnectionError(f"the head of an answer has more than {_MOST_HEAD_BYTES:,} bytes")
        self._go_on()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._has_head and _DELIMITING.isdisjoint(name for name, _ in self.headers):
            self._is_whole = True
        self._error = self._error or error or ConnectionResetError(_CLOSED)
        self._parser = None  # it refers to this
        self._go_on()
        self._on_lost(self)

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ConnectionError("the server has sent what nobody has asked for")
        self._headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status, self.headers = self._parser.get_status_code(), self._headers
        self._has_head = self.status >= HTTPStatus.OK  # others, as 100 Continue, come before it

    def on_body(self, piece: bytes) -> None:
        self._received.append(piece)

    def on_message_complete(self) -> None:
        self._is_whole, self._stays = self._has_head, self._parser.should_keep_alive()

    def _go_on(self) -> None:
        """Pass on what has been received, unless nobody waits for it, or what came before is still being taken in."""
        if self._waiter.done() or self._taking is not None:
            self._transport.pause_reading()
            return
        self._transport.resume_reading()
        if self._take is None:
            if self._has_head:
                self._waiter.set_result(None)
        elif self._received or self._is_whole:
            self._pass_on(self._take)
        if self._error is not None and self._taking is None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError(str(self._error)))

    def _pass_on(self, take: Receiver) -> None:
        received, is_last = self._received, self._is_whole
        self._received = []
        taking = take(received[0] if len(received) == 1 else b"".join(received), is_last)
        # A task is only made if it has to wait.
        try:
            awaited = taking.send(None)
        except StopIteration:
            self._taken(None, is_last)
        except Exception as error:
            self._taken(error, is_last)
        else:
            self._taking = task = asyncio.ensure_future(_rest_of(taking, awaited))
            task.add_done_callback(lambda task: self._was_slow(task, is_last))

    def _was_slow(self, task: asyncio.Task[None], is_last: bool) -> None:
        self._taking = None
        if self._waiter.done() or task.cancelled():
            return
        self._taken(task.exception(), is_last)
        if not self._waiter.done():
            self._go_on()

    def _taken(self, error: BaseException | None, is_last: bool) -> None:
        if error is not None:
            self._waiter.set_exception(error)
        elif is_last:
            self._waiter.set_result(None)


@coroutine
def _rest_of(started: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Continue a coroutine that awaits something, in a task."""
    yield awaited
    yield from started

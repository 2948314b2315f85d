"""An HTTP/1.1 client for the servers behind a router, which parses no more of an answer than it must.

Connections are kept, as a server's answer allows; redirects, cookies and compression are the client's affair.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

from octavo.workloads.http import MAX_HEAD_BYTES, BodyDecoder, ProtocolError, parse_head

CONNECT_SECONDS = 2.0
# Less than a server's keep_alive_timeout, so that it does not close a connection just as a request is sent over it.
KEPT_SECONDS = 4.0
# Bytes of an answer that wait for the client; beyond that, no more are received.
_HELD_AT_MOST = 256 * 1024
_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


class WorkerClient:
    """Connections to one server, which are kept for further requests."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None  # `checked_url`
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._address = parts.hostname, parts.port or (80 if self._ssl is None else 443)
        self._host = parts.netloc.rpartition("@")[2].encode("latin-1")
        self._open: set[WorkerAnswer] = set()
        self._idle: list[tuple[float, WorkerAnswer]] = []  # since when

    @asynccontextmanager
    async def send(
        self, method: str, target: str, headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> AsyncIterator[WorkerAnswer]:
        """Send a request, and receive the head of its answer; the rest is received within the context.

        Raises:
            OSError: the connection could not be made, broke, or carries something else than HTTP/1.1.
        """
        answer = await self._connection()
        try:
            lines = [f"{method} {target} HTTP/1.1".encode("latin-1"), b"host: " + self._host]
            lines += [b"%b: %b" % header for header in headers]
            lines += [b"content-length: %d" % len(body), b"", body]
            await answer.begin(b"\r\n".join(lines))
            yield answer
        finally:
            if answer.is_reusable:
                self._idle.append((time.monotonic(), answer))
            else:
                answer.close()
                self._open.discard(answer)

    async def close(self) -> None:
        """Close all connections; requests that wait for their answers raise `ConnectionError`."""
        for answer in self._open:
            answer.close()
        self._open.clear()
        self._idle.clear()

    async def _connection(self) -> WorkerAnswer:
        while self._idle:
            since, answer = self._idle.pop()
            if answer.is_reusable and time.monotonic() - since < KEPT_SECONDS:
                return answer
            answer.close()
            self._open.discard(answer)
        async with asyncio.timeout(CONNECT_SECONDS):
            _, answer = await asyncio.get_running_loop().create_connection(WorkerAnswer, *self._address, ssl=self._ssl)
        self._open.add(answer)
        return answer


class WorkerAnswer(asyncio.Protocol):
    """A connection, and the answer to the last request sent over it.

    Attributes:
        status: 0 until its head has arrived.
        headers: with names in lower case.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._error: OSError | None = None
        self._rest = b""  # of a head that is not whole
        self._body: BodyDecoder | None = None
        self._received: list[bytes] = []
        self._size = 0
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent: the answer has been received whole, and the connection is kept."""
        body = self._body
        return (
            self._error is None
            and body is not None
            and body.done
            and not body.has_excess
            and not self._received
            and (b"connection", b"close") not in self.headers
            and not self._transport.get_write_buffer_size()
        )

    async def begin(self, request: bytes) -> None:
        """Send a request, and wait for the head of its answer; raises OSError."""
        self.status, self.headers, self._body = 0, [], None
        self._transport.write(request)
        while not self.status:
            await self._more()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; raises OSError if it is cut off."""
        while True:
            if self._received:
                chunk = self._received[0] if len(self._received) == 1 else b"".join(self._received)
                self._received, self._size = [], 0
                if self._is_paused:
                    self._is_paused = False
                    self._transport.resume_reading()
                yield chunk
            elif self._body is not None and self._body.done:
                return
            else:
                await self._more()

    async def read(self) -> bytes:
        """Return the rest of the body; raises OSError if it is cut off."""
        return b"".join([chunk async for chunk in self.chunks()])

    def close(self) -> None:
        """Close the connection; whoever waits for the answer gets `ConnectionError`."""
        self._fail(ConnectionAbortedError("the connection was closed"))

    async def _more(self) -> None:
        """Wait until something has arrived."""
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        is_whole = self._body is not None and self._body.done
        if self._error is not None and not self._received and not is_whole:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: OSError) -> None:
        if self._error is None:
            self._error = error
            self._transport.abort()
            self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        try:
            piece = self._decode(data)
        except ProtocolError as error:
            self._fail(ConnectionError(str(error)))
            return
        if piece:
            self._received.append(piece)
            self._size += len(piece)
            if self._size > _HELD_AT_MOST and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._body is not None and self._body.ends_with_connection:
            self._body.done = True
        self._fail(error if isinstance(error, OSError) else ConnectionResetError("the server closed the connection"))

    def _decode(self, data: bytes) -> bytes:
        """Return the bytes of the body, once the head is whole."""
        if self._body is not None:
            return self._body.feed(data)
        head, end, rest = (self._rest + data).partition(b"\r\n\r\n")
        if not end:
            if len(head) > MAX_HEAD_BYTES:
                raise ProtocolError(f"the head of an answer exceeds {MAX_HEAD_BYTES} bytes")
            self._rest = head
            return b""
        self._rest = b""
        status, headers = parse_head(head)
        if status < HTTPStatus.OK:  # such as 100: the head of the answer follows
            return self._decode(rest)
        self.status, self.headers = status, headers
        self._body = BodyDecoder(dict(headers) if status not in _WITHOUT_BODY else {b"content-length": b"0"})
        return self._body.feed(rest)

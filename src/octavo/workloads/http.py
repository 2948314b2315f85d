"""A streaming HTTP/1.1 POST on bare asyncio, for a client that shares its machine with the server it measures.

A general-purpose client spends about 150 µs of CPU time per streamed token, which at 64 streams takes a sixth of a core
from the server. This one takes a fraction of that, and records arrival times in the transport's own callback.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 65536


class ProtocolError(Exception):
    """The server's answer is not HTTP/1.1, or was cut off."""


@dataclass(frozen=True, slots=True)
class PostUrl:
    """The parts of a URL to post to.

    Attributes:
        path: the URL's path, such as '/v1/completions' in 'http://host:8000/v1/completions'.
    """

    host: str
    port: int
    path: str
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> PostUrl:
        """Parse a URL; raises ValueError if it is not an http(s) URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http URL: {url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), parts.path or "/", tls)


async def post_json(
    endpoint: PostUrl, headers: Mapping[str, str], body: Any, on_body: Callable[[bytes, float], None]
) -> tuple[int, bytes]:
    """Post `body` on a new connection.

    Args:
        on_body: called with each piece of the body of a 200 response as it arrives, and the `time.perf_counter` of its
            arrival.

    Returns:
        The status and, unless it is 200, the body of the response.

    Raises:
        OSError: the connection could not be made, or it broke.
        ProtocolError: the response was cut off, or is not HTTP.
    """
    loop = asyncio.get_running_loop()
    transport, response = await loop.create_connection(
        lambda: _Response(on_body), endpoint.host, endpoint.port, ssl=endpoint.tls or None
    )
    try:
        transport.write(_request_bytes(endpoint, headers, body))
        await response.finished
    finally:
        transport.close()
    return response.status, bytes(response.error_body)


def _request_bytes(endpoint: PostUrl, headers: Mapping[str, str], body: Any) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    lines = {
        "Host": f"{host}:{endpoint.port}",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
        **headers,
    }
    head = f"POST {endpoint.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + content


class _Response(asyncio.Protocol):
    """Collects the head of a response, then passes the decoded body on, piece by piece."""

    def __init__(self, on_body: Callable[[bytes, float], None]) -> None:
        self.status = 0
        self.error_body = bytearray()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._head = bytearray()
        self._body: BodyDecoder | None = None

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.finished.done():
            return
        try:
            self._receive(data, now)
        except Exception as error:  # errors must reach the waiting caller, not the event loop's log
            self.finished.set_exception(error)

    def _receive(self, data: bytes, now: float) -> None:
        if self._body is None:
            self._head += data
            head, separator, data = bytes(self._head).partition(b"\r\n\r\n")
            if not separator:
                if len(head) > MAX_HEAD_BYTES:
                    raise ProtocolError("the header of the response does not end")
                return
            self.status, headers = parse_head(head)
            self._body = BodyDecoder(headers)
        piece = self._body.feed(data)
        if piece and self.status == 200:
            self._on_body(piece, now)
        elif piece:
            self.error_body += piece
        if self._body.done:
            self.finished.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.finished.done():
            return
        if self._body is not None and self._body.ends_with_connection and error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error or ProtocolError("the connection closed before the answer ended"))


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Parse the status and headers (names in lower case) from the head of a response, without its empty line."""
    status_line, *lines = head.decode("latin-1").split("\r\n")
    parts = status_line.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
        raise ProtocolError(f"not an HTTP/1.1 answer: {status_line[:60]!r}")
    pairs = (line.partition(":") for line in lines)
    return int(parts[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


class BodyDecoder:
    """Decodes an HTTP body that arrives in arbitrary pieces: chunked, with a length, or until the connection ends."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.done = False
        self._chunked = headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = headers.get("content-length")
        self.ends_with_connection = not self._chunked and length is None
        self._left = int(length) if length is not None and not self._chunked else 0
        self._buffer = bytearray()
        self.done = length == "0" and not self._chunked

    def feed(self, data: bytes) -> bytes:
        """Return the body's bytes in `data`; sets `done` at the end of the body."""
        if self.ends_with_connection:
            return data
        if self._chunked:
            return self._feed_chunked(data)
        piece = data[: self._left]
        self._left -= len(piece)
        self.done = self._left == 0
        return piece

    def _feed_chunked(self, data: bytes) -> bytes:
        self._buffer += data
        body = bytearray()
        position = 0
        # size CRLF data CRLF … 0 CRLF trailers CRLF; `position` is always at the start of a chunk's size.
        while (line_end := self._buffer.find(b"\r\n", position)) >= 0:
            try:
                size = int(bytes(self._buffer[position:line_end]).split(b";")[0], 16)
            except ValueError:
                raise ProtocolError("bad chunk size") from None
            if size == 0:
                # Ignore trailers: they have nothing that is measured, and the connection is closed anyway.
                self.done = True
                break
            start = line_end + 2
            if len(self._buffer) < start + size + 2:
                break
            body += self._buffer[start : start + size]
            position = start + size + 2
        del self._buffer[:position]
        return bytes(body)


class EventLines:
    """Splits a stream of server-sent events, arriving in arbitrary pieces, into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

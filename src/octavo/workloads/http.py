"""A streaming HTTP/1.1 POST on bare asyncio, for a client that shares its machine with the server it measures.

A general-purpose client spends about 150 µs of CPU time per streamed token, which at 64 streams takes a sixth of a core
from the server. This one takes a fraction of that, and records arrival times in the transport's own callback.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 65536
MAX_LINE_BYTES = 4096
"""Of a line between two chunks of a body."""
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)


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
            self._body = BodyDecoder(dict(headers))
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


def parse_head(head: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Parse the status and headers (names in lower case) from the head of a response, without its empty line."""
    status_line, *lines = head.split(b"\r\n")
    parts = status_line.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise ProtocolError(f"not an HTTP/1.1 answer: {status_line[:60]!r}")
    pairs = (line.partition(b":") for line in lines)
    return int(parts[1]), [(name.strip().lower(), value.strip()) for name, _, value in pairs]


class BodyDecoder:
    """Decodes an HTTP body that arrives in arbitrary pieces: chunked, with a length, or until the connection ends.

    Attributes:
        done: whether the whole body was fed; what follows it is not part of it.
        has_excess: whether bytes were fed that follow it.
    """

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        self._chunked = headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        length = headers.get(b"content-length")
        self.ends_with_connection = not self._chunked and length is None
        if length is not None and not length.isdigit():
            raise ProtocolError("bad content-length")
        self._left = int(length) if length is not None and not self._chunked else 0  # of the body, or of a chunk
        self._rest = b""  # not enough to decode
        self._ends_chunk = self._in_trailers = self.has_excess = False
        self.done = length is not None and not self._chunked and self._left == 0

    def feed(self, data: bytes) -> bytes:
        """Return the body's bytes in `data`; sets `done` at the end of the body. Raises `ProtocolError`."""
        if self.ends_with_connection:
            return data
        if self._chunked:
            return self._feed_chunked(data)
        piece = data[: self._left]
        self._left -= len(piece)
        self.done = self._left == 0
        self.has_excess |= len(data) > len(piece)
        return piece

    def _feed_chunked(self, data: bytes) -> bytes:
        # size CRLF bytes CRLF … 0 CRLF trailers CRLF
        data, at, pieces = self._rest + data, 0, list[bytes]()
        while not self.done:
            if self._left:
                pieces.append(piece := data[at : at + self._left])
                at += len(piece)
                self._left -= len(piece)
                self._ends_chunk = True
                if self._left:
                    break
            begin = at + 2 if self._ends_chunk else at
            if (end := data.find(b"\r\n", begin)) < 0:
                if len(data) - at > MAX_LINE_BYTES:
                    raise ProtocolError("a line between chunks does not end")
                break
            if self._ends_chunk and data[at:begin] != b"\r\n":
                raise ProtocolError("a chunk does not end where its size says")
            self._ends_chunk = False
            if self._in_trailers:
                self.done = end == begin
            elif (size := _CHUNK_SIZE.fullmatch(data, begin, end)) is None:
                raise ProtocolError("bad chunk size")
            else:
                self._left = int(size[1], 16)
                self._in_trailers = self._left == 0
            at = end + 2
        self._rest = data[at:]
        self.has_excess = self.done and bool(self._rest)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class EventLines:
    """Splits a stream of server-sent events, arriving in arbitrary pieces, into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

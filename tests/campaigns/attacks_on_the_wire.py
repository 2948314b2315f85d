"""Attacks by the way bytes arrive, or by a few bytes that stand for many. Part of `attacks.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.campaigns.watched_server import ATTACKER_KEY, Answer, as_json, head, post

RESPONSES = "/v1/responses"


async def send(port: int, content: bytes, seconds: float = 3.0) -> Answer:
    """Send bytes as they are; returns the first answer, or how the connection ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        async with asyncio.timeout(seconds):
            writer.write(content)
            received = await reader.readuntil(b"\r\n\r\n")
    except TimeoutError:
        return Answer(-1)
    except (ConnectionError, asyncio.IncompleteReadError):
        return Answer(0)
    finally:
        writer.transport.abort()
    return Answer(int(received[9:12]))


def header(method: str, path: str, *lines: str) -> bytes:
    """The header of a request with the attacker's key."""
    first = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {ATTACKER_KEY}"]
    return "\r\n".join([*first, *lines, "", ""]).encode()


async def chunks_of_a_byte(port: int) -> list[Answer]:
    """Three bodies of 200,000 chunks of one byte each."""
    lines = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    content = header("POST", "/v1/completions", *lines) + b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n"
    return list(await asyncio.gather(*(send(port, content) for _ in range(3))))


async def many_in_chunks_of_a_byte(port: int) -> list[Answer]:
    """Two hundred bodies of 1,300 chunks of one byte each, at once."""
    lines = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    content = header("POST", "/v1/completions", *lines) + b"1\r\n \r\n" * 1300 + b"0\r\n\r\n"
    return list(await asyncio.gather(*(send(port, content) for _ in range(200))))


async def tiny_header_lines(port: int) -> list[Answer]:
    """Twenty headers of 256 KiB with five bytes per line, each pipelined after another request."""
    lines = b"".join(b"A%d:\r\n" % (i % 10) for i in range(50_000))
    content = header("GET", "/v1/models") + header("GET", "/v1/models")[:-2] + lines + b"\r\n"
    return list(await asyncio.gather(*(send(port, content) for _ in range(20))))


async def requests_sent_ahead(port: int) -> list[Answer]:
    """Four connections, on each of which 1,000 requests for /metrics are pipelined."""
    content = header("GET", "/metrics") * 1000
    return list(await asyncio.gather(*(send(port, content) for _ in range(4))))


async def no_http(port: int) -> list[Answer]:
    """Bytes that are not HTTP, and header fields that libraries parse."""
    kinds = [
        b"GET /\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        header("POST", "/v1/completions", "Content-Length: 5", "Content-Length: 6") + b"xxxxxx",
        header("POST", "/v1/completions", "Transfer-Encoding: chunked") + b"ffffffffffffffff\r\nx",
        header("GET", "/metrics", "Accept: application/openmetrics-text; version=x.y"),
        header("GET", "/none", "Host: ["),
        header("PUT", "/v1/completions", "Host: [::1"),
        header("GET", "/none", "Host: http://["),
    ]
    return [await send(port, kind, 1.0) for kind in kinds]


async def follow_ups(port: int) -> list[Answer]:
    """A hundred small bodies that continue a stored response of 14 MB."""
    item = {"type": "message", "role": "user", "content": "x", "unknown": "j" * 14_000_000}
    first = await post(port, RESPONSES, as_json({"input": [item], "max_output_tokens": 1}), 10, keeps=65536)
    if first.status != 200:
        return [first]
    body = {"input": "y", "max_output_tokens": 1, "store": False}
    body["previous_response_id"] = json.loads(first.body)["id"]
    return list(await asyncio.gather(*(post(port, RESPONSES, as_json(body)) for _ in range(100))))


async def leaving_at_every_phase(port: int) -> list[Answer]:
    """Clients that leave after 0 to 500 ms: while a body is read, prompts are computed, a grammar is followed."""
    few = {"max_tokens": 200, "stream": True}
    bodies = [
        ("/v1/completions", {"prompt": [[i] * 2000 for i in range(1, 9)], **few}),
        ("/v1/completions", {"prompt": [5], "use_beam_search": True, "best_of": 16, "max_tokens": 100}),
        ("/v1/completions", {"prompt": [5], "n": 8, "structured_outputs": {"regex": "([a-z]{1,9} ){200}"}, **few}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 20_000}], "max_tokens": 5}),
        ("/v1/embeddings", {"input": [[i] * 2000 for i in range(1, 33)]}),
    ]

    async def leave(path: str, body: bytes, seconds: float) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(path, len(body)) + body)
        await asyncio.sleep(seconds)
        writer.transport.abort()

    delays = (0.0, 0.002, 0.01, 0.05, 0.1, 0.2, 0.5)
    await asyncio.gather(*(leave(path, as_json(body), after) for path, body in bodies for after in delays))
    return [Answer(-1)] * (len(bodies) * len(delays))


def wire_attacks() -> Iterator[tuple[str, Callable[[int], Coroutine[Any, Any, list[Answer]]]]]:
    """Yield (name, attack)."""
    yield "3 bodies in 200,000 chunks of a byte", chunks_of_a_byte
    yield "200 bodies in 1,300 chunks of a byte", many_in_chunks_of_a_byte
    yield "20 headers of 50,000 lines, sent ahead", tiny_header_lines
    yield "4 × 1,000 requests for /metrics sent ahead", requests_sent_ahead
    yield "no HTTP, and odd header fields", no_http
    yield "100 follow-ups of a response of 14 MB", follow_ups
    yield "35 clients leave at every phase", leaving_at_every_phase

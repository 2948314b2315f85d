"""A completions server of a few lines, in a thread: two tokens a chunk, and whatever misbehaviour a test asks for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

MODEL = "fake-model"
MAX_MODEL_LEN = 64


class FakeServer:
    """Attributes set by a test before it sends; those below `bodies` are what the server saw.

    Attributes:
        misbehave: maps a prompt's first token id to 'http 503', 'cut', 'hang up', 'error event', 'garbage',
            'no finish', 'silent', 'endless' or 'last' (ends once `num_awaited` requests have come).
    """

    def __init__(self) -> None:
        self.misbehave: dict[int, str] = {}
        self.gives_token_ids = self.gives_usage = True
        self.chunk_delay_s = 0.0
        self.num_awaited = 0
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._stop.wait()

    async def _handle(self, reader: Any, writer: Any) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request_line, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self._answer(request_line.split()[1], headers, body, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, headers: dict[str, Any], body: bytes, writer: Any) -> None:
        if path == "/v1/models":
            _plain(writer, {"data": [{"id": MODEL, "max_model_len": MAX_MODEL_LEN}]})
            return
        if path != "/v1/completions":
            _plain(writer, {})
            return
        request = json.loads(body)
        self.bodies.append(request)
        self.headers.append(headers)
        what = self.misbehave.get(request["prompt"][0])
        if what == "http 503":
            _plain(writer, {"error": {"message": "busy"}}, "503 Service Unavailable")
            return
        if what == "hang up":
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
        for chunk in self._chunks(request, what):
            payload = chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()
            event = b"data: " + payload + b"\n\n"
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()
            await asyncio.sleep(600 if what == "endless" else self.chunk_delay_s)
            while what == "last" and len(self.bodies) < self.num_awaited:
                await asyncio.sleep(0.001)
            if what == "cut":
                return
        writer.write(b"0\r\n\r\n")
        return

    def _chunks(self, request: dict[str, Any], what: str | None) -> Iterator[Any]:
        left = 0 if what == "silent" else request["max_tokens"]
        while left > 0:
            count = min(2, left)
            left -= count
            choice = {"index": 0, "text": "ab", "finish_reason": None if left or what == "no finish" else "length"}
            if self.gives_token_ids and request.get("return_token_ids"):
                choice["token_ids"] = [1] * count
            yield {"choices": [choice]}
            if what == "error event":
                yield {"error": {"message": "oops"}}
            if what == "garbage":
                yield b"{not json"
        if what == "silent":
            yield {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
        if self.gives_usage:
            usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": request["max_tokens"]}
            yield {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 1}}}
        yield b"[DONE]"


def _plain(writer: Any, body: dict[str, Any], status: str = "200 OK") -> None:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\nContent-Type: application/json\r\n\r\n"
    writer.write(head.encode() + content)

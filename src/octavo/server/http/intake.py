"""Receives request bodies, and bounds the memory that all of them take until they have been read.

Each connection may send a body of `--max-body-size`, and may send it slowly. The total that is held beyond the first
64 KiB of each body stays below `--max-total-body-size`: when it would be exceeded, an incomplete body is cut off (503,
`Retry-After`; 429 if its tenant holds more than half), namely the oldest of the tenant that holds the most. A tenant
that stalls many bodies therefore loses them first, and small bodies are never refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request

from octavo.errors import shown
from octavo.server.errors import BODY_TOO_LARGE, TOO_MANY_BODIES, TOO_MANY_TENANT_BODIES, ApiError
from octavo.server.http.connection import ClientLeftError
from octavo.server.tenants.auth import client_of

# Bytes of each body that are not counted.
FREE_BYTES = 64 * 1024
# Bodies below this size in bytes are joined on the event loop; joining larger ones releases the interpreter's lock.
_JOINED_AT_ONCE = 1024 * 1024


@dataclass(eq=False, slots=True)
class _Body:
    """A body from its first byte until it has been read.

    Attributes:
        held: bytes that count towards the limit on all bodies.
        refusal: why the body was cut off to make room for others; None if it was not.
    """

    tenant: str
    task: asyncio.Task[Any]
    size: int = 0
    held: int = 0
    is_whole: bool = False
    refusal: ApiError | None = None

    def take_refusal(self) -> ApiError:
        """Return why the body was cut off, and forget it.

        An error that is raised refers to the frames that it left, and so to what has been received. If these frames
        referred to the error, only a full garbage collection would free that, which a busy server does not run.
        """
        refusal, self.refusal = self.refusal, None
        assert refusal is not None
        return refusal


class BodyIntake:
    """The bodies of all connections. Used only from the event loop.

    Args:
        most: maximum size of one body in bytes.
        most_in_all: maximum total of all bodies that have not been read, not counting the first `FREE_BYTES` of each.
    """

    def __init__(self, most: int, most_in_all: int) -> None:
        self._most = most
        self._most_in_all = most_in_all
        self._bodies: dict[_Body, None] = {}
        self.held = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Receive the whole body of a request, which counts as held until the context is left.

        Raises:
            ClientLeftError: the client closed the connection.
            ApiError: the body is compressed, or exceeds the limit by its headers or by what was received; or it was
                cut off to make room for others, or there is no room for it.
        """
        if (encoding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            message = f"Content-Encoding {shown(encoding)}: send the body as it is, not compressed."
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_content_encoding")
        task = asyncio.current_task()
        assert task is not None  # handlers run in tasks
        body = _Body(client_of(request.scope).tenant, task)
        self._bodies[body] = None
        try:
            yield await self._receive(request, body)
        finally:
            del self._bodies[body]
            self.held -= body.held

    async def _receive(self, request: Request, body: _Body) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._most:
            raise BODY_TOO_LARGE(self._most)
        chunks: list[bytes] = []
        try:
            async for chunk in request.stream():
                body.size += len(chunk)
                if body.size > self._most:
                    raise BODY_TOO_LARGE(self._most)
                self._hold(body)
                chunks.append(chunk)
            body.is_whole = True
        except ClientDisconnect:
            raise ClientLeftError from None
        except asyncio.CancelledError:
            if body.refusal is None:
                raise
            body.task.uncancel()
            raise body.take_refusal() from None
        finally:
            if not body.is_whole:
                chunks.clear()
        if body.size < _JOINED_AT_ONCE:
            return b"".join(chunks)
        return await asyncio.to_thread(b"".join, chunks)

    def _hold(self, body: _Body) -> None:
        """Count what was received, and make room for it."""
        more = max(0, body.size - FREE_BYTES) - body.held
        body.held += more
        self.held += more
        while self.held > self._most_in_all:
            victim, refusal = self._victim()
            if victim is body:
                raise refusal()
            victim.refusal = refusal()
            self.held -= victim.held
            victim.held = 0
            victim.task.cancel()

    def _victim(self) -> tuple[_Body, Callable[[], ApiError]]:
        """Return the oldest incomplete body of the tenant that holds the most, of those with one, and its error."""
        unfinished = [body for body in self._bodies if body.held and not body.is_whole]
        by_tenant: Counter[str] = Counter()
        for body in self._bodies:
            by_tenant[body.tenant] += body.held
        worst = max((body.tenant for body in unfinished), key=by_tenant.__getitem__)
        victim = next(body for body in unfinished if body.tenant == worst)
        # Without API keys all clients are one tenant, whose name is empty: what they hold is no single client's.
        if worst and by_tenant[worst] > self._most_in_all // 2:
            return victim, partial(TOO_MANY_TENANT_BODIES, self._most_in_all // 2)
        return victim, partial(TOO_MANY_BODIES, self._most_in_all)

"""Takes in requests' bodies, and bounds what all of them hold together until they have been read.

Each connection may send a body of `--max-body-size`, and may take its time. Together, what is held beyond the first
64 KiB of each body stays under `--max-total-body-size`: one more byte, and a body that has not come whole is cut (503,
`Retry-After`): of the tenant that holds the most, the one that began first. So whoever stalls many bodies makes room
for others with them, and small bodies are never refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import ClientDisconnect, Request

from octavo.server.auth import client_of
from octavo.server.connection import ClientLeftError
from octavo.server.errors import RETRY_AFTER_SECONDS, ApiError, BodyTooLargeError

# Bytes of each body that are not counted.
FREE_BYTES = 64 * 1024
# Bytes of a body that are put together on the event loop; of more, joining lets go of the interpreter's lock.
_JOINED_AT_ONCE = 1024 * 1024


class TooManyBodiesError(ApiError):
    """The bodies that are being received or read hold as much memory as they may."""

    def __init__(self, most: int) -> None:
        super().__init__(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"The request bodies that this server is receiving are larger than {most} bytes together, the most it "
            "holds (--max-total-body-size): try again later.",
            type="server_error",
            code="too_many_bodies",
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )


@dataclass(eq=False, slots=True)
class _Body:
    """A body from its first byte until it has been read.

    Attributes:
        held: bytes that count.
        is_cut: it was given up for others.
    """

    tenant: str
    task: asyncio.Task[Any]
    size: int = 0
    held: int = 0
    is_whole: bool = False
    is_cut: bool = False


class BodyIntake:
    """The bodies of all connections. Used only from the event loop.

    Args:
        most: bytes of one body.
        most_in_all: bytes of all bodies that have not been read, beyond the first `FREE_BYTES` of each.
    """

    def __init__(self, most: int, most_in_all: int) -> None:
        self._most = most
        self._most_in_all = most_in_all
        self._bodies: dict[_Body, None] = {}
        self.held = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body of a request, which counts as held until the context is left.

        Raises:
            BodyTooLargeError: before more than the limit is held, whatever its headers say.
            TooManyBodiesError: it was cut, or there is no room for it.
            ClientLeftError: the client closed the connection.
        """
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
            raise BodyTooLargeError(self._most)
        chunks: list[bytes] = []
        try:
            async for chunk in request.stream():
                body.size += len(chunk)
                if body.size > self._most:
                    raise BodyTooLargeError(self._most)
                self._hold(body)
                chunks.append(chunk)
        except ClientDisconnect:
            raise ClientLeftError from None
        except asyncio.CancelledError:
            if not body.is_cut:
                raise
            body.task.uncancel()
            raise TooManyBodiesError(self._most_in_all) from None
        body.is_whole = True
        if body.size < _JOINED_AT_ONCE:
            return b"".join(chunks)
        return await asyncio.to_thread(b"".join, chunks)

    def _hold(self, body: _Body) -> None:
        """Count what has come, and make room for it."""
        more = max(0, body.size - FREE_BYTES) - body.held
        body.held += more
        self.held += more
        while self.held > self._most_in_all:
            victim = self._victim()
            if victim is body:
                raise TooManyBodiesError(self._most_in_all)
            victim.is_cut = True
            self.held -= victim.held
            victim.held = 0
            victim.task.cancel()

    def _victim(self) -> _Body:
        """Of the tenant that holds the most, the body that began first; only of those that have not come whole."""
        unfinished = [body for body in self._bodies if body.held and not body.is_whole]
        by_tenant: Counter[str] = Counter()
        for body in self._bodies:
            by_tenant[body.tenant] += body.held
        worst = max((body.tenant for body in unfinished), key=by_tenant.__getitem__)
        return next(body for body in unfinished if body.tenant == worst)

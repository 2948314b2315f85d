"""The HTTP connections: request bodies in, within a total bound, and answers out.

Each request in flight is cancelled when its client disconnects, and all are when a shutdown times out.

Each connection may send a body of `max_body_size`, and may send it slowly. The total that is held beyond the first
64 KiB of each body stays below `max_total_body_size`: when it would be exceeded, an incomplete body is cut off (503,
`Retry-After`; 429 if its tenant holds more than half), namely the oldest of the tenant that holds the most. A tenant
that stalls many bodies therefore loses them first, and small bodies are never refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import shown
from octavo.server.access import client_of
from octavo.server.apis import EVENTS
from octavo.server.errors import (
    BODY_TOO_LARGE,
    REQUEST_TIMED_OUT,
    SHUTTING_DOWN,
    TOO_MANY_BODIES,
    TOO_MANY_TENANT_BODIES,
    ApiError,
    to_api_error,
)

# nginx's status for a client that closed the connection. Nobody receives it; it only ends the handler.
CLIENT_CLOSED_REQUEST = 499

# Bytes of an answer that are handed to the socket at a time.
_SENT_AT_ONCE = 64 * 1024

Result = TypeVar("Result")


class ClientLeftError(HTTPException):
    """The client disconnected before it was answered."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client closed the connection")


@dataclass(eq=False, slots=True)
class _Running:
    """Work in flight, in the task of its handler.

    Attributes:
        stopped_by: makes the error that the work ends with, as it was cancelled; None if it was not.
    """

    task: asyncio.Task[Any]
    stopped_by: Callable[[], HTTPException | ApiError] | None = None

    def stop(self, error: Callable[[], HTTPException | ApiError]) -> None:
        if self.stopped_by is None:
            self.stopped_by = error
            self.task.cancel()

    async def stop_at_departure(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientLeftError)


class InFlight:
    """The work in flight for connected clients. Used only from the event loop.

    Args:
        timeout: seconds after which work is cancelled; None for no limit.

    Attributes:
        draining: whether the server is shutting down and takes no new work.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self.draining = False
        self._running: set[_Running] = set()
        self._cancelled = False

    def __len__(self) -> int:
        return len(self._running)

    def cancel_all(self) -> None:
        """Cancel all work, present and future, with `SHUTTING_DOWN`."""
        self._cancelled = True
        for each in self._running:
            each.stop(SHUTTING_DOWN)

    async def run(self, receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, and cancel it if its client disconnects. The request's body must have been read before.

        Raises:
            ClientLeftError: the client closed the connection.
            ApiError: `cancel_all` was called, or the work took longer than the timeout.
        """
        if self._cancelled:
            work.close()
            raise SHUTTING_DOWN()
        task = asyncio.current_task()
        assert task is not None  # handlers run in tasks
        # In this task, because a task of its own and waiting for both took 25 µs more of each request.
        own = _Running(task)
        self._running.add(own)
        departure = asyncio.ensure_future(own.stop_at_departure(receive))
        timer = None
        if self._timeout is not None:
            error = partial(REQUEST_TIMED_OUT, self._timeout)
            timer = asyncio.get_running_loop().call_later(self._timeout, own.stop, error)
        try:
            result = await work
        except (Exception, asyncio.CancelledError):
            if own.stopped_by is None:
                raise
        finally:
            self._running.discard(own)
            departure.cancel()
            if timer is not None:
                timer.cancel()
        if own.stopped_by is not None:
            task.uncancel()
            raise own.stopped_by()
        return result


class WholeAnswer(Response):
    """A response with finished JSON in pieces, which are not joined, and are sent as fast as the client reads."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, pieces)))
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in _grouped(self._pieces):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            # Sending to a fast client never waits, so let other tasks run between the parts of a large answer.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _grouped(pieces: Sequence[bytes]) -> Iterator[bytes]:
    group: list[bytes] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece)
        if size >= _SENT_AT_ONCE:
            yield b"".join(group)
            group, size = [], 0
    if group:
        yield b"".join(group)


class EventStream(Response):
    """A response that is sent in pieces, by default server-sent events: chunks of bytes as `events` yields them.

    The status is sent with the first chunk: an error before it becomes an error response, a later one an event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        in_flight: InFlight,
        error_event: Callable[[ApiError], bytes],
        media_type: str = EVENTS,
    ) -> None:
        super().__init__(
            status_code=HTTPStatus.OK,
            media_type=media_type,
            # Proxies such as nginx would otherwise buffer the events before passing them on.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._events = events
        self._in_flight = in_flight
        self._error_event = error_event
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._in_flight.run(receive, self._send_events(send))
        except ClientLeftError:
            return
        except Exception as error:
            if not self._started:
                raise
            await send(
                {"type": "http.response.body", "body": self._error_event(to_api_error(error)), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for piece in events:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": piece, "more_body": True})


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
        # Without API keys all clients are one tenant, whose name is empty: what they hold belongs to no single client.
        if worst and by_tenant[worst] > self._most_in_all // 2:
            return victim, partial(TOO_MANY_TENANT_BODIES, self._most_in_all // 2)
        return victim, partial(TOO_MANY_BODIES, self._most_in_all)

"""Requests in flight: each is cancelled when its client disconnects, and all are when a shutdown times out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.apis import EVENTS
from octavo.server.errors import REQUEST_TIMED_OUT, SHUTTING_DOWN, ApiError, to_api_error

# nginx's status for a client that closed the connection. Nobody receives it; it only ends the handler.
CLIENT_CLOSED_REQUEST = 499

# Bytes of an answer that are handed to the socket at a time.
_SENT_AT_ONCE = 64 * 1024

Result = TypeVar("Result")


class ClientLeftError(HTTPException):
    """The client disconnected before it was answered."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client closed the connection")


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
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled = False

    def __len__(self) -> int:
        return len(self._tasks)

    def cancel_all(self) -> None:
        """Cancel all work, present and future, with `SHUTTING_DOWN`."""
        self._cancelled = True
        for task in self._tasks:
            task.cancel()

    async def run(self, receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`, and cancel it if its client disconnects. The request's body must have been read before.

        Raises:
            ClientLeftError: the client closed the connection.
            ApiError: `cancel_all` was called, or the work took longer than the timeout.
        """
        task = asyncio.ensure_future(work)
        departure = asyncio.ensure_future(_departure(receive))
        self._tasks.add(task)
        if self._cancelled:
            task.cancel()
        try:
            await asyncio.wait((task, departure), timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                if self._timeout is not None and not departure.done():
                    raise REQUEST_TIMED_OUT(self._timeout)
                raise ClientLeftError
            if task.cancelled():
                raise SHUTTING_DOWN()
            return task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()
            departure.cancel()
            # Wait, so that the engine's iterators are closed and their blocks freed before the handler ends.
            await asyncio.wait((task, departure))
            if not task.cancelled():
                task.exception()  # marks the exception as retrieved; asyncio would log it otherwise


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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

"""One request on its way to a server, and the server's answer on its way back.

attempt ── fails before it answers ──> another server
   └────── answers ──> headers, then bytes as they come; of a stream, only whole events
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from octavo.cluster.connections import Headers, ServerAnswer
from octavo.cluster.router import OF_CONNECTION, NoWorkerError, RelayedRequest, Router
from octavo.cluster.selection import Ticket
from octavo.server.apis import EVENTS, REQUEST_ID_HEADER, api_of
from octavo.server.errors import ApiError
from octavo.server.http.connection import ClientLeftError
from octavo.server.http.transport import WRITE_CHUNK

logger = logging.getLogger("octavo.route")

MOST_EVENT_BYTES = 64 * 1024 * 1024
"""Of one event, which is held until it is whole. The longest is the last of a response, which repeats all of it."""

# Attempts for one request: a server may fail before it answers.
_MOST_TRIES = 3
_NOT_RETURNED = OF_CONNECTION | {b"date", b"server", REQUEST_ID_HEADER, b"request-id"}


class WorkerLostError(ApiError):
    """The server was lost while it answered."""

    def __init__(self) -> None:
        message = "The server that was answering this request has gone, so the answer is cut short: send it again."
        super().__init__(HTTPStatus.BAD_GATEWAY, message, type="server_error", code="worker_lost")


class EventTooLargeError(ApiError):
    """A server sent more than `MOST_EVENT_BYTES` without the end of an event."""

    def __init__(self) -> None:
        message = f"The server sent an event of more than {MOST_EVENT_BYTES:,} bytes, so the answer is cut short."
        super().__init__(HTTPStatus.BAD_GATEWAY, message, type="server_error", code="event_too_large")


class Relay:
    """The endpoint that sends requests to servers. An ASGI application, which Starlette calls without wrapping it."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = await self._router.job(Request(scope, receive))
        await RelayedAnswer(self._router, job)(scope, receive, send)


class RelayedAnswer:
    """A server's answer, relayed as it comes; a server that fails before it answers is replaced by another."""

    def __init__(self, router: Router, job: RelayedRequest) -> None:
        self._router = router
        self._job = job
        self._started = self._is_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._router.in_flight.run(receive, self._run(send))
        except ClientLeftError:
            return
        except ApiError as error:
            if not self._started:
                await error.response(scope)(scope, receive, send)
            elif self._is_stream:
                last = api_of(scope).error_event(error.status, error.fields())
                await send({"type": "http.response.body", "body": last, "more_body": False})
            # Else the answer stays unfinished: its connection is closed, so the client sees that it is cut.

    async def _run(self, send: Send) -> None:
        job, left = self._job, list(self._job.workers)
        for _ in range(_MOST_TRIES):
            left = [worker for worker in left if worker.is_healthy]
            if not left:
                left = [worker for worker in self._router.workers.answering(job.model) if worker not in job.workers]
            if not left:
                break
            began = time.perf_counter()
            for_answers = [worker for worker in left if worker.role != "prefill"] or left
            ticket = await self._router.selection.choose(for_answers, job.prompt)
            self._router.stats.choices += 1
            self._router.stats.choice_seconds += time.perf_counter() - began
            try:
                await self._router.prefill(job, ticket)
                if await self._send_to(ticket, send, is_last=len(left) == 1):
                    return
            finally:
                self._router.selection.done(ticket)
            left.remove(ticket.worker)
        raise NoWorkerError(job.model)

    async def _send_to(self, ticket: Ticket, send: Send, *, is_last: bool) -> bool:
        """Send the request to a server and relay its answer; False if another server should be tried."""
        job, worker, stats = self._job, ticket.worker, self._router.stats
        scope = job.request.scope
        target = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        try:
            headers = self._router.headers(job, ticket)
            async with worker.post(target, headers, job.body + job.packed, job.prompt) as answer:
                if answer.status == HTTPStatus.CONFLICT and job.packed:
                    stats.retries["other_tokenizer"] += 1
                    job.packed = b""
                    return await self._send_to(ticket, send, is_last=is_last)
                if answer.status == HTTPStatus.SERVICE_UNAVAILABLE and not is_last:
                    stats.retries["unavailable"] += 1
                    return False
                stats.requests[worker.url, f"{answer.status // 100}xx"] += 1
                if job.prompt.token_ids:
                    stats.prompt_tokens += len(job.prompt.token_ids)
                    stats.cached_tokens += ticket.cached_tokens
                await self._relay(answer, ticket, send)
                return True
        except ApiError:
            raise
        except OSError as error:
            logger.warning("lost %s while it had a request: %s %s", worker.url, type(error).__name__, error)
            await self._router.workers.suspect(worker)
            if not self._started:
                stats.retries["lost"] += 1
                return False
            stats.broken_streams += 1
            raise WorkerLostError from error

    async def _relay(self, answer: ServerAnswer, ticket: Ticket, send: Send) -> None:
        headers = [header for header in answer.headers if header[0] not in _NOT_RETURNED]
        self._is_stream = dict(headers).get(b"content-type", b"").startswith(EVENTS.encode())
        self._started = True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        events = WholeEvents() if self._is_stream else None
        awaits_first = self._is_stream
        write = self._chunk_writer(headers)

        async def take(received: bytes, is_last: bool) -> None:
            nonlocal awaits_first
            chunk = received if events is None else events.feed(received) + (events.rest() if is_last else b"")
            if chunk or is_last:
                if is_last or write is None or not write(chunk):
                    await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
                if awaits_first:
                    awaits_first = False
                    self._router.selection.first_token(ticket)

        await answer.relay(take)

    def _chunk_writer(self, headers: Headers) -> Callable[[bytes], bool] | None:
        """Return what writes a chunk of the answer to the client's connection; None if it has no chunks."""
        scope = self._job.request.scope
        if scope["http_version"] != "1.1" or any(name == b"content-length" for name, _ in headers):
            return None
        write: Callable[[bytes], bool] | None = scope["state"].get(WRITE_CHUNK)
        return write


class WholeEvents:
    """Withholds incomplete events: after one from a lost server, a client could not read an error."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> bytes:
        """Return the events that are whole; raises `EventTooLargeError`."""
        if not self._held and received.endswith(b"\n\n"):
            return received
        # The end of an event may have arrived in two pieces.
        last = self._held[-1][-1:] if self._held else b""
        end = (last + received).rfind(b"\n\n")
        if end < 0:
            self._hold(received)
            return b""
        end += 2 - len(last)
        whole = b"".join((*self._held, received[:end]))
        self._held, self._size = [], 0
        if end < len(received):
            self._hold(received[end:])
        return whole

    def rest(self) -> bytes:
        return b"".join(self._held)

    def _hold(self, part: bytes) -> None:
        self._held.append(part)
        self._size += len(part)
        if self._size > MOST_EVENT_BYTES:
            raise EventTooLargeError

"""HTTP connections with a time limit for each phase of a request.

    connected ── header ──> body ── answer ──> kept alive ── header ──> …
               header_timeout  body_timeout   write_timeout  keep_alive_timeout

The time of a phase is not prolonged by sending a byte now and then (slowloris), but a large body has the time that it
takes at `MIN_BODY_RATE`. An answer that nobody reads is held back at the socket's buffers, and its connection is cut
once nothing could be written for `write_timeout`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.server.config import ServerConfig
from octavo.server.turnstile import Turnstile

# Bytes a second that a body must come at, once its first `body_timeout` is over.
MIN_BODY_RATE = 64 * 1024
# Requests that begin in one round of the event loop: a millisecond or two of it each, over the next few rounds.
_BEGUN_AT_ONCE = 4


@dataclass(slots=True)
class ConnectionCounters:
    """Numbers of connections ended since the start, by reason."""

    refused: int = 0
    slow_header: int = 0
    slow_body: int = 0
    unread: int = 0


def guarded_protocol(
    limits: ServerConfig, counters: ConnectionCounters, gives_way: Callable[[], bool] = lambda: False
) -> type[GuardedConnection]:
    """The connection class for uvicorn, bound to these limits.

    Args:
        gives_way: whether requests that begin or are left should wait, where there are many (`Turnstile`).
    """
    fields = {"limits": limits, "counters": counters, "turnstile": Turnstile(_BEGUN_AT_ONCE, gives_way)}
    return type("LimitedConnection", (GuardedConnection,), fields)


class GuardedConnection(H11Protocol):
    """One connection, with a timer for the phase it is in.

    Attributes:
        limits: `max_connections` and the timeouts of the phases.
        turnstile: of all connections, for those on which a request begins, or whose client leaves before its end.
    """

    limits: ClassVar[ServerConfig]
    counters: ClassVar[ConnectionCounters]
    turnstile: ClassVar[Turnstile]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._held = b""  # what has come and must wait for its turn
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body_began = 0.0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.limits.max_connections:
            self._refused = True
            self.counters.refused += 1
            message = f"The server has {self.limits.max_connections} connections open, the most it accepts."
            transport.write(_plain_answer(HTTPStatus.SERVICE_UNAVAILABLE, message, "too_many_connections", retry=True))
            transport.close()
            return
        super().connection_made(transport)
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._refused:
            return
        for timer in (self._header_timer, self._body_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering or self.turnstile.passes():
            self._lose(exc)
        else:
            # Giving up what was under way takes the event loop half a millisecond, and clients may leave in a crowd.
            self.turnstile.queue(lambda: self._lose(exc))

    def _lose(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # asyncio's transport refers to itself by this method: only a collection of all garbage would find it.
        if hasattr(self.transport, "_read_ready_cb"):
            self.transport._read_ready_cb = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._held:
            self._held += data
            return
        if self.conn.their_state is h11.IDLE and not self.turnstile.passes():
            self._held = data
            # At most what the socket hands over in one go is held.
            self.transport.pause_reading()
            self.turnstile.queue(self._go_on)
            return
        self._take_in(data)

    def _go_on(self) -> None:
        """It is its turn."""
        data, self._held = self._held, b""
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        self._take_in(data)

    def _take_in(self, data: bytes) -> None:
        if self._body_timer is not None:
            self._body_bytes += len(data)
        elif self.conn.their_state is h11.IDLE and self._header_timer is None:
            self._await_header()
        super().data_received(data)
        self._note_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A request that was sent ahead may have begun.
        self._note_phase()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_timeout, self._cut_unread)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _await_header(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_timeout, self._end_slow_header)

    def _note_phase(self) -> None:
        """Start and stop the header and body timers by the phase the client is in."""
        state = self.conn.their_state
        if state is not h11.IDLE and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        if state is h11.SEND_BODY and self._body_timer is None:
            self._body_began, self._body_bytes = self.loop.time(), 0
            self._body_timer = self.loop.call_later(self.limits.body_timeout, self._check_body)
        elif state is not h11.SEND_BODY and self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _check_body(self) -> None:
        deadline = self._body_began + self.limits.body_timeout + self._body_bytes / MIN_BODY_RATE
        # Never within a millisecond: a loop's clock is coarse, and a late byte costs nobody anything.
        if (left := deadline - self.loop.time()) > 0.001:
            self._body_timer = self.loop.call_later(left, self._check_body)
            return
        self._body_timer = None
        self.counters.slow_body += 1
        self._end_slow("The request's body did not come in time.", "body_timeout")

    def _end_slow_header(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        self.counters.slow_header += 1
        if self.conn.trailing_data[0]:
            self._end_slow("The request's header did not come in time.", "header_timeout")
        else:
            self.transport.close()  # nothing was asked

    def _end_slow(self, message: str, code: str) -> None:
        """Send an error in place of the application, tell it that the client disconnected, and close."""
        if self.transport.is_closing():
            return
        answered = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not answered:
            self.transport.write(_plain_answer(HTTPStatus.REQUEST_TIMEOUT, message, code))
        # Not a polite wait for the client to finish: it has had its time. `close` still flushes what is written.
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _cut_unread(self) -> None:
        self._write_timer = None
        self.counters.unread += 1
        self.transport.abort()


def _plain_answer(status: HTTPStatus, message: str, code: str, *, retry: bool = False) -> bytes:
    """A complete response that closes its connection."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(["retry-after: 1"] if retry else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body

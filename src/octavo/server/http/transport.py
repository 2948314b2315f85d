"""HTTP connections with a time limit for each phase of a request.

    connected ── header ──> body ── answer ──> kept alive ── header ──> …
               header_timeout  body_timeout   write_timeout  keep_alive_timeout

Where all connections are taken, a new one closes the one that has waited for a request for the longest: otherwise a
client without a key could hold all of them by opening one whenever one is closed. It is refused if all serve requests.

Sending a byte now and then (slowloris) does not extend the time of a phase, but a large body gets the time that it
takes at `MIN_BODY_RATE`. The time for which received data waits here for its turn is not counted against the client. An
answer that the client does not read waits behind the socket's buffers, and the connection is cut when nothing could be
written for `write_timeout`.
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

from octavo.server.config import ServerLimits
from octavo.server.http.turnstile import Turnstile

WRITE_CHUNK = "write_chunk"
"""Name of `GuardedConnection.write_chunk` in the state of a request's scope."""

# Minimum rate of a body in bytes per second, after its first `body_timeout`.
MIN_BODY_RATE = 64 * 1024
# Number of requests that begin in one round of the event loop; each takes 1-2 ms of the loop over the next few rounds.
_BEGUN_AT_ONCE = 4
# Number of bytes of a connection that are parsed in one round of the event loop: of headers and bodies in chunks, which
# are parsed line by line, and of a body whose length is known. Each part costs 40 µs: 6 ms for 1 MB in parts of 8 KiB,
# and 1 ms in these.
_PARSED_AT_ONCE = 8 * 1024
_BODY_AT_ONCE = 64 * 1024
# Beginnings of requests that need no place among those with a body: a GET takes little work, and a
# monitor that polls /health must not wait behind a burst of bodies.
_WITHOUT_BODY = (b"GET ", b"HEAD ")
# Number of lines that are parsed in one round, over all connections with more than that to parse. h11 takes 4 µs for
# each line of a header, and for each of the two around a chunk of a body.
_LINES_AT_ONCE = 256
# Received bytes beyond which a connection that waits for its turn is not read. Below that it is, so that a client that
# leaves is noticed.
_HELD_AT_MOST = 64 * 1024
# Seconds until a timer looks again at a connection that waits for its turn.
_QUEUED_GRACE = 1.0
# Size limit of a request's header, whose lines h11 parses all at once.
MAX_HEADER_BYTES = 16 * 1024


@dataclass(slots=True)
class ConnectionCounters:
    """Numbers of connections ended since the server's start, by reason."""

    refused: int = 0
    displaced: int = 0
    slow_header: int = 0
    slow_body: int = 0
    unread: int = 0


def guarded_protocol(
    limits: ServerLimits,
    counters: ConnectionCounters,
    gives_way: Callable[[], bool] = lambda: False,
    shares: Callable[[], bool] = lambda: False,
) -> type[GuardedConnection]:
    """Return the connection class for uvicorn, bound to these limits.

    Args:
        gives_way: returns whether queued requests that begin should wait; see `Turnstile`.
        shares: returns whether what takes long to parse should rest after each part; see `Turnstile`.
    """
    fields = {
        "limits": limits,
        "counters": counters,
        "idle": {},
        "turnstile": Turnstile(_BEGUN_AT_ONCE, gives_way),
        "bodiless": Turnstile(_BEGUN_AT_ONCE, gives_way),
        "parsing": Turnstile(1, gives_way, shares),
    }
    return type("LimitedConnection", (GuardedConnection,), fields)


class GuardedConnection(H11Protocol):
    """One connection, with a timer for the phase it is in.

    Attributes:
        limits: `max_connections` and the timeouts of the phases.
        idle: shared by all connections: those on which no request waits for its answer, the longest first. A client
            may still be sending its header, or a body that was answered without being read.
        turnstile: shared by all connections; limits how many requests begin at a time.
        bodiless: the same for requests without a body, so that they do not wait for those with one.
        parsing: shared by all connections; lets one at a time go on with what takes long to parse.
    """

    limits: ClassVar[ServerLimits]
    counters: ClassVar[ConnectionCounters]
    idle: ClassVar[dict[GuardedConnection, None]]
    turnstile: ClassVar[Turnstile]
    bodiless: ClassVar[Turnstile]
    parsing: ClassVar[Turnstile]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._held = b""  # received data that must wait for its turn
        self._is_queued = False  # whether `_go_on` will be called
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._body_began = 0.0
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.limits.max_connections and not self._displace_one():
            self._refused = True
            self.counters.refused += 1
            message = f"The server has {self.limits.max_connections} connections open, the most it accepts."
            transport.write(_plain_answer(HTTPStatus.SERVICE_UNAVAILABLE, message, "too_many_connections", retry=True))
            transport.close()
            return
        super().connection_made(transport)
        self.app_state = {WRITE_CHUNK: self.write_chunk}
        self.idle[self] = None
        self._await_header()

    def _displace_one(self) -> bool:
        """Close the connection that has been idle for the longest; False if there is none."""
        # A request that waits for its turn has arrived.
        longest = next((connection for connection in self.idle if not connection._held), None)
        if longest is None:
            return False
        self.counters.displaced += 1
        longest.transport.abort()
        # `connection_lost` comes later, and others may connect until then.
        del self.idle[longest]
        self.connections.discard(longest)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._refused:
            return
        self.idle.pop(self, None)
        for timer in (self._header_timer, self._body_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # Only a full garbage collection would free cycles, and a server that is never idle runs none. asyncio's
        # transport refers to itself by this method; the last request, which holds its prompt, to this connection.
        if hasattr(self.transport, "_read_ready_cb"):
            self.transport._read_ready_cb = None
        self.cycle = None  # type: ignore[assignment]  # as it is before the first request
        self.scope, self.app_state = None, {}  # type: ignore[assignment]  # they refer to this by `write_chunk`
        self._unset_keepalive_if_required()

    def write_chunk(self, data: bytes) -> bool:
        """Write a chunk of an answer that is sent in chunks; False if that must wait, or is in vain: then use `send`.

        Through the middleware, uvicorn and h11, a chunk takes 5 µs in a loop, and 26 on a machine that slept before.
        """
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._held:
            self._hold(self._held + data)
            return
        turnstile = self._turnstile_for(data)
        if turnstile is None or turnstile.passes():
            self._take_in(data)
        else:
            self._hold(data)
            self._queue(turnstile)

    def _hold(self, data: bytes) -> None:
        """Keep data until it is its turn."""
        self._held = data
        if len(data) >= _HELD_AT_MOST:
            self.transport.pause_reading()

    def _turnstile_for(self, data: bytes) -> Turnstile | None:
        """Return where received data has to wait for its turn."""
        if _end_of_lines(data, self._is_parsed_by_lines) < len(data):
            return self.parsing
        if self.conn.their_state is not h11.IDLE:
            return None
        return self.bodiless if data.startswith(_WITHOUT_BODY) else self.turnstile

    @property
    def _is_parsed_by_lines(self) -> bool:
        """Whether what comes next is a header, or a body in chunks."""
        if self.conn.their_state is not h11.SEND_BODY:
            return True
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _queue(self, turnstile: Turnstile | None) -> None:
        """Let `_go_on` be called once it is this connection's turn."""
        self._unset_keepalive_if_required()
        if self._is_queued:
            return
        self._is_queued = True
        if turnstile is None:
            self.loop.call_soon(self._go_on)
        else:
            turnstile.queue(self._go_on)

    def _go_on(self) -> None:
        """Continue a connection whose turn it is."""
        self._is_queued = False
        if self.conn.their_state is h11.DONE and not self.transport.is_closing():
            return  # a pipelined request waits until the previous one is answered
        data, self._held = self._held, b""
        if not data or self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self._take_in(data)

    def _take_in(self, data: bytes) -> None:
        by_lines = self._is_parsed_by_lines
        end = _end_of_lines(data[: _PARSED_AT_ONCE if by_lines else _BODY_AT_ONCE], by_lines)
        if end < len(data):
            self._hold(data[end:])
            data = data[:end]
        if self._body_timer is not None:
            self._body_bytes += len(data)
        elif self.conn.their_state is h11.IDLE and self._header_timer is None:
            self._await_header()
        super().data_received(data)
        self._note_phase()
        if self._held:
            self._queue(self._turnstile_for(self._held))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A pipelined request may have begun.
        self._note_phase()
        if self._held:
            self._queue(self._turnstile_for(self._held))

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error object too."""
        self._end(HTTPStatus.BAD_REQUEST, msg, "invalid_http")

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
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.transport.is_closing():
            self.idle.pop(self, None)
        else:
            self.idle.setdefault(self)
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
        left = _QUEUED_GRACE if self._held else deadline - self.loop.time()
        # Do not wait for less than a millisecond: the loop's clock is coarse, and the precision does not matter.
        if left > 0.001:
            self._body_timer = self.loop.call_later(left, self._check_body)
            return
        self._body_timer = None
        self.counters.slow_body += 1
        self._end(HTTPStatus.REQUEST_TIMEOUT, "The request's body did not come in time.", "body_timeout")

    def _end_slow_header(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        received = self.conn.trailing_data[0] + self._held
        if _has_header(received):
            self._header_timer = self.loop.call_later(_QUEUED_GRACE, self._end_slow_header)
            return
        self.counters.slow_header += 1
        if received:
            self._end(HTTPStatus.REQUEST_TIMEOUT, "The request's header did not come in time.", "header_timeout")
        else:
            self.transport.close()  # no part of a request was received

    def _end(self, status: HTTPStatus, message: str, code: str) -> None:
        """Send an error in place of the application's answer, report a disconnect to the application, and close."""
        if self.transport.is_closing():
            return
        # Only if no part of an answer to the same request has been sent.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_plain_answer(status, message, code))
        # Do not wait for the client to finish, because its time is over. `close` still flushes what was written.
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _cut_unread(self) -> None:
        self._write_timer = None
        self.counters.unread += 1
        self.transport.abort()


def _end_of_lines(data: bytes, counts: bool) -> int:
    """Return where the first `_LINES_AT_ONCE` lines of data end, or its size if it has no more or they do not count."""
    end = 0
    for _ in range(_LINES_AT_ONCE if counts else 0):
        end = data.find(b"\n", end) + 1
        if not end:
            break
    return end or len(data)


def _has_header(data: bytes) -> bool:
    """Return whether data from the start of a request has its whole header."""
    return b"\n\r\n" in data or b"\n\n" in data


def _plain_answer(status: HTTPStatus, message: str, code: str, *, retry: bool = False) -> bytes:
    """Return a complete response that closes its connection."""
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

"""A crowd is spread over rounds of the event loop, and everyone in it has its turn."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.server.http.transport import _BEGUN_AT_ONCE, _LINES_AT_ONCE, GuardedConnection
from octavo.server.http.turnstile import _MOST_REST_SECONDS, _MOST_WAITS, Turnstile
from tests.server.conftest import Running, wait_until
from tests.server.fake_engine import FakeEngine
from tests.server.http.test_connections import BODY, HEAD, answer_of

NUM_CONNECTIONS = 40
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


class LoopEngine(FakeEngine):
    """Remembers the server's event loop."""

    async def start(self) -> None:
        await super().start()
        self.loop = asyncio.get_running_loop()


def connected(server: Running) -> list[socket.socket]:
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(NUM_CONNECTIONS)]
    wait_until(lambda: len(server.server.server_state.connections) >= NUM_CONNECTIONS)
    return connections


class Rounds:
    """Counts the rounds of the event loop that runs."""

    def __init__(self) -> None:
        self.number = 0
        self._tick()

    def _tick(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._tick)


def test_large_ones_take_several_places_of_a_round() -> None:
    async def run() -> None:
        turnstile, rounds = Turnstile(4), Rounds()
        passed: list[int] = []

        async def go(size: int) -> None:
            await turnstile.turn(size)
            passed.append(rounds.number)

        await asyncio.gather(*map(go, [2, 2, 9, 1, 1, 1, 1, 1]))
        rounds_of = [[number for number in passed if number == when] for when in sorted(set(passed))]
        assert [len(together) for together in rounds_of] == [2, 1, 4, 1]

    asyncio.run(run())


def test_so_many_pass_in_a_round_and_all_in_the_order_they_came() -> None:
    async def run() -> None:
        turnstile, rounds = Turnstile(3), Rounds()
        passed: list[tuple[int, int]] = []

        async def go(number: int) -> None:
            await turnstile.turn()
            passed.append((number, rounds.number))

        await asyncio.gather(*map(go, range(10)))
        assert [number for number, _ in passed] == list(range(10))
        assert max(Counter(when for _, when in passed).values()) == 3
        # A crowd that has gone costs nobody a turn.
        assert turnstile.passes()

    asyncio.run(run())


def test_who_is_cancelled_in_line_is_passed_over() -> None:
    async def run() -> None:
        turnstile = Turnstile(1)
        tasks = [asyncio.ensure_future(turnstile.turn()) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [False, True, False, False]

    asyncio.run(run())


@pytest.mark.slow
def test_requests_that_come_at_once_begin_in_many_rounds_and_all_are_answered(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(LoopEngine())
    begun: Counter[int] = Counter()
    rounds: list[Rounds] = []
    take_in = GuardedConnection._take_in

    def counted(self: Any, data: bytes) -> None:
        begun[rounds[0].number] += 1
        take_in(self, data)

    monkeypatch.setattr(GuardedConnection, "_take_in", counted)
    loop = server.engine.loop
    loop.call_soon_threadsafe(lambda: rounds.append(Rounds()))
    wait_until(lambda: bool(rounds))
    connections = connected(server)
    # All come while the loop is busy.
    loop.call_soon_threadsafe(time.sleep, 0.2)
    for connection in connections:
        connection.sendall(REQUEST)
    for connection in connections:
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
        connection.close()
    assert begun.total() == NUM_CONNECTIONS
    assert max(begun.values()) <= _BEGUN_AT_ONCE


@pytest.mark.slow
def test_bodies_in_many_chunks_are_parsed_one_in_a_round(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(LoopEngine())
    parsed: Counter[int] = Counter()
    rounds: list[Rounds] = []
    receive = H11Protocol.data_received

    def counted(self: H11Protocol, data: bytes) -> None:
        # Beginnings and ends that need not wait have fewer lines.
        parsed[rounds[0].number] += data.count(b"\n") == _LINES_AT_ONCE
        receive(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", counted)
    loop = server.engine.loop
    loop.call_soon_threadsafe(lambda: rounds.append(Rounds()))
    wait_until(lambda: bool(rounds))
    connections = connected(server)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * 256) + b"0\r\n\r\n"
    loop.call_soon_threadsafe(time.sleep, 0.2)
    for connection in connections:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    for connection in connections:
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
        connection.close()
    assert parsed.total() >= 2 * len(connections)
    assert max(parsed.values()) == 1


def test_who_leaves_in_line_is_forgotten(start_server: Callable[..., Running]) -> None:
    server = start_server(LoopEngine())
    connections = connected(server)
    server.engine.loop.call_soon_threadsafe(time.sleep, 0.1)
    for connection in connections:
        connection.sendall(REQUEST)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_until(lambda: not server.server.server_state.connections)
    assert server.client.get("/health").status_code == 200
    wait_until(lambda: not server.engine.running)


def test_who_stands_in_line_waits_while_a_step_needs_the_interpreter_but_not_for_good() -> None:
    async def run() -> None:
        is_planning, asked = True, 0

        def gives_way() -> bool:
            nonlocal asked
            asked += 1
            return is_planning

        turnstile = Turnstile(1, gives_way)
        turns = [asyncio.ensure_future(turnstile.turn()) for _ in range(3)]
        await asyncio.wait_for(turns[0], 60)
        await asyncio.wait_for(turns[1], 60)
        assert asked >= _MOST_WAITS
        is_planning = False
        await asyncio.wait_for(turns[2], 60)

    asyncio.run(run())


def test_a_crowd_rests_for_twice_as_long_as_it_worked_while_a_step_is_under_way() -> None:
    is_stepping, rests = True, []

    async def run() -> None:
        turnstile = Turnstile(1, shares=lambda: is_stepping)
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def noted(delay: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            rests.append(delay)
            return call_later(delay, *args, **kwargs)

        loop.call_later = noted  # type: ignore[assignment]

        async def go() -> None:
            await turnstile.turn()
            time.sleep(0.002)

        await asyncio.gather(*(go() for _ in range(4)))

    asyncio.run(run())
    assert len(rests) == 3
    assert all(0.004 <= rest <= _MOST_REST_SECONDS for rest in rests)
    is_stepping = False
    asyncio.run(run())
    assert len(rests) == 3

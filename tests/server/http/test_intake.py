"""Bodies on their way in: what all of them hold is bounded, and whoever stalls many makes room with his own."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from starlette.requests import Request

from octavo.server.errors import TOO_MANY_BODIES, TOO_MANY_TENANT_BODIES, ApiError
from octavo.server.http.connection import FREE_BYTES, BodyIntake
from octavo.server.keys import Client
from tests.server.conftest import Running, wait_until
from tests.server.http.test_connections import HEAD, connect

pytestmark = pytest.mark.anyio

KIB = 1024


class Upload:
    """A body that comes in chunks as the test sends them."""

    def __init__(self, intake: BodyIntake, tenant: str = "") -> None:
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._intake = intake
        self._tenant = tenant
        self.read = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    async def send(self, size: int) -> None:
        self._chunks.put_nowait(b" " * size)
        for _ in range(5):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        self._chunks.put_nowait(None)
        for _ in range(5):
            await asyncio.sleep(0)

    async def _receive(self) -> dict[str, object]:
        chunk = await self._chunks.get()
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    async def _run(self) -> int:
        state = {"client": Client(tenant=self._tenant)} if self._tenant else {}
        scope = {"type": "http", "method": "POST", "headers": [], "state": state}
        async with self._intake.body(Request(scope, self._receive)) as raw:
            await self.read.wait()
            return len(raw)

    async def error(self) -> ApiError:
        with pytest.raises(ApiError) as refusal:
            await self.task
        return refusal.value


def intake(most_in_all: int = 100 * KIB) -> BodyIntake:
    return BodyIntake(1024 * KIB, most_in_all)


async def test_the_body_that_began_first_makes_room_for_others() -> None:
    bodies = intake()
    stalled = [Upload(bodies) for _ in range(4)]
    for upload in stalled:
        await upload.send(FREE_BYTES + 30 * KIB)
    assert bodies.held == 90 * KIB
    error = await stalled[0].error()
    assert (error.status, error.code, dict(error.headers or {})) == (503, "too_many_bodies", {"Retry-After": "1"})
    assert str(100 * KIB) in str(error)
    for upload in stalled[1:]:
        upload.read.set()
        await upload.finish()
        assert await upload.task == FREE_BYTES + 30 * KIB
    assert bodies.held == 0


async def test_the_tenant_that_holds_the_most_makes_room_though_others_began_before() -> None:
    bodies = intake()
    quiet = Upload(bodies, "quiet")
    await quiet.send(FREE_BYTES + 20 * KIB)
    greedy = [Upload(bodies, "greedy") for _ in range(3)]
    for upload in greedy:
        await upload.send(FREE_BYTES + 40 * KIB)
    error = await greedy[0].error()
    assert error.code == TOO_MANY_TENANT_BODIES.code
    assert (error.status, error.code) == (429, "too_many_tenant_bodies")
    assert dict(error.headers or {}) == {"Retry-After": "1"}
    assert f"of this API key's tenant exceed {50 * KIB} bytes together" in str(error)
    assert not quiet.task.done()
    for upload in (quiet, *greedy[1:]):
        upload.read.set()
        await upload.finish()
        await upload.task
    assert bodies.held == 0


async def test_a_body_that_has_come_whole_is_not_cut_and_counts_until_it_is_read() -> None:
    bodies = intake()
    whole = Upload(bodies)
    await whole.send(FREE_BYTES + 90 * KIB)
    await whole.finish()
    late = Upload(bodies)
    await late.send(FREE_BYTES + 20 * KIB)
    assert (await late.error()).code == TOO_MANY_BODIES.code
    small = Upload(bodies)
    small.read.set()
    await small.send(FREE_BYTES)
    await small.finish()
    assert await small.task == FREE_BYTES
    whole.read.set()
    assert await whole.task == FREE_BYTES + 90 * KIB
    assert bodies.held == 0


async def test_whether_the_server_or_its_tenant_holds_too_much_is_told_apart_by_half_of_the_limit() -> None:
    bodies = intake()
    whole = Upload(bodies, "greedy")
    await whole.send(FREE_BYTES + 90 * KIB)
    await whole.finish()
    quiet = Upload(bodies, "quiet")
    await quiet.send(FREE_BYTES + 20 * KIB)
    assert (await quiet.error()).code == TOO_MANY_BODIES.code
    own = Upload(bodies, "greedy")
    await own.send(FREE_BYTES + 20 * KIB)
    assert (await own.error()).code == TOO_MANY_TENANT_BODIES.code
    whole.read.set()
    await whole.task
    assert bodies.held == 0


async def test_a_cancelled_upload_is_no_cut_one() -> None:
    bodies = intake()
    upload = Upload(bodies)
    await upload.send(FREE_BYTES + KIB)
    upload.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload.task
    assert bodies.held == 0


@contextmanager
def stalling(server: Running, count: int, size: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent all of a body but its last bytes."""
    held = [connect(server) for _ in range(count)]
    try:
        for connection in held:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (size + 10) + b" " * size)
        yield held
    finally:
        for connection in held:
            connection.close()


def read_answer(connection: socket.socket) -> bytes:
    """An error's head and body, which may come apart."""
    answer = b""
    while b"}}" not in answer and (received := connection.recv(65536)):
        answer += received
    return answer


def test_a_hundred_stalled_bodies_hold_no_more_than_the_limit(start_server: Callable[..., Running]) -> None:
    server = start_server(server_limits={"max_total_body_size": "1MiB", "max_body_size": "512KiB"})
    with stalling(server, 100, 256 * KIB) as held:
        wait_until(lambda: len(select.select(held, [], [], 0)[0]) >= 90)
        answers = [read_answer(connection) for connection in select.select(held, [], [], 0)[0]]
        assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
        assert all(b'"code": "too_many_bodies"' in answer for answer in answers)
        large = json.dumps({"prompt": "x", "max_tokens": 1, "user": "u" * 50, "metadata": {"m": "y" * 200_000}})
        for body in ('{"prompt": "x", "max_tokens": 1}', large):
            assert server.client.post("/v1/completions", content=body).status_code == 200
    wait_until(lambda: not server.server.server_state.connections or not server.engine.running)


@pytest.mark.parametrize("most", [200, 100], ids=["to make room", "because it is too large"])
async def test_what_came_of_a_body_that_is_cut_off_is_freed(most: int) -> None:
    """Its error held what had come, in a cycle: 450 MiB a round of stalled bodies, until a server was idle."""
    bodies = intake(most * KIB)
    cut = Upload(bodies)
    await cut.send(100 * KIB)
    await cut.send(100 * KIB)
    other = Upload(bodies)
    await other.send(200 * KIB)
    error = await cut.error()
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    received = [frame.f_locals["chunks"] for frame in frames if "chunks" in frame.f_locals]
    assert received == [[]]
    assert not any(frame.f_locals.get("refusal") is error for frame in frames)
    assert not any(getattr(frame.f_locals.get("body"), "refusal", None) is error for frame in frames)
    other.task.cancel()

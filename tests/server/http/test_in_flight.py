"""Work in flight is stopped for a reason, and its handler goes on after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from octavo.server.errors import ApiError
from octavo.server.http.connection import ClientLeftError, InFlight


async def until_stopped() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # as an engine's iterator does, which frees its blocks


async def stay() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def leave() -> dict[str, Any]:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("timeout", "receive", "stop", "error"),
    [
        (None, leave, None, ClientLeftError),
        (0.0, stay, None, "request_timeout"),
        (None, stay, InFlight.cancel_all, "shutting_down"),
    ],
)
def test_work_that_is_stopped_raises_the_reason_and_its_handler_can_still_answer(
    timeout: float | None, receive: Any, stop: Callable[[InFlight], None] | None, error: Any
) -> None:
    async def handle() -> None:
        in_flight = InFlight(timeout)
        if stop is not None:
            asyncio.get_running_loop().call_soon(stop, in_flight)
        with pytest.raises(ApiError if isinstance(error, str) else error) as raised:
            await in_flight.run(receive, until_stopped())
        if isinstance(error, str):
            assert raised.value.code == error
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert (len(in_flight), task.cancelling()) == (0, 0)

    asyncio.run(handle())


def test_a_handler_that_is_cancelled_itself_is_cancelled() -> None:
    async def handle() -> None:
        handler = asyncio.ensure_future(InFlight().run(stay, until_stopped()))
        await asyncio.sleep(0)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler

    asyncio.run(handle())


def test_work_that_arrives_after_all_was_cancelled_does_not_begin() -> None:
    async def work() -> None:
        raise AssertionError

    async def handle() -> None:
        in_flight = InFlight()
        in_flight.cancel_all()
        with pytest.raises(ApiError, match="shutting down"):
            await in_flight.run(stay, work())

    asyncio.run(handle())

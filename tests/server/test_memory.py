"""The interpreter's settings in a process that serves, and the memory that it gives back."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from octavo.server import interpreter_settings, run
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.http.connection import InFlight
from tests.server.fake_engine import FakeEngine


def test_threads_of_a_server_wait_200_microseconds_for_the_interpreters_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[bool] = []
    monkeypatch.setattr(interpreter_settings, "settle_garbage_collection", lambda: settled.append(True))
    before = sys.getswitchinterval()
    try:
        interpreter_settings.settle_interpreter()
        assert sys.getswitchinterval() == pytest.approx(0.0002)
    finally:
        sys.setswitchinterval(before)
    assert settled == [True]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_below_what_is_in_use_is_returned() -> None:
    # Larger than Python's own allocator takes, smaller than what malloc maps by itself.
    blocks = [b"x" * 10_000 for _ in range(10_000)]
    in_use = blocks[-1]
    full = resident()
    del blocks
    interpreter_settings.return_free_memory()
    assert full - resident() > 80 * 2**20
    assert len(in_use) == 10_000


def test_a_server_returns_freed_memory_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = []
    monkeypatch.setattr(run, "return_free_memory", lambda: returned.append(True))
    config, engine = ServerConfig(), FakeEngine()
    server = run.Server(create_app(cast("Any", engine), config), config, InFlight(), "fake")
    server.config.load()

    async def tick(count: int) -> None:
        for counter in range(count):
            assert not await server.on_tick(counter)

    asyncio.run(tick(900))
    assert len(returned) == 3

"""The interpreter's settings in a process that serves."""

from __future__ import annotations

import sys

import pytest

from octavo.server import memory


def test_threads_of_a_server_wait_200_microseconds_for_the_interpreters_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[bool] = []
    monkeypatch.setattr(memory, "settle_garbage_collection", lambda: settled.append(True))
    before = sys.getswitchinterval()
    try:
        memory.settle_interpreter()
        assert sys.getswitchinterval() == pytest.approx(0.0002)
    finally:
        sys.setswitchinterval(before)
    assert settled == [True]

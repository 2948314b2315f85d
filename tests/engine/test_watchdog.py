"""A step that hangs is told, in the log, the statistics and over HTTP; nothing is ended for it."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.watchdog import Watchdog
from octavo.observe.stats import EngineStats
from tests.engine.tiny_engine import assert_drained, is_drained, tiny_core
from tests.server.conftest import running_server, wait_until


@pytest.fixture
def stats() -> EngineStats:
    return EngineStats(max_model_len=100)


@pytest.fixture
def watchdog(stats: EngineStats) -> Watchdog:
    return Watchdog(threading.current_thread(), stats, 10.0)


def test_a_step_in_time_is_not_reported(
    watchdog: Watchdog, stats: EngineStats, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog.check(1.0)
    watchdog.began = 1.0
    watchdog.check(10.9)
    assert (stats.num_hung_steps, stats.hung_step_seconds, caplog.text) == (0, None, "")


def test_a_step_that_hangs_is_reported_each_time_its_age_has_doubled(
    watchdog: Watchdog, stats: EngineStats, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog.began = 1.0
    reported = []
    for now in range(100):
        caplog.clear()
        watchdog.check(float(now))
        if caplog.records:
            reported.append(now)
    assert reported == [11, 21, 41, 81]
    assert (stats.num_hung_steps, stats.hung_step_seconds) == (1, 98.0)


def test_the_log_has_the_stack_of_the_engines_thread(watchdog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    watchdog.began = 0.0
    watchdog.check(12.0)
    assert "a step has been running for 12 s" in caplog.text
    assert "test_the_log_has_the_stack_of_the_engines_thread" in caplog.text


@pytest.mark.parametrize("after", [None, 40.0])
def test_the_end_of_a_step_that_hung_is_told(
    watchdog: Watchdog, stats: EngineStats, caplog: pytest.LogCaptureFixture, after: float | None
) -> None:
    watchdog.began = 1.0
    watchdog.check(31.0)
    watchdog.began = after
    watchdog.check(41.0)
    assert "the hung step has ended" in caplog.text
    assert (stats.num_hung_steps, stats.hung_step_seconds) == (1, None)


def test_a_server_whose_step_hangs_says_so_and_goes_on_once_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "octavo")
    hanging, free = threading.Event(), threading.Event()
    with tiny_core() as core:
        execute = core.runner.execute

        def hang(plan: Any) -> Any:
            hanging.set()
            assert free.wait(120)
            return execute(plan)

        core.runner.execute = hang
        engine = AsyncEngine(core, "tiny", watchdog_seconds=0.05)
        with running_server(engine, shutdown_timeout=0) as server, ThreadPoolExecutor(1) as callers:
            try:
                body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
                call = callers.submit(server.post, "/v1/completions", body)
                assert hanging.wait(60)
                wait_until(lambda: core.stats.hung_step_seconds is not None)
                health = server.client.get("/health")
                assert (health.status_code, health.json()["status"]) == (200, "degraded")
                assert "A step of the engine has been running for" in health.json()["detail"]
                ready = server.client.get("/ready")
                assert (ready.status_code, ready.json()["error"]["code"]) == (503, "step_hangs")
                assert "octavo:hung_steps_total{" in server.client.get("/metrics").text
            finally:
                free.set()
            assert call.result().status_code == 200
            wait_until(lambda: core.stats.hung_step_seconds is None)
            assert server.client.get("/health").json() == {"status": "ok"}
            assert server.client.get("/ready").status_code == 200
            wait_until(lambda: is_drained(core) and not engine._streams)
            assert_drained(core)
    assert "in hang" in caplog.text, "the stack names the function that waits"
    assert core.stats.num_hung_steps >= 1

"""Where servers are named, and when they take requests."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import octavo.cluster.workers
from octavo.cluster.config import RouterConfig
from octavo.cluster.connections import Connections
from octavo.cluster.workers import REGISTERED_SECONDS, Worker, Workers
from octavo.errors import ConfigError

FACTS = {"instance": "1", "names": ["m"], "fingerprint": "f", "block_size": 16, "kv_events": None}
HANGS = "hangs"


class Fleet:
    """What stands in for servers, by URL: their facts; None where nothing answers, a number for a status, `HANGS`."""

    def __init__(self, **options: Any) -> None:
        self.servers: dict[str, Any] = {}
        self.closed: list[str] = []
        self.log: list[str] = []
        self.workers = Workers(RouterConfig(**options), "way", lambda url: _Connections(self, url))
        self.workers.on_up = self._up
        self.workers.on_down = self._down

    async def _up(self, worker: Worker) -> None:
        self.log.append(f"up {worker.url}")

    async def _down(self, worker: Worker) -> None:
        self.log.append(f"down {worker.url}")

    def check(self) -> list[str]:
        """Check all, and return those that take requests."""
        asyncio.run(self.workers.check_all())
        return sorted(worker.url for worker in self.workers.healthy())


class _Connections(Connections):
    def __init__(self, fleet: Fleet, url: str) -> None:
        self._fleet = fleet
        self._url = url

    async def get(self, target: str, headers: Any = ()) -> tuple[int, bytes]:
        server = self._fleet.servers.get(self._url)
        if server is None:
            raise OSError("refused")
        if server == HANGS:
            await asyncio.Event().wait()
        assert headers == ((b"authorization", b"Bearer way"),)
        return (server, b"no") if isinstance(server, int) else (200, json.dumps(server).encode())

    def close(self) -> None:
        self._fleet.closed.append(self._url)


A, B = "http://a:1", "http://b:2"


def test_a_server_takes_requests_while_it_is_ready_and_may_miss_a_check() -> None:
    fleet = Fleet(worker=[A, B + "/"])
    fleet.servers = {A: FACTS, B: None}
    assert fleet.check() == [A]
    fleet.servers[B] = FACTS
    assert fleet.check() == [A, B]
    fleet.servers[A] = None
    assert fleet.check() == [A, B]
    assert [worker.url for worker in fleet.workers.answering(None)] == [B]
    assert fleet.check() == [B]
    assert fleet.closed == [A], "requests that wait for a server that hangs must end"
    fleet.servers |= {A: FACTS, B: 503}
    assert fleet.check() == [A], "a server that stops says so itself"
    assert fleet.log == [f"up {A}", f"up {B}", f"down {A}", f"down {B}", f"up {A}"] or fleet.log[:3] == [
        f"up {A}",
        f"up {B}",
        f"down {A}",
    ]


def test_a_server_that_was_started_anew_is_forgotten_and_added_again() -> None:
    fleet = Fleet(worker=[A])
    fleet.servers = {A: FACTS}
    fleet.check()
    fleet.servers = {A: {**FACTS, "instance": "2"}}
    assert fleet.check() == [A]
    assert fleet.log == [f"up {A}", f"down {A}", f"up {A}"]


def test_events_are_followed_anew_after_a_missed_check() -> None:
    fleet = Fleet(worker=[A])
    for answers in ({A: FACTS}, {}, {A: FACTS}, {A: FACTS}):
        fleet.servers = answers
        assert fleet.check() == [A]
    assert fleet.log == [f"up {A}"] * 2


def test_a_server_that_cannot_be_forgotten_does_not_end_the_checks_of_the_others() -> None:
    fleet = Fleet(worker=[A, B])
    fleet.servers = {A: FACTS, B: FACTS}
    assert fleet.check() == [A, B]

    async def fail(worker: Worker) -> None:
        raise RuntimeError("the index does not know it")

    fleet.workers.on_down = fail
    fleet.servers = {A: None, B: FACTS}
    for _ in range(2):
        fleet.check()
    assert fleet.check() == [B]
    fleet.servers = {A: FACTS, B: FACTS}
    assert fleet.check() == [A, B]


def test_a_search_for_servers_that_fails_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, searches = Fleet(worker=[A], health_interval=0.001), list[int]()

    async def urls() -> set[str]:
        searches.append(1)
        if len(searches) == 1:
            raise RuntimeError("whatever it is")
        raise asyncio.CancelledError

    monkeypatch.setattr(fleet.workers, "_urls", urls)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(fleet.workers.run())
    assert len(searches) == 2


def test_a_server_that_hangs_does_not_delay_the_checks_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo.cluster.workers, "_CHECK_SECONDS", 3600.0)
    fleet = Fleet(worker=[A], accept_workers=True, health_interval=0.001)
    fleet.servers = {A: HANGS, B: FACTS}
    fleet.workers.register(B)

    async def until(log: list[str]) -> None:
        while fleet.log != log:
            await asyncio.sleep(0.001)

    async def watch() -> None:
        checks = asyncio.ensure_future(fleet.workers.run())
        async with asyncio.timeout(60):
            await until([f"up {B}"])
            fleet.servers[B] = None
            await until([f"up {B}", f"down {B}"])
            fleet.servers[B] = FACTS
            await until([f"up {B}", f"down {B}", f"up {B}"])
        checks.cancel()
        with suppress(asyncio.CancelledError):
            await checks

    asyncio.run(watch())


def test_requests_that_are_lost_at_once_lead_to_one_check() -> None:
    fleet = Fleet(worker=[A])
    fleet.servers = {A: {**FACTS, "instance": "1"}}
    fleet.check()
    (worker,) = fleet.workers.healthy()
    fleet.servers = {A: {**FACTS, "instance": "2"}}

    async def slow(up: Worker) -> None:
        await asyncio.sleep(0)
        fleet.log.append(f"up {up.url}")

    fleet.workers.on_up = slow

    async def lose() -> None:
        await asyncio.gather(*(fleet.workers.suspect(worker) for _ in range(4)))

    asyncio.run(lose())
    assert fleet.log == [f"up {A}", f"down {A}", f"up {A}"]


def test_a_lost_connection_makes_a_server_be_checked_at_once() -> None:
    fleet = Fleet(worker=[A])
    fleet.servers = {A: FACTS}
    fleet.check()
    (worker,) = fleet.workers.healthy()
    asyncio.run(fleet.workers.suspect(worker))
    assert worker.is_healthy, "it answers"
    fleet.servers = {}
    asyncio.run(fleet.workers.suspect(worker))
    assert not worker.is_healthy


def test_a_file_is_read_again_when_it_changes_and_a_bad_line_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text(f"# ours\n{A}  # the first\n\n")
    fleet = Fleet(workers_file=str(file))
    fleet.servers = {A: FACTS, B: FACTS}
    assert fleet.check() == [A]
    for text, expected in ((f"{A}\n{B}\n", [A, B]), ("nonsense\n", [A, B]), (f"{B}\n", [B])):
        file.write_text(text)
        # However coarse the file system's clock is.
        stat = file.stat()
        os.utime(file, (stat.st_atime, stat.st_mtime + len(text)))
        assert fleet.check() == expected
    file.unlink()
    assert fleet.check() == [B]


def test_servers_register_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(accept_workers=True)
    fleet.servers = {A: FACTS, B: FACTS}
    assert fleet.check() == []
    fleet.workers.register(A)
    fleet.workers.register(B + "/")
    assert fleet.check() == [A, B]
    fleet.workers.unregister(B)
    assert fleet.check() == [A]
    now = time.monotonic() + REGISTERED_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert fleet.check() == []


def test_each_address_of_a_name_is_a_server() -> None:
    fleet = Fleet(workers_dns="localhost:7")
    fleet.servers = {"http://127.0.0.1:7": FACTS}
    assert fleet.check() == ["http://127.0.0.1:7"]


@pytest.mark.parametrize(
    ("url", "published", "seen"),
    [
        ("http://10.0.0.7:8000", "tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("http://host:8000", "tcp://127.0.0.1:5557", "tcp://host:5557"),
        ("http://host:8000", "tcp://10.1.1.1:5557", "tcp://10.1.1.1:5557"),
        ("http://host:8000", "ipc:///run/events", "ipc:///run/events"),
        ("http://host:8000", None, None),
    ],
)
def test_events_are_read_from_the_host_that_is_routed_to(url: str, published: Any, seen: Any) -> None:
    facts = {**FACTS, "kv_events": None if published is None else {"endpoint": published}}
    assert Worker(url, Connections(url), facts).event_address("endpoint") == seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no servers: give --worker"),
        ({"worker": ["10.0.0.1:80"]}, "must be a URL such as"),
        ({"workers_dns": "host"}, "must be HOST:PORT"),
        ({"worker": [A], "replica_sync_peers": ["tcp://x:1"]}, "needs replica_sync_port"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**options)

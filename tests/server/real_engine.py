"""A server over the real engine, and what tests look at from outside: streams, usage, counters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.core import EngineCore
from octavo.server.access import AcceptedKeys
from octavo.server.config import ServerConfig
from tests.engine.tiny_engine import assert_drained, is_drained, slow_down, tiny_core
from tests.server.conftest import Running, running_server, wait_until

MODEL = "tiny"


class RealServer(Running):
    """A server over a tiny random model."""

    @property
    def core(self) -> EngineCore:
        return self.engine.core

    def assert_nothing_runs(self) -> None:
        """No request is left anywhere, no block is held, and the accounting is proven."""
        wait_until(lambda: is_drained(self.core) and not self.engine._streams)
        assert_drained(self.core)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The response to a completion of exactly `max_tokens` tokens, greedy unless said otherwise."""
        response = self.post("/v1/completions", {"prompt": prompt, "ignore_eos": True, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """Everything a stream sent."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream"), response.read()
            return [line.removeprefix("data: ") for line in response.iter_lines() if line]

    def counters(self) -> dict[str, float]:
        """The samples of /metrics by name, buckets left out; /stop, /length, … where there is a reason."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
        return {sample.name + _reason(sample.labels): sample.value for sample in samples}


def _reason(labels: dict[str, str]) -> str:
    return f"/{labels['finished_reason']}" if "finished_reason" in labels else ""


@contextmanager
def real_server(server_options: dict[str, Any] | None = None, **options: Any) -> Iterator[RealServer]:
    """`options` are the engine's."""
    with tiny_core(**options) as core:
        engine = AsyncEngine(core, MODEL, idle_audit_seconds=0.2)
        with running_server(engine, **{"shutdown_timeout": 0, **(server_options or {})}) as running:
            yield RealServer(running.url, running.port, engine, running.client, running.server)


@contextmanager
def slowed_down(real: RealServer) -> Iterator[None]:
    """Steps take a tenth of a second longer meanwhile."""
    hurry = slow_down(real.core, 0.1)
    try:
        yield
    finally:
        hurry()


@contextmanager
def revocable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RealServer, Callable[[], object]]]:
    """A server whose key `admin-key`, an admin's, is revoked by a call of the second value."""
    file, made = folder / "keys.toml", list[AcceptedKeys]()

    def access(config: ServerConfig) -> AcceptedKeys:
        made.append(AcceptedKeys(config))
        return made[-1]

    def revoke() -> None:
        file.write_text(text.replace("admin-key", "another-key"))
        assert made[0].reread()

    text = '[tenants.operations]\nkeys = ["admin-key"]\nadmin = true\n'
    file.write_text(text)
    file.chmod(0o600)
    with monkeypatch.context() as patched:
        patched.setattr("octavo.server.app.AcceptedKeys", access)
        with real_server({"keys_file": str(file)}, num_blocks=65) as server:
            yield server, revoke


def sse_objects(events: list[str]) -> list[dict[str, Any]]:
    """The JSON of a stream's events; checks that it ended as it should."""
    *objects, done = events
    assert done == "[DONE]"
    return [json.loads(event) for event in objects]


def error_of(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]

"""A real Prometheus scrapes a real run, and evaluates every query of the dashboard and every alert."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.files import ADMIN_KEY, HOW_TO_GET_IT, PROMETHEUS, RULES, alerts, dashboard_queries, with_tiers
from tests.ports import free_port
from tests.server.real_engine import RealServer, real_server

pytestmark = [pytest.mark.integration, pytest.mark.skipif(PROMETHEUS is None, reason=HOW_TO_GET_IT)]


class Prometheus:
    """A running Prometheus, asked over its API."""

    def __init__(self, client: httpx.Client, log: Path) -> None:
        self._client = client
        self._log = log

    def get(self, path: str, **params: str) -> Any:
        """The data of an answer; None where it has not started yet."""
        try:
            response = self._client.get(path, params=params)
        except httpx.ConnectError:
            return None
        if response.status_code == 503:
            return None
        assert response.status_code == 200, (params, response.text)
        return response.json()["data"]

    def query(self, query: str) -> list[dict[str, Any]]:
        data = self.get("/query", query=query)
        return [] if data is None else list(data["result"])

    def answer(self, query: str) -> list[dict[str, Any]]:
        """The results of a query once it has any."""
        self.wait_until(lambda: bool(self.query(query)), query)
        return self.query(query)

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, f"{what}\n{self.get('/targets')}\n{self._log.read_text()[-2000:]}"
            time.sleep(0.05)


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    """One with our rules, that scrapes `target`."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "octavo",
                "static_configs": [{"targets": [target]}],
                "authorization": {"credentials": ADMIN_KEY},
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address, log = f"127.0.0.1:{free_port()}", folder / "log"
    # It looks for targets five seconds after its start, which no option changes, and then at this interval.
    command = [str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", "--scrape.discovery-reload-interval=100ms"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1", timeout=60) as client:
            yield Prometheus(client, log)
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def scraped_server(folder: Path) -> Iterator[tuple[RealServer, Prometheus]]:
    """A server that computes, and a Prometheus that has scraped it before."""
    port = free_port()
    # The server starts while Prometheus waits.
    with (
        prometheus(f"127.0.0.1:{port}", folder) as found,
        real_server({"port": port, "admin_key": ADMIN_KEY}, **with_tiers(folder / "disk")) as server,
    ):
        found.wait_until(lambda: bool(found.query("octavo:steps_total")), "no sample")
        yield server, found


def test_every_query_of_the_dashboard_has_an_answer_and_every_alert_is_evaluated(tmp_path: Path) -> None:
    with scraped_server(tmp_path) as (server, found):
        for _ in range(2):
            server.complete(list(range(5, 45)), max_tokens=4)
        steps = server.counters()["octavo:steps_total"]
        risen = f"octavo:steps_total >= {steps} and rate(octavo:steps_total[1m]) > 0"
        found.wait_until(lambda: bool(found.query(risen)), "the steps were not scraped")
        for query in dashboard_queries():
            # A series that began with the requests has no rate before its second sample.
            results = found.answer(query)
            assert all(not math.isnan(float(result["value"][1])) for result in results), query

        def health() -> dict[str, str]:
            return {rule["name"]: rule["health"] for group in found.get("/rules")["groups"] for rule in group["rules"]}

        found.wait_until(lambda: "unknown" not in health().values(), "an alert was not evaluated")
        assert health() == dict.fromkeys(alerts(), "ok")
        server.assert_nothing_runs()

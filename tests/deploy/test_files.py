"""Alert rules, dashboard and the other files of `deploy/` agree with the server and with each other."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.cli import build_parser
from tests.deploy.files import (
    ADMIN_KEY,
    DASHBOARD,
    DEPLOY,
    HOW_TO_GET_IT,
    PROMTOOL,
    RULES,
    alerts,
    dashboard,
    dashboard_queries,
    load,
    metric_names,
    with_tiers,
)
from tests.server.real_engine import real_server

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=HOW_TO_GET_IT)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all series that an admin sees of a server with tiers, and `up`, which Prometheus adds."""
    names = {"up"}
    with real_server({"admin_key": ADMIN_KEY}, **with_tiers(tmp_path_factory.mktemp("disk"))) as server:
        server.complete([5, 6, 7], max_tokens=1)
        text = server.client.get("/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text
    for family in text_string_to_metric_families(text):
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("name", alerts())
def test_an_alert_uses_metrics_that_exist(name: str, exported: set[str]) -> None:
    used = metric_names(alerts()[name]["expr"])
    assert used
    assert used <= exported


def test_the_dashboard_uses_metrics_that_exist(exported: set[str]) -> None:
    for query in dashboard_queries():
        assert (used := metric_names(query)), query
        assert used <= exported, query


def test_the_panel_of_requests_counts_every_endpoint_that_computes() -> None:
    (query,) = (query for query in dashboard_queries() if 'handler=~"' in query and 'method="POST"' in query)
    handlers = re.compile(query.split('handler=~"')[1].split('"')[0])
    with real_server({}) as server:
        paths = server.client.get("/openapi.json").json()["paths"]
    missed = {path for path, methods in paths.items() if "post" in methods and not handlers.fullmatch(path)}
    assert missed == {"/api/pull", "/api/show", "/detokenize", "/reset_prefix_cache", "/tokenize"}


def test_every_alert_says_what_to_do_and_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tested = [
        (rule["alertname"], bool(rule["exp_alerts"]))
        for test in load(RULES.with_name("octavo.rules.test.yml"))["tests"]
        for rule in test["alert_rule_test"]
    ]
    assert sorted(tested) == sorted((name, fires) for name in alerts() for fires in (True, False))
    for alert in alerts().values():
        assert alert["annotations"].keys() == {"summary", "action"}
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize(
    "command",
    [("test", "rules", "octavo.rules.test.yml"), ("check", "rules", RULES.name), ("check", "config", "prometheus.yml")],
    ids=" ".join,
)
def test_promtool_accepts_rules_and_configuration(command: tuple[str, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *command], cwd=RULES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_the_dashboard_and_its_data_where_compose_puts_them() -> None:
    services = load(DEPLOY / "compose.yml")["services"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    (provider,) = load(DEPLOY / "grafana/provisioning/dashboards/octavo.yml")["providers"]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    (source,) = load(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    (scrape,) = load(RULES.with_name("prometheus.yml"))["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["octavo:8000"]}]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    for mount in mounts:
        assert not mount.startswith(".") or (DEPLOY / mount).is_dir()


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels), DASHBOARD
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd")
def test_systemd_accepts_the_unit_file(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "octavo.service").read_text()
    unit = tmp_path / "octavo.service"
    unit.write_text(text.replace("/opt/octavo/bin/octavo", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_unit_file_starts_a_command_that_exists() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "systemd" / "octavo.service")
    program, *arguments = unit["Service"]["ExecStart"].split()
    assert program == "/opt/octavo/bin/octavo"
    assert build_parser().parse_known_args(arguments)[0] is not None

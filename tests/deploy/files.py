"""What `deploy/` holds, as tests read it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "octavo.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "octavo.json"
PROMTOOL = shutil.which("promtool")
PROMETHEUS = shutil.which("prometheus")
HOW_TO_GET_IT = "needs prometheus and promtool: apt-get install prometheus"


# Without it, a scrape holds no series of tenants.
ADMIN_KEY = "admin-key"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in load(RULES)["groups"] for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def dashboard_queries() -> list[str]:
    """Every query of the dashboard, as Grafana would send it with all models and instances chosen."""
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [re.sub(r"\$(model|instance)", ".*", query).replace("$__rate_interval", "1m") for query in queries]


def metric_names(query: str) -> set[str]:
    """The metrics that a query selects: ours, those of HTTP and of the process, and `up`."""
    return set(re.findall(r"(?<![\w:])(?:(?:vllm|octavo):\w+|process_\w+|http_requests_total|up(?=\{))", query))


def with_tiers(folder: Path) -> dict[str, Any]:
    """Engine options of a server that has every kind of series."""
    return {"kv_host_memory": 1 << 20, "kv_disk": str(folder)}

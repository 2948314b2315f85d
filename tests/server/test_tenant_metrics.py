"""What an operator sees of each tenant, and nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.kvcache.host_memory import HostCounters
from octavo.observe.stats import EngineStats
from octavo.server import quotas
from octavo.server.server_metrics import TenantCollector
from octavo.tiers.store import Store
from tests.server.conftest import Running, wait_until
from tests.tiers.stores import BLOCK_BYTES, disk, put

KEYS = """
[tenants.ada]
keys = ["sk-ada"]
requests_per_minute = 2

[tenants.bob]
keys = ["sk-bob"]

[tenants.eve]
keys = ["sk-eve"]
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return str(path)


def ask(server: Running, key: str, prompt: str = "secret words") -> int:
    body = {"prompt": prompt, "max_tokens": 3}
    return server.client.post("/v1/completions", json=body, headers={"x-api-key": key}).status_code


def metrics(server: Running, key: str = "root") -> str:
    response = server.client.get("/metrics", headers={"x-api-key": key} if key else {})
    assert response.status_code == 200, response.text
    return response.text


def by_tenant(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["tenant"] + sample.labels.get("reason", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "tenant" in sample.labels
    }


def test_an_admin_sees_what_each_tenant_uses(start_server: Callable[..., Running], keys_file: str) -> None:
    server = start_server(keys_file=keys_file, admin_key="root")
    assert [ask(server, "sk-ada") for _ in range(3)] == [200, 200, 429]
    assert ask(server, "sk-bob") == 200
    wait_until(lambda: by_tenant(metrics(server))["octavo:tenant_requests_running", "bob"] == 0)
    told = by_tenant(metrics(server))
    length = len(b"secret words") + 1
    assert {name: value for name, value in told.items() if name[1].startswith("ada")} == {
        ("octavo:tenant_requests_running", "ada"): 0,
        ("octavo:tenant_refused_requests_total", "adarate"): 1,
        ("octavo:tenant_requests_total", "ada"): 2,
        ("octavo:tenant_prompt_tokens_total", "ada"): 2 * length,
        ("octavo:tenant_cached_tokens_total", "ada"): length - 1,
        ("octavo:tenant_generation_tokens_total", "ada"): 6,
        ("octavo:tenant_requests_waiting", "ada"): 0,
        ("octavo:tenant_waiting_tokens", "ada"): 0,
    }


@pytest.mark.parametrize("key", ["", "sk-ada", "sk-wrong"])
def test_a_tenants_name_is_shown_to_nobody_else(start_server: Callable[..., Running], keys_file: str, key: str) -> None:
    server = start_server(keys_file=keys_file, admin_key="root")
    assert ask(server, "sk-bob") == 200
    text = metrics(server, key)
    assert "vllm:num_requests_running" in text
    assert "tenant" not in text
    assert "bob" not in text


def test_no_series_holds_a_key_a_prompt_or_an_id(start_server: Callable[..., Running], keys_file: str) -> None:
    server = start_server(keys_file=keys_file, admin_key="root")
    assert ask(server, "sk-bob") == 200
    text = metrics(server)
    (call,) = server.engine.received
    assert not any(word in text for word in ("sk-bob", "root", "secret", call["context"].request_id))


def test_a_key_given_alone_is_shown_by_a_hash_of_it(start_server: Callable[..., Running]) -> None:
    server = start_server(api_key=["sk-alone"], admin_key="root")
    assert ask(server, "sk-alone") == 200
    (call,) = server.engine.received
    told = by_tenant(metrics(server))
    assert told["octavo:tenant_requests_total", call["context"].tenant] == 1
    assert "sk-alone" not in metrics(server)


def test_tenants_beyond_the_cap_are_added_up(
    start_server: Callable[..., Running], keys_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MAX_SHOWN_TENANTS", 1)
    server = start_server(keys_file=keys_file, admin_key="root")
    assert [ask(server, key) for key in ("sk-ada", "sk-bob", "sk-eve")] == [200] * 3
    told = by_tenant(metrics(server))
    assert {label: value for (name, label), value in told.items() if name == "octavo:tenant_requests_total"} == {
        "ada": 1,
        "other": 2,
    }


def test_without_keys_there_are_no_tenants(start_server: Callable[..., Running]) -> None:
    server = start_server()
    assert ask(server, "") == 200
    assert "tenant" not in metrics(server, "")


def test_metrics_for_admins_need_an_admin_key_to_be_configured(start_server: Callable[..., Running]) -> None:
    headers = {"Authorization": "Bearer a"}
    response = start_server(api_key=["a"], metrics_access="admin").client.get("/metrics", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "no_admin_key")
    assert "start it with --admin-key" in response.text


def test_floors_and_caps_are_shown_under_a_bounded_number_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_SHOWN_TENANTS", 1)
    stats = EngineStats(max_model_len=100)
    stats.kv_limits = {
        "ada": {"floor_bytes": 10, "cap_bytes": None},
        "bob": {"floor_bytes": 20, "cap_bytes": 50},
        "eve": {"floor_bytes": 40, "cap_bytes": 60},
    }
    collector = TenantCollector(quotas.Quotas(), stats, "m")
    told = {
        (sample.name, sample.labels["tenant"]): sample.value
        for metric in collector.collect()
        for sample in metric.samples
        if "_kv_" in sample.name
    }
    assert told == {
        ("octavo:tenant_kv_floor_bytes", "ada"): 10,
        ("octavo:tenant_kv_floor_bytes", "other"): 60,
        ("octavo:tenant_kv_cap_bytes", "other"): 110,
    }


def test_what_tenants_have_below_the_device_is_shown_by_tier(tmp_path: Path) -> None:
    stats = EngineStats(max_model_len=100)
    stats.host, stats.block_bytes = HostCounters(by_tenant=lambda: {"ada": 2, "bob": 1}), 100
    store = Store(disk(tmp_path))
    put(store, 1, 2, tenant="ada")
    put(store, 3, tenant="eve")
    stats.stores = (store,)
    shown = quotas.Quotas()
    shown.show("ada")
    told = {
        (sample.labels["tenant"], sample.labels["tier"]): sample.value
        for metric in TenantCollector(shown, stats, "m").collect()
        for sample in metric.samples
        if sample.name == "octavo:tenant_tier_bytes"
    }
    store.close()
    assert told == {
        ("ada", "host"): 200,
        ("other", "host"): 100,
        ("ada", "disk"): 2 * BLOCK_BYTES,
        ("other", "disk"): BLOCK_BYTES,
    }

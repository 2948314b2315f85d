"""The files of `deploy/` for several servers: their schemas, and that commands, ports and names agree."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from octavo.cli import build_parser
from octavo.cluster.config import RouterConfig
from octavo.commands.options import given_options
from octavo.config import EngineConfig
from octavo.config_tables import KVEventsConfig
from tests.deploy.files import DEPLOY, load

MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "octavo.yml").read_text()))
COMPOSE = load(DEPLOY / "compose.router.yml")


def manifest(kind: str, name: str) -> dict[str, Any]:
    return next(each for each in MANIFESTS if (each["kind"], each["metadata"]["name"]) == (kind, name))


def events_of(arguments: list[str]) -> KVEventsConfig:
    """What a server with these arguments publishes; they are checked as the command does."""
    given = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", argument) for argument in arguments]
    args = build_parser().parse_args(["serve", *given])
    events = EngineConfig.from_options(given_options(args, EngineConfig)).kv_events
    assert events is not None
    return events


def router_of(arguments: list[str]) -> RouterConfig:
    return RouterConfig(**given_options(build_parser().parse_args(["route", *arguments]), RouterConfig))


@pytest.mark.parametrize("each", MANIFESTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_a_manifest_follows_the_schema_of_its_kind(each: dict[str, Any]) -> None:
    validate: Any = pytest.importorskip("kubernetes_validate")
    validate.validate(each, "1.34", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**each, "spec": {**each["spec"], "replica": 2}}, "1.34", strict=True)


def test_routers_find_servers_by_the_headless_service_and_reach_every_port_that_servers_have() -> None:
    service, workers = manifest("Service", "octavo-workers"), manifest("Deployment", "octavo-workers")
    (server,) = workers["spec"]["template"]["spec"]["containers"]
    (router,) = manifest("Deployment", "octavo-router")["spec"]["template"]["spec"]["containers"]
    events, config = events_of(server["args"]), router_of(router["args"])
    assert service["spec"]["clusterIP"] == "None"
    assert config.workers_dns == f"{service['metadata']['name']}:8000"
    ports = {port["containerPort"] for port in server["ports"]}
    assert ports == {
        8000,
        *(int(str(address).rpartition(":")[2]) for address in (events.endpoint, events.replay_endpoint)),
    }
    assert ports == {port["port"] for port in service["spec"]["ports"]}
    (rule,) = manifest("NetworkPolicy", "octavo-workers")["spec"]["ingress"]
    assert ports == {port["port"] for port in rule["ports"]}
    assert (router["command"], server.get("command")) == (["octavo", "route"], None)
    assert server["env"] == router["env"]


def test_every_selector_matches_the_pods_it_means() -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in MANIFESTS
        if each["kind"] == "Deployment"
    }
    for kind, name, selected in (
        ("Service", "octavo-workers", "octavo-workers"),
        ("Service", "octavo", "octavo-router"),
        ("Deployment", "octavo-workers", "octavo-workers"),
        ("Deployment", "octavo-router", "octavo-router"),
        ("PodDisruptionBudget", "octavo-workers", "octavo-workers"),
        ("NetworkPolicy", "octavo-workers", "octavo-workers"),
    ):
        spec = manifest(kind, name)["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        assert selector.get("matchLabels", selector) == pods[selected], (kind, name)


def test_the_compose_files_router_names_its_servers_and_only_it_has_a_port() -> None:
    services = COMPOSE["services"]
    router = services.pop("router")
    assert router["entrypoint"] == ["octavo", "route"]
    assert router_of(router["command"]).worker == tuple(f"http://{name}:8000" for name in services)
    assert router["ports"] == ["127.0.0.1:8000:8000"]
    for server in services.values():
        assert events_of(server["command"]).endpoint == "tcp://*:5557"
        assert "ports" not in server
        assert server["environment"] == router["environment"]

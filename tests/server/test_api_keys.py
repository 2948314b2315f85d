"""Who may ask, and to whom it is accounted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.server.access import AcceptedKeys
from octavo.server.config import ServerConfig
from octavo.server.keys import tenant_of
from tests.server.conftest import Running, running_server
from tests.server.fake_engine import FakeEngine
from tests.server.real_engine import real_server, slowed_down

BODY = {"prompt": "x", "max_tokens": 1}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[Running]:
    with running_server(FakeEngine(), shutdown_timeout=0, api_key=["first-key", "second-key"]) as running:
        yield running


@pytest.fixture
def guarded(keyed_server: Running) -> Running:
    keyed_server.engine.received.clear()
    return keyed_server


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "didn't provide an API key"),
        ({"Authorization": "Basic first-key"}, "didn't provide an API key"),
        ({"Authorization": "Bearer"}, "didn't provide an API key"),
        ({"Authorization": "first-key"}, "didn't provide an API key"),
        (bearer("first-ke"), "Incorrect API key"),
        (bearer("first-key2"), "Incorrect API key"),
        (bearer("FIRST-KEY"), "Incorrect API key"),
        ({"x-api-key": "first-ke"}, "Incorrect API key"),
        ({"x-api-key": ""}, "didn't provide an API key"),
        ({"x-api-key": "ключ".encode()}, "Incorrect API key"),
    ],
)
def test_without_a_right_key_nothing_is_done(guarded: Running, headers: dict[str, Any], says: str) -> None:
    response = guarded.client.post("/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert says in error["message"]
    assert "first-ke" not in error["message"]
    assert response.headers["www-authenticate"] == "Bearer"
    assert guarded.engine.received == []


def test_each_key_is_a_tenant_of_its_own(guarded: Running) -> None:
    for key in ("first-key", "second-key", "first-key"):
        assert guarded.client.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
    tenants = [call["context"].tenant for call in guarded.engine.received]
    assert tenants == [tenant_of("first-key"), tenant_of("second-key"), tenant_of("first-key")]
    assert len(set(tenants)) == 2


def test_a_key_may_come_as_x_api_key(guarded: Running) -> None:
    assert guarded.client.post("/v1/completions", json=BODY, headers={"X-Api-Key": "second-key"}).status_code == 200
    assert guarded.engine.received[-1]["context"].tenant == tenant_of("second-key")


def test_a_request_may_wait_longer_than_others_but_not_go_before_them(guarded: Running) -> None:
    ask = lambda priority: guarded.client.post(  # noqa: E731
        "/v1/completions", json={**BODY, "priority": priority}, headers=bearer("first-key")
    )
    assert ask(5).status_code == 200
    refused = ask(-1)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "priority must be at least 0 for this API key, got -1"


def test_a_tenants_name_is_stable_and_does_not_hold_the_key() -> None:
    assert tenant_of("first-key") == "7091d13ee5b5892a"


def test_without_keys_everybody_is_the_same_tenant(server: Running) -> None:
    assert server.post("/v1/completions", BODY, headers=bearer("whatever")).status_code == 200
    assert server.engine.received[-1]["context"].tenant == ""


def test_keys_come_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "one, two,")
    assert ServerConfig().accepted_keys == ("one", "two")
    assert ServerConfig(api_key="three").accepted_keys == ("three",)
    monkeypatch.delenv("OCTAVO_API_KEY")
    assert ServerConfig().accepted_keys == ()


@pytest.mark.parametrize("variable", ["OCTAVO_API_KEY", "OCTAVO_ADMIN_KEY"])
@pytest.mark.parametrize("value", ["", " , ", ","])
def test_a_variable_that_holds_no_key_does_not_open_the_server(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} is set but has no key"):
        AcceptedKeys(ServerConfig())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"api_key": [""]}, "api_key must not be empty"),
        ({"api_key": ["two words"]}, "api_key must be at most 1024 printable ASCII characters"),
        ({"admin_key": " "}, "admin_key must be at most 1024 printable ASCII characters"),
        ({"api_key": ["a"], "keys_file": "keys.toml"}, "give either keys_file or api_key"),
        ({"served_model_name": ["a", ""]}, "served_model_name must not be empty"),
        ({"port": 65536}, "port must be between 0 and 65535, got 65536"),
        ({"server_limits": {"max_body_size": "many"}}, "cannot read 'many'"),
        ({"server_limits": {"max_body_size": 0}}, "max_body_size must be at least 1, got 0"),
        (
            {"server_limits": {"max_total_body_size": 9, "max_body_size": 10}},
            r"\(9\) must be at least max_body_size \(10\)",
        ),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be at least 0, got -1"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**options)


def test_slots_show_a_key_its_own_sequences_and_nobody_elses() -> None:
    with real_server({"api_key": ["ada", "bob"]}, num_blocks=65) as shared, slowed_down(shared):

        def taken(key: str) -> int:
            listed = shared.client.get("/slots", headers=bearer(key)).json()
            assert len(listed) == shared.engine.info.max_num_seqs
            return sum(slot["is_processing"] for slot in listed)

        body = {"prompt": [5, 6], "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 2}
        with shared.client.stream("POST", "/v1/completions", json=body, headers=bearer("ada")) as response:
            lines = response.iter_lines()
            assert next(lines)
            assert (taken("ada"), taken("bob")) == (2, 0)

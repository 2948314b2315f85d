"""Tenants and their keys out of a file, read at the start and on SIGHUP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.scheduler.kv_limits import KVLimits
from octavo.server.access import AcceptedKeys
from octavo.server.config import ServerConfig
from octavo.server.http.listening import bound
from octavo.server.keys import Client, read_keys_file, tenant_of
from octavo.server.run import serve_on
from tests.server.conftest import Running, running_server
from tests.server.fake_engine import FakeEngine

HASHED = hashlib.sha256(b"sk-bob").hexdigest()
KEYS = f"""
[tenants.ada]
keys = ["sk-ada-1", "sk-ada-2"]
cache_group = "lab"
priority = [-5, 5]

[tenants.bob]
keys = ["sha256:{HASHED}"]

[tenants."ops@home"]
keys = ["sk-ops"]
admin = true
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


def ask(server: Running, key: str, **fields: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields}, headers=headers)


def test_every_key_is_its_tenants_in_plain_text_or_hashed(keys_file: Path) -> None:
    access = AcceptedKeys(ServerConfig(keys_file=str(keys_file)))
    ada = Client(tenant="ada", cache_group="lab", min_priority=-5, max_priority=5)
    assert access.clients.find("sk-ada-1") == access.clients.find("sk-ada-2") == ada
    assert access.clients.find("sk-bob") == Client(tenant="bob")
    assert (
        access.clients.find(HASHED) is access.clients.find(f"sha256:{HASHED}") is access.clients.find("sk-eve") is None
    )


def test_a_request_is_its_tenants_with_its_group_and_priority(keys_file: Path) -> None:
    with running_server(FakeEngine(), shutdown_timeout=0, keys_file=str(keys_file)) as server:
        assert ask(server, "sk-ada-1", priority=-5).status_code == 200
        assert ask(server, "sk-bob").status_code == 200
        contexts = [call["context"] for call in server.engine.received]
        assert [(c.tenant, c.cache_group, c.priority) for c in contexts] == [("ada", "lab", -5), ("bob", None, 0)]
        refused = ask(server, "sk-ada-1", priority=6)
        assert "priority must be between -5 and 5 for this API key" in refused.json()["error"]["message"]
        assert ask(server, "sk-eve").status_code == 401


def test_all_tenants_share_where_the_operator_says_so(keys_file: Path) -> None:
    access = AcceptedKeys(ServerConfig(keys_file=str(keys_file), shared_prefix_cache=True))
    assert {client.cache_group for client in access.clients.clients} == {""}
    assert {
        client.cache_group
        for client in AcceptedKeys(ServerConfig(api_key=["a"], shared_prefix_cache=True)).clients.clients
    } == {""}


def test_an_admins_key_opens_debug_and_another_tenants_does_not(keys_file: Path) -> None:
    with running_server(FakeEngine(), shutdown_timeout=0, keys_file=str(keys_file), admin_key="root") as server:
        for key, status in (("sk-ops", 200), ("root", 200), ("sk-ada-1", 401), ("sk-eve", 401)):
            assert server.client.post("/reset_prefix_cache", headers={"x-api-key": key}).status_code == status
        assert ask(server, "root").status_code == 401, "the admin key is no client's"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no key in it"),
        ("tenants = 7", r"tenants are written as \[tenants.NAME\]"),
        ("[tenant.a]", "unknown table 'tenant'"),
        ("[tenants.a]", "tenants.a needs keys"),
        ("[tenants.a]\nkeys = []", "tenants.a needs keys"),
        ('[tenants.a]\nkeys = [""]', r"tenants.a.keys\[0\] must not be empty"),
        ('[tenants.a]\nkeys = ["se cret"]', r"tenants.a.keys\[0\] must be at most 1024 printable"),
        ('[tenants.a]\nkeys = ["sha256:12"]', r"tenants.a.keys\[0\] must have 64 hexadecimal digits"),
        ('[tenants.a]\nkeys = ["s"]\n[tenants.b]\nkeys = ["t", "s"]', r"tenants.b.keys\[1\] is a key of tenant a too"),
        ('[tenants."a b"]\nkeys = ["s"]', "a tenant's name must be 1 to 64 letters"),
        (
            '[tenants.a]\nkeys = ["s"]\ncolour = 3',
            "tenants.a: unknown field 'colour'; known: keys, priority, cache_group",
        ),
        ('[tenants.a]\nkeys = ["s"]\nmax_concurency = 3', "field 'max_concurency'; did you mean max_concurrency"),
        ('[tenants.a]\nkeys = ["s"]\nmax_waiting_tokens = true', "max_waiting_tokens must be an integer, got True"),
        ('[tenants.a]\nkeys = ["s"]\nadmin = 1', "tenants.a: admin must be true or false"),
        ('[tenants.a]\nkeys = ["s"]\ncache_group = ""', "tenants.a: cache_group must be 1 to 64 letters"),
        ('[tenants.a]\nkeys = ["s"]\npriority = [3, 1]', "tenants.a: priority must be a range"),
        ('[tenants.a]\nkeys = ["s"]\npriority = [true, 1]', "tenants.a: priority must be a range"),
        ('[tenants.a]\nkeys = ["s"]\nmax_concurrency = 0', "tenants.a: max_concurrency must be at least 1, got 0"),
        ('[tenants.a]\nkeys = ["s"]\nmax_concurrency = 1.5', "tenants.a: max_concurrency must be an integer, got 1.5"),
        ('[tenants.a]\nkeys = ["s"]\ntokens_per_minute = "x"', "tenants.a: tokens_per_minute must be a number"),
        ('[tenants.a]\nkeys = ["s"]\nweight = 0', "tenants.a: weight must be above 0, got 0"),
        (
            '[tenants.a]\nkeys = ["s"]\nrequests_per_minute = inf',
            "tenants.a: requests_per_minute must be a finite number above 0, got inf",
        ),
        (
            '[tenants.a]\nkeys = ["s"]\nkv_floor = 0',
            "kv_floor and kv_cap must be a positive number of tokens, or a part",
        ),
        (
            '[tenants.a]\nkeys = ["s"]\nkv_cap = "101%"',
            "kv_floor and kv_cap must be a positive number of tokens, or a part",
        ),
        (
            '[tenants.a]\nkeys = ["s"]\nkv_cap = "10"',
            "kv_floor and kv_cap must be a positive number of tokens, or a part",
        ),
        (
            '[tenants.a]\nkeys = ["s"]\nkv_cap = 0.5',
            "kv_floor and kv_cap must be a positive number of tokens, or a part",
        ),
        ("[tenants.a\nkeys = 'secret'", "is not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_is_refused_without_repeating_a_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        read_keys_file(str(path))
    assert "secret" not in str(error.value)
    assert "se cret" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the keys file .*no\.toml: No such file"):
        AcceptedKeys(ServerConfig(keys_file=str(tmp_path / "no.toml")))


def test_a_file_that_others_can_read_is_told(keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys_file.chmod(0o644)
    read_keys_file(str(keys_file))
    assert "chmod 600" in caplog.text


def test_rereading_takes_in_new_keys_and_drops_old_ones(keys_file: Path) -> None:
    access = AcceptedKeys(ServerConfig(keys_file=str(keys_file)))
    keys_file.write_text('[tenants.ada]\nkeys = ["sk-new"]\nadmin = true')
    assert access.reread()
    assert access.clients.find("sk-ada-1") is None
    found = access.admins.find("sk-new")
    assert found is not None
    assert found.admin


@pytest.mark.parametrize("text", ["[tenants.a", "", None])
def test_a_bad_file_on_rereading_keeps_the_old_keys_and_says_why(
    keys_file: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    access = AcceptedKeys(ServerConfig(keys_file=str(keys_file)))
    keys_file.unlink() if text is None else keys_file.write_text(text)
    access.reread()
    assert access.clients.find("sk-ada-1") is not None
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "keeping the previous keys" in record.getMessage()


LIMITED = """
[tenants.ada]
keys = ["sk-ada-1", "sk-ada-2"]
kv_floor = "12.5%"
kv_cap = 800

[tenants.bob]
keys = ["sk-bob"]
"""


class Unstarted(FakeEngine):
    """An engine that does not start."""

    async def start(self) -> None:
        raise ChildProcessError


def serve_briefly(engine: Any, keys_file: Path) -> None:
    config = ServerConfig(port=0, keys_file=str(keys_file))
    with bound(config) as listener:
        asyncio.run(serve_on(listener, engine, config))


def test_floors_and_caps_come_to_the_engine_before_it_serves(keys_file: Path) -> None:
    keys_file.write_text(LIMITED)
    assert AcceptedKeys(ServerConfig(keys_file=str(keys_file))).kv_amounts == {"ada": (0.125, 800)}
    engine = Unstarted()
    with pytest.raises(ChildProcessError):
        serve_briefly(engine, keys_file)
    assert engine.kv_limits == {"ada": KVLimits(12, 50)}


def test_floors_beyond_the_cache_on_rereading_keep_the_old_keys(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys_file.write_text(LIMITED)
    access = AcceptedKeys(ServerConfig(keys_file=str(keys_file)))
    keys_file.write_text(LIMITED.replace("12.5%", "60%").replace('"sk-bob"]', '"sk-new"]\nkv_floor = "50%"'))
    assert not access.reread(FakeEngine().resolve_kv_limits)
    assert access.clients.find("sk-bob") is not None
    assert access.clients.find("sk-new") is None
    assert "kv_cap of tenant ada is 50 KV blocks of 16 tokens, below its kv_floor of 60" in caplog.text


def test_floors_beyond_the_cache_stop_the_server_at_its_start(keys_file: Path) -> None:
    keys_file.write_text('[tenants.a]\nkeys = ["s"]\nkv_floor = 1_000_000')
    with pytest.raises(ConfigError, match="kv_floor add up to 62500 KV blocks of 16 tokens, but the cache has 100: a"):
        serve_briefly(Unstarted(), keys_file)


def test_a_key_given_alone_is_a_tenant_of_its_own() -> None:
    access = AcceptedKeys(ServerConfig(api_key=["first-key"]))
    assert not access.reread(), "there is no file"
    found = access.clients.find("first-key")
    assert found == Client(tenant=tenant_of("first-key"))
    assert "first-key" not in repr(vars(access.clients))


def test_a_tenants_weight_goes_with_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[tenants.a]\nkeys = ["s"]\nweight = 2.5\n[tenants.b]\nkeys = ["t"]')
    contexts = [client.context("id", None, None) for client in read_keys_file(str(path)).values()]
    assert [context.weight for context in contexts] == [2.5, 1.0]

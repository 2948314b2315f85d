"""A server that asks for no key serves programs, and no web page of another origin."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.server.access import AcceptedKeys
from octavo.server.config import ServerConfig
from octavo.server.http.listening import bind, require_keys_beyond_loopback
from tests.server.conftest import Running, running_server
from tests.server.fake_engine import FakeEngine

BODY = b'{"prompt": "x", "max_tokens": 1}'
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def open_server() -> Iterator[Running]:
    options = {"allowed_hosts": ["octavo.internal"], "allowed_origins": ["https://chat.example"]}
    with running_server(FakeEngine(), shutdown_timeout=0, **options) as running:
        yield running


def post(server: Running, headers: dict[str, str]) -> tuple[int, str | None]:
    server.engine.received.clear()
    response = httpx.post(f"{server.url}/v1/completions", content=BODY, headers=headers)
    assert bool(server.engine.received) == (response.status_code == 200)
    return response.status_code, None if response.status_code == 200 else response.json()["error"]["code"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_page_can_send_without_asking_is_refused(open_server: Running, content_type: str) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    assert post(open_server, headers) == (415, "unsupported_media_type")
    assert post(open_server, {"Content-Type": "Application/JSON; charset=utf-8"}) == (200, None)


def test_an_empty_body_of_a_program_needs_no_type_and_that_of_a_page_does(open_server: Running) -> None:
    reset = f"{open_server.url}/reset_prefix_cache"
    assert httpx.post(reset).status_code == httpx.post(reset, headers=JSON).status_code == 403
    connection = http.client.HTTPConnection("127.0.0.1", open_server.port, timeout=60)
    connection.putrequest("POST", "/reset_prefix_cache")  # without a Content-Length
    connection.endheaders()
    with connection.getresponse() as response:
        assert response.status == 403
    connection.close()
    assert httpx.post(reset, content=iter([b"x"])).status_code == 415, "in chunks"
    for header in ("Referer", "Sec-Fetch-Site"):
        assert httpx.post(reset, headers={header: "https://evil.example/"}).status_code == 415


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::1].evil.example"],
)
def test_a_name_that_was_rebound_to_this_machine_is_not_served(open_server: Running, host: str) -> None:
    assert post(open_server, {**JSON, "Host": host}) == (421, "host_not_allowed")
    assert open_server.client.get("/health", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "192.168.1.5", "octavo.internal:80"]
)
def test_addresses_and_names_of_its_own_are(open_server: Running, host: str) -> None:
    assert post(open_server, {**JSON, "Host": host}) == (200, None)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://chat.example", "https://chat.example.evil.example"]
)
def test_a_page_of_another_origin_is_refused(open_server: Running, origin: str) -> None:
    assert post(open_server, {**JSON, "Origin": origin}) == (403, "origin_not_allowed")


def test_its_own_pages_and_allowed_ones_may_ask_and_read(open_server: Running) -> None:
    own = f"http://127.0.0.1:{open_server.port}"
    assert post(open_server, {**JSON, "Origin": own}) == (200, None)
    assert post(open_server, {**JSON, "Origin": "https://chat.example"}) == (200, None)
    headers = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "content-type,authorization"
    preflight = open_server.client.options("/v1/completions", headers=headers)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    answer = open_server.client.get("/v1/models", headers={"Origin": "https://chat.example"})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"


def test_a_preflight_of_another_origin_gets_no_leave(open_server: Running) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in open_server.client.options("/v1/completions", headers=headers).headers


def test_with_keys_names_and_content_types_do_not_matter() -> None:
    with running_server(FakeEngine(), shutdown_timeout=0, api_key=["key"]) as server:
        headers = {"Authorization": "Bearer key", "Host": "proxy.example", "Content-Type": "text/plain"}
        assert post(server, headers) == (200, None)
        assert (
            "access-control-allow-origin"
            not in server.client.get("/health", headers={"Origin": "https://x.example"}).headers
        )


def serving(host: str, **options: object) -> None:
    config = ServerConfig(host=host, port=0, **options)  # type: ignore[arg-type]
    with bind(host, 0) as listener:
        require_keys_beyond_loopback(listener, config, AcceptedKeys(config))


def test_without_keys_other_machines_are_not_served_unless_that_was_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 can be reached from other machines, but no API key is required"):
        serving("0.0.0.0")
    serving("0.0.0.0", allow_unauthenticated=True)
    serving("0.0.0.0", api_key=["key"])
    serving("127.0.0.1")
    serving("localhost")

"""Every route of the running application, in every spelling: closed unless its row says that it is public."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.routing import Route

from octavo.server.app import create_app
from octavo.server.route import Access, Endpoint
from tests.server.conftest import Running, running_server
from tests.server.fake_engine import FakeEngine

PUBLIC = {"/health", "/ready", "/ping", "/load", "/version", "/metrics", "/openapi.json", "/docs", "/", "/cache"}
PUBLIC |= {f"/live/{name}.js" for name in ("chat", "blocks", "details", "page", "docs")}
PUBLIC |= {f"/live/{name}.css" for name in ("chat", "page", "docs")}
ROUTER = "/router/"
OPERATOR = ("/live/", "/debug/", "/reset_prefix_cache")

SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": lambda path: path,
    "percent": lambda path: path[:-1] + f"%{ord(path[-1]):02x}",
    "newline": lambda path: path + "%0a",
    "carriage return": lambda path: path + "%0d",
    "NUL": lambda path: path + "%00",
    "newline in front": lambda path: "/%0a" + path[1:],
    "double slash": lambda path: "/" + path,
    "dot segments": lambda path: "/x/.." + path,
    "upper case": lambda path: path.upper(),
    "trailing slash": lambda path: path + "/",
    "trailing space": lambda path: path + "%20",
    "query": lambda path: path + "?x=%0a",
    "semicolon": lambda path: path + ";x",
}
# Those that name the same path.
SAME = {"as it is", "percent", "query"}
CONTROL = {"newline", "carriage return", "NUL", "newline in front"}


def routes() -> list[tuple[str, str]]:
    app = create_app(FakeEngine())
    found = [route for route in app.routes if isinstance(route, Route)]
    return [(method, route.path) for route in found for method in sorted(route.methods or ())]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    options: dict[str, Any] = {"api_key": ["mine", "other"], "admin_key": "root", "router_key": "way"}
    with running_server(FakeEngine(), shutdown_timeout=0, **options) as running:
        yield running


CONNECTIONS: dict[int, http.client.HTTPConnection] = {}
"""By port, of the servers of one test."""


@pytest.fixture(autouse=True)
def close_connections() -> Iterator[None]:
    yield
    while CONNECTIONS:
        CONNECTIONS.popitem()[1].close()


def status_of(server: Running, method: str, target: str, key: str | None = None) -> int:
    """The status of a request whose target is sent as it is written."""
    if (connection := CONNECTIONS.get(server.port)) is None:
        connection = CONNECTIONS[server.port] = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection._validate_path = lambda url: None  # type: ignore[attr-defined]
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    connection.request(method, target, body=b"{}" if method == "POST" else None, headers=headers)
    with connection.getresponse() as response:
        response.read()  # the connection is used again
        return response.status


def example(path: str) -> str:
    return path.replace("{model:path}", "fake").replace("{", "").replace("}", "")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_route_is_closed_without_a_key_unless_it_is_public(server: Running, spelling: str) -> None:
    for method, path in routes():
        target = SPELLINGS[spelling](example(path))
        if path in PUBLIC and (spelling in SAME or target == path):
            assert status_of(server, method, target) == 200, (method, target)
            continue
        for key in (None, "wrong"):
            assert status_of(server, method, target, key) in (400, 401), (method, target, key)
    assert server.engine.received == []


def test_a_route_that_does_not_exist_is_closed_before_it_is_missing(server: Running) -> None:
    for path in ("/nothing", "/v1/nothing", "/api/nothing", "/tokenize/more", "/static/page.html", "/live/nothing"):
        assert status_of(server, "GET", path) == 401
        assert status_of(server, "GET", path, "mine") == 404
        assert status_of(server, "DELETE", "/health") == 401


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_key_opens_what_it_is_for_and_nothing_else_in_any_spelling(server: Running, spelling: str) -> None:
    for method, path in routes():
        if path in PUBLIC or path == "/live/events":  # a stream without an end
            continue
        keys = {"root"} if path.startswith(OPERATOR) else {"way"} if path.startswith(ROUTER) else {"mine", "other"}
        target = SPELLINGS[spelling](example(path))
        for key in ("mine", "other", "root", "way") if spelling in SAME else ("other", "root"):
            status = status_of(server, method, target, key)
            if spelling in SAME:
                assert (status == 401) == (key not in keys), (method, target, key)
            elif spelling in CONTROL:
                assert status == 400, (method, target, key)
            else:
                assert status in (401, 404, 405), (method, target, key)


def test_without_a_router_key_nobody_is_the_router(start_server: Callable[..., Running]) -> None:
    for options in ({}, {"api_key": ["mine"], "admin_key": "root"}):
        server = start_server(**options)
        for key in ("mine", "root"):
            assert status_of(server, "GET", "/router/worker", key) == 403


def test_a_stored_response_belongs_to_its_tenant(server: Running) -> None:
    body = {"input": "x", "max_output_tokens": 1}
    made = server.client.post("/v1/responses", json=body, headers={"Authorization": "Bearer mine"}).json()
    stored = f"/v1/responses/{made['id']}"
    for spell in SPELLINGS.values():
        for method, path in (("GET", stored), ("GET", f"{stored}/input_items"), ("DELETE", stored)):
            for key in ("other", "root", "way", "wrong", None):
                assert status_of(server, method, spell(path), key) in (400, 401, 404), (method, spell(path), key)
    for path in (stored, f"{stored}/input_items"):
        assert status_of(server, "GET", path, "mine") == 200


def test_an_endpoint_is_for_clients_unless_it_says_otherwise() -> None:
    async def handler(request: Any) -> Any: ...

    assert Endpoint("GET", "/new", handler, "Status", "A new one").access is Access.CLIENT


def test_a_block_that_cannot_be_is_missing(start_server: Callable[..., Running]) -> None:
    server = start_server()
    for number in ("9" * 5000, "9" * 10, "-1", "x", "٣"):
        answer = server.client.get(f"/live/blocks/{number}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_such_block"), number


def test_the_load_is_as_closed_as_the_metrics(start_server: Callable[..., Running]) -> None:
    server = start_server(api_key=["mine"], admin_key="root", metrics_access="admin")
    for path in ("/load", "/metrics"):
        assert [status_of(server, "GET", path, key) for key in (None, "mine", "root")] == [401, 401, 200]

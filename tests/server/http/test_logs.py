"""Every request has an id and a line in the log, which says nothing of what was asked."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.server.config import ServerConfig
from octavo.server.http.logs import JsonFormatter
from octavo.server.run import check_certificate
from tests.server.conftest import Running, wait_until
from tests.server.fake_engine import FakeEngine

BODY = {"prompt": "a secret prompt", "max_tokens": 3}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, object]]]:
    caplog.set_level(logging.DEBUG, "octavo.access")
    return lambda: [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "octavo.access"]


def test_a_request_is_logged_with_its_tenant_and_tokens_and_without_its_text(
    start_server: Callable[..., Running], lines: Callable[[], list[dict[str, object]]], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(api_key=["key-of-ada"])
    headers = {"x-api-key": "key-of-ada", "X-Request-Id": "trace-7"}
    response = server.client.post("/v1/completions", json=BODY, headers=headers)
    assert response.headers["x-request-id"] == "trace-7"
    wait_until(lambda: bool(lines()))
    (line,) = lines()
    assert (
        line.items()
        >= {
            "level": "info",
            "request_id": "trace-7",
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "prompt_tokens": response.json()["usage"]["prompt_tokens"],
            "completion_tokens": 3,
        }.items()
    )
    assert line["tenant"]
    assert "secret" not in caplog.text
    assert "key-of-ada" not in caplog.text


@pytest.mark.parametrize("given", ["", "two words", "x" * 65, "a\tb"])
def test_an_id_that_could_not_stand_in_a_log_is_replaced(start_server: Callable[..., Running], given: str) -> None:
    server = start_server()
    answers = [server.client.get("/health", headers={"X-Request-Id": given} if given else {}) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert given not in ids


def test_errors_have_ids_and_lines_too(
    start_server: Callable[..., Running], lines: Callable[[], list[dict[str, object]]]
) -> None:
    server = start_server(FakeEngine(breaks_after=0), api_key=["key"])
    assert "x-request-id" in server.client.post("/v1/completions", json=BODY).headers
    broken = server.client.post("/v1/completions", json=BODY, headers={"x-api-key": "key"})
    assert server.client.get("/no%0Awhere").status_code == 400
    wait_until(lambda: len(lines()) == 3)
    assert [(line["status"], line["path"]) for line in lines()] == [
        (401, "/v1/completions"),
        (500, "/v1/completions"),
        (400, "/no%0Awhere"),
    ]
    assert lines()[1]["request_id"] == broken.headers["x-request-id"]


def test_probes_are_logged_for_debugging_alone(
    start_server: Callable[..., Running], lines: Callable[[], list[dict[str, object]]]
) -> None:
    server = start_server()
    assert server.client.get("/ready").json() == {"status": "ready"}
    wait_until(lambda: bool(lines()))
    assert [line["level"] for line in lines()] == ["debug"]


def test_under_a_root_path_probes_and_endpoints_are_known_all_the_same(
    start_server: Callable[..., Running], lines: Callable[[], list[dict[str, object]]]
) -> None:
    server = start_server(root_path="/llm")
    assert server.client.get("/health").status_code == server.client.get("/v1/models/fake").status_code == 200
    wait_until(lambda: len(lines()) == 2)
    assert [line["level"] for line in lines()] == ["debug", "info"]
    assert 'http_requests_total{handler="/v1/models/{model:path}",method="GET"' in server.client.get("/metrics").text


def test_without_an_access_log_requests_have_ids_alone(
    start_server: Callable[..., Running], lines: Callable[[], list[dict[str, object]]]
) -> None:
    server = start_server(access_log=False)
    assert "x-request-id" in server.client.get("/version").headers
    assert lines() == []


def test_a_line_of_json_holds_the_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.getLogger("octavo").makeRecord("octavo", logging.ERROR, "", 0, "it %s", ("failed",), None)
        record.exc_info = __import__("sys").exc_info()
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["level"], entry["message"]) == ("error", "it failed")
    assert "ValueError: broken" in entry["exception"]


def test_a_server_that_stops_is_not_ready(start_server: Callable[..., Running]) -> None:
    server = start_server()
    server.server._in_flight.draining = True
    response = server.client.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert server.client.get("/health").status_code == 200
    server.engine.is_alive = False
    assert server.client.get("/ready").json()["error"]["code"] == "engine_dead"


def test_under_a_root_path_a_key_is_asked_for_all_the_same(start_server: Callable[..., Running]) -> None:
    server = start_server(api_key=["key"], root_path="/llm")
    for path in ("/v1/models", "/v1/completions", "/tokenize"):
        assert server.client.post(path, json=BODY).status_code == 401
    assert server.client.get("/v1/models", headers={"x-api-key": "key"}).status_code == 200
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/llm/v1/models", headers={"x-api-key": "key"}).status_code == 404


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"root_path": "llm"}, "root_path must begin with /"),
        ({"root_path": "/llm/"}, "root_path must begin with / and not end with it"),
        ({"log_level": "loud"}, "log_level must be one of debug, info, warning, error, got 'loud'"),
        ({"log_format": "xml"}, "log_format must be one of text, json, got 'xml'"),
        ({"ssl_certfile": "cert.pem"}, "ssl_certfile needs ssl_keyfile, which is not given"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**options)  # type: ignore[arg-type]


def test_a_certificate_that_cannot_be_used_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nonsense")
    for name in ("cert.pem", "none.pem"):
        with pytest.raises(ConfigError, match="cannot serve HTTPS with"):
            check_certificate(ServerConfig(ssl_certfile=str(tmp_path / name), ssl_keyfile=str(tmp_path / "cert.pem")))

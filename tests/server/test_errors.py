"""What a client is told of each exception of the tree."""

from __future__ import annotations

import asyncio
import inspect
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request

from octavo import errors
from octavo.errors import (
    CacheError,
    CapacityError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    GrammarError,
    LogitsError,
    OctavoError,
    RequestError,
)
from octavo.server.errors import answer_http_error, to_api_error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("no", param="n"), 400, None),
        (ContextLengthError("too long"), 400, "context_length_exceeded"),
        (CapacityError("too large"), 400, "capacity_exceeded"),
        (LogitsError(["somebody-elses-id"]), 500, "unusable_logits"),
        (EngineDeadError("dead"), 503, "engine_dead"),
        (CacheError("block 7 is freed twice"), 500, "internal_error"),
        (ConfigError("num_blocks must be at least 2"), 500, "internal_error"),
    ],
)
def test_each_exception_has_its_status_and_code(error: OctavoError, status: int, code: str | None) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    told = answer.message
    assert (str(error) in told) == (status == 400), "only what is wrong with a request is told in detail"


def test_the_tree_in_the_docstring_has_every_exception_under_its_parent() -> None:
    drawn = {}
    path: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        if "──" in line or line == "OctavoError":
            indent = len(line) - len(line.lstrip("│├└─ "))
            path[indent] = line.lstrip("│├└─ ").split()[0]
            drawn[path[indent]] = path.get(indent - 4)
    defined = {
        name: found.__mro__[1].__name__
        for name, found in vars(errors).items()
        if inspect.isclass(found) and issubclass(found, OctavoError)
    }
    assert drawn == {**defined, "OctavoError": None}


def test_a_grammar_error_tells_nothing_of_other_requests() -> None:
    answer = to_api_error(GrammarError({"somebody-elses-id": "after 5 output tokens"}))
    assert (answer.status, answer.code) == (400, "grammar_too_complex")
    assert "somebody" not in str(answer.fields())


@pytest.mark.parametrize("host", [b"[", b"[::1", b"a]b[", b"http://[", b"a@b", b"\xbd", b""])
def test_an_unknown_path_is_a_404_whatever_the_host_header(host: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starlette 0.48 parses the header in `Request.url`, which failed: the 404 became a 500."""
    monkeypatch.setattr(Request, "url", property(lambda request: urlsplit(f"http://{host.decode('latin-1')}[/")))
    scope = {"type": "http", "method": "GET", "path": "/none", "headers": [(b"host", host)], "app": Starlette()}
    answer = asyncio.run(answer_http_error(Request(scope), HTTPException(404)))
    assert answer.status_code == 404
    assert b"Invalid URL (GET /none)" in answer.body

"""What a client is told of each exception of the tree."""

from __future__ import annotations

import inspect

import pytest

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
from octavo.server.errors import to_api_error


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

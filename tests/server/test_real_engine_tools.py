"""Answers that must call, through HTTP and the whole engine, with a model of random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from octavo.dialect.bare_text import text_rule
from tests.server.real_engine import RealServer, real_server, sse_objects

TOOL = {
    "type": "function",
    "function": {
        "name": "set_volume",
        "parameters": {
            "type": "object",
            "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 10}},
            "required": ["level"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server({"tool_call_parser": "hermes"}) as running:
        yield running


def asked(**fields: Any) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": "set_volume"}}
    user = {"role": "user", "content": "louder"}
    return {"messages": [user], "tools": [TOOL], "tool_choice": named, "max_tokens": 300, "seed": 1, **fields}


def test_a_named_tool_is_called_with_arguments_that_fit(server: RealServer) -> None:
    response = server.post("/v1/chat/completions", asked())
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert 0 <= json.loads(call["function"]["arguments"])["level"] <= 10
    chunks = sse_objects(server.events("/v1/chat/completions", asked()))
    calls = [made for chunk in chunks for made in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "set_volume"
    assert "".join(made["function"]["arguments"] for made in calls) == call["function"]["arguments"]
    server.assert_nothing_runs()


STRINGS: list[dict[str, Any]] = [
    {"enum": ["Paris", "Oslo", 'a "quoted" one']},
    {"const": "Rome"},
    {"pattern": "^[0-9]{5}$"},
    {"pattern": "^/[a-z]{1,3}/|[0-9]$", "maxLength": 8},
    {"minLength": 2, "maxLength": 4},
    {"format": "date"},
    {"pattern": "^[a-c]{3}$", "maxLength": 3},
]


@pytest.mark.slow
def test_strings_without_quotes_fit_their_schemas() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    with real_server({"tool_call_parser": "qwen3_xml"}) as server:
        for string in STRINGS:
            schema = {"type": "object", "properties": {"s": {"type": "string", **string}}, "required": ["s"]}
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            choice = server.post("/v1/chat/completions", asked(tools=[tool], tool_choice=named)).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
            jsonschema.validate(arguments, schema, format_checker=jsonschema.FormatChecker())


def test_patterns_that_cannot_be_enforced_are_passed_over() -> None:
    for pattern in ("^(?!x)", "^a$|^b$", r"(a)\1", r"\bword"):
        assert "&" not in text_rule("value", {"pattern": pattern})
    assert text_rule("value", {"enum": ["</parameter>", 1]}) == text_rule("value", {})


def test_a_schema_that_is_none_is_refused_and_leaves_nothing(server: RealServer) -> None:
    function = {"name": "f", "parameters": {"type": "nonsense"}}
    fields = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    server.error("/v1/chat/completions", asked(**fields), 400)


def test_other_apis_must_call_too(server: RealServer) -> None:
    user = [{"role": "user", "content": "louder"}]
    tool = {"name": "set_volume", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    body = {"messages": user, "max_tokens": 300, "tools": [tool], "tool_choice": {"type": "any"}}
    message = server.post("/v1/messages", {**body, "tool_choice": {"type": "tool", "name": "set_volume"}}).json()
    assert message["stop_reason"] == "tool_use"
    assert 0 <= message["content"][0]["input"]["level"] <= 10
    flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    named = {"type": "function", "name": "set_volume"}
    answer = server.post("/v1/responses", {"input": "louder", "tools": [flat], "tool_choice": named}).json()
    assert answer["output"][0]["type"] == "function_call"
    server.assert_nothing_runs()

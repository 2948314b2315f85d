"""Structured outputs over HTTP: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.server.real_engine import RealServer, error_of, real_server

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(limits={"max_grammar_bytes": 4000, "max_grammar_depth": 9}) as running:
        yield running


def post(server: RealServer, **fields: Any) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 200, "seed": 3, **fields}
    if "messages" in fields:
        del body["prompt"]
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    return httpx.post(server.url + path, json=body, timeout=60)


def text(server: RealServer, **fields: Any) -> str:
    answer = post(server, **fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"guided_json": SCHEMA, "guided_decoding_backend": "guidance"},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"},
    ],
)
def test_json_of_a_schema(server: RealServer, fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text(server, **fields)), SCHEMA)
    jsonschema.validate(json.loads(text(server, messages=[{"role": "user", "content": "x"}], **fields)), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [ab] ">"'}}, "<[ab]>"),
        ({"guided_grammar": 'start: "<" /[ab]/ ">"'}, "<[ab]>"),
        ({"grammar": 'root ::= "<" [ab] ">"'}, "<[ab]>"),
    ],
)
def test_other_forms(server: RealServer, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, text(server, **fields))


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_json_object(server: RealServer, fields: dict[str, Any]) -> None:
    answer = post(server, **fields)
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["text"]), dict)
    else:
        assert choice["text"].startswith("{")


def test_a_stream_adds_up_to_json(server: RealServer) -> None:
    body = {"prompt": "x", "max_tokens": 200, "stream": True, "guided_json": SCHEMA, "n": 2}
    texts = {0: "", 1: ""}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
    for whole in texts.values():
        jsonschema.validate(json.loads(whole), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "did you mean json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one of .*json and regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "non-empty strings, got 1"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not a valid JSON Schema"),
        (
            {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
            "guided_*",
            "cannot be combined with structured_outputs",
        ),
        ({"guided_whitespace_pattern": " "}, "structured_outputs", "none of them"),
        ({"guided_json": {"not": {}}}, "structured_outputs", "Unimplemented keys"),
        ({"guided_regex": "a" * 4001}, "structured_outputs", "4001 bytes of regex, but at most 4000"),
        ({"guided_regex": "(" * 10 + ")" * 10}, "structured_outputs.regex", "nested 10 levels deep, but at most 9"),
        ({"guided_regex": "a", "use_beam_search": True, "best_of": 2}, "structured_outputs", "use_beam_search"),
        ({"guided_regex": "a", "bad_words": ["b"]}, "bad_words", "cannot be combined"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids", "cannot be combined"),
    ],
)
def test_a_description_that_cannot_be_served_is_refused_by_name(
    server: RealServer, fields: dict[str, Any], param: str, says: str
) -> None:
    answer = post(server, **fields)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert re.search(says, error["message"]), error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_becomes_too_complex_is_an_error_of_its_own(server: RealServer, stream: bool) -> None:
    (letter,) = server.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    body = {
        "prompt": "x",
        "max_tokens": 150,
        "guided_grammar": 'start: "[" s "]"\ns: "a" | s s s s | s s s | s s',
        "logit_bias": {str(letter): 100},
    }
    if stream:
        *_, last = [json.loads(each) for each in server.events("/v1/completions", body) if each != "[DONE]"]
        error = last["error"]
    else:
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 400
        error = error_of(answer)
    assert (error["code"], error["param"]) == ("grammar_too_complex", "structured_outputs")
    assert re.search(r"too complex to parse after \d+ output tokens: more than 250 rules", error["message"])
    server.assert_nothing_runs()

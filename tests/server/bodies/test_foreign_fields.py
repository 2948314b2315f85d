"""Fields of other servers' clients: ignored and named, taken under another name, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from octavo.server.bodies.fields import RequestBody
from octavo.server.bodies.foreign_fields import NEUTRAL
from octavo.server.handling import IGNORED_HEADER, MAX_LOGGED, IgnoredFields
from tests.server.conftest import Running, rendered
from tests.server.scripted_engine import ScriptedEngine

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
# As llama.cpp's own web page sends them, each at its default.
LLAMA_CPP = {
    "cache_prompt": True,
    "id_slot": -1,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "n_keep": 0,
    "min_keep": 0,
    "mirostat": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "typical_p": 1.0,
    "tfs_z": 1,
    "dynatemp_range": 0,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "max_tokens": -1,
}
VLLM = {"mm_processor_kwargs": None, "vllm_xargs": None, "request_id": "r", "spaces_between_special_tokens": True}


def send(server: Running, path: str = PATH, **fields: Any) -> Any:
    body = {"prompt": "x"} if path == PATH else {"messages": [{"role": "user", "content": "x"}]}
    return server.post(path, {**body, "max_tokens": 2, **fields})


@pytest.mark.parametrize("path", [PATH, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named_in_a_header(server: Running, path: str, stream: bool) -> None:
    answer = send(server, path, foo=1, **{"bär,": [2]}, stream=stream)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "foo, b?r?"


def test_a_field_within_an_object_is_named_with_it(server: Running) -> None:
    answer = send(server, stream=True, stream_options={"bar": 1, "include_usage": True})
    assert answer.headers[IGNORED_HEADER] == "stream_options.bar"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_every_body_may_hold_unknown_fields(server: Running, path: str) -> None:
    answer = server.post(path, {"prompt": "x", "foo": 1} if path == "/tokenize" else {"tokens": [65], "foo": 1})
    assert answer.status_code == 200
    assert answer.headers[IGNORED_HEADER] == "foo"


@pytest.mark.parametrize("fields", [LLAMA_CPP, VLLM, {"nothing": None}])
def test_what_other_clients_send_at_its_default_passes(server: Running, fields: dict[str, Any]) -> None:
    answer = send(server, **fields)
    assert answer.status_code == 200, answer.text
    told = set(answer.headers.get(IGNORED_HEADER, "").split(", ")) - {""}
    assert told == (
        {"repeat_last_n", "min_keep", "mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base"} & fields.keys()
    )


def test_llama_cpps_names_mean_what_they_mean_there(server: Running) -> None:
    assert send(server, repeat_penalty=1.5, seed=-1).status_code == 200
    params = server.engine.received[-1]["params"]
    assert (params.repetition_penalty, params.seed) == (1.5, None)
    assert server.post(PATH, {"prompt": "x", "n_predict": 3}).json()["usage"]["completion_tokens"] == 3
    both = {"prompt": "x", "n_predict": 3, "max_tokens": None}
    assert server.post(PATH, both).json()["usage"]["completion_tokens"] == 3, "null is nothing"
    assert server.post(PATH, {**both, "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2
    assert server.post(PATH, {"prompt": "x", "n_predict": -1}).json()["usage"]["total_tokens"] == 4096
    body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": -1}
    assert server.post(CHAT, body).json()["usage"]["total_tokens"] == 4096


@pytest.mark.parametrize("field", NEUTRAL)
def test_what_would_change_the_answer_and_is_not_there_is_refused(server: Running, field: str) -> None:
    error = server.error(PATH, {"prompt": "x", field: {"some": 1}}, 400)
    assert error["param"] == field
    assert error["message"] == f"{field} is not supported by this server"


@pytest.mark.parametrize(("name", "told"), [("", "?"), (" ", "?"), ("a b ", "a?b?"), ("\x00\r\n", "???")])
def test_a_name_that_no_header_may_carry_is_no_broken_answer(name: str, told: str, server: Running) -> None:
    answer = server.post(PATH, {"prompt": "a", "max_tokens": 1, name: 1})
    assert answer.status_code == 200
    assert answer.headers[IGNORED_HEADER] == told


def test_thousands_of_unknown_fields_are_one_short_header(server: Running) -> None:
    fields: dict[str, Any] = {f"f{i:05}" + "x" * 100: 1 for i in range(5000)}
    answer = server.post(PATH, {"prompt": "x", "max_tokens": 2, **fields})
    assert answer.status_code == 200
    assert len(answer.headers[IGNORED_HEADER]) < 1000
    assert " and " in answer.headers[IGNORED_HEADER]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"foo": 1}, "foo", "foo is not a field of this request"),
        ({"foo": 1, "bar": 2}, "foo", "foo, bar are not fields of this request"),
        ({"stream": True, "stream_options": {"bar": 1}}, "stream_options.bar", "stream_options.bar"),
        ({"repeat_penalty": 1.0}, "repeat_penalty", "is not a field of this request"),
        ({"cache_prompt": None}, "cache_prompt", "is not a field of this request"),
        ({"max_tokens": -1}, "max_tokens", "at least 1, got -1"),
    ],
)
def test_a_strict_server_refuses_what_it_does_not_know(
    start_server: Callable[..., Running], fields: dict[str, Any], param: str, says: str
) -> None:
    error = start_server(strict_requests=True).error(PATH, {"prompt": "x", **fields}, 400)
    assert error["param"] == param
    assert says in error["message"]


def test_each_field_is_logged_once_and_never_more_than_some(caplog: pytest.LogCaptureFixture) -> None:
    from starlette.responses import Response

    fields = IgnoredFields()
    body = RequestBody()
    with caplog.at_level(logging.WARNING, logger="octavo.server"):
        for i in range(MAX_LOGGED + 50):
            body.ignored = (f"f{i}\nforged", "f0\nforged")
            fields.add_header(body, Response())
    assert len(caplog.records) == MAX_LOGGED + 1
    assert "\n" not in caplog.records[0].getMessage()
    assert "further ones are not logged" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "x", "max_tokens": 3.0, "seed": 7.0, "top_k": 40.0}),
        (PATH, {"prompt": "x", "options": {"num_predict": 3.0, "seed": 7.0, "top_k": 40.0}}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3.0, "seed": 7.0, "top_k": 40.0}),
        ("/completion", {"prompt": "x", "n_predict": 3.0, "seed": 7.0, "top_k": 40.0}),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": 3.0, "seed": 7.0, "top_k": 40.0}}),
    ],
)
def test_whole_numbers_may_be_written_as_floats(server: Running, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, body).status_code == 200
    params = server.engine.received[-1]["params"]
    assert [(value, type(value)) for value in (params.max_tokens, params.seed, params.top_k)] == [
        (3, int),
        (7, int),
        (40, int),
    ]


@pytest.mark.parametrize("limit", [0, -1, -2, -5, 0.0, -1.0])
def test_ollamas_limit_of_0_and_below_is_none(server: Running, limit: float) -> None:
    answer = server.post(PATH, {"prompt": "x", "options": {"num_predict": limit}})
    assert answer.json()["usage"]["total_tokens"] == 4096


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
OPTIONS = {
    "num_predict": 3,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 5,
    "stop": ["x"],
    "repeat_penalty": 1.5,
    "mirostat": 0,
    "num_ctx": 4096,
    "num_gpu": 1,
}


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_ollamas_options_are_the_fields_that_they_stand_for(server: Running, path: str) -> None:
    given = {"prompt": "x"} if path == PATH else {"messages": [{"role": "user", "content": "x"}]}
    answer = server.post(path, {**given, "options": OPTIONS, "top_p": 0.8, "max_tokens": None})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "options.num_ctx, options.num_gpu"
    params = server.engine.received[-1]["params"]
    assert (params.max_tokens, params.temperature, params.top_k, params.min_p) == (3, 0.5, 7, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (5, ("x",), 1.5)
    assert params.top_p == 0.8  # the body's own field wins
    answer = server.post(path, {**given, "options": {"num_predict": -2}, "max_tokens": None})
    assert answer.json()["usage"]["total_tokens"] == 4096
    assert server.error(path, {**given, "options": {"mirostat": 2}}, 400)["param"] == "mirostat"
    assert server.error(path, {**given, "options": {"temperature": "hot"}}, 400)["param"] == "temperature"


@pytest.mark.slow
@pytest.mark.parametrize("path", [PATH, CHAT])
def test_ollamas_format_describes_the_output(server: Running, path: str) -> None:
    given = {"prompt": "x"} if path == PATH else {"messages": [{"role": "user", "content": "x"}]}
    for form, wanted in (("json", {"type": "json_object"}), (SCHEMA, {"type": "json_object", "schema": SCHEMA})):
        described = []
        for field, value in (("format", form), ("response_format", wanted)):
            assert server.post(path, {**given, field: value}).status_code == 200
            described.append(server.engine.received[-1]["params"].structured_outputs)
        assert described[0] == described[1] is not None
    for empty in (None, ""):
        assert server.post(path, {**given, "format": empty}).status_code == 200
        assert server.engine.received[-1]["params"].structured_outputs is None
    assert server.error(path, {**given, "format": "xml"}, 400)["param"] == "format"
    both = server.error(path, {**given, "format": "json", "response_format": {"type": "json_object"}}, 400)
    assert both["message"] == "format cannot be combined with response_format"


def test_ollamas_think_goes_to_the_chat_template(start_server: Callable[..., Running]) -> None:
    template = "{{ enable_thinking }}|{{ reasoning_effort }}"
    server = start_server(ScriptedEngine("x", template=template))
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for think, prompt in ((True, "True|"), (False, "False|"), ("high", "|high"), (None, "|")):
        assert server.post(CHAT, {**chat, "think": think}).status_code == 200
        assert rendered(server) == prompt
    assert server.error(CHAT, {**chat, "think": 1}, 400)["param"] == "think"

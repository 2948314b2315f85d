"""What /v1/chat/completions gives back, field by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.server.handling import IGNORED_HEADER
from tests.server.answers.test_completions import events
from tests.server.conftest import Running, rendered
from tests.server.fake_engine import FakeEngine
from tests.server.scripted_engine import ScriptedEngine

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}


def chat(server: Running, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"model": "fake", "messages": list(messages or [USER]), "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_messages_go_through_the_chat_template(server: Running) -> None:
    chat(server, {"role": "system", "content": "be brief"}, USER)
    assert rendered(server) == "#system: be brief\n#user: hello\n#assistant: "


def test_text_parts_are_joined(server: Running) -> None:
    chat(server, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    assert rendered(server) == "#user: a\nb\n#assistant: "


def test_template_options_reach_the_template(server: Running) -> None:
    chat(server, add_generation_prompt=False, add_special_tokens=True, chat_template_kwargs={"marker": ">"})
    assert rendered(server) == "<bos>>user: hello\n"


def test_without_a_limit_the_answer_may_fill_the_context(server: Running) -> None:
    answer = chat(server, max_tokens=None)
    assert answer["usage"]["total_tokens"] == server.engine.info.max_model_len


def test_the_newer_name_of_the_limit_wins(server: Running) -> None:
    assert chat(server, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


def test_n_choices_are_numbered(server: Running) -> None:
    answer = chat(server, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 12


def test_logprobs_come_with_bytes_and_alternatives(server: Running) -> None:
    choice = chat(server, logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]


def test_logprobs_alone_report_the_chosen_tokens(server: Running) -> None:
    content = chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * 4


def test_a_stream_opens_with_the_role_and_carries_logprobs(server: Running) -> None:
    body = {"model": "fake", "messages": [USER], "max_tokens": 3, "stream": True, "n": 2, "logprobs": True}
    chunks = events(server.post(PATH, body))
    deltas = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]) for chunk in chunks]
    assert deltas[:2] == [(i, {"role": "assistant", "content": ""}) for i in range(2)]
    for chunk in chunks[2:]:
        (choice,) = chunk["choices"]
        assert choice["logprobs"]["content"][0]["token"] == choice["delta"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_stream_reports_usage_last(server: Running) -> None:
    options = {"include_usage": True}
    body = {"messages": [USER], "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, last = events(server.post(PATH, body))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert "cached_tokens" in last["usage"]["prompt_tokens_details"]


def test_token_ids_are_returned_when_asked_for(server: Running) -> None:
    answer = chat(server, return_token_ids=True, prompt_logprobs=0)
    assert bytes(answer["prompt_token_ids"]).decode() == rendered(server)
    assert bytes(answer["choices"][0]["token_ids"]).decode() == answer["choices"][0]["message"]["content"]
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    body = {"messages": [USER], "max_tokens": 2, "stream": True, "return_token_ids": True}
    first, *others = events(server.post(PATH, body))
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in others] == [1, 1]


def test_echo_repeats_the_message_that_the_answer_continues(server: Running) -> None:
    messages = [USER, {"role": "assistant", "content": "Sure: "}]
    answer = chat(server, *messages, echo=True, add_generation_prompt=False)
    assert answer["choices"][0]["message"]["content"].startswith("Sure: ")


def test_a_final_message_may_be_continued(server: Running) -> None:
    messages = [USER, {"role": "assistant", "content": "Sure: "}]
    answer = chat(server, *messages, continue_final_message=True)
    assert rendered(server) == "#user: hello\n#assistant: Sure: "
    echoed = chat(server, *messages, continue_final_message=True, add_generation_prompt=False, echo=True)
    assert echoed["choices"][0]["message"]["content"] == "Sure: " + answer["choices"][0]["message"]["content"]
    tokenized = server.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert tokenized == server.engine.received[-1]["prompt"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"add_generation_prompt": True}, "cannot both be true"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "whose content the chat template prints"),
    ],
)
def test_what_cannot_be_continued_is_refused(server: Running, fields: dict[str, Any], says: str) -> None:
    error = server.error(PATH, {"messages": [USER], "continue_final_message": True, **fields}, 400)
    assert error["param"] == "continue_final_message"
    assert says in error["message"]


@pytest.mark.parametrize(("kept", "length"), [(5, 5), (-1, 4086), (4096, 4077)])
def test_a_prompt_is_cut_down_to_its_end(server: Running, kept: int, length: int) -> None:
    long = {"role": "user", "content": "y" * 5000 if kept == -1 else "y" * 4057}
    answer = chat(server, long, truncate_prompt_tokens=kept, max_tokens=10)
    assert answer["usage"]["prompt_tokens"] == length
    assert rendered(server).endswith("ant: ")


@pytest.mark.parametrize("kept", [0, -2, 4097])
def test_a_prompt_cannot_be_cut_down_to_more_than_the_model_reads(server: Running, kept: int) -> None:
    error = server.error(PATH, {"messages": [USER], "truncate_prompt_tokens": kept}, 400)
    assert error["param"] == "truncate_prompt_tokens"
    assert f"between 1 and 4096, this model's maximum context length, got {kept}" in error["message"]


def test_features_that_are_switched_off_are_accepted(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    chat(server, tools=[tool], tool_choice="none", response_format={"type": "text"}, modalities=["text"])
    chat(server, tools=[], tool_choice="auto", audio=None, functions=None, parallel_tool_calls=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"verbosity": "low", "prediction": {"type": "content", "content": "x"}, "top_logprobs": 0},
        {"function_call": "none", "prompt_cache_options": {"mode": "implicit"}, "stop": None, "store": True},
        {"service_tier": "auto", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
    ],
)
def test_fields_that_change_no_answer_pass_without_a_warning(server: Running, fields: dict[str, Any]) -> None:
    answer = server.post(PATH, {"messages": [USER], "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    assert IGNORED_HEADER not in answer.headers


@pytest.mark.parametrize("content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]])
def test_the_tokens_of_a_prediction_reach_the_engine(server: Running, content: Any) -> None:
    chat(server, prediction={"type": "content", "content": content})
    assert server.engine.received[-1]["context"].predicted_ids == (97, 98)


@pytest.mark.parametrize(
    "given",
    [{"content": "x"}, *({"type": "content", "content": [part]} for part in ({"type": "image_url"}, {"text": ""}))],
)
def test_a_prediction_without_text_is_refused(server: Running, given: Any) -> None:
    error = server.error(PATH, {"messages": [USER], "prediction": given}, 400)
    assert error["param"] == "prediction"
    assert "a text or a list of text parts" in error["message"]


def test_refusals_and_parts_of_the_newer_api_are_text(server: Running) -> None:
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]}
    newer = {"role": "user", "content": [{"type": "input_text", "text": "why"}]}
    chat(server, USER, refused, USER, parts, newer)
    assert "assistant: no" in rendered(server)
    assert "assistant: never" in rendered(server)
    assert "user: why" in rendered(server)


def test_a_template_that_knows_no_developer_gets_a_system_message(start_server: Any) -> None:
    messages = [{"role": "developer", "content": "be brief"}, USER]
    server = start_server(ScriptedEngine("x"))
    chat(server, *messages)
    assert rendered(server).startswith("#system: be brief#user: ")
    knowing = start_server(
        ScriptedEngine("x", template="{% for m in messages %}{{ m.role }}{% endfor %}{# developer #}")
    )
    chat(knowing, *messages)
    assert rendered(knowing) == "developeruser"


def test_no_effort_of_reasoning_is_no_thinking(start_server: Any) -> None:
    server = start_server(
        ScriptedEngine("x", template="{{ messages[0].content }} {{ enable_thinking }} {{ verbosity }}")
    )
    chat(server, reasoning_effort="none", verbosity="low")
    assert rendered(server).endswith(" False low")


def test_tokens_may_be_named_by_their_ids(server: Running) -> None:
    fields = {"max_tokens": 1, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    (entry,) = chat(server, **fields)["choices"][0]["logprobs"]["content"]
    assert entry["token"].startswith("token_id:")
    assert entry["top_logprobs"][0]["token"].startswith("token_id:")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "structural_tag"}),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("web_search_options", {"a": 1}),
        ("web_search_options", {}),
        ("structured_outputs", {"structural_tag": "{}"}),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_a_feature_we_do_not_have_is_refused_by_its_name(server: Running, field: str, value: Any) -> None:
    error = server.error(PATH, {"messages": [USER], field: value}, 400)
    assert error["param"] == field
    assert field in error["message"]
    assert "support" in error["message"]


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"content": "x"}, "messages[1].role", "must be one of 'system'"),
        ({"role": "robot", "content": "x"}, "messages[1].role", "got 'robot'"),
        ({"role": "user"}, "messages[1].content", "required"),
        ({"role": "user", "content": 5}, "messages[1].content", "string or a list of text parts"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]", "not an object"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[1].content[0]",
            "'image_url' is not",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]", "'input_audio' is not"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "must be a string"),
    ],
)
def test_a_message_that_cannot_be_used_is_named(server: Running, message: Any, param: str, says: str) -> None:
    error = server.error(PATH, {"messages": [USER, message]}, 400)
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": []}, "messages", "must not be empty"),
        ({}, "messages", "messages is required"),
        ({"messages": "hi"}, "messages", "a list of objects"),
        ({"messages": [USER], "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"messages": [USER], "logprobs": 3}, "logprobs", "true or false"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set"),
        ({"messages": [USER], "chat_template_kwargs": {"template": "x"}}, "chat_template_kwargs", "must not set"),
        ({"messages": [USER], "chat_template_kwargs": {"refuse": True}}, "messages", "template refused"),
        ({"messages": [USER], "max_completion_tokens": 0}, "max_tokens", "at least 1"),
        ({"messages": [USER], "max_completion_tokens": 3, "max_tokens": 0}, "max_tokens", "at least 1"),
    ],
)
def test_a_chat_body_that_cannot_be_used_is_refused(server: Running, body: Any, param: str, says: str) -> None:
    error = server.error(PATH, body, 400)
    assert error["param"] == param
    assert says in error["message"]


def test_what_the_model_recommends_holds_where_a_body_says_nothing(start_server: Any) -> None:
    engine = FakeEngine()
    engine.info = replace(engine.info, default_sampling={"temperature": 0.5, "top_k": 7})
    server = start_server(engine)
    chat(server, top_k=9)
    params = engine.received[-1]["params"]
    assert (params.temperature, params.top_k) == (0.5, 9)
    assert server.post("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 2}).status_code == 200
    assert engine.received[-1]["params"].temperature == 1.0

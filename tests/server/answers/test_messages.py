"""/v1/messages with Anthropic's own client, unchanged, against a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from tests.server.conftest import Running, rendered, running_server
from tests.server.fake_engine import FakeEngine
from tests.server.scripted_engine import ScriptedEngine

if TYPE_CHECKING:  # importing it takes a second, in every process that collects the tests
    import anthropic

PATH = "/v1/messages"
USER: Any = {"role": "user", "content": "weather?"}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ScriptedEngine(CALL), shutdown_timeout=0) as running:
        yield running


def client_of(server: Running) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def test_a_message_is_answered(client: anthropic.Anthropic, server: Running) -> None:
    answer = client.messages.create(
        model="fake",
        max_tokens=100,
        system="be brief",
        messages=[USER],
        stop_sequences=["never"],
        extra_body={"top_k": 5},
    )
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", "fake", "end_turn")
    assert [block.text for block in answer.content if block.type == "text"] == [CALL]
    assert rendered(server) == "#system: be brief#user: weather?#assistant: "
    assert answer.usage.output_tokens == len(CALL) + 1
    params = server.engine.received[-1]["params"]
    assert (params.max_tokens, params.stop, params.top_k) == (100, ("never",), 5)


def test_tools_are_used_and_their_results_read(client: anthropic.Anthropic, server: Running) -> None:
    answer = client.messages.create(model="fake", max_tokens=100, messages=[USER], tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    text, use = answer.content
    assert text.type == "text"
    assert text.text == "Let me see."
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "rain"}]}
    history: Any = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    client.messages.create(model="fake", max_tokens=100, messages=history, tools=[TOOL])
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>#tool: rain#assistant: ' in rendered(
        server
    )


def test_a_stream_adds_up_to_the_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="fake", max_tokens=100, messages=[USER], tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    whole = client.messages.create(model="fake", max_tokens=100, messages=[USER], tools=[TOOL])
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_stop") == 2
    assert kinds.count("input_json") > 1


def test_tokens_are_counted_as_they_are_sent(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="fake", messages=[USER], tools=[TOOL]).input_tokens
    usage = client.messages.create(model="fake", max_tokens=100, messages=[USER], tools=[TOOL]).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_reason_of_the_end_is_told(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine())
    with client_of(server) as client:
        assert client.messages.create(model="fake", max_tokens=3, messages=[USER]).stop_reason == "max_tokens"
        answer = client.messages.create(model="fake", max_tokens=300, messages=[USER], stop_sequences=["owl"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "owl")


def test_cached_tokens_are_told_apart(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine())
    with client_of(server) as client:
        usages = [client.messages.create(model="fake", max_tokens=3, messages=[USER]).usage for _ in range(2)]
    assert [usage.cache_read_input_tokens for usage in usages] == [0, usages[0].input_tokens - 1]
    assert usages[1].input_tokens == 1


def test_thinking_is_a_block_of_its_own(start_server: Callable[..., Running]) -> None:
    template = "{% for m in messages %}{{ m.content }}</think>{% endfor %}{{ enable_thinking }}"
    server = start_server(ScriptedEngine("<think>Hm.</think>Yes.", template=template))
    with client_of(server) as client:
        asked: Any = {"model": "fake", "max_tokens": 2000, "messages": [USER]}
        answer = client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        assert [(block.type, getattr(block, block.type, None)) for block in answer.content] == [
            ("thinking", "Hm."),
            ("text", "Yes."),
        ]
        assert rendered(server).endswith("True")
        with client.messages.stream(**asked) as stream:
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]


def test_an_answer_goes_on_with_the_assistants_last_message(client: anthropic.Anthropic, server: Running) -> None:
    prefill: Any = {"role": "assistant", "content": "It is"}
    client.messages.create(model="fake", max_tokens=5, messages=[USER, prefill])
    assert rendered(server).endswith("#assistant: It is")


def test_cache_control_pins_the_prefix_up_to_it(client: anthropic.Anthropic, server: Running) -> None:
    tools: Any = [{**TOOL, "cache_control": {"type": "ephemeral"}}]
    marked: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    client.messages.create(
        model="fake",
        max_tokens=5,
        system=marked,
        messages=[USER],
        tools=tools,
    )
    (pin,) = server.engine.received[-1]["context"].pins
    text = rendered(server)
    assert text[: pin.num_tokens].endswith("#system: be brief")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "must not be empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be 'user' or 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is required"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "input must be an object"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
            "messages[0].content[0].name must be the name of a tool",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be a string or a list of blocks"),
        ({"system": [{"type": "image"}]}, "system[0] of type 'image'"),
        ({"cache_control": {"type": "forever"}}, "cache_control must be"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "only 'custom'"),
        ({"tool_choice": {"type": "some"}}, 'tool_choice.type must be "auto"'),
        ({"tool_choice": {"type": {}}}, 'tool_choice.type must be "auto"'),
        ({"max_tokens": None}, "max_tokens is required"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17 entries, but at most 16"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"container": {"skills": []}}, "container is not supported"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 'output_config.format must be {"type": "json_schema"'),
        ({"output_config": {"effort": {}}}, "output_config.effort must be a string"),
        ({"stop_sequences": [""]}, "stop_sequences must not be empty"),
        (
            {"output_format": {"type": "json_schema", "schema": {"$ref": "#/none", "a": "x" * 70_000}}},
            "output_config.format has 70024 bytes of json",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content must be a string or a list of blocks"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}, "x"]}]},
            "messages[0].content[1] is not an object",
        ),
        (
            {"system": "s", "messages": [{**USER, "cache_control": {"type": "ephemeral", "ttl": "x"}}]},
            "messages[0].cache_control.ttl must be like",
        ),
        ({"system": [{"type": "text", "text": "x", "cache_control": 5}]}, "system[0].cache_control must be"),
        ({"system": [{"type": "text"}]}, "system[0].text must be a string"),
        (
            {"system": "s", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0] of type 'image'",
        ),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "maximum context length"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"messages": [USER] * 4097}, "4097 messages, but at most 4096"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_an_error_of_anthropics(server: Running, fields: dict[str, Any], says: str) -> None:
    for stream in (False, True):
        answer = server.post(PATH, {"model": "fake", "max_tokens": 5, "messages": [USER], "stream": stream, **fields})
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert says in answer.json()["error"]["message"]
        server.assert_nothing_runs()


def test_an_error_names_the_place_in_the_body_where_it_is(server: Running) -> None:
    # A system message, and tool results of their own, number the messages of the chat anew.
    use: Any = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {}}
    seen: Any = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    for content, where in (
        ([{"type": "text", "text": "x"}, image], "messages[2].content[1]"),
        ([seen, {**seen, "content": [*seen["content"], image]}], "messages[2].content[1].content[1]"),
        ([{**seen, "content": {}}], "messages[2].content[0].content"),
    ):
        messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": content}]
        answer = server.post(PATH, {"model": "fake", "max_tokens": 5, "system": "be brief", "messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"{where} ")


def test_cache_control_of_the_body_pins_the_whole_prompt(client: anthropic.Anthropic, server: Running) -> None:
    answer = client.messages.with_raw_response.create(
        model="fake", max_tokens=5, messages=[USER], extra_body={"cache_control": {"type": "ephemeral"}}
    )
    (pin,) = server.engine.received[-1]["context"].pins
    assert rendered(server)[: pin.num_tokens].endswith("#user: weather?")
    assert "x-octavo-ignored-fields" not in answer.headers


class City(pydantic.BaseModel):
    name: str


def test_the_form_of_an_answer_is_kept(start_server: Callable[..., Running]) -> None:
    server = start_server(ScriptedEngine('{"name": "Paris"}'))
    with client_of(server) as client:
        asked: Any = {"model": "fake", "max_tokens": 100, "messages": [USER]}
        assert client.messages.parse(**asked, output_format=City).parsed_output == City(name="Paris")
        wanted = server.engine.received[-1]["params"].structured_outputs
        assert wanted is not None
        schema = json.loads(wanted.json)
        assert schema["required"] == ["name"]
        server.post(PATH, {**asked, "output_format": {"type": "json_schema", "schema": schema}})
        assert server.engine.received[-1]["params"].structured_outputs == wanted


def test_errors_before_a_body_is_read_are_anthropics_too(start_server: Callable[..., Running], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.ada]\nkeys = ["ada"]\nrequests_per_minute = 1\n')
    keys.chmod(0o600)
    server = start_server(FakeEngine(), keys_file=str(keys), server_limits={"max_body_size": "1MiB"})
    body: Any = {"model": "fake", "max_tokens": 1, "messages": [USER]}
    ada = {"x-api-key": "ada"}
    answers = [
        server.post(PATH, body),
        server.client.get(PATH, headers=ada),
        server.post(PATH + "/batches", body, headers=ada),
        server.post(PATH, {**body, "system": "x" * (1 << 20)}, headers=ada),
        server.post(PATH, body, headers=ada),
        server.client.get("/v1/models/other", headers={**ada, "anthropic-version": "2023-06-01"}),
    ]
    found = [(answer.status_code, answer.json()["error"]["type"]) for answer in answers]
    assert found == [
        (401, "authentication_error"),
        (405, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (404, "not_found_error"),
    ]
    for answer in answers:
        assert answer.json()["type"] == "error"
        assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert list(server.client.get("/v1/models/other", headers=ada).json()) == ["error"]


def test_anthropics_client_lists_the_models(client: anthropic.Anthropic, server: Running) -> None:
    (model,) = client.models.list()
    assert (model.type, model.id, model.display_name) == ("model", "fake", "fake")
    assert client.models.retrieve("fake").created_at == model.created_at
    assert server.client.get("/v1/models").json()["object"] == "list"


def test_an_error_within_a_stream_is_an_event(start_server: Callable[..., Running]) -> None:
    import anthropic

    server = start_server(FakeEngine(dies_after=3))
    with (
        client_of(server) as client,
        pytest.raises(anthropic.APIStatusError, match="engine has stopped"),
        client.messages.stream(model="fake", max_tokens=9, messages=[USER]) as stream,
    ):
        stream.get_final_message()
    assert not server.engine.running


def test_unknown_fields_are_named(server: Running) -> None:
    answer = server.post(PATH, {"model": "fake", "max_tokens": 5, "messages": [USER], "speed": "fast"})
    assert answer.headers["X-Octavo-Ignored-Fields"] == "speed"


def test_ping_and_load(server: Running) -> None:
    assert server.client.get("/ping").status_code == 200
    assert server.client.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0}

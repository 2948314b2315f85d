"""/v1/responses with OpenAI's own client, unchanged, against a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from octavo.server.answers.responses import ResponseStore, StoredResponse
from tests.server.conftest import Running, openai_client, rendered, running_server
from tests.server.fake_engine import FakeEngine
from tests.server.scripted_engine import ScriptedEngine

PATH = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ScriptedEngine(CALL), shutdown_timeout=0) as running:
        yield running


@pytest.mark.slow
def test_a_text_is_answered(client: openai.OpenAI, server: Running) -> None:
    answer = client.responses.create(model="fake", input="weather?", instructions="be brief", max_output_tokens=100)
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", CALL)
    assert rendered(server) == "#system: be brief#user: weather?#assistant: "
    assert answer.usage is not None
    assert answer.usage.total_tokens == len(rendered(server)) + len(CALL) + 1
    assert server.engine.received[-1]["params"].max_tokens == 100
    assert answer.instructions == "be brief"


def test_a_tool_loop_goes_on_from_the_previous_response(client: openai.OpenAI, server: Running) -> None:
    first = client.responses.create(model="fake", input="weather?", tools=[TOOL])
    text, call = first.output
    assert text.type == "message"
    assert first.output_text == "Let me see."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model="fake", input=[result], previous_response_id=first.id, tools=[TOOL])
    assert second.previous_response_id == first.id
    expected = (
        '#user: weather?#assistant: Let me see.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}'
    )
    assert expected + "\n</tool_call>#tool: rain#assistant: " in rendered(server)
    client.responses.create(model="fake", input="and now?", previous_response_id=second.id, tools=[TOOL])
    assert rendered(server).count("#assistant: Let me see.") == 2
    stateless: Any = [{"role": "user", "content": "weather?"}, *(item.to_dict() for item in first.output), result]
    client.responses.create(model="fake", input=stateless, tools=[TOOL], store=False)
    assert expected + "\n</tool_call>#tool: rain#assistant: " in rendered(server)


@pytest.mark.slow
def test_a_stream_adds_up_to_the_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="weather?", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    final = events[-1].response
    whole = client.responses.create(model="fake", input="weather?", tools=[TOOL])
    assert final.output_text == whole.output_text
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 1
    assert "".join(pieces) == final.output[1].arguments == whole.output[1].arguments
    with client.responses.stream(model="fake", input="weather?", tools=[TOOL]) as stream:
        assert stream.get_final_response().output_text == "Let me see."
    assert client.responses.retrieve(final.id).output_text == "Let me see."


def test_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="weather?", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output if item.type == "message"] == ["incomplete"]
    *_, last = client.responses.create(model="fake", input="weather?", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"
    assert [item.status for item in last.response.output if item.type == "message"] == ["incomplete"]


def test_reasoning_is_an_item_of_its_own(start_server: Callable[..., Running]) -> None:
    server = start_server(ScriptedEngine("<think>Hm.</think>Yes.", template="{{ messages[0].content }}</think>"))
    with openai_client(server) as client:
        answer = client.responses.create(model="fake", input="x")
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        events = list(client.responses.create(model="fake", input="x", stream=True))
        assert "response.reasoning_text.delta" in {event.type for event in events}
        assert client.responses.create(model="fake", input="y", previous_response_id=answer.id).output_text == "Yes."


def test_a_stored_response_may_be_retrieved_and_deleted(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="x")
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.delete(answer.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="There is no response"):
            ask(answer.id)


def test_a_response_that_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="x", store=False)
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="fake", input="y", previous_response_id=answer.id)
    assert missing.value.param == "previous_response_id"


@pytest.mark.parametrize("asks", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
def test_a_texts_logprobs_are_those_of_its_own_tokens(client: openai.OpenAI, asks: dict[str, Any]) -> None:
    whole: Any = client.responses.create(model="fake", input="weather?", tools=[TOOL], **asks)
    entries = whole.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == whole.output_text == "Let me see."
    assert {len(entry.top_logprobs) for entry in entries} == {asks.get("top_logprobs", 0)}
    assert whole.top_logprobs == asks.get("top_logprobs", 0)
    stored: Any = client.responses.retrieve(whole.id)
    assert stored.output[0].content[0].logprobs == entries
    events: list[Any] = list(client.responses.create(model="fake", input="weather?", tools=[TOOL], stream=True, **asks))
    texts = [event for event in events if event.type == "response.output_text.delta"]
    assert all("".join(entry.token for entry in event.logprobs) == event.delta for event in texts)
    grown = [entry.to_dict() for event in texts for entry in event.logprobs]
    assert grown == [entry.to_dict() for entry in entries]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.to_dict() for entry in done.logprobs] == grown
    assert events[-1].response.output[0].content[0].logprobs == entries


def test_logprobs_leave_out_reasoning_and_keep_tokens_that_are_parts_of_characters(
    start_server: Callable[..., Running],
) -> None:
    server = start_server(
        ScriptedEngine("<think>Hm.</think> Yes, \U0001f989.", per_token=1, template="<think></think>")
    )
    with openai_client(server) as client:
        message: Any = client.responses.create(model="fake", input="x", top_logprobs=1).output[1]
    assert bytes(byte for entry in message.content[0].logprobs for byte in entry.bytes).decode() == "Yes, \U0001f989."


def test_input_items_are_listed_a_page_at_a_time(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="weather?", tools=[TOOL])
    call = first.output[1]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain", "id": "fco_mine"}
    second = client.responses.create(model="fake", input=[result, result], previous_response_id=first.id)
    asked = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert asked.has_more
    assert [item.id for item in asked] == [item.id for item in [*client.responses.input_items.list(second.id)][::-1]]
    items: list[Any] = list(asked)
    question, text, told, *results = items
    assert (question.content[0].to_dict(), question.status) == ({"type": "input_text", "text": "weather?"}, "completed")
    assert (text.id, told.id, told.name) == (first.output[0].id, call.id, "get_weather")
    assert [item.output for item in results] == ["rain", "rain"]
    assert results[0].id == "fco_mine" != results[1].id
    (only,) = client.responses.input_items.list(first.id)
    assert only.id == question.id


def test_a_query_of_input_items_that_is_wrong_is_refused(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="x")
    for query, says in (({"limit": 101}, "between 1 and 100, got '101'"), ({"order": "up"}, '"asc" or "desc"')):
        with pytest.raises(openai.BadRequestError, match=says):
            client.responses.input_items.list(answer.id, **query)
    with pytest.raises(openai.NotFoundError, match="There is no item `msg_0`"):
        client.responses.input_items.list(answer.id, after="msg_0")


def test_items_may_be_referred_to_while_their_response_is_stored(client: openai.OpenAI, server: Running) -> None:
    first = client.responses.create(model="fake", input="weather?", tools=[TOOL])
    (question,) = client.responses.input_items.list(first.id)
    text, call = first.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    given: Any = [{"type": "item_reference", "id": question.id}, {"id": text.id}, {"id": call.id}, result]
    second = client.responses.create(model="fake", input=given, tools=[TOOL])
    follow_up = client.responses.create(model="fake", input=[result], previous_response_id=first.id, tools=[TOOL])
    assert second.usage is not None
    assert follow_up.usage is not None
    assert second.usage.input_tokens == follow_up.usage.input_tokens
    assert "#user: weather?#assistant: Let me see.<tool_call>" in rendered(server)
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.id for item in listed][:3] == [question.id, text.id, call.id]
    again: Any = [{"id": call.id}]
    client.responses.create(model="fake", input=again, previous_response_id=first.id, tools=[TOOL])
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=f"There is no item `{question.id}`") as missing:
        client.responses.create(model="fake", input=given)
    assert (missing.value.param, missing.value.code) == ("input[0]", "item_not_found")


def test_names_that_clients_choose_are_encoded_as_any_other(client: openai.OpenAI) -> None:
    names = {"choices": "abc", "output": "def", "content": "g"}
    assert client.responses.create(model="fake", input="x", metadata=names).metadata == names


def test_another_tenants_response_is_not_there(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine(), api_key=["one-key", "another-key"])
    with openai_client(server, "one-key") as one, openai_client(server, "another-key") as other:
        answer = one.responses.create(model="fake", input="secret", max_output_tokens=3)
        unknown = "resp_" + "0" * 32
        reference: Any = [{"type": "item_reference", "id": answer.output[0].id}]
        for asked in (answer.id, unknown):
            with pytest.raises(openai.NotFoundError) as missing:
                other.responses.create(model="fake", input="x", previous_response_id=asked)
            assert missing.value.message.replace(asked, "") == missing.value.message.replace(asked, "")
            for ask in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    ask(asked)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="fake", input=reference)
        assert one.responses.retrieve(answer.id).id == answer.id
        server.assert_nothing_runs()


def test_fields_that_change_no_answer_pass_without_a_warning(server: Running) -> None:
    fields: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"],
        "stream_options": {"include_obfuscation": False},
        "prompt_cache_retention": "24h",
        "max_tool_calls": 3,
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "truncation": "disabled",
    }
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    asked = [{"role": "user", "content": "x"}, refused, {"role": "user", "content": "why"}]
    answer = server.post(PATH, {"model": "fake", "input": asked, **fields})
    assert answer.status_code == 200, answer.text
    assert "X-Octavo-Ignored-Fields" not in answer.headers
    assert "#assistant: no" in rendered(server)


def test_an_error_within_a_stream_is_an_event_of_its_own(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine(dies_after=3))
    text = server.post(PATH, {"input": "x", "stream": True}).text
    *before, last = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    assert "event: error\n" in text
    assert (last["type"], last["code"], last["message"]) == ("error", "engine_dead", last["error"]["message"])
    assert last["sequence_number"] == before[-1]["sequence_number"] + 1 == len(before)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": None}, "input", "a string or a list of items"),
        ({"input": [1]}, "input", "a string or a list of items"),
        ({"input": []}, "input", "input must not be empty"),
        ({"input": [{"type": [[]], "content": "x"}]}, "input[0]", "input[0] of type [[]] is not supported"),
        ({"instructions": "x", "input": [{"role": "robot", "content": "x"}]}, "input[0].role", "input[0].role must be"),
        ({"input": [{"type": "function_call"}]}, "input[0].name", "must be a function's name, got None"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort", "reasoning.effort must be a string"),
        ({"text": {"verbosity": []}}, "text.verbosity", "text.verbosity must be a string"),
        ({"text": {"format": {"type": "x"}}}, "text.format", "text.format of type 'x' is not supported"),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1] must be a string, got 5"),
        ({"input": [{"type": "item_reference"}]}, "input[0]", "must have the id of an item, got None"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "'input_image'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "must be a string or a list"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input", "4097 items, but at most 4096"),
        ({"background": True}, "background", "background is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"truncation": "some"}, "truncation", '"auto" or "disabled"'),
        ({"metadata": {"a": "x" * 65_536}}, "metadata", "65544 bytes of JSON, but at most 65536 are repeated"),
        ({"metadata": {"a": float("nan")}}, "metadata", "metadata must not hold NaN or an infinite number"),
        ({"input": [{"role": "user", "content": "x", "a": float("inf")}]}, "input", "input must not hold NaN"),
        ({"tools": [{**TOOL, "parameters": {"a": float("-inf")}}]}, "tools", "tools must not hold NaN"),
        ({"top_logprobs": 21}, "top_logprobs", "between 0 and 20, got 21"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1, got 0"),
        ({"previous_response_id": "x" * 257}, "previous_response_id", "257 characters, but at most 256"),
    ],
)
def test_what_cannot_be_served_is_refused(server: Running, fields: dict[str, Any], param: str, says: str) -> None:
    # Not by `json=`, which refuses NaN.
    content = json.dumps({"model": "fake", "input": "x", **fields}).encode()
    answer = server.client.post(PATH, content=content)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


def stored(size: int) -> StoredResponse:
    return StoredResponse(b"x" * (size - 512), b"")


def test_a_stored_response_cannot_be_streamed(client: openai.OpenAI) -> None:
    stored_id = client.responses.create(model="fake", input="x", max_output_tokens=2).id
    with pytest.raises(openai.BadRequestError, match="stream must be false for a stored response"):
        list(client.responses.retrieve(stored_id, stream=True))


def test_the_input_tokens_of_a_response_are_counted(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="weather?", max_output_tokens=2)
    for asked in ({}, {"previous_response_id": first.id, "instructions": "be brief"}):
        counted = client.responses.input_tokens.count(model="fake", input="weather?", **asked)  # type: ignore[arg-type]
        answer = client.responses.create(model="fake", input="weather?", max_output_tokens=2, **asked)  # type: ignore[call-overload]
        assert answer.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be at most"):
        client.responses.input_tokens.count(model="fake", input="x", extra_body={"max_output_tokens": 4097})


def test_the_oldest_responses_make_room_within_a_tenant() -> None:
    store = ResponseStore(12_000)
    for name in ("a", "b", "c"):
        store.put("one", name, stored(1400))
    store.put("one", "too large", stored(3001))
    assert [store.get("one", name) is None for name in ("a", "b", "c", "too large")] == [True, False, False, True]
    assert store.size == 2800


def test_the_tenant_that_stores_most_makes_room_for_others() -> None:
    store = ResponseStore(16_000)
    store.put("small", "a", stored(1000))
    for tenant, size in (("second", 3000), ("third", 3500), ("fourth", 3500)):
        store.put(tenant, "f", stored(size))
    for name in ("b", "c", "d", "e"):
        store.put("large", name, stored(1000))
    assert store.size == 15_000
    store.put("fifth", "g", stored(2000))
    assert [store.get("large", name) is None for name in ("b", "c", "d", "e")] == [True, False, False, False]
    assert store.get("small", "a") is not None
    assert store.size == 16_000
    assert store.get("other", "a") is None
    assert not store.delete("other", "a")
    assert store.delete("small", "a")
    assert store.size == 15_000

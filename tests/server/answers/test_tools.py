"""Tools in chats: what the model is told, what comes back, whole and streamed, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.server.answers.test_completions import events
from tests.server.conftest import Running, rendered, running_server
from tests.server.scripted_engine import ScriptedEngine

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "weather?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "stop"}}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ScriptedEngine(CALLS), shutdown_timeout=0) as running:
        yield running


def chat(server: Running, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"messages": list(messages or [USER]), "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_calls_come_out_of_the_text(server: Running) -> None:
    choice = chat(server)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_weather", "stop"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Paris"}, {}]
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == 2
    assert json.dumps(TOOLS) in rendered(server)


def test_a_history_may_have_openais_older_form_of_calls(server: Running) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    asked = {"role": "assistant", "content": None, "function_call": call}
    chat(server, USER, asked, {"role": "function", "name": "get_weather", "content": "rain"})
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>#tool: rain' in rendered(
        server
    )


def test_a_stream_names_a_call_and_then_sends_its_arguments_in_pieces(server: Running) -> None:
    chunks = events(server.post(PATH, {"messages": [USER], "tools": TOOLS, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    first = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]) for call in first] == [
        (0, {"name": "get_weather", "arguments": ""}),
        (1, {"name": "stop", "arguments": ""}),
    ]
    pieces = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert len(pieces) > 3
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


def test_the_openai_client_reads_calls_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": [USER], "tools": TOOLS}
    whole = client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert whole.content == streamed.content
    for made in (whole.tool_calls, streamed.tool_calls):
        assert made is not None
        assert [(call.function.name, call.function.arguments) for call in made] == [
            ("get_weather", '{"city":"Paris"}'),
            ("stop", "{}"),
        ]


def test_a_tool_loop_shows_the_model_its_calls_and_their_results(client: openai.OpenAI, server: Running) -> None:
    messages: list[Any] = [USER]
    answer = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS).choices[0].message  # type: ignore[arg-type]
    messages.append(answer)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in answer.tool_calls or ()]
    client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    assert (
        '#assistant: Let me see.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        in rendered(server)
    )
    assert rendered(server).count("#tool: rain") == 2


def test_parallel_calls_may_be_switched_off(server: Running) -> None:
    calls = chat(server, parallel_tool_calls=False)["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_weather"]


def test_without_tools_or_with_the_choice_of_none_text_is_text(server: Running) -> None:
    for choice in (chat(server, tool_choice="none"), chat(server, tools=None)):
        assert choice["message"]["content"] == CALLS
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
        assert "get_weather" not in rendered(server)


def test_a_call_that_is_cut_off_ends_by_its_length(server: Running) -> None:
    choice = chat(server, max_tokens=24)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_each_choice_is_read_for_itself(start_server: Callable[..., Running]) -> None:
    server = start_server(ScriptedEngine(CALLS, "no call", "<tool_call>oops"))
    for stream in (False, True):
        response = server.post(PATH, {"messages": [USER], "tools": TOOLS, "n": 3, "stream": stream})
        reasons = {
            choice["index"]: choice["finish_reason"]
            for chunk in (events(response) if stream else [response.json()])
            for choice in chunk["choices"]
            if choice["finish_reason"]
        }
        assert reasons == {0: "tool_calls", 1: "stop", 2: "stop"}


def test_a_stream_with_token_ids_keeps_all_of_them(server: Running) -> None:
    body = {"messages": [USER], "tools": TOOLS, "stream": True, "return_token_ids": True}
    choices = [chunk["choices"][0] for chunk in events(server.post(PATH, body))]
    told = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    assert bytes(told[:-1]).decode() == CALLS


class TestReasoning:
    """`<think>` becomes `reasoning_content`."""

    TEXT = "<think>\nHm.\n</think>\n\nYes."
    TEMPLATE = "{% for m in messages %}{{ m.content }}</think>{% endfor %}{% if open %}<think>\n{% endif %}"

    @pytest.fixture
    def thinker(self, start_server: Callable[..., Running]) -> Running:
        return start_server(ScriptedEngine(self.TEXT, template=self.TEMPLATE))

    def test_it_comes_apart_whole_and_streamed(self, thinker: Running) -> None:
        message = chat(thinker, tools=None)["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        deltas = [
            chunk["choices"][0]["delta"] for chunk in events(thinker.post(PATH, {"messages": [USER], "stream": True}))
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."

    def test_a_prompt_that_ends_in_reasoning_is_gone_on_with(self, thinker: Running) -> None:
        thinker.engine.says = ["Hm.</think>Yes."]
        message = chat(thinker, tools=None, chat_template_kwargs={"open": True})["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")

    @pytest.mark.parametrize(("variables", "is_open"), [({"open": True}, True), ({"open": False}, None)])
    def test_a_form_of_the_answer_holds_after_it(
        self, thinker: Running, variables: dict[str, Any], is_open: bool | None
    ) -> None:
        chat(thinker, tools=None, chat_template_kwargs=variables, response_format={"type": "json_object"})
        wanted = thinker.engine.received[-1]["params"].structured_outputs
        assert (wanted.reasoning and wanted.reasoning.is_open) is is_open

    def test_it_may_be_left_out(self, thinker: Running) -> None:
        message = chat(thinker, tools=None, include_reasoning=False)["message"]
        assert "reasoning_content" not in message
        assert message["content"] == "Yes."

    def test_a_server_may_leave_it_in_the_text(self, start_server: Callable[..., Running]) -> None:
        server = start_server(ScriptedEngine(self.TEXT, template=self.TEMPLATE), reasoning_parser="none")
        assert chat(server, tools=None)["message"]["content"] == self.TEXT


def test_special_tokens_that_are_marks_reach_the_parser(start_server: Callable[..., Running]) -> None:
    server = start_server(ScriptedEngine('[TOOL_CALLS][{"name": "stop", "arguments": {}}]'), tool_call_parser="mistral")
    (call,) = chat(server)["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert server.engine.received[-1]["params"].skip_special_tokens is False
    chat(server, tools=None)
    assert server.engine.received[-1]["params"].skip_special_tokens is True


@pytest.mark.parametrize("parser", ["auto", "hermes"])
def test_a_model_whose_template_knows_no_tools_is_told_of_them(
    start_server: Callable[..., Running], parser: str
) -> None:
    template = "{% for m in messages %}#{{ m.role }}: {{ m.content }}\n{% endfor %}"
    server = start_server(ScriptedEngine(CALLS, template=template), tool_call_parser=parser)
    system = {"role": "system", "content": "be brief", "cache_control": {"type": "ephemeral"}}
    message = chat(server, system, USER)["message"]
    assert len(message["tool_calls"]) == 2
    assert rendered(server).startswith("#system: be brief\n\nYou may call functions")
    assert json.dumps(WEATHER) in rendered(server)
    history = [USER, message, {"role": "tool", "tool_call_id": "x", "content": "rain"}]
    chat(server, *history)
    assert "#user: <tool_response>\nrain\n</tool_response>" in rendered(server)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in rendered(server)


HARMONY_TEMPLATE = (
    "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}<|start|>assistant to=functions."
    "{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis #}"
)


def test_channels_of_harmony_are_reasoning_content_and_calls(start_server: Callable[..., Running]) -> None:
    text = (
        "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'
        "<|call|>"
    )
    server = start_server(ScriptedEngine(text, template=HARMONY_TEMPLATE))
    message = chat(server)["message"]
    assert (message["reasoning_content"], message["content"]) == ("Rain?", "I look.")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris"})
    assert server.engine.received[-1]["params"].skip_special_tokens is False


def test_a_server_without_a_parser_of_calls_refuses_tools(start_server: Callable[..., Running]) -> None:
    server = start_server(ScriptedEngine(CALLS, template="{{ messages[0].content }}"), tool_call_parser="none")
    error = server.error(PATH, {"messages": [USER], "tools": TOOLS}, 400)
    assert error["param"] == "tools"
    assert "--tool-call-parser auto" in error["message"]


def test_a_template_with_calls_in_an_unknown_format_is_told_of_tools_in_the_system_message(
    start_server: Callable[..., Running],
) -> None:
    template = "{{ tools }}{% for m in messages %}#{{ m.role }}: {{ m.content }}<{{ m.tool_calls }}>{% endfor %}"
    server = start_server(ScriptedEngine(CALLS, template=template))
    assert len(chat(server)["message"]["tool_calls"]) == 2
    assert rendered(server).startswith("None#system: You may call functions")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"tools": [*TOOLS, WEATHER]},
            "tools[2].function.name",
            "must differ from other tools'",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not supported"),
        ({"tools": [{"function": 1}]}, "tools[0].function", "must be an object"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name", "1 to 128 letters"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "got 'a b'"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters", "JSON Schema"),
        ({"tools": [{"function": {"name": "f", "description": 1}}]}, "tools[0].function.description", "a string"),
        ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools", "129 tools, but at most 128"),
        ({"tools": [{"function": {"name": "f", "description": "x" * 300_000}}]}, "tools", "at most 262144 are allowed"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "without tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", 'must be "none", "auto"'),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "must name one of the tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "needs a mode"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
            *("tool_choice", "must name tools of this request, got 'g'"),
        ),
    ],
)
def test_tools_that_cannot_be_used_are_refused_by_name(
    server: Running, fields: dict[str, Any], param: str, says: str
) -> None:
    error = server.error(PATH, {"messages": [USER], "tools": TOOLS, **fields}, 400)
    assert error["param"] == param
    assert says in error["message"]


def test_deeply_nested_tools_are_refused(server: Running) -> None:
    schema: dict[str, Any] = {}
    for _ in range(31):
        schema = {"items": schema}
    error = server.error(PATH, {"messages": [USER], "tools": [{"function": {"name": "f", "parameters": schema}}]}, 400)
    assert "nested more than 32 levels deep (--limits max_tools_depth)" in error["message"]


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ("x", "must be a list of tool calls"),
        ([5], "must be a call of a function with a name"),
        ([{"function": {"name": ""}}], "must be a call of a function with a name"),
        ([{"function": {"name": "f", "arguments": 5}}], "arguments must be a JSON object"),
        ([{"function": {"name": "f" * 257}}], "257 characters, but at most 256"),
    ],
)
def test_calls_of_a_history_that_cannot_be_used_are_refused(server: Running, calls: Any, says: str) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": calls}]
    error = server.error(PATH, {"messages": messages}, 400)
    assert error["param"].startswith("messages[1].tool_calls")
    assert says in error["message"]


def test_arguments_of_a_history_that_are_no_json_are_passed_on(server: Running) -> None:
    made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Par'}}
    chat(server, USER, {"role": "assistant", "content": None, "tool_calls": [made]})
    assert json.dumps({"arguments": '{"city": "Par'}) in rendered(server)


NAMED = {"type": "function", "function": {"name": "stop"}}


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"get_weather", "stop"}), (NAMED, {"stop"}), (ALLOWED, {"stop"})]
)
def test_an_answer_that_must_call_is_held_to_it(server: Running, choice: Any, names: set[str]) -> None:
    chat(server, tool_choice=choice)
    wanted = server.engine.received[-1]["params"].structured_outputs
    assert {name for name in ("get_weather", "stop") if f'\\"name\\": \\"{name}\\"' in wanted.grammar} == names
    chat(server)
    assert server.engine.received[-1]["params"].structured_outputs is None


def test_an_answer_cannot_have_two_forms(server: Running) -> None:
    form = {"type": "json_object"}
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "response_format": form}
    assert "cannot have another form too" in server.error(PATH, body, 400)["message"]

"""Ollama's API over a real socket; its official client is run by benchmarks/compatibility.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.server.conftest import Running, rendered, running_server
from tests.server.fake_engine import FakeEngine
from tests.server.scripted_engine import ScriptedEngine

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "weather?"}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
DURATIONS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ScriptedEngine(CALL), shutdown_timeout=0) as running:
        yield running


def lines(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream; checks that only the last is done."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    told = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    return told


def error_of(server: Running, path: str, body: dict[str, Any], status: int) -> str:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    message: str = response.json()["error"]
    return message


def test_a_chat_is_streamed_unless_the_body_says_otherwise(server: Running) -> None:
    told = lines(server, CHAT, {"model": "fake", "messages": [USER]})
    assert "".join(line["message"]["content"] for line in told) == CALL
    assert set(told[-1]) >= DURATIONS | {"done_reason", "created_at", "model"}
    whole = server.post(CHAT, {"model": "fake:latest", "messages": [USER], "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": CALL}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("fake:latest", True, "stop")
    assert whole["eval_count"] == len(CALL) + 1
    assert rendered(server) == "#user: weather?#assistant: "


def test_options_are_the_fields_of_the_same_meaning(server: Running) -> None:
    options = {"num_predict": 7, "temperature": 0.5, "seed": 3, "stop": ["never"], "repeat_penalty": 1.1, "num_ctx": 9}
    response = server.post(CHAT, {"messages": [USER], "options": options, "stream": False})
    assert response.json()["done_reason"] == "length"
    assert response.headers["X-Octavo-Ignored-Fields"] == "options.num_ctx"
    params = server.engine.received[-1]["params"]
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (7, 0.5, 3, ("never",))
    assert (params.repetition_penalty, params.top_k, params.top_p) == (1.1, 40, 0.9)


def test_an_answer_may_be_as_long_as_the_context_has_room_for(server: Running) -> None:
    for limit in (-1, -2, 100_000):
        whole = server.post(CHAT, {"messages": [USER], "options": {"num_predict": limit}, "stream": False}).json()
        assert whole["message"]["content"] == CALL


def test_the_models_own_sampling_goes_before_ollamas(start_server: Callable[..., Running]) -> None:
    engine = FakeEngine()
    engine.info = replace(engine.info, default_sampling={"temperature": 0.6})
    server = start_server(engine)
    server.post(CHAT, {"messages": [USER], "options": {"num_predict": 1}})
    params = server.engine.received[-1]["params"]
    assert (params.temperature, params.top_k) == (0.6, 40)


def test_tools_are_called_with_arguments_as_objects(server: Running) -> None:
    body = {"messages": [USER], "tools": [TOOL]}
    (whole,) = server.post(CHAT, {**body, "stream": False}).json()["message"]["tool_calls"]
    assert whole["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    told = lines(server, CHAT, body)
    assert [call["function"] for line in told for call in line["message"].get("tool_calls", [])] == [whole["function"]]
    history = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": whole["function"]}]},
        {"role": "tool", "content": "rain", "tool_name": "get_weather"},
    ]
    server.post(CHAT, {"messages": history, "tools": [TOOL]})
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in rendered(server)
    assert rendered(server).endswith("#tool: rain#assistant: ")


def test_thinking_stands_beside_the_content(start_server: Callable[..., Running]) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{% endfor %}<think>{{ enable_thinking }}"
    server = start_server(ScriptedEngine("I think.</think>So.", template=template), reasoning_parser="qwen3")
    body = {"messages": [{**USER, "thinking": "before"}], "think": True}
    message = server.post(CHAT, {**body, "stream": False}).json()["message"]
    assert message == {"role": "assistant", "content": "So.", "thinking": "I think."}
    assert rendered(server) == "weather?before<think>True"
    told = [line["message"] for line in lines(server, CHAT, body)]
    assert "".join(each.get("thinking", "") for each in told) == "I think."
    assert "".join(each["content"] for each in told) == "So."
    assert server.post("/api/show", {"model": "fake"}).json()["capabilities"] == ["completion", "tools", "thinking"]


def test_a_begun_answer_is_continued(server: Running) -> None:
    server.post(CHAT, {"messages": [USER, {"role": "assistant", "content": "It is"}]})
    assert rendered(server).endswith("#assistant: It is")


def test_a_completion_is_a_chat_unless_it_is_raw(server: Running) -> None:
    told = lines(server, GENERATE, {"prompt": "weather?", "system": "be brief"})
    assert "".join(line["response"] for line in told) == CALL
    assert rendered(server) == "#system: be brief#user: weather?#assistant: "
    assert bytes(told[-1]["context"][:-1]).decode() == rendered(server) + CALL
    raw = server.post(GENERATE, {"prompt": "weather?", "raw": True, "stream": False}).json()
    assert raw["response"] == CALL
    assert "context" not in raw
    assert rendered(server) == "<bos>weather?"


def test_a_context_goes_before_the_prompt(server: Running) -> None:
    server.post(GENERATE, {"prompt": "and now?", "context": list(b"before. ")})
    assert rendered(server) == "before. #user: and now?#assistant: "
    error = error_of(server, GENERATE, {"prompt": "x", "context": [5000]}, 400)
    assert "context must contain token ids from 0 to 257, got 5000" in error


def test_a_model_without_a_template_gets_the_prompt_as_it_is(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine())
    server.post(GENERATE, {"prompt": "once", "options": {"num_predict": 1}})
    assert rendered(server) == "<bos>once"


@pytest.mark.parametrize(("path", "reason"), [(CHAT, "load"), (GENERATE, "load"), (GENERATE, "unload")])
def test_a_body_without_a_prompt_loads_nothing(server: Running, path: str, reason: str) -> None:
    answer = server.post(path, {"model": "fake", "keep_alive": 0 if reason == "unload" else "5m"}).json()
    assert (answer["done"], answer["done_reason"]) == (True, reason)


def test_the_format_of_an_answer_is_that_of_a_structured_output(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    server.post(CHAT, {"messages": [USER], "format": schema})
    wanted = server.engine.received[-1]["params"].structured_outputs
    assert wanted.json == json.dumps(schema, separators=(",", ":"))
    assert wanted.disable_additional_properties, "as in Ollama"
    assert error_of(server, CHAT, {"messages": [USER], "format": "xml"}, 400).startswith("format must be")


def test_logprobs_stand_beside_the_message(server: Running) -> None:
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "stream": False, "options": {"num_predict": 1}}
    (first, *_) = server.post(CHAT, body).json()["logprobs"]
    assert set(first) == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(first["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images are not supported"),
        (CHAT, {"messages": [{"role": "robot"}]}, "messages[0].role must be one of"),
        (CHAT, {"messages": [USER], "options": {"mirostat": 1}}, "mirostat is not supported"),
        (CHAT, {"messages": [USER], "options": {"temperature": -1}}, "options.temperature must"),
        (CHAT, {"messages": [USER], "options": {"num_predict": "x"}}, "options.num_predict must be"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
        ("/api/embed", {"input": [1]}, "input[0] must be a string"),
        # Without a prompt too, which is only a request to load the model.
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be"),
        (GENERATE, {"images": ["aGk="]}, "images is not supported"),
        ("/api/embed", {"dimensions": 3}, "dimensions must be 4"),
    ],
)
def test_errors_are_in_ollamas_form_and_words(server: Running, path: str, body: dict[str, Any], says: str) -> None:
    assert says in error_of(server, path, body, 400)


def test_other_models_and_paths_are_errors_in_ollamas_form(server: Running) -> None:
    assert "`other` does not exist" in error_of(server, CHAT, {"model": "other", "messages": [USER]}, 404)
    assert "octavo serve MODEL" in error_of(server, "/api/create", {"model": "x"}, 404)


def test_an_error_in_a_stream_is_a_line(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine(breaks_after=3))
    last = server.post(CHAT, {"messages": [USER]}).text.splitlines()[-1]
    assert "internal error" in json.loads(last)["error"]


def test_options_that_are_not_there_are_refused_by_a_strict_server(start_server: Callable[..., Running]) -> None:
    server = start_server(strict_requests=True)
    body = {"messages": [USER], "keep_alive": "5m", "options": {"num_predict": 1, "temperature": 0}}
    assert server.post(CHAT, body).status_code == 200
    body["options"] = {"num_ctx": 10}
    assert "options.num_ctx" in error_of(server, CHAT, body, 400)


def test_embeddings_of_both_ages(server: Running) -> None:
    answer = server.post("/api/embed", {"model": "fake", "input": ["ab", "abcd"]}).json()
    assert [vector[0] for vector in answer["embeddings"]] == [3 / 8, 5 / 8]
    assert answer["prompt_eval_count"] == 8
    ignored = server.post("/api/embed", {"input": "ab", "options": {"num_ctx": 9, "x" * 100: 1}}).headers
    assert ignored["X-Octavo-Ignored-Fields"].startswith("options.num_ctx, options.xxx")
    assert server.post("/api/embed", {"input": "ab"}).json()["embeddings"][0][0] == 3 / 8
    assert server.post("/api/embed", {"input": []}).json()["embeddings"] == []
    assert server.post("/api/embeddings", {"prompt": "ab"}).json()["embedding"][0] == 3 / 8
    assert server.post("/api/embeddings", {"prompt": ""}).json() == {"embedding": []}


def test_too_long_inputs_are_cut_at_their_end_unless_the_body_says_otherwise(server: Running) -> None:
    text = "a" * 3000 + "b" * 3000
    server.post("/api/embed", {"input": text})
    assert rendered(server) == ("<bos>" + text)[: 4096 + len("<bos>") - 1]
    assert "maximum context length" in error_of(server, "/api/embed", {"input": text, "truncate": False}, 400)


def test_the_model_is_described(start_server: Callable[..., Running]) -> None:
    server = start_server(served_model_name=["mine", "other:7b"])
    assert [model["name"] for model in server.client.get("/api/tags").json()["models"]] == ["mine:latest", "other:7b"]
    (running, _) = server.client.get("/api/ps").json()["models"]
    assert (running["model"], running["context_length"], running["size"]) == ("mine:latest", 4096, 1000)
    assert len(running["digest"]) == 64
    assert server.client.head("/").status_code == 200  # how Ollama's command looks whether a server is there
    described = server.post("/api/show", {"name": "mine"}).json()
    assert described["model_info"]["poem.context_length"] == 4096
    assert server.client.get("/api/version").json()["version"]
    assert server.post("/api/show", {"model": "none"}).status_code == 404


def test_a_model_that_is_served_is_pulled_at_once(server: Running) -> None:
    assert server.post("/api/pull", {"model": "fake", "stream": False}).json() == {"status": "success"}
    streamed = server.post("/api/pull", {"model": "fake", "depth": 1})
    assert json.loads(streamed.text) == {"status": "success"}
    assert streamed.headers["X-Octavo-Ignored-Fields"] == "depth"
    assert server.post("/api/pull", {"model": "none"}).status_code == 404


def test_the_api_needs_a_key_where_the_server_has_keys(start_server: Callable[..., Running]) -> None:
    server = start_server(api_key=["k"])
    for path in ("/api/tags", "/api/ps", "/api/version"):
        assert server.client.get(path).status_code == 401
    assert list(server.client.get("/api/tags").json()) == ["error"]
    assert server.client.get("/api/tags", headers={"Authorization": "Bearer k"}).status_code == 200
    assert server.post(CHAT, {"messages": [USER]}).status_code == 401


def test_documented_curl_commands_need_no_content_type(server: Running) -> None:
    body = json.dumps({"messages": [USER]}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.client.post(CHAT, content=body, headers=form).status_code == 200
    # A page could send such a request without asking; browsers then name its origin, or say that it is another site's.
    for header in ({"Sec-Fetch-Site": "cross-site"}, {"Referer": "http://evil.example/"}):
        assert server.client.post(CHAT, content=body, headers={**form, **header}).status_code == 415
    assert server.client.post("/v1/chat/completions", content=body, headers=form).status_code == 415
    text = {"Content-Type": "text/plain"}
    assert server.client.post(CHAT, content=body, headers=text).status_code == 415


def long_chat(*roles: str, length: int = 1200) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{i}" * length} for i, role in enumerate(roles)]


def test_of_a_chat_that_is_too_long_the_oldest_messages_are_dropped(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    roles = ("system", "user", "assistant", "user", "assistant", "tool", "user")
    messages = long_chat(*roles, length=1000)
    response = server.post(CHAT, {"messages": messages, "stream": False})
    assert response.status_code == 200, response.text
    # The system message and the last question: the one before it would not leave a quarter for the answer.
    assert rendered(server).replace("\n", "") == f"#system: {'0' * 1000}#user: {'6' * 1000}#assistant: "
    assert response.headers["X-Octavo-Ignored-Fields"] == "messages.oldest"
    assert "their oldest messages are left out" in caplog.text
    assert "--strict-requests" not in caplog.text  # which would not refuse them


def test_an_answer_without_length_leaves_room_for_more_messages(server: Running) -> None:
    messages = long_chat("user", "assistant", "user", "assistant", "user")
    response = server.post(CHAT, {"messages": messages, "stream": False, "options": {"num_predict": 5}})
    assert response.headers["X-Octavo-Ignored-Fields"] == "messages.oldest"
    assert rendered(server).startswith("#user: 222")


def test_a_chat_that_is_too_long_is_refused_where_nothing_may_be_dropped(server: Running) -> None:
    messages = long_chat("user", "assistant", "user", "assistant", "user")
    assert "maximum context length" in error_of(server, CHAT, {"messages": messages, "truncate": False}, 400)
    assert "maximum context length" in error_of(server, CHAT, {"messages": long_chat("user", length=5000)}, 400)
    last_is_long = [*long_chat("user", "assistant"), *long_chat("user", length=5000)]
    assert "maximum context length" in error_of(server, CHAT, {"messages": last_is_long}, 400)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/create"), ("POST", "/api/copy"), ("POST", "/api/push"), ("DELETE", "/api/delete")],
)
def test_managing_models_is_refused_with_what_to_do_instead(server: Running, method: str, path: str) -> None:
    response = server.client.request(method, path, json={"model": "fake"})
    assert response.status_code == 404
    assert "one model, chosen at start" in response.json()["error"]

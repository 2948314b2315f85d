"""llama.cpp's own API over a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.server.conftest import Running, running_server
from tests.server.fake_engine import BOS, FakeEngine, InfillTokenizer
from tests.server.scripted_engine import ScriptedEngine

PATH = "/completion"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(ScriptedEngine("ten simple steps"), shutdown_timeout=0) as running:
        yield running


def events(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(PATH, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-1]]


@pytest.mark.parametrize("path", [PATH, "/completions"])
def test_a_completion_is_answered(server: Running, path: str) -> None:
    body = {"prompt": "Building a website", "n_predict": 128, "cache_prompt": True, "id_slot": -1}
    response = server.post(path, body)
    assert "X-Octavo-Ignored-Fields" not in response.headers
    answer = response.json()
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("ten simple steps", True, "eos")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (17, 19)
    assert (answer["prompt"], answer["tokens"], answer["model"]) == ("Building a website", [], "fake")
    assert answer["generation_settings"]["n_predict"] == 128
    assert set(answer["timings"]) == {
        "cache_n",
        *(f"{part}_{what}" for part in ("prompt", "predicted") for what in ("n", "ms", "per_token_ms", "per_second")),
    }


def test_a_stream_adds_up_to_the_completion(server: Running) -> None:
    told = events(server, {"prompt": "x", "return_tokens": True})
    assert [event["stop"] for event in told] == [False] * (len(told) - 1) + [True]
    assert "".join(event["content"] for event in told) == "ten simple steps"
    tokens = [token for event in told for token in event["tokens"]]
    assert bytes(tokens[:-1]) == b"ten simple steps"
    assert told[-1]["tokens_predicted"] == len(tokens)
    assert told[-1]["stop_type"] == "eos"


def test_several_prompts_have_several_answers(server: Running) -> None:
    answers = server.post(PATH, {"prompt": ["a", "bc"], "n_predict": 2}).json()
    assert [answer["index"] for answer in answers] == [0, 1]
    assert [answer["tokens_evaluated"] for answer in answers] == [2, 3]
    assert [answer["stop_type"] for answer in answers] == ["limit", "limit"]
    ended = [event["index"] for event in events(server, {"prompt": ["a", "bc"], "n_predict": 2}) if event["stop"]]
    assert sorted(ended) == [0, 1]


def test_fields_are_those_of_the_same_meaning(server: Running) -> None:
    body = {"prompt": "x", "n_predict": -1, "seed": -1, "repeat_penalty": 1.2, "min_p": 0.1, "n_probs": 2}
    server.post(PATH, {**body, "logit_bias": [[65, 1.5], [66, False]], "grammar": "", "json_schema": {}})
    params = server.engine.received[-1]["params"]
    assert (params.max_tokens, params.seed, params.repetition_penalty, params.min_p) == (None, None, 1.2, 0.1)
    assert (params.logprobs, params.logit_bias) == (2, {65: 1.5, 66: -100.0})
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.95)
    server.post(PATH, {"prompt": ["ab", "abcd"], "n_predict": 5000})
    assert server.engine.received[-1]["params"].max_tokens == 4096 - 5  # what the longest leaves room for
    server.post(PATH, {"prompt": "x", "n_predict": None, "max_tokens": 3})
    assert server.engine.received[-1]["params"].max_tokens == 3, "null is nothing"
    assert server.post(PATH, {"prompt": "x", "samplers": ["top_k"]}).headers["X-Octavo-Ignored-Fields"] == "samplers"


def test_probabilities_name_their_tokens(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine())
    (first, _) = server.post(PATH, {"prompt": "x", "n_predict": 2, "n_probs": 2}).json()["completion_probabilities"]
    assert set(first) == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert [alternative["id"] for alternative in first["top_logprobs"]] == [first["id"], (first["id"] + 1) % 128]


def test_a_stop_string_is_named(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine())
    answer = server.post(PATH, {"prompt": "x", "stop": ["sea"], "n_predict": 500}).json()
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", "sea")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "prompt is required"),
        ({"prompt": "x", "repeat_penalty": 0}, "repeat_penalty must"),
        ({"prompt": "x", "n_probs": 21}, "n_probs must"),
        ({"prompt": "x", "logit_bias": [1]}, "logit_bias must be a list"),
        ({"prompt": "x", "logit_bias": [[1, "x"]]}, "logit_bias must have token ids"),
        ({"prompt": "x", "logit_bias": [[1, 10**400]]}, "logit_bias must have finite numbers"),
        ({"prompt": "x", "mirostat": 2}, "mirostat is not supported"),
    ],
)
def test_errors_are_in_llamacpps_form_and_words(server: Running, body: dict[str, Any], says: str) -> None:
    response = server.post(PATH, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert says in error["message"]


def test_what_is_not_there_is_an_error_in_llamacpps_form(server: Running) -> None:
    error = server.post("/apply-template", {}).json()["error"]
    assert (error["code"], error["type"]) == (404, "not_found_error")
    assert server.client.get("/lora-adapters").json()["error"]["code"] == 404


def test_slots_tell_how_many_sequences_can_run(server: Running) -> None:
    listed = server.client.get("/slots").json()
    assert [slot["id"] for slot in listed] == list(range(server.engine.info.max_num_seqs))
    assert listed[0] == {"id": 0, "n_ctx": server.engine.info.max_model_len, "is_processing": False}


@pytest.fixture
def infilling(start_server: Callable[..., Running]) -> Running:
    engine = FakeEngine()
    engine.tokenizer = InfillTokenizer()
    return start_server(engine)


def test_the_middle_is_asked_for_between_prefix_and_suffix(infilling: Running) -> None:
    extra = [{"filename": "a.py", "text": "x = 1"}]
    body = {"input_prefix": "p(", "input_suffix": ")", "input_extra": extra, "prompt": "y", "n_predict": 3}
    response = infilling.post("/infill", body)
    assert response.json()["tokens_predicted"] == 3
    assert "X-Octavo-Ignored-Fields" not in response.headers
    received = infilling.engine.received[-1]
    prefix, suffix, middle, separator = InfillTokenizer.ids.values()
    assert received["prompt"] == [
        *(BOS, separator, *b"a.py\nx = 1\n", prefix, *b"p(", suffix, *b")", middle, *b"y"),
    ]
    assert set(received["params"].stop_token_ids) == {prefix, suffix, middle, separator}


def test_of_long_texts_what_is_far_from_the_middle_is_cut_off(infilling: Running) -> None:
    def asked(prefix: str, suffix: str, extra: str = "") -> tuple[bytes, bytes, bytes]:
        files = [{"filename": "f", "text": extra}]
        body = {"input_prefix": prefix, "input_suffix": suffix, "input_extra": files, "n_predict": 96}
        infilling.post("/infill", body)
        ids = [i for i in infilling.engine.received[-1]["prompt"][1:] if i != InfillTokenizer.ids["<|file_sep|>"]]
        ends = [ids.index(i) for i in list(InfillTokenizer.ids.values())[:3]]
        return bytes(ids[: ends[0]]), bytes(ids[ends[0] + 1 : ends[1]]), bytes(ids[ends[1] + 1 : ends[2]])

    room = 4096 - 96 - 4
    assert asked("a" * 5000 + "b", "c" + "d" * 5000) == (b"", b"a" * 2996 + b"b", b"c" + b"d" * 998)
    assert asked("a" * 5000, "") == (b"", b"a" * room, b"")
    assert asked("", "d" * 5000) == (b"", b"", b"d" * room)
    extra, prefix, suffix = asked("p" * 1000, "s" * 1000, "x" * 5000)
    assert (len(extra), len(prefix), len(suffix)) == (room - 2000, 1000, 1000)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input_prefix": "a"}, "input_suffix is required"),
        ({"input_prefix": "a", "input_suffix": "", "input_extra": [{"text": 1}]}, "input_extra[0] must have"),
        ({"input_prefix": "a", "input_suffix": "", "n_predict": 2.5}, "n_predict"),
        ({"input_prefix": "a", "input_suffix": "", "n_predict": -3}, "n_predict"),
    ],
)
def test_a_wrong_infill_is_refused(infilling: Running, body: dict[str, Any], says: str) -> None:
    response = infilling.post("/infill", body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_a_model_without_tokens_for_it_cannot_fill_in(server: Running) -> None:
    response = server.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 400
    assert "input_prefix needs a model that can fill in the middle" in response.json()["error"]["message"]


def test_an_error_in_a_stream_is_an_event(start_server: Callable[..., Running]) -> None:
    server = start_server(FakeEngine(breaks_after=3))
    assert events(server, {"prompt": "x"})[-1]["error"]["code"] == 500


def test_properties_tell_the_template_and_the_length(server: Running) -> None:
    told = server.client.get("/props").json()
    assert told["default_generation_settings"]["n_ctx"] == 4096
    assert "#tools" in told["chat_template"]


def test_a_schema_allows_the_listed_properties_only(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    server.post(PATH, {"prompt": "x", "json_schema": schema})
    assert server.engine.received[-1]["params"].structured_outputs.disable_additional_properties
    server.post("/v1/completions", {"prompt": "x", "guided_json": schema})
    assert not server.engine.received[-1]["params"].structured_outputs.disable_additional_properties


def test_properties_tell_the_defaults_that_completions_are_drawn_with(start_server: Callable[..., Running]) -> None:
    engine = FakeEngine()
    engine.info = replace(engine.info, default_sampling={"top_k": 7})
    server = start_server(engine)
    told = server.client.get("/props").json()["default_generation_settings"]["params"]
    drawn_with = server.post("/completion", {"prompt": "x"}).json()["generation_settings"]
    assert told == drawn_with
    assert (told["temperature"], told["top_k"], told["min_p"]) == (0.8, 7, 0.05)


def test_tokenize_and_detokenize_take_llamacpps_fields(start_server: Callable[..., Running]) -> None:
    server = start_server()
    assert server.post("/tokenize", {"content": "ab"}).json()["tokens"] == [97, 98]
    assert server.post("/tokenize", {"content": "a", "add_special": True}).json()["tokens"] == [BOS, 97]
    pieces = server.post("/tokenize", {"content": "aé", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert server.post("/detokenize", {"tokens": [97, 98]}).json()["content"] == "ab"


def test_the_api_needs_a_key_where_the_server_has_keys(start_server: Callable[..., Running]) -> None:
    server = start_server(api_key=["k"])
    assert server.post(PATH, {"prompt": "x"}).json()["error"]["type"] == "authentication_error"
    assert server.client.get("/props").status_code == 401
    body = {"prompt": "x", "n_predict": 1}
    assert server.post(PATH, body, headers={"Authorization": "Bearer k"}).status_code == 200

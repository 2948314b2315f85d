"""What /v1/completions gives back, field by field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from octavo.sampling_params import SamplingParams
from tests.server.conftest import Running
from tests.server.fake_engine import BOS, EOS, ByteTokenizer, FakeEngine

PATH = "/v1/completions"


def complete(server: Running, **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"model": "fake", "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[Any]:
    """The objects of an event stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def stream(server: Running, **body: Any) -> list[Any]:
    return events(server.post(PATH, {"model": "fake", "max_tokens": 4, "stream": True, **body}))


def joined(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("prompt", ["abc", ["abc", "de"], [97, 98], [[97, 98], [99]]])
def test_every_form_of_prompt_gives_a_choice_for_each_of_its_prompts(server: Running, prompt: Any) -> None:
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    answer = complete(server, prompt=prompt)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompt) if several else 1))


def test_choices_are_numbered_prompt_by_prompt(server: Running) -> None:
    answer = complete(server, prompt=["first", "second"], n=3, temperature=1, seed=7, add_special_tokens=False)
    params = SamplingParams(n=3, seed=7, max_tokens=4)
    wanted = [
        "".join(delta.text for delta in server.engine.answer(list(prompt), params, i))
        for prompt in (b"first", b"second")
        for i in range(3)
    ]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert answer["usage"]["completion_tokens"] == 24


def test_a_stream_of_many_choices_joins_to_the_same_texts(server: Running) -> None:
    body = {"prompt": ["first", "second"], "n": 2, "seed": 3}
    whole = complete(server, **body)
    assert joined(stream(server, **body)) == {choice["index"]: choice["text"] for choice in whole["choices"]}


def test_the_default_length_is_openais_sixteen_tokens(server: Running) -> None:
    response = server.post(PATH, {"model": "fake", "prompt": "x"})
    assert response.json()["usage"]["completion_tokens"] == 16


def test_null_max_tokens_goes_to_the_end_of_the_context(server: Running) -> None:
    answer = complete(server, prompt=[1, 2], max_tokens=None)
    assert answer["usage"]["total_tokens"] == server.engine.info.max_model_len


def test_the_model_may_be_left_out(server: Running) -> None:
    assert server.post(PATH, {"prompt": "x"}).json()["model"] == "fake"


def test_every_sampling_field_reaches_the_engine(server: Running) -> None:
    asked: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 11,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [3],
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "logprobs": 2,
    }
    complete(server, prompt="x", **asked, logit_bias={"5": -100}, stop="zz", priority=3, cache_salt="salt")
    received = server.engine.received[-1]
    params = received["params"]
    assert {name: getattr(params, name) for name in asked} == {**asked, "stop_token_ids": frozenset({3})}
    assert (params.logit_bias, params.stop, params.max_tokens) == ({5: -100}, ("zz",), 4)
    assert (received["context"].priority, received["context"].cache_salt) == (3, "salt")


def test_openais_defaults_are_used(server: Running) -> None:
    complete(server, prompt="x", temperature=None, top_p=None)
    assert server.engine.received[-1]["params"] == SamplingParams(max_tokens=4)


def test_harmless_fields_are_accepted(server: Running) -> None:
    complete(
        server, prompt="x", user="u", metadata={"a": "b"}, store=False, service_tier="auto", best_of=1, suffix=None
    )


def test_a_stop_string_ends_the_choice_and_is_named(server: Running) -> None:
    choice = complete(server, prompt="x", max_tokens=400, stop=["pussycat"])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "pussycat")
    assert "pussycat" not in choice["text"]
    assert len(choice["text"]) > 0


def test_echo_puts_the_prompt_before_the_text(server: Running) -> None:
    plain = complete(server, prompt="prompt ")["choices"][0]["text"]
    assert complete(server, prompt="prompt ", echo=True)["choices"][0]["text"] == "prompt " + plain
    assert joined(stream(server, prompt="prompt ", echo=True)) == {0: "prompt " + plain}


def test_echo_of_token_ids_decodes_them(server: Running) -> None:
    assert complete(server, prompt=list(b"ids "), echo=True)["choices"][0]["text"].startswith("ids ")


def test_echo_without_output_scores_the_prompt(server: Running) -> None:
    answer = complete(server, prompt=list(b"score"), echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "score"
    assert choice["logprobs"]["tokens"] == list("score")
    assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * 4
    assert answer["usage"]["completion_tokens"] == 0


def test_logprobs_name_each_token_its_alternatives_and_its_place_in_the_text(server: Running) -> None:
    choice = complete(server, prompt="x", logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4
    assert all(top[token] == -0.25 for top, token in zip(logprobs["top_logprobs"], logprobs["tokens"], strict=True))


def test_logprobs_of_a_stream_join_to_those_of_the_whole(server: Running) -> None:
    body = {"prompt": "x", "logprobs": 1, "echo": True}
    whole = complete(server, **body)["choices"][0]["logprobs"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in stream(server, **body)]
    assert {name: [entry for part in parts for entry in part[name]] for name in whole} == whole


def test_text_offset_points_at_whole_characters_and_skips_what_the_text_leaves_out(start_server: Any) -> None:
    server = start_server(FakeEngine(script="é", eos_after=4))
    # A prompt whose answer begins with the first byte of a character; each of them has two.
    token_ids = next([i] for i in range(9) if server.engine.answer([i], SamplingParams(), 0)[0].text == "")
    choice = complete(server, prompt=token_ids, logprobs=0, max_tokens=9, temperature=0)["choices"][0]
    assert choice["text"] == "éé"
    assert choice["logprobs"]["tokens"][-1] == "<eos>"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2]


def test_tokens_can_be_named_by_their_ids(server: Running) -> None:
    logprobs = complete(server, prompt="x", logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert all(name.startswith("token_id:") for name in logprobs["tokens"])


def test_prompt_logprobs_come_in_vllms_format(server: Running) -> None:
    choice = complete(server, prompt=list(b"ab"), prompt_logprobs=1)["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}]


def test_token_ids_are_returned_when_asked_for(server: Running) -> None:
    choice = complete(server, prompt="a", return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [BOS, 97]
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    first, *others = stream(server, prompt="a", return_token_ids=True)
    assert first["choices"][0]["prompt_token_ids"] == [BOS, 97]
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in others)


def test_special_tokens_count_as_output_but_stay_out_of_the_text(start_server: Any) -> None:
    server = start_server(FakeEngine(eos_after=2))
    answer = complete(server, prompt="x", return_token_ids=True)
    assert answer["choices"][0]["token_ids"][-1] == EOS
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(answer["choices"][0]["text"]) == 2
    assert answer["usage"]["completion_tokens"] == 3


def test_usage_can_be_reported_with_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, prompt=[1, 2], stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


def test_events_are_ascii_so_that_no_client_splits_them(start_server: Any) -> None:
    server = start_server(FakeEngine(script="日本\u2028語"))
    body = {"model": "fake", "prompt": [1], "max_tokens": 24, "stream": True, "temperature": 0}
    response = server.post(PATH, body)
    assert response.content.isascii()
    assert "\u2028" in joined(events(response))[0]


def test_a_prompt_may_be_cut_down_to_its_last_tokens(server: Running) -> None:
    body = {"prompt": ["abcdef", "123", "x"], "truncate_prompt_tokens": 2, "max_tokens": 1, "echo": True}
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["text"][:-1] for choice in answer["choices"]] == ["ef", "23", "x"]
    assert answer["usage"]["prompt_tokens"] == 6


def test_a_prompt_that_is_cut_down_is_not_tokenised_whatever_its_length(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteTokenizer, "max_kept_token_bytes", 1)
    server = start_server(FakeEngine(max_model_len=64))
    error = server.error(PATH, {"prompt": "a" * 257, "truncate_prompt_tokens": 2, "max_tokens": 1}, 400)
    assert error["param"] == "prompt"
    assert "257 bytes" in error["message"]
    assert server.post(PATH, {"prompt": "a" * 256, "truncate_prompt_tokens": 2, "max_tokens": 1}).status_code == 200

"""The official client, unchanged, against a real socket."""

from __future__ import annotations

import openai
import pytest

MESSAGES = [{"role": "user", "content": "tell me a poem"}]


def test_the_client_lists_and_retrieves_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "octavo"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other/model")


def test_the_clients_own_stream_accumulator_reads_a_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=MESSAGES, stop=".", n=2) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]
    assert all(choice.message.content for choice in final.choices)


def test_an_answer_larger_than_one_write_arrives_whole(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="x", max_tokens=4000, logprobs=5)
    assert len(answer.choices[0].text) == 4000
    assert len(answer.choices[0].logprobs.tokens) == 4000  # type: ignore[arg-type]


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x" * 5000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"

"""Anthropic's client, used as in its README and guides."""

from __future__ import annotations

import anthropic
from checks import MODEL, URL, check, run_all
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "Name a colour of the sky."}]
WEATHER = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
# One call, because the model may write calls without an end.
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}
FORCED = {"model": MODEL, "max_tokens": 64, "messages": ASK, "tools": [WEATHER], "tool_choice": ONE_CALL}


@check("messages")
def messages() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=8, system="Be brief.", messages=ASK)
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")


@check("messages, streaming helper")
def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=8, messages=ASK) as events:
        text = "".join(events.text_stream)
        assert events.get_final_text() == text


@check("messages, tools")
def tools() -> None:
    answer = client.messages.create(**FORCED)
    call = next(block for block in answer.content if block.type == "tool_use")
    assert call.input["city"] in ("Paris", "Oslo")
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    after = [*ASK, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=after, tools=[WEATHER]).content


@check("messages, results of two tools, one of them an error; an image in one is refused")
def tool_results() -> None:
    calls = [
        {"type": "tool_use", "id": f"t{i}", "name": "get_weather", "input": {"city": city}}
        for i, city in enumerate(("Paris", "Oslo"))
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t0", "content": [{"type": "text", "text": "12 degrees"}]},
        {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no such city"},
    ]
    history = [*ASK, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=history, tools=[WEATHER]).content
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    results[0]["content"].append(image)
    try:
        client.messages.create(model=MODEL, max_tokens=8, messages=history, tools=[WEATHER], system="Be brief.")
    except anthropic.BadRequestError as error:
        told = str(error)
    else:
        raise AssertionError("an image was accepted")
    assert "messages[2].content[0].content[1]" in told, told


@check("messages, tools with the streaming helper")
def tools_stream() -> None:
    with client.messages.stream(**FORCED) as events:
        answer = events.get_final_message()
    assert any(block.type == "tool_use" and block.input["city"] for block in answer.content)


class Answer(BaseModel):
    yes: bool


@check("messages, structured parse")
def parse() -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=64, messages=ASK, output_format=Answer)
    assert isinstance(answer.parsed_output, Answer)


@check("models")
def models() -> None:
    (model,) = client.models.list()
    assert (model.type, model.id, model.display_name) == ("model", MODEL, MODEL)


@check("count_tokens")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.")
    answer = client.messages.create(model=MODEL, max_tokens=1, messages=ASK, system="Be brief.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check("cache_control")
def cache_control() -> str:
    marked = {"type": "text", "text": "Many rules hold. " * 40, "cache_control": {"type": "ephemeral"}}
    for _ in range(2):
        answer = client.messages.create(model=MODEL, max_tokens=1, system=[marked], messages=ASK)
    assert answer.usage.cache_read_input_tokens >= 64
    return f"{answer.usage.cache_read_input_tokens} tokens read from the cache the second time"


@check("errors are the client's own")
def errors() -> None:
    try:
        client.messages.create(model="another", max_tokens=8, messages=ASK)
    except anthropic.NotFoundError:
        return
    raise AssertionError("a model that is not served was accepted")


run_all()

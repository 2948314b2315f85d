"""OpenAI's client, used as in its README and guides."""

from __future__ import annotations

import datetime
import json
import uuid
from typing import Literal

import openai
from checks import MODEL, URL, check, run_all
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "Name a colour of the sky."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


# Short enough for a small model to finish within the limit, though it may write much white space.
class Choice(BaseModel):
    yes: bool
    count: int


class Line(BaseModel):
    kind: Literal["book", "paper"]
    count: int = Field(ge=1, le=99)


class Order(BaseModel):
    lines: list[Line] = Field(min_length=1, max_length=2)
    on: datetime.date
    number: uuid.UUID
    gift: bool | None


@check("models")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@check("completions, echo and logprobs")
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=4, logprobs=2, echo=True)
    assert answer.choices[0].text.startswith("Once")
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.total_tokens


@check("completions, streaming")
def completions_stream() -> None:
    stream = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=4, stream=True)
    assert {chunk.choices[0].index for chunk in stream} == {0, 1}


@check("chat")
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=8, n=2)
    assert len(answer.choices) == 2
    assert answer.usage.completion_tokens <= 16


@check("chat, streaming with usage")
def chat_stream() -> None:
    options = {"include_usage": True}
    *_, last = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=8, stream=True, stream_options=options
    )
    assert last.usage.completion_tokens <= 8


@check("chat, streaming helper")
def chat_helper() -> None:
    # The helper raises if an answer is cut off.
    with client.chat.completions.stream(model=MODEL, messages=ASK, max_tokens=400, stop=["e", "."]) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.content == "".join(deltas)


@check("chat, tools")
def tools() -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=64
    )
    (call, *_) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")
    after = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}]
    assert client.chat.completions.create(model=MODEL, messages=after, tools=[WEATHER], max_tokens=8).choices
    return call.function.arguments


@check("chat, tools with the streaming helper")
def tools_stream() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice=named, max_tokens=64
    ) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


@check("chat, structured parse")
def parse() -> str:
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Choice, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, Choice)
    return str(answer.choices[0].message.parsed)


@check("chat, structured parse of a model with lists, dates and unions, streaming")
def parse_rich() -> str:
    asked = {"model": MODEL, "messages": ASK, "response_format": Order, "max_tokens": 400}
    with client.chat.completions.stream(**asked) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Order)
    assert isinstance(client.chat.completions.parse(**asked).choices[0].message.parsed, Order)
    return str(parsed)


@check("chat, a parse that is cut off raises the client's own error")
def parse_cut_off() -> None:
    try:
        client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Order, max_tokens=3)
    except openai.LengthFinishReasonError:
        return
    raise AssertionError("an answer of 3 tokens was parsed")


@check("chat, tools of pydantic models, with their arguments parsed")
def tools_parsed() -> None:
    tools = [openai.pydantic_function_tool(Choice)]
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=400
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Choice)


@check("chat, parallel calls of two tools, streaming")
def parallel_calls() -> None:
    other = {"type": "function", "function": {**WEATHER["function"], "name": "get_time"}}
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[WEATHER, other], tool_choice="required", max_tokens=400
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [event.index for event in done] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    assert all(json.loads(call.function.arguments)["city"] in ("Paris", "Oslo") for call in calls)


@check("responses")
def responses() -> None:
    first = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=8)
    assert first.output_text
    after = client.responses.create(model=MODEL, input="Another.", previous_response_id=first.id, max_output_tokens=8)
    assert after.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).id == first.id
    client.responses.delete(first.id)


@check("responses, streaming helper")
def responses_stream() -> None:
    # The helper raises if an answer is cut off.
    asked = {"max_output_tokens": 400, "extra_body": {"stop": ["e", "."]}}
    with client.responses.stream(model=MODEL, input="Name a colour.", **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas)


@check("responses, structured parse")
def responses_parse() -> None:
    answer = client.responses.parse(model=MODEL, input="Is it late?", text_format=Choice, max_output_tokens=400)
    assert isinstance(answer.output_parsed, Choice)


@check("responses, structured parse of a model with lists, dates and unions, streaming")
def responses_parse_rich() -> None:
    with client.responses.stream(model=MODEL, input="x", text_format=Order, max_output_tokens=400) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Order)


@check("responses, input tokens are counted")
def responses_count() -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="Name a colour.")
    answer = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens


@check("responses, tools")
def responses_tools() -> None:
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    answer = client.responses.create(
        model=MODEL, input="Weather?", tools=[tool], tool_choice="required", max_output_tokens=64
    )
    assert any(item.type == "function_call" for item in answer.output)


@check("responses, logprobs, whole and streaming")
def responses_logprobs() -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0, "max_output_tokens": 8}
    (message,) = client.responses.create(model=MODEL, input="Name a colour.", **asked).output
    (text,) = message.content
    assert "".join(entry.token for entry in text.logprobs) == text.text
    assert {len(entry.top_logprobs) for entry in text.logprobs} == {2}
    events = list(client.responses.create(model=MODEL, input="Name a colour.", stream=True, **asked))
    grown = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert events[-1].response.output[0].content[0].logprobs == text.logprobs
    assert [entry.token for entry in grown] == [entry.token for entry in text.logprobs]


@check("responses, input items and references to them")
def responses_items() -> None:
    first = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=8)
    (question,) = client.responses.input_items.list(first.id)
    given = [{"type": "item_reference", "id": item.id} for item in (question, *first.output)]
    given.append({"role": "user", "content": "Another."})
    second = client.responses.create(model=MODEL, input=given, max_output_tokens=8)
    listed = [item.id for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert listed[:2] == [question.id, first.output[0].id]
    assert len(listed) == 3


@check("responses, an error in a stream's beginning is the client's own")
def responses_error() -> None:
    try:
        list(client.responses.create(model=MODEL, input="x", top_logprobs=21, stream=True))
    except openai.BadRequestError as error:
        param = error.param
    else:
        raise AssertionError("21 alternatives were accepted")
    assert param == "top_logprobs"


@check("embeddings")
def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["a text", "another"])
    assert [abs(sum(x * x for x in entry.embedding) - 1) < 1e-3 for entry in answer.data] == [True, True]


@check("errors are the client's own")
def errors() -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    except openai.BadRequestError as error:
        param = error.param
    else:
        raise AssertionError("a temperature of -1 was accepted")
    assert param == "temperature"


run_all()

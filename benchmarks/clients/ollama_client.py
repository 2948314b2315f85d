"""Ollama's own client, used as in its README."""

from __future__ import annotations

import json
from collections.abc import Callable

import ollama
from checks import MODEL, URL, check, run_all
from pydantic import BaseModel

client = ollama.Client(host=URL)
ASK = [{"role": "user", "content": "Why is the sky blue?"}]
SHORT = {"num_predict": 8, "temperature": 0}


class Colour(BaseModel):
    yes: bool
    count: int


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The name of the city

    Returns:
        The weather
    """
    return f"12 degrees in {city}"


def timed(answer: ollama.GenerateResponse | ollama.ChatResponse) -> None:
    assert answer.done
    assert answer.done_reason == "length"
    assert answer.eval_count == 8
    assert 0 < answer.prompt_eval_duration < answer.total_duration
    assert 0 < answer.eval_duration < answer.total_duration


def error_of(call: Callable[[], object]) -> ollama.ResponseError:
    try:
        call()
    except ollama.ResponseError as error:
        return error
    raise AssertionError("it was taken")


@check("list, ps and show")
def models() -> None:
    assert f"{MODEL}:latest" in [model.model for model in client.list().models]
    assert client.ps().models[0].context_length
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"]


@check("chat")
def chat() -> str:
    answer = client.chat(model=MODEL, messages=ASK, options=SHORT)
    assert answer["message"]["content"] == answer.message.content
    timed(answer)
    return f"{answer.eval_count / answer.eval_duration * 1e9:.0f} tokens/s"


@check("chat, streaming")
def chat_stream() -> None:
    *parts, last = client.chat(model=f"{MODEL}:latest", messages=ASK, options=SHORT, stream=True)
    whole = client.chat(model=MODEL, messages=ASK, options=SHORT).message.content
    assert "".join(part.message.content for part in [*parts, last]) == whole
    timed(last)


@check("generate, whole and streaming")
def generate() -> None:
    answer = client.generate(model=MODEL, prompt="Why is the sky blue?", system="Be brief.", options=SHORT)
    timed(answer)
    parts = client.generate(model=MODEL, prompt="Why is the sky blue?", system="Be brief.", options=SHORT, stream=True)
    assert "".join(part["response"] for part in parts) == answer.response


@check("generate, with the context of an earlier answer, and raw")
def generate_more() -> None:
    first = client.generate(model=MODEL, prompt="My name is Ada.", options=SHORT)
    second = client.generate(model=MODEL, prompt="What is my name?", context=first.context, options=SHORT)
    assert second.prompt_eval_count > len(first.context)
    assert client.generate(model=MODEL, prompt="Once upon a time", raw=True, options=SHORT).context is None


@check("chat, structured output of a pydantic model")
def structured() -> str:
    answer = client.chat(model=MODEL, messages=ASK, format=Colour.model_json_schema(), options={"num_predict": 200})
    return str(Colour.model_validate_json(answer.message.content))


@check("chat, JSON")
def as_json() -> None:
    answer = client.generate(
        model=MODEL, prompt="Name a colour, as JSON.", format="json", options={"num_predict": 400, "temperature": 0}
    )
    if answer.done_reason == "stop":
        json.loads(answer.response)


@check("chat, a Python function as a tool, and its result")
def tools() -> str:
    history = [{"role": "user", "content": "What is the weather in Paris? Call get_weather."}]
    answer = client.chat(model=MODEL, messages=history, tools=[get_weather], options={"num_predict": 100})
    call = ollama.Message.ToolCall(function={"name": "get_weather", "arguments": {"city": "Paris"}})
    calls = answer.message.tool_calls or [call]
    history.append({"role": "assistant", "content": answer.message.content or "", "tool_calls": calls})
    history.append({"role": "tool", "content": get_weather("Paris"), "tool_name": "get_weather"})
    final = client.chat(model=MODEL, messages=history, tools=[get_weather], options=SHORT)
    assert final.done
    return f"called: {answer.message.tool_calls is not None}"


@check("chat, logprobs")
def logprobs() -> None:
    answer = client.chat(model=MODEL, messages=ASK, options=SHORT, logprobs=True, top_logprobs=2)
    assert [len(token.top_logprobs) for token in answer.logprobs] == [2] * 8


@check("chat, keep_alive, think and options that only Ollama has")
def others() -> None:
    options = {**SHORT, "num_ctx": 4096, "repeat_penalty": 1.1, "num_thread": 2}
    client.chat(model=MODEL, messages=ASK, think=False, keep_alive="5m", options=options)
    assert client.generate(model=MODEL, keep_alive=0).done_reason == "unload"


@check("embed, one and several inputs, and embeddings")
def embed() -> None:
    (one,) = client.embed(model=MODEL, input="one").embeddings
    several = client.embed(model=MODEL, input=["one", "two"])
    assert len(several.embeddings) == 2
    assert abs(sum(a * b for a, b in zip(one, several.embeddings[0], strict=True)) - 1) < 1e-2
    assert len(client.embeddings(model=MODEL, prompt="one").embedding) == len(one)


@check("the model that is served is pulled at once; others, push and create are errors")
def managing() -> None:
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(MODEL, stream=True)] == ["success"]
    for refused in (lambda: client.pull("other"), lambda: client.push(MODEL), lambda: client.create("x", from_=MODEL)):
        error = error_of(refused)
        assert error.status_code == 404
        assert "{" not in error.error


@check("errors are the client's own")
def errors() -> None:
    assert error_of(lambda: client.chat(model="other", messages=ASK)).status_code == 404
    seen = [{"role": "user", "content": "What is this?", "images": ["aGk="]}]
    assert "images" in error_of(lambda: client.chat(model=MODEL, messages=seen)).error


if __name__ == "__main__":
    run_all()

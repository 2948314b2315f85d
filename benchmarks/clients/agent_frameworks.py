"""Tool loops of two agent frameworks: the model calls a tool, the framework runs it, the model answers."""

from __future__ import annotations

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from checks import MODEL, URL, check, run_all
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

disable_tracing(True)
asked: list[str] = []


@function_tool
def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather in a city."""
    asked.append(city)
    return "12 degrees"


def loop(model_class: type) -> str:
    """Run a loop whose first turn must call the tool; the framework then lets the model answer."""

    async def run() -> str:
        model = model_class(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))
        settings = ModelSettings(tool_choice="required", max_tokens=1500, extra_body={"stop": ["."]})
        agent = Agent(name="a", instructions="Be brief.", model=model, tools=[get_weather], model_settings=settings)
        result = await Runner.run(agent, "What is the weather in Oslo?", max_turns=6)
        return str(result.final_output)

    asked.clear()
    answer = asyncio.run(run())
    assert asked, "the tool was not called"
    return f"called {len(asked)} times, then: {answer[:60]!r}"


@check("openai-agents, tool loop over chat completions")
def over_chat() -> str:
    return loop(OpenAIChatCompletionsModel)


@check("openai-agents, tool loop over responses")
def over_responses() -> str:
    return loop(OpenAIResponsesModel)


class Answer(BaseModel):
    warm: bool
    degrees: int


@check("pydantic-ai, typed output by a tool")
def typed() -> str:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    agent = PydanticAgent(model, output_type=Answer, retries=3, model_settings={"max_tokens": 64})
    result = agent.run_sync("It is 12 degrees. Is that warm?")
    assert isinstance(result.output, Answer)
    return str(result.output)


run_all()

"""One chat with one answer, which APIs other than chat completions convert into their own form."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from octavo.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.server.answer_json import weight_of
from octavo.server.answers.blocks import Blocks, Change
from octavo.server.answers.choices import CallIds, ChoiceReader
from octavo.server.answers.generation import Job, Usage
from octavo.server.bodies.reading import ChatRequest
from octavo.server.engine_client import EngineClient
from octavo.server.tenants.keys import Client


class SingleChat:
    """Runs one chat request.

    Attributes:
        blocks: the answer so far.
        usage: the token usage so far.
        completion: the latest part of the answer.
    """

    def __init__(
        self, engine: EngineClient, read: ChatRequest, client: Client, request_id: str, traceparent: str | None
    ) -> None:
        context = client.context(request_id, read.body.priority, read.cache_salt, read.prompt.pins)
        self._engine = engine
        self.job = Job(read.model, [read.prompt], read.params, replace(context, traceparent=traceparent))
        self._choice = ChoiceReader(read.speech)
        self.blocks = Blocks(CallIds(read.speech.dialect))
        self.usage = Usage(self.job.prompts)
        self.completion = CompletionOutput(0)

    async def whole(self) -> RequestOutput:
        """Run the chat to its end and return the output; `read` turns it into blocks."""
        (output,) = await self.job.results(self._engine)
        return output

    @staticmethod
    def weight(output: RequestOutput) -> int:
        """Estimate how many small objects are made when an output is read."""
        return weight_of(output) + sum(len(completion.text) for completion in output.outputs) // 2

    def read(self, output: RequestOutput) -> list[Change]:
        """Add an output to the blocks, and return the changes."""
        self.usage.add(0, output)
        changes: list[Change] = []
        for completion in output.outputs:
            self.completion = completion
            changes += self.blocks.take(self._choice.read(completion))
        if output.finished:
            changes += self.blocks.end()
        return changes

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs as they arrive; `read` turns them into blocks."""
        async with aclosing(self.job.stream(self._engine, OutputKind.DELTA)) as outputs:
            async for _, output in outputs:
                yield output

    @property
    def calls(self) -> bool:
        """Whether the answer ended by calling tools."""
        return self._choice.finish_reason(self.completion) == "tool_calls"

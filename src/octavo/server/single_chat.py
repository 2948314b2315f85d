"""One chat with one answer, of which other APIs than chat completions make theirs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from octavo.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.server.blocks import Blocks, Change
from octavo.server.choices import CallIds, ChoiceReader
from octavo.server.engine_client import EngineClient
from octavo.server.generation import Job, Usage, new_id, weight_of
from octavo.server.keys import Client
from octavo.server.reading import ChatRequest


class SingleChat:
    """Runs a chat that was read.

    Attributes:
        blocks: the answer, as far as it has come.
        usage: its tokens.
        completion: its latest part.
    """

    def __init__(
        self, engine: EngineClient, read: ChatRequest, client: Client, prefix: str, traceparent: str | None
    ) -> None:
        context = client.context(new_id(prefix), read.body.priority, read.cache_salt, read.prompt.pins)
        self._engine = engine
        self.job = Job(read.model, [read.prompt], read.params, replace(context, traceparent=traceparent))
        self._choice = ChoiceReader(read.speech)
        self.blocks = Blocks(CallIds(read.speech.dialect))
        self.usage = Usage(self.job.prompts)
        self.completion = CompletionOutput(0)

    async def whole(self) -> RequestOutput:
        """Run it to its end; `read` makes blocks of it."""
        (output,) = await self.job.results(self._engine)
        return output

    @staticmethod
    def weight(output: RequestOutput) -> int:
        """About how many small objects reading an output makes."""
        return weight_of(output) + sum(len(completion.text) for completion in output.outputs) // 2

    def read(self, output: RequestOutput) -> list[Change]:
        """Take in an output: what it changes of the blocks."""
        self.usage.add(0, output)
        changes: list[Change] = []
        for completion in output.outputs:
            self.completion = completion
            changes += self.blocks.take(self._choice.read(completion))
        if output.finished:
            changes += self.blocks.end()
        return changes

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """The outputs as they come; `read` makes blocks of them."""
        async with aclosing(self.job.stream(self._engine, OutputKind.DELTA)) as outputs:
            async for _, output in outputs:
                yield output

    @property
    def calls(self) -> bool:
        """Whether it ended by calling tools."""
        return self._choice.finish_reason(self.completion) == "tool_calls"

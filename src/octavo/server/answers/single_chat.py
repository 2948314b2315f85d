"""One chat with one answer, as the blocks (reasoning, text, calls) that APIs other than chat completions show."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum

from octavo.dialect.events import Arguments, CallBegins, Event, Reasoning
from octavo.engine.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.server.answer_json import weight_of
from octavo.server.answers.choices import CallIds, ChoiceReader
from octavo.server.answers.generation import Job, Usage
from octavo.server.bodies.body_reader import ChatRequest
from octavo.server.engine_client import EngineClient
from octavo.server.tenants.keys import Client


class BlockKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One part of an answer.

    Attributes:
        name: the name of the called tool; empty for other kinds.
        call_id: the id of the call; empty for other kinds.
        pieces: the block's text, or the arguments of a call.
    """

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    """A block has become longer.

    Attributes:
        end: number of characters that the model wrote up to the end of `text`; 0 for a call.
    """

    block: Block
    text: str
    end: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Grew | Closed


class Blocks:
    """Collects an answer's blocks, of which at most one is open."""

    def __init__(self, ids: CallIds) -> None:
        self._ids = ids
        self._open: Block | None = None
        self.all: list[Block] = []

    def take(self, events: Iterable[Event]) -> Iterator[Change]:
        """Add events and yield the changes to the blocks."""
        for event in events:
            if isinstance(event, CallBegins):
                yield from self._begin(BlockKind.CALL, event.name)
                continue
            if isinstance(event, Arguments):
                kind = BlockKind.CALL
            else:
                kind = BlockKind.REASONING if isinstance(event, Reasoning) else BlockKind.TEXT
            if self._open is None or self._open.kind is not kind:
                yield from self._begin(kind)
            assert self._open is not None
            self._open.pieces.append(event.text)
            yield Grew(self._open, event.text, 0 if isinstance(event, Arguments) else event.end)

    def end(self) -> Iterator[Change]:
        """Close the open block, if any."""
        if self._open is not None:
            yield Closed(self._open)
            self._open = None

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[Change]:
        yield from self.end()
        self._open = Block(len(self.all), kind, name, self._ids.new() if kind is BlockKind.CALL else "")
        self.all.append(self._open)
        yield Opened(self._open)


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

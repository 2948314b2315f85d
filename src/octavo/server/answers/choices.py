"""The choices of a chat's answer, as the blocks (reasoning, text, calls) that the renderers of all APIs show."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.dialect.events import Arguments, CallBegins, Event, Reasoning
from octavo.dialect.parser import Dialect, OutputParser
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.request import FinishReason
from octavo.server.answer_json import weight_of
from octavo.server.answers.generation import Answer, Job
from octavo.server.bodies.body_reader import ChatRequest
from octavo.server.bodies.dialects import Speech
from octavo.server.engine_client import EngineClient
from octavo.server.tenants.keys import Client

_ID_LENGTH = 24


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
        number: its place among the calls; 0 for other kinds.
        pieces: the block's text, or the arguments of a call.
    """

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    number: int = 0
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


class CallIds:
    """Generates ids of tool calls in the form that the model's chat template expects."""

    def __init__(self, dialect: Dialect) -> None:
        self._length = None if dialect.calls is None else dialect.calls.id_length

    def new(self) -> str:
        if self._length is None:
            return f"call_{secrets.token_hex(_ID_LENGTH // 2)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self._length))


class ChatChoice:
    """One choice of an answer: parsed into blocks, of which at most one is open, whole or as it is generated.

    Attributes:
        blocks: the choice so far.
        completion: its latest part.
    """

    def __init__(self, speech: Speech, ids: CallIds) -> None:
        self._speech = speech
        self._parser = OutputParser(speech.dialect)
        self._ids = ids
        self._open: Block | None = None
        self.blocks: list[Block] = []
        self.completion = CompletionOutput(0)

    def read(self, completion: CompletionOutput) -> list[Change]:
        """Add a completion, or the next part of one, and return the changes to the blocks."""
        self.completion = completion
        events = self._parser.feed(completion.text)
        ends = completion.finish_reason is not None
        if ends:
            events += self._parser.finish()
        return [*self._take(filter(self._is_visible, events)), *(self._close() if ends else ())]

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's finish reason: "tool_calls" if the choice ended by itself and has calls."""
        reason = self.completion.finish_reason
        return "tool_calls" if reason is FinishReason.STOP and self._parser.num_calls else reason

    def text(self, kind: BlockKind) -> str:
        """Return the text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if block.kind is kind)

    def _is_visible(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._speech.tells_reasoning
        return not (self._speech.one_call and isinstance(event, CallBegins | Arguments) and event.index > 0)

    def _take(self, events: Iterable[Event]) -> Iterator[Change]:
        for event in events:
            if isinstance(event, CallBegins):
                yield from self._begin(
                    Block(len(self.blocks), BlockKind.CALL, event.name, self._ids.new(), event.index)
                )
                continue
            if isinstance(event, Arguments):
                kind = BlockKind.CALL
            else:
                kind = BlockKind.REASONING if isinstance(event, Reasoning) else BlockKind.TEXT
            if self._open is None or self._open.kind is not kind:
                yield from self._begin(Block(len(self.blocks), kind))
            assert self._open is not None
            self._open.pieces.append(event.text)
            yield Grew(self._open, event.text, 0 if isinstance(event, Arguments) else event.end)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._close()
        self._open = block
        self.blocks.append(block)
        yield Opened(block)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield Closed(self._open)
            self._open = None


class SingleChat(Answer):
    """An answer of one choice.

    Attributes:
        choice: the answer so far.
    """

    def __init__(
        self, engine: EngineClient, read: ChatRequest, client: Client, prefix: str, traceparent: str | None
    ) -> None:
        super().__init__(engine, Job.of(read, prefix, client, traceparent))
        self.choice = ChatChoice(read.speech, CallIds(read.speech.dialect))

    def weight(self, output: RequestOutput) -> int:
        return weight_of(output) + sum(len(completion.text) for completion in output.outputs) // 2

    def read(self, output: RequestOutput) -> list[Change]:
        """Add an output to the blocks, and return the changes."""
        self.usage.add(0, output)
        return [change for completion in output.outputs for change in self.choice.read(completion)]

"""The choices of a chat's answer as blocks (reasoning, text, calls), and `POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from octavo.dialect.events import Arguments, CallBegins, Event, Reasoning
from octavo.dialect.parser import Dialect, OutputParser
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.request import FinishReason
from octavo.server.answer_json import dumps, event, json_pieces, weight_of
from octavo.server.answers.generation import Answer, Job, OpenAIAnswer
from octavo.server.answers.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.bodies.read_bodies import ChatRequest
from octavo.server.bodies.tools import Speech

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
        for parsed in events:
            if isinstance(parsed, CallBegins):
                known = {block.call_id for block in self.blocks}
                call_id = parsed.id if parsed.id and parsed.id not in known else self._ids.new()
                yield from self._begin(Block(len(self.blocks), BlockKind.CALL, parsed.name, call_id, parsed.index))
                continue
            if isinstance(parsed, Arguments):
                kind = BlockKind.CALL
            else:
                kind = BlockKind.REASONING if isinstance(parsed, Reasoning) else BlockKind.TEXT
            if self._open is None or self._open.kind is not kind:
                yield from self._begin(Block(len(self.blocks), kind))
            assert self._open is not None
            self._open.pieces.append(parsed.text)
            yield Grew(self._open, parsed.text, 0 if isinstance(parsed, Arguments) else parsed.end)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._close()
        self._open = block
        self.blocks.append(block)
        yield Opened(block)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield Closed(self._open)
            self._open = None


class SingleChat(Answer[ChatRequest]):
    """An answer of one choice.

    Attributes:
        choice: the answer so far.
    """

    def __init__(self, job: Job[ChatRequest]) -> None:
        super().__init__(job)
        self.choice = ChatChoice(job.read.speech, CallIds(job.read.speech.dialect))

    def weight(self, output: RequestOutput) -> int:
        return weight_of(output) + sum(len(completion.text) for completion in output.outputs) // 2

    def read(self, output: RequestOutput) -> list[Change]:
        """Add an output to the blocks, and return the changes."""
        self.usage.add(0, output)
        return [change for completion in output.outputs for change in self.choice.read(completion)]


class ChatAnswer(OpenAIAnswer[ChatRequest]):
    """One chat request."""

    def __init__(self, job: Job[ChatRequest]) -> None:
        super().__init__(job, "chat.completion.chunk", tells_pins=bool(job.context.pins))
        read = job.read
        self._texts = job.texts
        self._body = read.body
        self._echoed = read.echoed
        # Only if the answer has a format to parse.
        ids = CallIds(read.speech.dialect)
        self._choices = [ChatChoice(read.speech, ids) for _ in range(read.params.n)] if read.speech else []
        self._begun = False

    def weight(self, output: RequestOutput) -> int:
        parsed = sum(len(completion.text) for completion in output.outputs) if self._choices else 0
        repeated = len(output.prompt_ids) if self._body.return_token_ids and not self._begun else 0
        return weight_of(output) + parsed // 2 + repeated

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        (output,) = outputs
        self._count(0, output)
        response: dict[str, Any] = {
            **self._head("chat.completion"),
            "choices": [self._choice(completion) for completion in output.outputs],
            **self._totals(),
        }
        if self._body.sampling.get("prompt_logprobs") is not None:
            given = output.prompt_logprobs or ()
            response["prompt_logprobs"] = prompt_logprobs(self._texts, output.prompt_ids, given)
        if self._body.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        return json_pieces(response)

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        payload: dict[str, Any] = {"role": "assistant", "content": self._echoed + completion.text, "refusal": None}
        if self._choices:
            choice = self._choices[completion.index]
            choice.read(completion)
            payload["content"] = self._echoed + choice.text(BlockKind.TEXT)
            if any(block.kind is BlockKind.REASONING for block in choice.blocks):
                payload["reasoning_content"] = choice.text(BlockKind.REASONING)
            if calls := [_call(block, block.text) for block in choice.blocks if block.kind is BlockKind.CALL]:
                payload |= {"content": payload["content"] or None, "tool_calls": calls}
        return {"index": completion.index, "message": payload, **self._reported(completion)}

    def _reported(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the fields of a choice other than its text, for whole answers and for chunks."""
        reported: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": (
                self._choices[completion.index].finish_reason if self._choices else completion.finish_reason
            ),
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            reported["logprobs"] = chat_logprobs(
                self._texts,
                completion.token_ids,
                completion.logprobs,
                as_token_ids=bool(self._body.return_tokens_as_token_ids),
            )
        if self._body.return_token_ids:
            reported["token_ids"] = completion.token_ids
        return reported

    def render(self, index: int, output: RequestOutput) -> bytes:
        self._count(0, output)
        tail = self._tail()
        chunks = [] if self._begun else self._roles(self._stream_head, tail, output)
        self._begun = True
        chunks += [
            event(self._stream_head + delta + tail)
            for completion in output.outputs
            if completion.token_ids or completion.text or completion.finish_reason
            for delta in (self._parsed_deltas(completion) if self._choices else [self._delta(completion)])
        ]
        return "".join(chunks).encode()

    def _roles(self, head: str, tail: str, output: RequestOutput) -> list[str]:
        """Return the first event of every choice, which carries its role."""
        delta = {"role": "assistant", "content": self._echoed}
        if self._body.return_token_ids:
            tail = f'],"prompt_token_ids":{dumps(output.prompt_token_ids)}{tail[1:]}'
        choices = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self.job.read.params.n)
        ]
        return [event(head + dumps(choice) + tail) for choice in choices]

    def _parsed_deltas(self, completion: CompletionOutput) -> list[str]:
        """Return one choice object per parsed delta; the last one also carries the fields of `_reported`."""
        changes = self._choices[completion.index].read(completion)
        deltas = [delta for change in changes if (delta := _delta(change)) is not None]
        plain = {"logprobs": None, "finish_reason": None}
        says_more = completion.finish_reason or completion.logprobs is not None or self._body.return_token_ids
        chunks = [{"index": completion.index, "delta": delta, **plain} for delta in deltas]
        if says_more:
            last = chunks.pop() if chunks and completion.finish_reason is None else {"index": completion.index}
            chunks.append({"delta": {}, **last, **self._reported(completion)})
        return [dumps(chunk) for chunk in chunks]

    def _delta(self, completion: CompletionOutput) -> str:
        if completion.finish_reason is None and completion.logprobs is None and not self._body.return_token_ids:
            # The fast path: nearly every event of nearly every stream.
            content = dumps(completion.text)
            return (
                f'{{"index":{completion.index},"delta":{{"content":{content}}},"logprobs":null,"finish_reason":null}}'
            )
        delta = {"content": completion.text} if completion.text else {}
        return dumps({"index": completion.index, "delta": delta, **self._reported(completion)})


def _call(block: Block, arguments: str) -> dict[str, Any]:
    return {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _delta(change: Change) -> dict[str, Any] | None:
    """Return a change as OpenAI's `delta` object; None if it says nothing."""
    match change:
        case Opened(block) if block.kind is BlockKind.CALL:
            return {"tool_calls": [{"index": block.number, **_call(block, "")}]}
        case Grew(block, text) if block.kind is BlockKind.CALL:
            return {"tool_calls": [{"index": block.number, "function": {"arguments": text}}]}
        case Grew(block, text):
            return {"reasoning_content" if block.kind is BlockKind.REASONING else "content": text}
        case _:
            return None

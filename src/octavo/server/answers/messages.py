"""`POST /v1/messages`: Anthropic's API, translated to a chat."""

from __future__ import annotations

from typing import Any

from octavo.engine.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.server.answer_json import dumps, json_pieces
from octavo.server.answers.chat import Block, BlockKind, Change, Closed, Grew, Opened, SingleChat
from octavo.server.answers.generation import Job
from octavo.server.bodies.messages_body import arguments_object
from octavo.server.bodies.read_bodies import ChatRequest


class MessagesAnswer(SingleChat):
    """One message."""

    def __init__(self, job: Job[ChatRequest]) -> None:
        super().__init__(job)
        self._begun = False

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        self.read(outputs[0])
        content = [{**_opening(block), **_whole(block)} for block in self.choice.blocks]
        return json_pieces({**self._head(content), **self._ending(), "usage": self._usage()})

    def render(self, index: int, output: RequestOutput) -> bytes:
        events = [_event(_payload(change)) for change in self.read(output)]
        if not self._begun:
            self._begun = True
            message = {**self._head([]), "stop_reason": None, "stop_sequence": None}
            usage = {**self._usage(), "output_tokens": 0}
            events.insert(0, _event({"type": "message_start", "message": {**message, "usage": usage}}))
        return "".join(events).encode()

    def last(self) -> bytes:
        ending = {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        return (_event(ending) + _event({"type": "message_stop"})).encode()

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        fields = {"id": self.job.response_id, "type": "message", "role": "assistant", "model": self.job.read.model}
        return {**fields, "content": content}

    def _ending(self) -> dict[str, Any]:
        completion = self.choice.completion
        if self.choice.finish_reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if completion.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _opening(block: Block) -> dict[str, Any]:
    """Return a block before it has any content."""
    if block.kind is BlockKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        return {"input": arguments_object(block.text)}
    return {"thinking" if block.kind is BlockKind.REASONING else "text": block.text}


def _payload(change: Change) -> dict[str, Any]:
    match change:
        case Opened(block):
            return {"type": "content_block_start", "index": block.index, "content_block": _opening(block)}
        case Grew(block, text):
            kinds = {
                BlockKind.TEXT: {"type": "text_delta", "text": text},
                BlockKind.REASONING: {"type": "thinking_delta", "thinking": text},
                BlockKind.CALL: {"type": "input_json_delta", "partial_json": text},
            }
            return {"type": "content_block_delta", "index": block.index, "delta": kinds[block.kind]}
        case Closed(block):
            return {"type": "content_block_stop", "index": block.index}


def _event(fields: dict[str, Any]) -> str:
    return f"event: {fields['type']}\ndata: {dumps(fields)}\n\n"

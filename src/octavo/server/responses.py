"""`POST /v1/responses`: OpenAI's newer API over the chat that its body stands for."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from octavo.engine.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.server.blocks import Block, BlockKind, Change, Closed, Grew, Opened
from octavo.server.engine_client import EngineClient
from octavo.server.generation import Usage, dumps, json_bytes, json_pieces, offload
from octavo.server.keys import Client
from octavo.server.reading import ChatRequest
from octavo.server.response_store import StoredResponse
from octavo.server.responses_body import ResponsesBody
from octavo.server.single_chat import SingleChat

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}
# Fields of the body that the response repeats, with what is told where they are not given.
_REPEATED: dict[str, Any] = {
    "previous_response_id": None,
    "max_output_tokens": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "user": None,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "metadata": {},
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
}


class ResponseAnswer:
    """One response, answered whole or as a stream.

    Args:
        store: takes the response once it is complete, where the body does not say otherwise.
    """

    def __init__(
        self,
        engine: EngineClient,
        read: ChatRequest,
        client: Client,
        traceparent: str | None,
        store: Callable[[str, StoredResponse], None],
    ) -> None:
        assert isinstance(read.origin, ResponsesBody)
        self._body = read.origin
        self._items = read.items
        self._instructions = read.instructions
        self._chat = SingleChat(engine, read, client, "resp", traceparent)
        self._store = store
        self._number = 0
        self._id = self._chat.job.response_id.replace("-", "_", 1)

    @property
    def usage(self) -> Usage:
        return self._chat.usage

    async def whole(self) -> list[bytes]:
        output = await self._chat.whole()
        pieces = await offload(self._chat.weight(output), lambda: self._assemble(output))
        self._keep(b"".join(pieces))
        return pieces

    def _assemble(self, output: RequestOutput) -> list[bytes]:
        self._chat.read(output)
        return json_pieces(self._response(self._ending()))

    def _keep(self, response: bytes) -> None:
        if self._body.is_stored:
            output = json_bytes(self._output())[1:-1]
            items = b",".join(part for part in (self._items, output) if part)
            self._store(self._id, StoredResponse(response, items))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """OpenAI's events: one chunk of bytes per wake-up of the engine."""
        begun = False
        async with aclosing(self._chat.outputs()) as outputs:
            async for output in outputs:
                yield await offload(self._chat.weight(output), partial(self._events_of, output, first=not begun))
                begun = True
        status = self._ending()
        response = self._response(status)
        self._keep(json_bytes(response))
        yield self._event(f"response.{status}", response=response).encode()

    def _events_of(self, output: RequestOutput, *, first: bool) -> bytes:
        told = []
        if first:
            begun = self._response("in_progress")
            told += [
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
            ]
        for change in self._chat.read(output):
            told += self._told(change)
        return "".join(told).encode()

    def _event(self, kind: str, **fields: Any) -> str:
        told = dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return f"event: {kind}\ndata: {told}\n\n"

    def _told(self, change: Change) -> list[str]:
        block = change.block
        where: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        name = {BlockKind.TEXT: "output_text", BlockKind.REASONING: "reasoning_text"}.get(block.kind)
        if name is None:
            return self._told_of_call(change, where)
        part = where | {"content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
        match change:
            case Opened(block):
                opened = self._event(
                    "response.output_item.added", output_index=block.index, item=self._item(block, whole=False)
                )
                return [opened, self._event("response.content_part.added", **part, part=_part(block, ""))]
            case Grew(_, text):
                return [self._event(f"response.{name}.delta", **part, delta=text, **logprobs)]
            case Closed(block):
                return [
                    self._event(f"response.{name}.done", **part, text=block.text, **logprobs),
                    self._event("response.content_part.done", **part, part=_part(block, block.text)),
                    self._event("response.output_item.done", output_index=block.index, item=self._item(block)),
                ]

    def _told_of_call(self, change: Change, where: dict[str, Any]) -> list[str]:
        kind = "response.function_call_arguments"
        match change:
            case Opened(block):
                item = self._item(block, whole=False)
                return [self._event("response.output_item.added", output_index=block.index, item=item)]
            case Grew(_, text):
                return [self._event(f"{kind}.delta", **where, delta=text)]
            case Closed(block):
                return [
                    self._event(f"{kind}.done", **where, name=block.name, arguments=block.text),
                    self._event("response.output_item.done", output_index=block.index, item=self._item(block)),
                ]

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id.partition('_')[2]}{block.index:04x}"

    def _item(self, block: Block, *, whole: bool = True) -> dict[str, Any]:
        text = block.text if whole else ""
        head: dict[str, Any] = {"id": self._item_id(block), "status": "completed" if whole else "in_progress"}
        if block.kind is BlockKind.CALL:
            called = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}
            return head | called
        content = [_part(block, text)] if whole else []
        if block.kind is BlockKind.REASONING:
            return head | {"type": "reasoning", "summary": [], "content": content}
        return head | {"type": "message", "role": "assistant", "content": content}

    def _output(self) -> list[dict[str, Any]]:
        return [self._item(block) for block in self._chat.blocks.all]

    def _ending(self) -> str:
        return "incomplete" if self._chat.completion.finish_reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        job, running = self._chat.job, status == "in_progress"
        given = {name: getattr(self._body, name) for name in _REPEATED}
        return {
            "id": self._id,
            "object": "response",
            "created_at": job.created,
            "completed_at": None if running else int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._instructions,
            "model": job.model,
            **{name: default if given[name] is None else given[name] for name, default in _REPEATED.items()},
            "store": self._body.is_stored,
            "background": False,
            "output": [] if running else self._output(),
            "usage": None if running else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

"""`POST /v1/responses`: OpenAI's newer API, translated to a chat, and the stored responses that later ones continue.

Each tenant sees only its own responses. If a tenant exceeds its share, its oldest responses are dropped; if all
together exceed the limit, the oldest of the tenant that holds the most. Nothing survives a restart.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.server.answer_json import ascii_bytes, json_bytes, json_pieces
from octavo.server.answers.chat import Block, BlockKind, Change, Closed, Grew, Opened, SingleChat
from octavo.server.answers.generation import Job
from octavo.server.answers.logprobs import PartLogprobs
from octavo.server.bodies.read_bodies import ChatRequest
from octavo.server.bodies.responses_body import ResponsesBody, id_of_item, response_id_of
from octavo.server.errors import ApiError

# Estimated bytes of a stored response's keys and objects, in addition to its contents.
_OVERHEAD = 512
# The least number of tenants that fill the store.
_TENANTS_OF_STORE = 4


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One stored response.

    Attributes:
        response: the response object, as JSON.
        items: all input and output items up to the end of the response, as the inside of a JSON list.
        input_size: number of bytes of `items` that are input items.
    """

    response: bytes
    items: bytes
    input_size: int = 0

    @property
    def input_items(self) -> bytes:
        return self.items[: self.input_size]

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + _OVERHEAD


class ResponseStore:
    """Stores responses by tenant. Used only from the event loop.

    Args:
        most: maximum total size of all responses in bytes; one tenant's may have a quarter of it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_tenant = most // _TENANTS_OF_STORE
        self._tenants: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[str, int] = {}
        self.size = 0

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it is larger than a tenant's share."""
        if stored.size > self._most_of_tenant:
            return
        self._tenants.setdefault(tenant, OrderedDict())[response_id] = stored
        self._sizes[tenant] = self._sizes.get(tenant, 0) + stored.size
        self.size += stored.size
        while self._sizes[tenant] > self._most_of_tenant:
            self._drop_oldest(tenant)
        while self.size > self._most:
            self._drop_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return one of the tenant's own responses, or None if it has none with that id (any more)."""
        responses = self._tenants.get(tenant)
        return None if responses is None else responses.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; returns False if there is none with that id."""
        if self.get(tenant, response_id) is None:
            return False
        self._drop(tenant, response_id)
        return True

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._tenants[tenant])))

    def _drop(self, tenant: str, response_id: str) -> None:
        stored = self._tenants[tenant].pop(response_id)
        self._sizes[tenant] -= stored.size
        self.size -= stored.size
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._sizes[tenant]


# The part of an item that grows in a stream, under its name in events, and its type.
_GROWING = {
    BlockKind.TEXT: "output_text",
    BlockKind.REASONING: "reasoning_text",
    BlockKind.CALL: "function_call_arguments",
}
_TYPES = {BlockKind.TEXT: "message", BlockKind.REASONING: "reasoning", BlockKind.CALL: "function_call"}
# Fields of the body that the response repeats, with the values it reports if they are not given.
_REPEATED: dict[str, Any] = {
    "previous_response_id": None,
    "max_output_tokens": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "user": None,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "metadata": {},
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
}


class ResponseAnswer(SingleChat):
    """One response.

    Args:
        store: called with the id and the complete response, unless the body has `store: false`.
    """

    def __init__(self, job: Job[ChatRequest], store: Callable[[str, StoredResponse], None]) -> None:
        super().__init__(job)
        read = job.read
        assert isinstance(read.origin, ResponsesBody)
        self._body = read.origin
        self._items = read.items
        self._instructions = read.instructions
        self._store = store
        self._number = 0
        self._stored: StoredResponse | None = None  # once it is whole
        self._id = response_id_of(read.request_id)
        self._arriving: PartLogprobs | None = None
        if read.params.logprobs is not None:
            self._arriving = PartLogprobs(job.texts, skip_special_tokens=read.params.skip_special_tokens)
        # The log-probabilities of each text, by its block's index.
        self._logprobs: dict[int, list[dict[str, Any]]] = {}

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        for change in self.read(outputs[0]):
            self._logprobs_of(change)
        pieces = json_pieces(self._response(self._ending()))
        self._stored = self._to_store(pieces)
        return pieces

    def _to_store(self, response: list[bytes]) -> StoredResponse | None:
        if not self._body.is_stored:
            return None
        # Without the log-probabilities, which no later response uses.
        output = json_bytes([self._item(block, logprobs=()) for block in self.choice.blocks])[1:-1]
        items = b",".join(part for part in (self._items, output) if part)
        return StoredResponse(b"".join(response), items, len(self._items))

    def finished(self) -> None:
        if self._stored is not None:
            self._store(self._id, self._stored)

    def bulk(self) -> list[list[Any]]:
        lists: list[list[Any]] = list(self._logprobs.values())
        self._logprobs = {}
        return lists

    def weight(self, output: RequestOutput) -> int:
        return super().weight(output) + (self.last_weight() if output.finished else 0)

    def last_weight(self) -> int:
        """Estimate how many small objects the whole response has."""
        logprobs = sum(
            len(entries) * (1 + len(entries[0]["top_logprobs"])) for entries in self._logprobs.values() if entries
        )
        return logprobs + sum(len(block.pieces) for block in self.choice.blocks)

    def render(self, index: int, output: RequestOutput) -> bytes:
        events: list[bytes] = []
        if not self._number:
            begun = self._response("in_progress")
            events = [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]
        for change in self.read(output):
            events += self._change_events(change, self._logprobs_of(change))
        return b"".join(events)

    def last(self) -> bytes:
        status = self._ending()
        response = self._response(status)
        self._stored = self._to_store(json_pieces(response))
        return self._event(f"response.{status}", response=response)

    def read(self, output: RequestOutput) -> list[Change]:
        if self._arriving is not None:
            for completion in output.outputs:
                self._arriving.add(completion.token_ids, completion.logprobs or ())
        return super().read(output)

    def _logprobs_of(self, change: Change) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens added to a text."""
        if self._arriving is None or not isinstance(change, Grew) or change.block.kind is not BlockKind.TEXT:
            return []
        taken = self._arriving.take(change.end - len(change.text), change.end)
        self._logprobs.setdefault(change.block.index, []).extend(taken)
        return taken

    def error_event(self, error: ApiError) -> bytes:
        """Format an error in the stream, with the fields of OpenAI's reference and with `error`, which clients read."""
        payload = error.fields()
        top_level = {name: payload[name] for name in ("code", "message", "param")}
        return self._event("error", **top_level, error=payload)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        # Only log-probabilities make an event so long that it must be encoded in pieces.
        pieces = json_pieces(payload, ascii_bytes) if self._logprobs else [ascii_bytes(payload)]
        return b"".join((f"event: {kind}\ndata: ".encode(), *pieces, b"\n\n"))

    def _change_events(self, change: Change, grown: list[dict[str, Any]]) -> list[bytes]:
        block, is_call = change.block, change.block.kind is BlockKind.CALL
        kind = f"response.{_GROWING[block.kind]}"
        where: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if not is_call:
            where["content_index"] = 0

        def logprobs(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
            return {"logprobs": entries} if block.kind is BlockKind.TEXT else {}

        match change:
            case Opened():
                item = self._item(block, whole=False)
                events = [self._event("response.output_item.added", output_index=block.index, item=item)]
                if not is_call:
                    events.append(self._event("response.content_part.added", **where, part=_part(block, "", ())))
            case Grew(_, text):
                events = [self._event(f"{kind}.delta", **where, delta=text, **logprobs(grown))]
            case Closed():
                whole = self._logprobs.get(block.index, [])
                if is_call:
                    events = [self._event(f"{kind}.done", **where, name=block.name, arguments=block.text)]
                else:
                    part = _part(block, block.text, whole)
                    events = [
                        self._event(f"{kind}.done", **where, text=block.text, **logprobs(whole)),
                        self._event("response.content_part.done", **where, part=part),
                    ]
                events.append(
                    self._event("response.output_item.done", output_index=block.index, item=self._item(block))
                )
        return events

    def _item_id(self, block: Block) -> str:
        return id_of_item(_TYPES[block.kind], self._id, block.index)

    def _item(
        self, block: Block, *, whole: bool = True, logprobs: Sequence[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        text = block.text if whole else ""
        status = self._status(block) if whole else "in_progress"
        head: dict[str, Any] = {"id": self._item_id(block), "type": _TYPES[block.kind], "status": status}
        if block.kind is BlockKind.CALL:
            return head | {"call_id": block.call_id, "name": block.name, "arguments": text}
        entries = self._logprobs.get(block.index, ()) if logprobs is None else logprobs
        content = [_part(block, text, entries)] if whole else []
        if block.kind is BlockKind.REASONING:
            return head | {"summary": [], "content": content}
        return head | {"role": "assistant", "content": content}

    def _status(self, block: Block) -> str:
        """Return the status of an item that has ended: only the last one can have been cut off."""
        return self._ending() if block is self.choice.blocks[-1] else "completed"

    def _ending(self) -> str:
        return "incomplete" if self.choice.completion.finish_reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        job, running = self.job, status == "in_progress"
        sampling = {self._body.CALLED.get(name, name): value for name, value in self._body.sampling.items()}
        given = {name: sampling.get(name, getattr(self._body, name, None)) for name in _REPEATED}
        return {
            "id": self._id,
            "object": "response",
            "created_at": job.created,
            "completed_at": None if running else int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._instructions,
            "model": job.read.model,
            **{name: default if given[name] is None else given[name] for name, default in _REPEATED.items()},
            "store": self._body.is_stored,
            "background": False,
            "output": [] if running else [self._item(block) for block in self.choice.blocks],
            "usage": None if running else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(block: Block, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

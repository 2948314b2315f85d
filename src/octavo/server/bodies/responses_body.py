"""The body of `POST /v1/responses`, OpenAI's newer API, and its translation into a chat.

instructions, the items of previous_response_id, input    ->  messages
tools (flat), tool_choice, text.format, reasoning.effort  ->  tools, tool_choice, response_format, reasoning_effort
text.verbosity                                            ->  verbosity
max_output_tokens                                         ->  max_tokens
include (message.output_text.logprobs), top_logprobs      ->  logprobs, top_logprobs
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

from octavo.errors import FieldError, shortened, shown
from octavo.server.bodies.chat_messages import ROLES, text_of
from octavo.server.bodies.fields import Schema, Served, StreamedBody, taken, unsupported
from octavo.server.bodies.openai_bodies import OF_ONE_ANSWER, Accounted, StreamOptions, tool_choices, tools_of
from octavo.server.errors import ITEM_MISSING

Item = dict[str, Any]

MAX_ID_LENGTH = 256
# The number of items of a page: by default, and at most; as in OpenAI's API.
PAGE, LARGEST_PAGE = 20, 100
PAGE_QUERY: dict[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": LARGEST_PAGE, "default": PAGE},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})i?[0-9a-f]{4}")


def response_id_of(request_id: str) -> str:
    """Return a response's id in OpenAI's form: "resp-4f1c…" -> "resp_4f1c…"."""
    return request_id.replace("-", "_", 1)


def id_of_item(kind: str, response_id: str, index: int) -> str:
    """Return the id of a response's item of this type."""
    return f"{_PREFIXES.get(kind, 'item')}_{response_id.partition('_')[2]}{index:04x}"


def response_of(item_id: str) -> str:
    """Return the id of the response that an item belongs to; "" if the id is none of this server's."""
    found = _ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else ""


def references(items: list[Item]) -> dict[int, str]:
    """Return the ids of the items that are referred to, by position; raise `RequestError` for one without an id."""
    found = {}
    for place, item in enumerate(items):
        # OpenAI's reference makes the type of a reference optional.
        if item.get("type") == "item_reference" or item.keys() == {"id"}:
            item_id = item.get("id")
            if not isinstance(item_id, str):
                raise FieldError(f"input[{place}]", f"must have the id of an item, got {shown(item_id)}")
            found[place] = item_id
    return found


def resolved(items: list[Item], stored: Iterable[Item]) -> list[Item]:
    """Return the items with the stored ones in place of references to them; raise `ApiError` for a missing one."""
    if not (wanted := references(items)):
        return items
    by_id = {item["id"]: item for item in stored}
    for place, item_id in wanted.items():
        if item_id not in by_id:
            raise ITEM_MISSING(shortened(item_id), param=f"input[{place}]")
    return [by_id[wanted[place]] if place in wanted else item for place, item in enumerate(items)]


def with_ids(items: list[Item], response_id: str, earlier: Iterable[Item]) -> list[Item]:
    """Return a response's new input items with ids; those that clients give are kept if they are unique."""
    known = {item["id"] for item in earlier}
    result = []
    for index, item in enumerate(items):
        item_id = item.get("id")
        if not isinstance(item_id, str) or not 0 < len(item_id) <= MAX_ID_LENGTH or item_id in known:
            # A type that is not a string is refused later; it may not even be hashable.
            kind = str(item.get("type", "message"))
            item_id = id_of_item(kind, f"{response_id}i", index)
        known.add(item_id)
        result.append({**item, "id": item_id})
    return result


def page(items: list[Item], query: dict[str, str]) -> dict[str, Any]:
    """Return a page of input items as OpenAI's list; raise `RequestError` for an invalid query."""
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise FieldError("order", f'must be "asc" or "desc", got {shown(order)}')
    limit = query.get("limit", str(PAGE))
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= LARGEST_PAGE:
        raise FieldError("limit", f"must be between 1 and {LARGEST_PAGE}, got {shown(limit)}")
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise ITEM_MISSING(shortened(after), param="after")
        listed = listed[places[0] + 1 :]
    shown_items = [_listed(item) for item in listed[: int(limit)]]
    return {
        "object": "list",
        "data": shown_items,
        "first_id": shown_items[0]["id"] if shown_items else None,
        "last_id": shown_items[-1]["id"] if shown_items else None,
        "has_more": len(listed) > len(shown_items),
    }


def _listed(item: Item) -> Item:
    """Return an item as it is listed: with a type and a status, and a message's text as a part."""
    payload = {"type": "message", "status": "completed", **item}
    if payload["type"] == "message" and isinstance(text := item.get("content"), str):
        kind = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
        payload["content"] = [{**kind, "text": text}]
    return payload


# Objects that the response repeats, several times if it is streamed; `tools` have limits of their own.
REPEATED_OBJECTS = ("metadata", "text", "reasoning", "tool_choice")
_strict_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
MOST_REPEATED_BYTES = 65_536
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def _inputs(server: Served) -> dict[str, Schema]:
    item = {"type": "object", "required": ["role", "content"], "properties": {"role": {"enum": list(ROLES)}}}
    return {"any": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": item}]}}


@dataclass(kw_only=True)
class ResponsesBody(Accounted, StreamedBody):
    """`POST /v1/responses`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"input": "What is a block?", "max_output_tokens": 32, "store": False}

    PARAMETERS: ClassVar[Collection[str]] = OF_ONE_ANSWER
    CALLED: ClassVar[Mapping[str, str]] = {"max_tokens": "max_output_tokens"}
    SOURCES: ClassVar[Mapping[str, str]] = {
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
        "response_format": "text.format",
        "structured_outputs": "text.format",
        "messages": "input",
        "prompt": "input",
    }

    input: Any = taken("a text, or a list of items", default=MISSING, ranges=_inputs, bulky=True)
    instructions: str | None = taken("the system message", bulky=True)
    previous_response_id: str | None = taken("the response that this one continues", limit="max_name_length")
    tools: list[dict[str, Any]] | None = taken("the functions that the model may call", ranges=tools_of)
    tool_choice: str | dict[str, Any] | None = taken("whether a tool may, or must, be called", ranges=tool_choices)
    parallel_tool_calls: bool | None = taken("whether the answer may have several calls; the default")
    text: dict[str, Any] | None = taken("the form of the answer, and how long it is")
    reasoning: dict[str, Any] | None = taken("how long the model reasons")
    include: list[str] | None = taken("message.output_text.logprobs, as top_logprobs has it", bulky=True)
    top_logprobs: int | None = taken("report this many most likely tokens", like="logprobs")
    chat_template_kwargs: dict[str, Any] | None = taken("variables of the chat template", bulky=True)
    # Repeated in the response.
    metadata: dict[str, Any] | None = taken("has no effect; the response repeats it")
    truncation: str | None = taken(
        "auto: a prompt that is too long loses its beginning",
        limit="max_name_length",
        ranges=lambda server: {"string": {"enum": ["auto", "disabled"]}},
    )
    stream_options: StreamOptions | None = taken("has no effect")
    max_tool_calls: int | None = taken("has no effect: of OpenAI's own tools, which do not exist here")

    background: Any = unsupported()
    conversation: Any = unsupported()
    prompt: Any = unsupported()

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def items(self) -> list[dict[str, Any]]:
        """Return the input as a list of items; raise `RequestError` for an invalid form."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        if not isinstance(self.input, list) or not all(isinstance(item, dict) for item in self.input):
            raise FieldError("input", f"must be a string or a list of items, got {shown(self.input)}")
        return self.input

    def chat(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of the equivalent chat body for all items; raise `RequestError` naming the field."""
        for name in REPEATED_OBJECTS:
            if (size := len(repeatable(name, getattr(self, name)))) > MOST_REPEATED_BYTES:
                raise FieldError(
                    name, f"has {size} bytes of JSON, but at most {MOST_REPEATED_BYTES} are repeated in a response"
                )
        repeatable("tools", self.tools)
        if self.truncation not in (None, "auto", "disabled"):
            raise FieldError("truncation", f'must be "auto" or "disabled", got {shown(self.truncation)}')
        fields: dict[str, Any] = dict(self.sampling)
        same = ("parallel_tool_calls", "priority", "cache_salt", "chat_template_kwargs", "tool_choice")
        fields |= {name: getattr(self, name) for name in same}
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields["messages"] = instructions + _messages(items)
        fields["logprobs"] = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        fields["top_logprobs"] = self.top_logprobs
        fields["tools"] = [_tool(tool) for tool in self.tools or ()] or None
        fields["reasoning_effort"] = (self.reasoning or {}).get("effort")
        fields["verbosity"] = (self.text or {}).get("verbosity")
        fields["response_format"] = _response_format((self.text or {}).get("format"))
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        return fields


def repeatable(name: str, value: Any) -> bytes:
    """Return a field as JSON that a response may repeat.

    Raises:
        RequestError: it holds NaN or an infinite number (1e999 is one), which clients cannot parse.
    """
    try:
        return _strict_json(value).encode("utf-8", "replace")
    except ValueError:
        raise FieldError(name, "must not hold NaN or an infinite number") from None


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a flat tool to the form of chat completions, which refuse anything but functions."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _response_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert items to messages; text, reasoning and calls of one answer become one assistant message."""
    messages: list[dict[str, Any]] = []
    open_answer: dict[str, Any] | None = None

    def answer() -> dict[str, Any]:
        nonlocal open_answer
        if open_answer is None:
            open_answer = {"role": "assistant", "content": ""}
            messages.append(open_answer)
        return open_answer

    for i, item in enumerate(items):
        where, at = f"input[{i}]", f"input[{i}].content"
        kind = item.get("type", "message")
        if kind == "function_call":
            if not isinstance(name := item.get("name"), str) or not name:
                raise FieldError(f"{where}.name", f"must be a function's name, got {shown(name)}")
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            answer().setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            answer()["reasoning_content"] = _text(parts, at)
        elif kind == "function_call_output":
            open_answer = None
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "message" and item.get("role") == "assistant":
            payload = answer()
            payload["content"] = f"{payload['content']}{_text(item.get('content'), at)}"
        elif kind == "message":
            open_answer = None
            if (role := item.get("role")) not in ROLES:
                roles = ", ".join(map(repr, ROLES))
                raise FieldError(f"{where}.role", f"must be one of {roles}, got {shown(role)}")
            messages.append({"role": role, "content": _text(item.get("content"), at)})
        else:
            raise FieldError(where, f"of type {shown(kind)} is not supported by this server")
    return messages


def _text(content: Any, where: str) -> str:
    return text_of(content, where, _TEXT_PARTS)

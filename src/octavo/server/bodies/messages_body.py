"""The body of `POST /v1/messages`, Anthropic's API, and its translation into a chat.

system, messages      ->  messages: tool results become messages of the role "tool", tool uses calls of an assistant's
tools, tool_choice    ->  tools, tool_choice, parallel_tool_calls
stop_sequences        ->  stop
thinking              ->  chat_template_kwargs.enable_thinking
output_config         ->  response_format, reasoning_effort
cache_control         ->  kept in place: it pins the prefix up to there in the cache; of the body, the whole prompt

Parts and calls are checked here, because an error names a place in the body, and messages are renumbered.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

from octavo.errors import FieldError, shown
from octavo.server.bodies.chat_messages import check_mark, part_text, text_of
from octavo.server.bodies.fields import EXAMPLE_CHAT, RequestBody, Schema, Served, StreamedBody, taken, unsupported
from octavo.server.bodies.openai_bodies import OF_ONE_ANSWER, messages_of, tools_of


def _tool_choices(server: Served) -> dict[str, Schema]:
    return {"object": {"required": ["type"], "properties": {"type": {"enum": ["auto", "any", "none"]}}}}


@dataclass(kw_only=True)
class CountTokensBody(RequestBody):
    """`POST /v1/messages/count_tokens`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"messages": EXAMPLE_CHAT}

    SOURCES: ClassVar[Mapping[str, str]] = {
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "structured_outputs": "output_config.format",
        "continue_final_message": "messages",
        "prompt": "messages",
    }

    messages: list[dict[str, Any]] = taken("what was said so far", default=MISSING, ranges=messages_of, bulky=True)
    system: str | list[dict[str, Any]] | None = taken("the system message", bulky=True)
    tools: list[dict[str, Any]] | None = taken("the functions that the model may call", ranges=tools_of, bulky=True)
    tool_choice: dict[str, Any] | None = taken(
        "whether a tool may, or must, be called", ranges=_tool_choices, bulky=True
    )
    thinking: dict[str, Any] | None = taken("whether the model reasons", bulky=True)
    output_config: dict[str, Any] | None = taken("the form of the answer, and how long the model reasons", bulky=True)
    output_format: dict[str, Any] | None = taken("the older place of output_config.format", bulky=True)
    cache_control: dict[str, Any] | None = taken("keep the whole prompt in the cache", bulky=True)
    mcp_servers: Any = unsupported()
    container: Any = unsupported()

    def chat(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat body; raise `RequestError` naming a field without counterpart."""
        fields: dict[str, Any] = {"model": self.model, "messages": self._messages()}
        if self.tools:
            fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        fields |= _tool_choice(self.tool_choice)
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.get("type") in ("enabled", "adaptive")}
        config = self.output_config or {}
        fields["reasoning_effort"] = config.get("effort")
        fields["response_format"] = _response_format(config.get("format") or self.output_format)
        # If the last message is the assistant's, the answer continues it.
        if self.messages and self.messages[-1].get("role") == "assistant":
            fields["continue_final_message"] = True
        return fields

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            if isinstance(self.system, list):
                for i, part in enumerate(self.system):
                    part_text(part, f"system[{i}]")
                    check_mark(part, f"system[{i}]")
            messages.append({"role": "system", "content": self.system})
        for i, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{i}]")
        if self.cache_control is not None and messages:
            messages[-1] = {"cache_control": self.cache_control, **messages[-1]}
        return messages


@dataclass(kw_only=True)
class MessagesBody(CountTokensBody, StreamedBody):
    """`POST /v1/messages`."""

    EXAMPLE: ClassVar[Mapping[str, Any]] = {"messages": EXAMPLE_CHAT, "max_tokens": 32}

    PARAMETERS: ClassVar[Collection[str]] = OF_ONE_ANSWER
    REQUIRED: ClassVar[Collection[str]] = ("max_tokens",)
    CALLED: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences"}

    metadata: dict[str, Any] | None = taken("has no effect", bulky=True)
    service_tier: str | None = taken("has no effect", limit="max_name_length")

    def chat(self) -> dict[str, Any]:
        return {**super().chat(), **self.sampling}


def _chat_messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Convert one message, into several if it holds tool results."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise FieldError(f"{where}.role", f"must be 'user' or 'assistant', got {shown(role)}")
    check_mark(message, where)
    if isinstance(content, str):
        return [message]
    if not isinstance(content, list):
        raise FieldError(f"{where}.content", f"must be a string or a list of blocks, got {shown(content)}")
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thinking: list[str] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(block, dict):
            check_mark(block, at)
        if kind == "tool_result":
            results.append(_tool_result(block, at))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, at))
        elif kind == "thinking" and role == "assistant":
            thinking.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            part_text(block, at)
            parts.append(block)
    payload: dict[str, Any] = {"role": role, "content": parts}
    if calls:
        payload["tool_calls"] = calls
        # The block marked to be cached may be a call, which is not among the parts.
        payload["cache_control"] = next((b["cache_control"] for b in content if b.get("cache_control")), None)
    if thinking:
        payload["reasoning_content"] = "\n".join(thinking)
    return results + ([payload] if parts or calls or thinking or not results else [])


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    identifier = block.get("tool_use_id")
    if not isinstance(identifier, str):
        raise FieldError(f"{where}.tool_use_id", "is required")
    if block.get("content") is not None:
        text_of(block["content"], f"{where}.content")
    result = {"role": "tool", "tool_call_id": identifier, "content": block.get("content") or ""}
    return result if block.get("cache_control") is None else {**result, "cache_control": block["cache_control"]}


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise FieldError(f"{where}.input", f"must be an object, got {shown(arguments)}")
    if not isinstance(name := block.get("name"), str) or not name:
        raise FieldError(f"{where}.name", f"must be the name of a tool, got {shown(name)}")
    function = {"name": name, "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise FieldError(where, f"of type {shown(tool['type'])} is not supported by this server, only 'custom'")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _response_format(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise FieldError(
            "output_config.format", f'must be {{"type": "json_schema", "schema": {{…}}}}, got {shown(form)}'
        )
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def _tool_choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise FieldError("tool_choice.type", f'must be "auto", "any", "tool" or "none", got {shown(kind)}')
    return {**fields, "tool_choice": known[kind]}


def arguments_object(text: str) -> dict[str, Any]:
    """Parse a call's arguments as an object; text that is not a JSON object becomes its only member."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}

"""The tools of a chat's body, and which of them the model may or must call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import FieldError, RequestError, shown
from octavo.limits import RequestLimits

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a chat may call.

    Attributes:
        tools: OpenAI's tool objects, as chat templates expect them.
        required: whether the answer must call a tool.
        named: name of the only tool that the answer may, and must, call; None if there is no such restriction.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    required: bool = False
    named: str | None = None

    def __bool__(self) -> bool:
        return bool(self.tools)

    @property
    def parameter_types(self) -> dict[str, dict[str, str]]:
        """The types of each tool's parameters, for parameters whose schema names one type."""
        return {tool["function"]["name"]: _types(tool["function"].get("parameters")) for tool in self.tools}

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that the answer may call."""
        functions = [tool["function"] for tool in self.tools]
        return [each for each in functions if self.named in (None, each["name"])]


def checked_tools(tools: list[dict[str, Any]] | None, choice: Any, limits: RequestLimits) -> ToolUse:
    """Return the tools that a body offers; raise `RequestError` naming a tool that cannot be used."""
    choice, allowed = _allowed_tools(choice)
    named, required = _choice(choice)
    if not tools:
        if required or named is not None:
            raise FieldError("tool_choice", f"is {shown(choice)}, but there are no tools")
        return ToolUse()
    limits.check_tools(len(tools), tools)
    names = [_checked_name(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"two tools are called {shown(name)}", param=f"tools[{i}].function.name")
    if named is not None and named not in names:
        raise FieldError("tool_choice", f"names {shown(named)}, which is not one of the tools")
    if unknown := [name for name in allowed or () if name not in names]:
        raise FieldError("tool_choice", f"allows {shown(unknown[0])}, which is not one of the tools")
    if choice == "none":
        return ToolUse()
    offered = [tool for tool, name in zip(tools, names, strict=True) if allowed is None or name in allowed]
    return ToolUse(offered, required or named is not None, named)


def _allowed_tools(choice: Any) -> tuple[Any, list[str] | None]:
    """Resolve OpenAI's `allowed_tools`: return the mode as the choice, and the names of the allowed tools."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, None
    # Nested in chat completions, flat in responses.
    allowed = choice.get("allowed_tools", choice)
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    named = [_choice(tool)[0] for tool in tools] if isinstance(tools, list) else []
    if mode not in ("auto", "required") or not named:
        raise FieldError(
            "tool_choice", 'of type "allowed_tools" needs a mode, "auto" or "required", and a list of tools'
        )
    return mode, [name for name in named if name is not None]


def _choice(choice: Any) -> tuple[str | None, bool]:
    """Return the name of the tool that must be called, if given, and whether any tool must be called."""
    if choice is None or choice in ("none", "auto"):
        return None, False
    if choice == "required":
        return None, True
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if isinstance(name, str) and name:
            return name, True
    raise FieldError(
        "tool_choice",
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}, '
        f"got {shown(choice)}",
    )


def _checked_name(tool: dict[str, Any], where: str) -> str:
    if tool.get("type", "function") != "function":
        raise FieldError(where, f"of type {shown(tool.get('type'))} is not supported by this server, only 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise FieldError(f"{where}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FieldError(f"{where}.function.name", f"must be 1 to 128 letters, digits, _, ., : or -, got {shown(name)}")
    if not isinstance(function.get("description", ""), str | None):
        raise FieldError(f"{where}.function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise FieldError(f"{where}.function.parameters", "must be a JSON Schema")
    return name


def _types(schema: Any) -> dict[str, str]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {
        name: kind
        for name, part in properties.items()
        if isinstance(part, Mapping) and isinstance(kind := part.get("type"), str)
    }


def checked_calls(calls: Any, where: str, limits: RequestLimits) -> list[dict[str, Any]]:
    """Return the calls of an assistant's message with their arguments as objects, as templates expect."""
    if not isinstance(calls, list):
        raise FieldError(where, "must be a list of tool calls")
    limits.check_messages(len(calls), "tool calls in one message")
    return [_checked_call(call, f"{where}[{i}]", limits) for i, call in enumerate(calls)]


def _checked_call(call: Any, where: str, limits: RequestLimits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise FieldError(where, "must be a call of a function with a name")
    limits.check_name(f"{where}.function.name", name)
    if isinstance(identifier := call.get("id"), str):
        limits.check_name(f"{where}.id", identifier)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            # The model's output was cut off or is not JSON: pass it to the template as it is.
            arguments = {"arguments": arguments}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise FieldError(f"{where}.function.arguments", "must be a JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}

"""The tools of a chat's body: checked, and what the model may or must do with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import RequestError, shown
from octavo.limits import RequestLimits

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat may call.

    Attributes:
        tools: as chat templates expect them, OpenAI's objects.
        required: the answer must call one.
        named: the only one that it may, and must, call.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    required: bool = False
    named: str | None = None

    def __bool__(self) -> bool:
        return bool(self.tools)

    @property
    def parameter_types(self) -> dict[str, dict[str, str]]:
        """For each tool, the types of its parameters, where its schema names one."""
        return {tool["function"]["name"]: _types(tool["function"].get("parameters")) for tool in self.tools}

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The functions that the answer may call."""
        functions = [tool["function"] for tool in self.tools]
        return [each for each in functions if self.named in (None, each["name"])]


def checked_tools(tools: list[dict[str, Any]] | None, choice: Any, limits: RequestLimits) -> ToolUse:
    """The tools that a body offers; raises `RequestError` naming the one that cannot be used."""
    named, required = _choice(choice)
    if not tools:
        if required or named is not None:
            raise RequestError(f"tool_choice is {shown(choice)}, but there are no tools", param="tool_choice")
        return ToolUse()
    limits.check_tools(len(tools), tools)
    names = [_checked_name(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"two tools are called {shown(name)}", param=f"tools[{i}].function.name")
    if named is not None and named not in names:
        raise RequestError(f"tool_choice names {shown(named)}, which is no tool of this request", param="tool_choice")
    return ToolUse() if choice == "none" else ToolUse(list(tools), required or named is not None, named)


def _choice(choice: Any) -> tuple[str | None, bool]:
    """The name that must be called, and whether any must be."""
    if choice is None or choice in ("none", "auto"):
        return None, False
    if choice == "required":
        return None, True
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if isinstance(name, str) and name:
            return name, True
    raise RequestError(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}, '
        f"got {shown(choice)}",
        param="tool_choice",
    )


def _checked_name(tool: dict[str, Any], where: str) -> str:
    if tool.get("type", "function") != "function":
        raise RequestError(
            f"{where} of type {shown(tool.get('type'))} is not supported by this server, only 'function'", param=where
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 128 letters, digits, _, ., : or -, got {shown(name)}",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("description", ""), str | None):
        raise RequestError(f"{where}.function.description must be a string", param=f"{where}.function.description")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{where}.function.parameters must be a JSON Schema", param=f"{where}.function.parameters")
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
    """The calls of an assistant's message, their arguments as objects, which is how templates expect them."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list of tool calls", param=where)
    limits.check_messages(len(calls), "tool calls in one message")
    return [_checked_call(call, f"{where}[{i}]", limits) for i, call in enumerate(calls)]


def _checked_call(call: Any, where: str, limits: RequestLimits) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RequestError(f"{where} must be a call of a function with a name", param=where)
    limits.check_name(f"{where}.function.name", name)
    if isinstance(identifier := call.get("id"), str):
        limits.check_name(f"{where}.id", identifier)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            # What a model wrote that was cut off, or is no JSON: its template gets it as it is.
            arguments = {"arguments": arguments}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments must be a JSON object", param=f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}

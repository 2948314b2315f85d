"""Checks the messages of a chat, and the marks in them of the prefixes to keep cached, as in Anthropic's API.

    {"role": "system", "content": "…", "cache_control": {"type": "ephemeral", "ttl": "5m"}}

On a message, or on one of its content parts, a mark pins the prefix up to and including that message once it is
computed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from octavo.errors import FieldError, shown
from octavo.request_limits import RequestLimits
from octavo.server.bodies.tools import checked_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
# Members of messages that are not passed to the template as they are.
_LEFT_OUT = ("cache_control", "tool_calls")
# Types of text parts, including those of the Responses API, as in vLLM.
_TEXT_PARTS = ("text", "refusal", "input_text", "output_text")
# Anthropic's limit on the number of marks, and its default time to live.
MAX_MARKS = 4
DEFAULT_TTL = "5m"
MAX_TTL_SECONDS = 24 * 3600

_UNITS = {"s": 1, "m": 60, "h": 3600}


def checked_messages(messages: list[dict[str, Any]], limits: RequestLimits) -> list[dict[str, Any]]:
    """Return messages with plain-text contents, as templates expect; raise `RequestError` naming an invalid message."""
    if not messages:
        raise FieldError("messages", "must not be empty")
    limits.check_messages(len(messages))
    parts = sum(len(content) for message in messages if isinstance(content := message.get("content"), list))
    limits.check_messages(parts, "content parts")
    for i, message in enumerate(messages):
        for name in ("role", "name", "tool_call_id"):
            if isinstance(value := message.get(name), str):
                limits.check_name(f"messages[{i}].{name}", value)
    return [_checked_message(message, f"messages[{i}]", limits) for i, message in enumerate(messages)]


def _checked_message(message: dict[str, Any], where: str, limits: RequestLimits) -> dict[str, Any]:
    message = _without_functions(message)
    role = message.get("role")
    if role not in ROLES:
        roles = ", ".join(map(repr, ROLES))
        raise FieldError(f"{where}.role", f"must be one of {roles}, got {shown(role)}")
    content = message.get("content")
    calls = {}
    if role == "assistant" and message.get("tool_calls"):
        calls = {"tool_calls": checked_calls(message["tool_calls"], f"{where}.tool_calls", limits)}
    if content is None:
        if role != "assistant":
            raise FieldError(f"{where}.content", "is required")
        content = message.get("refusal") or ""
    else:
        content = text_of(content, f"{where}.content")
    # A template that prints unknown members would make `cache_control` part of the prompt.
    return {name: value for name, value in message.items() if name not in _LEFT_OUT} | {"content": content} | calls


def _without_functions(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with OpenAI's older form of a call, or of its result, in today's form."""
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if not message.get("function_call") or message.get("tool_calls"):
        return message
    rest = {name: value for name, value in message.items() if name != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": message["function_call"]}]}


def text_of(content: Any, where: str, kinds: Collection[str] = _TEXT_PARTS) -> str:
    """Return the text of a content, which is one or a list of text parts; raise `FieldError` for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FieldError(where, f"must be a string or a list of text parts, got {shown(content)}")
    return "\n".join(part_text(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def part_text(part: Any, where: str, kinds: Collection[str] = _TEXT_PARTS) -> str:
    """Return the text of a content part; raise `FieldError` if it is not text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        problem = (
            f"of type {shown(kind)} is not supported by this server" if isinstance(kind, str) else "is not an object"
        )
        raise FieldError(where, f"{problem}; only parts of type 'text' are")
    name = "refusal" if kind == "refusal" else "text"
    text = part.get(name)
    if not isinstance(text, str):
        raise FieldError(f"{where}.{name}", f"must be a string, got {shown(text)}")
    return text


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A mark that the prefix up to and including message `index` is to be kept for `ttl_seconds`."""

    index: int
    ttl_seconds: float


def cache_marks(messages: list[dict[str, Any]]) -> list[CacheMark]:
    """Return the marks of a chat's messages, at most one per message; raise `RequestError` naming an invalid one."""
    marks = []
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        found = [
            _ttl_seconds(holder["cache_control"], f"messages[{index}]")
            for holder in (message, *parts)
            if holder.get("cache_control") is not None
        ]
        if found:
            marks.append(CacheMark(index, max(found)))
    if len(marks) > MAX_MARKS:
        raise FieldError("messages", f"must have at most {MAX_MARKS} with cache_control, got {len(marks)}")
    return marks


def check_mark(holder: dict[str, Any], where: str) -> None:
    """Raise `RequestError` for a message or part whose `cache_control` is invalid."""
    if holder.get("cache_control") is not None:
        _ttl_seconds(holder["cache_control"], where)


def _ttl_seconds(control: Any, where: str) -> float:
    param = f"{where}.cache_control"
    if not isinstance(control, dict) or control.get("type") != "ephemeral" or set(control) - {"type", "ttl"}:
        raise FieldError(
            param, f'must be {{"type": "ephemeral", "ttl": "5m"}}, where ttl may be left out, got {shown(control)}'
        )
    ttl = control.get("ttl", DEFAULT_TTL)
    match = re.fullmatch(r"([0-9]{1,6})([smh])", ttl) if isinstance(ttl, str) else None
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_TTL_SECONDS:
        raise FieldError(f"{param}.ttl", f'must be like "30s", "5m" or "1h", at most "24h", got {shown(ttl)}')
    return float(seconds)

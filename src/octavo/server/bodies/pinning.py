"""`cache_control` on messages, which marks the prefixes of a chat to keep cached, as in Anthropic's API.

    {"role": "system", "content": "…", "cache_control": {"type": "ephemeral", "ttl": "5m"}}

On a message, or on one of its content parts, it pins the prefix up to and including that message once it is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from octavo.errors import RequestError, shown

# Anthropic's limit on the number of marks, and its default time to live.
MAX_MARKS = 4
DEFAULT_TTL = "5m"
MAX_TTL_SECONDS = 24 * 3600

_UNITS = {"s": 1, "m": 60, "h": 3600}


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
        raise RequestError(f"at most {MAX_MARKS} messages may have cache_control, got {len(marks)}", param="messages")
    return marks


def check_mark(holder: dict[str, Any], where: str) -> None:
    """Raise `RequestError` for a message or part whose `cache_control` is invalid."""
    if holder.get("cache_control") is not None:
        _ttl_seconds(holder["cache_control"], where)


def _ttl_seconds(control: Any, where: str) -> float:
    param = f"{where}.cache_control"
    if not isinstance(control, dict) or control.get("type") != "ephemeral" or set(control) - {"type", "ttl"}:
        raise RequestError(
            f'{param} must be {{"type": "ephemeral", "ttl": "5m"}}, where ttl may be left out, got {shown(control)}',
            param=param,
        )
    ttl = control.get("ttl", DEFAULT_TTL)
    match = re.fullmatch(r"([0-9]{1,6})([smh])", ttl) if isinstance(ttl, str) else None
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_TTL_SECONDS:
        raise RequestError(
            f'{param}.ttl must be like "30s", "5m" or "1h", at most "24h", got {shown(ttl)}', param=param
        )
    return float(seconds)

"""Writes calls in a model's format, and describes tools to models whose chat template does not support them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.dialect.formats import Body, CallFormat, JsonCalls, NamedJsonCall, XmlCall

_INTRODUCTION = """You may call functions to help with the user's request. These are the functions you have, as JSON:
<tools>
{tools}
</tools>

To call a function, answer in this form and with nothing else:
{example}"""


def write_calls(calls: CallFormat, wanted: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls, given as names and arguments, as a model with this format writes them."""
    body = calls.bodies[0]
    if isinstance(body, JsonCalls) and body.brackets[0]:
        separator = f"{body.separator} "
        run = separator.join(_write(body, name, arguments) for name, arguments in wanted)
        return f"{calls.opening}{body.brackets[0]}{run}{body.brackets[1]}"
    if not calls.closing:
        return "; ".join(_write(body, name, arguments) for name, arguments in wanted)
    return "\n".join(f"{calls.opening}\n{_write(body, name, arguments)}\n{calls.closing}" for name, arguments in wanted)


def _write(body: Body, name: str, arguments: Mapping[str, Any]) -> str:
    if isinstance(body, JsonCalls):
        return _json({"name": name, body.arguments[0]: dict(arguments)})
    if isinstance(body, NamedJsonCall):
        return f"{name}{body.tag}{_json(dict(arguments))}"
    if isinstance(body, XmlCall):
        inside = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<function={name}>\n{inside}</function>"
    return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def with_tools_described(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], calls: CallFormat
) -> list[dict[str, Any]]:
    """Return a chat for a template without support for tools.

    Tools are described in the system message, calls are written out in the assistant's messages, and results become
    messages of the user.
    """
    example = write_calls(calls, [("function_name", {"parameter_name": "value"})])
    text = _INTRODUCTION.format(tools="\n".join(map(_json, tools)), example=example)
    chat = [_plain(message, calls) for message in messages]
    if chat[0].get("role") in ("system", "developer"):
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{text}"}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def _plain(message: dict[str, Any], calls: CallFormat) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if made := message.get("tool_calls"):
        written = write_calls(calls, [(call["function"]["name"], call["function"]["arguments"]) for call in made])
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**kept, "content": f"{message['content']}\n{written}".lstrip()}
    return message

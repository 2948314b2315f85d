"""Writes calls in a model's format, and describes tools to models whose chat template does not support them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.dialect.formats import BareCall, Body, CallFormat, JsonCalls, NamedJsonCall, PythonCalls, XmlCall

_INTRODUCTION = """You may call functions to help with the user's request. These are the functions you have, as JSON:
<tools>
{tools}
</tools>

To call a function, answer in this form and with nothing else:
{example}"""


def write_calls(calls: CallFormat, wanted: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls, given as names and arguments, as a model with this format writes them."""
    body = calls.bodies[0]
    each = [_write(body, name, arguments) for name, arguments in wanted]
    if isinstance(body, PythonCalls):
        return f"{calls.opening}[{', '.join(each)}]{calls.closing}"
    if isinstance(body, JsonCalls) and body.brackets[0]:
        run = f"{body.separator} ".join(each)
        return f"{calls.opening}{body.brackets[0]}{run}{body.brackets[1]}{calls.closing}"
    if isinstance(body, NamedJsonCall) and calls.is_one_run:
        return f"{calls.opening}{body.separator.join(each)}{calls.closing}"
    if not calls.closing:
        return ("" if calls.unmarked else calls.opening) + "; ".join(each)
    pad = calls.padding
    separator = "<|start|>assistant" if calls.channels else "\n"
    return separator.join(f"{calls.opening}{pad}{call}{pad}{calls.closing}" for call in each)


def _write(body: Body, name: str, arguments: Mapping[str, Any]) -> str:
    if isinstance(body, JsonCalls):
        return _json({body.name: name, body.arguments[0]: dict(arguments)})
    if isinstance(body, NamedJsonCall):
        return f"{body.before}{name}{':0' if body.numbered else ''}{body.tag}{_json(dict(arguments))}{body.after}"
    if isinstance(body, XmlCall):
        pad = "\n" if body.padded else ""
        inside = "".join(
            f"{body.key}{key}{value_opening(body, is_text=isinstance(value, str))}{pad}"
            f"{value if isinstance(value, str) else _json(value)}{pad}{body.value_end}\n"
            for key, value in arguments.items()
        )
        opening, end = body.name or ("", "")
        return f"{opening}{name}{end}\n{inside}{body.end}"
    if isinstance(body, BareCall):
        return f"call:{name}{_bare(body.quote, dict(arguments))}"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def value_opening(body: XmlCall, *, is_text: bool) -> str:
    """Return what stands between a parameter's name and its value."""
    return "\n".join(body.between) + (f' string="{"true" if is_text else "false"}">' if body.typed else "")


def _bare(quote: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_bare(quote, each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(_bare(quote, each) for each in value)}]"
    return _json(value)


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
    chat = [
        {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if message["role"] == "tool"
        else message
        for message in with_calls_written(messages, calls)
    ]
    if chat[0].get("role") in ("system", "developer"):
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{text}"}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def with_calls_written(messages: Sequence[dict[str, Any]], calls: CallFormat) -> list[dict[str, Any]]:
    """Return a chat whose calls are part of the messages' content, for a template that leaves them out."""
    chat = []
    for message in messages:
        if made := message.get("tool_calls"):
            written = write_calls(calls, [(call["function"]["name"], call["function"]["arguments"]) for call in made])
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**kept, "content": f"{message['content']}\n{written}".lstrip()}
        chat.append(message)
    return chat


def without_system_messages(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return a chat for a template without system messages, and the place in it of each message.

    What they say is said by the user. Such templates also want user and assistant to take turns, so that messages of
    the user that follow each other become one.
    """
    chat: list[dict[str, Any]] = []
    places = []
    for message in messages:
        message = {**message, "role": "user"} if message["role"] == "system" else message
        if chat and chat[-1]["role"] == message["role"] == "user":
            chat[-1] = {**message, "content": f"{chat[-1]['content']}\n\n{message['content']}"}
        else:
            chat.append(message)
        places.append(len(chat) - 1)
    return chat, places

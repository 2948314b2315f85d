"""Writes calls in a model's format, and describes tools to models whose chat template does not support them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from octavo.dialect.formats import CallFormat
from octavo.dialect.notations import to_json

_INTRODUCTION = """You may call functions to help with the user's request. These are the functions you have, as JSON:
<tools>
{tools}
</tools>

To call a function, answer in this form and with nothing else:
{example}"""


def write_calls(calls: CallFormat, wanted: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return calls, given as names and arguments, as a model with this format writes them."""
    form, (before, after) = calls.form, calls.around_run
    written = [
        form.before
        + form.head.format(name=name, id=f"call{number:06}", index=number)
        + form.between
        + form.arguments.write(arguments)
        + form.after
        for number, (name, arguments) in enumerate(wanted)
    ]
    if form.separator is None:
        return calls.between_runs.join(f"{before}{call}{after}" for call in written)
    return f"{before}{form.separator.join(written)}{after}"


def with_tools_described(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], calls: CallFormat
) -> list[dict[str, Any]]:
    """Return a chat for a template without support for tools.

    Tools are described in the system message, calls are written out in the assistant's messages, and results become
    messages of the user.
    """
    example = write_calls(calls, [("function_name", {"parameter_name": "value"})])
    text = _INTRODUCTION.format(tools="\n".join(map(to_json, tools)), example=example)
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


def with_single_calls(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return a chat for a template that writes one call of a message, and the place in it of each message.

    A message with several calls becomes one for each, with its result after it.
    """
    chat: list[dict[str, Any]] = []
    places = [0] * len(messages)
    waiting: list[int] = []  # results that were moved

    def add(message: dict[str, Any], index: int) -> None:
        places[index] = len(chat)
        chat.append(message)

    for i, message in enumerate(messages):
        made = message.get("tool_calls") or []
        if len(made) < 2:
            if i in waiting:
                waiting.remove(i)
            else:
                add(message, i)
            continue
        results = list(takewhile(lambda j: messages[j]["role"] == "tool", range(i + 1, len(messages))))
        for call in made:
            said = message if call is made[0] else {"role": "assistant", "content": ""}
            add({**said, "tool_calls": [call]}, i)
            found = next((j for j in results if messages[j].get("tool_call_id") == call.get("id")), None)
            if found is not None:
                results.remove(found)
                waiting.append(found)
                add(messages[found], found)
    return chat, places


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

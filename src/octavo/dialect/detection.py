"""Finds the format of a chat template's tool calls by rendering a conversation that has one.

    render   user: … | assistant calls octavo_probe(text="probe value", count=7) | tool: …
    text     … <|assistant|><tool_call>octavo_probe<arg_key>text</arg_key>…</tool_call><|observation|> …
    format   the first whose parser reads this call in it

A template that describes tools but writes no calls is searched for the marks that its description names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.dialect.events import Arguments, CallBegins
from octavo.dialect.formats import CALL_FORMATS, CallFormat
from octavo.dialect.parser import Dialect, OutputParser
from octavo.dialect.writing import with_calls_written
from octavo.errors import RequestError

Render = Callable[..., str]
"""Renders a chat: messages, tools=…, add_generation_prompt=…; raises `RequestError`."""

_NAME = "octavo_probe"
_ARGUMENTS = {"text": "probe value", "count": 7}
_TYPES = {_NAME: {"text": "string", "count": "integer"}}
_SYSTEM, _QUESTION, _RESULT = "octavo-system", "octavo-question", "octavo-result"


@dataclass(frozen=True, slots=True)
class TemplateCalls:
    """The format in which a chat template writes calls.

    Attributes:
        format: None if it has none, or an unknown one.
        as_text: whether it wants a call's arguments as JSON text instead of an object.
        are_dropped: whether it leaves out the calls of earlier messages.
        one_a_message: whether it refuses a message with two calls, or leaves the second out.
    """

    format: CallFormat | None = None
    as_text: bool = False
    are_dropped: bool = False
    one_a_message: bool = False


def template_calls(render: Render, template: str) -> TemplateCalls:
    """Return how the template that `render` uses writes calls; `template` is its source."""
    described = next((each for each in CALL_FORMATS if each.may_be_in(template)), None)
    for as_text in (False, True):
        if (written := _written(render, as_text=as_text)) is None:
            continue
        if _NAME not in written:
            # Kimi K2 Thinking's template writes the id alone, of which the name is a part.
            written = _written(render, as_text=as_text, call_id=f"functions.{_NAME}:0") or ""
        if _NAME not in written:
            return TemplateCalls(described, are_dropped=True)
        found = next((each for each in CALL_FORMATS if not each.unmarked and _reads(each, written)), None)
        if found is None and described is not None and described.unmarked:
            # The instructions to the model count, not how the template renders earlier calls.
            found = described
        if found is None and (begun := _after_prompt(render, written)):
            found = next((each for each in CALL_FORMATS if each.unmarked and _reads(each, begun)), None)
        return TemplateCalls(found, as_text, one_a_message=_writes_one(render, as_text=as_text))
    # It refuses calls in earlier messages; they may be written out there.
    if described is not None and _rendered(render, with_calls_written(_chat(_ARGUMENTS), described)) is not None:
        return TemplateCalls(described, are_dropped=True)
    return TemplateCalls()


def takes_system_messages(render: Render) -> bool:
    """Return whether the template renders a system message; true if it renders no chat at all."""
    question = {"role": "user", "content": _QUESTION}
    try:
        return _SYSTEM in render([{"role": "system", "content": _SYSTEM}, question], add_generation_prompt=False)
    except RequestError:
        pass
    try:
        render([question], add_generation_prompt=False)
    except RequestError:
        return True
    return False


def reasoning_marks(render: Render, template: str) -> str:
    """Return a text with the marks of reasoning that the template has, or puts together."""
    chat = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _RESULT, "reasoning_content": "octavo-reasoning"},
    ]
    try:
        return template + render(chat, add_generation_prompt=True)
    except RequestError:
        return template


def _written(render: Render, *, as_text: bool, call_id: str = "call00000") -> str | None:
    """Return the text of a call in a rendered chat, from the question to the result; None if it cannot be rendered."""
    text = _rendered(render, _chat(json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS, call_id))
    return None if text is None else text.rpartition(_QUESTION)[2].partition(_RESULT)[0]


def _writes_one(render: Render, *, as_text: bool) -> bool:
    """Whether the template writes only one of two calls in a message."""
    question, calling, result = _chat(json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS)
    (call,) = calling["tool_calls"]
    second = {**call, "id": "call00001", "function": {**call["function"], "name": "octavo_second"}}
    results = [result, {**result, "tool_call_id": "call00001", "name": "octavo_second"}]
    both = _rendered(render, [question, {**calling, "tool_calls": [call, second]}, *results])
    return both is None or "octavo_second" not in both.partition(_RESULT)[0]


def _chat(arguments: Any, call_id: str = "call00000") -> list[dict[str, Any]]:
    """Return a chat with a call and its result. Mistral's templates require ids of nine letters and digits."""
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": _NAME, "content": _RESULT},
    ]


def _rendered(render: Render, chat: list[dict[str, Any]]) -> str | None:
    """Return a rendered chat; None if the template refuses it."""
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "a text"},
            "count": {"type": "integer", "description": "a number"},
        },
        "required": ["text", "count"],
    }
    function = {"name": _NAME, "description": "a function", "parameters": parameters}
    try:
        return render(chat, tools=[{"type": "function", "function": function}], add_generation_prompt=False)
    except RequestError:
        return None


def _after_prompt(render: Render, written: str) -> str:
    """Return the part of `written` that begins an answer; "" if that is unclear."""
    try:
        prompt = render([{"role": "user", "content": _QUESTION}], add_generation_prompt=True)
    except RequestError:
        return ""
    prompt = prompt.rpartition(_QUESTION)[2].rstrip()
    return written.removeprefix(prompt) if written.startswith(prompt) else ""


def _reads(calls: CallFormat, written: str) -> bool:
    """Whether the format's parser finds the call, up to its closing mark."""
    if calls.closing.strip() not in written:
        return False
    if calls.channels:
        written = written.rpartition("<|start|>assistant")[2]
    parser = OutputParser(Dialect(calls, tools=_TYPES))
    events = [*parser.feed(written), *parser.finish()]
    names = [event.name for event in events if isinstance(event, CallBegins)]
    text = "".join(event.text for event in events if isinstance(event, Arguments))
    try:
        # Some templates write numbers as text.
        read = {name: str(value) for name, value in json.loads(text).items()}
        return names == [_NAME] and read == {name: str(value) for name, value in _ARGUMENTS.items()}
    except ValueError:
        return False

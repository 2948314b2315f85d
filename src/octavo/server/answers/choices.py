"""Splits one choice of a chat's answer into content, reasoning and tool calls, whole or as it is generated."""

from __future__ import annotations

import secrets
import string
from typing import Any

from octavo.dialect.events import Arguments, CallBegins, Content, Event, Reasoning
from octavo.dialect.parser import Dialect, OutputParser
from octavo.engine.outputs import CompletionOutput
from octavo.request import FinishReason
from octavo.server.bodies.dialects import Speech

_ID_LENGTH = 24


class ChoiceReader:
    """Parses one choice."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._parser = OutputParser(speech.dialect)

    def read(self, completion: CompletionOutput) -> list[Event]:
        """Return the events in a completion, or in the next part of one."""
        events = self._parser.feed(completion.text)
        if completion.finish_reason is not None:
            events += self._parser.finish()
        return [event for event in events if self._is_told(event)]

    def _is_told(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._speech.tells_reasoning
        return not (self._speech.one_call and isinstance(event, CallBegins | Arguments) and event.index > 0)

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Return OpenAI's finish reason: "tool_calls" if the choice ended by itself and has calls."""
        called = completion.finish_reason is FinishReason.STOP and self._parser.num_calls
        return "tool_calls" if called else completion.finish_reason


class CallIds:
    """Generates ids of tool calls in the form that the model's chat template expects."""

    def __init__(self, dialect: Dialect) -> None:
        self._length = None if dialect.calls is None else dialect.calls.id_length

    def new(self) -> str:
        if self._length is None:
            return f"call_{secrets.token_hex(_ID_LENGTH // 2)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self._length))


def deltas(events: list[Event], ids: CallIds) -> list[dict[str, Any]]:
    """Return the events as OpenAI's `delta` objects."""
    return [_delta(event, ids) for event in events]


def _delta(event: Event, ids: CallIds) -> dict[str, Any]:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegins(index, name):
            call = {"index": index, "id": ids.new(), "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message(events: list[Event], ids: CallIds, echoed: str = "") -> dict[str, Any]:
    """Return OpenAI's `message` object for the events of a whole choice."""
    content, reasoning = [echoed], [""]
    calls: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegins(_, name):
                calls.append({"id": ids.new(), "type": "function", "function": {"name": name, "arguments": ""}})
            case Arguments(_, text):
                calls[-1]["function"]["arguments"] += text
    told: dict[str, Any] = {"role": "assistant", "content": "".join(content), "refusal": None}
    if len(reasoning) > 1:
        told["reasoning_content"] = "".join(reasoning)
    if calls:
        told["tool_calls"] = calls
        told["content"] = told["content"] or None
    return told

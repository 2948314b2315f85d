"""One choice of a chat's answer: its text taken apart into content, reasoning and tool calls, whole or as it comes."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from octavo.dialect.events import Arguments, CallBegins, Content, Event, Reasoning
from octavo.dialect.parser import Dialect, OutputParser
from octavo.engine.outputs import CompletionOutput
from octavo.request import FinishReason

_ID_LENGTH = 24


@dataclass(frozen=True, slots=True)
class Speech:
    """How an answer's text is to be read, and what of it is told.

    Attributes:
        one_call: of several calls only the first is told (`parallel_tool_calls: false`).
        tells_reasoning: false: it is left out.
    """

    dialect: Dialect = field(default_factory=Dialect)
    one_call: bool = False
    tells_reasoning: bool = True

    def __bool__(self) -> bool:
        return bool(self.dialect)


class ChoiceReader:
    """Reads one choice."""

    def __init__(self, speech: Speech) -> None:
        self._speech = speech
        self._parser = OutputParser(speech.dialect)

    def read(self, completion: CompletionOutput) -> list[Event]:
        """What a completion, or the next part of one, says."""
        events = self._parser.feed(completion.text)
        if completion.finish_reason is not None:
            events += self._parser.finish()
        return [event for event in events if self._is_told(event)]

    def _is_told(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._speech.tells_reasoning
        return not (self._speech.one_call and isinstance(event, CallBegins | Arguments) and event.index > 0)

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """OpenAI's: "tool_calls" where it ended by itself and called."""
        called = completion.finish_reason is FinishReason.STOP and self._parser.num_calls
        return "tool_calls" if called else completion.finish_reason


class CallIds:
    """The ids of one choice's calls, as the model's chat template wants them."""

    def __init__(self, dialect: Dialect) -> None:
        self._length = None if dialect.calls is None else dialect.calls.id_length

    def new(self) -> str:
        if self._length is None:
            return f"call_{secrets.token_hex(_ID_LENGTH // 2)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self._length))


def deltas(events: list[Event], ids: CallIds) -> list[dict[str, Any]]:
    """OpenAI's `delta` objects."""
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
    """OpenAI's `message` object of a whole choice."""
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

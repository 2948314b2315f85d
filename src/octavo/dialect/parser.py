"""A streaming parser for all formats, from text as it is generated to content, reasoning and tool calls.

    text      Let me <think> see.\\n<tool_call>{"name": "f", "argu   ments": {"a"   : 1}}</tool_call>
    events    Content                            held back            CallBegins     Arguments

A call begins once its name is known and its arguments follow, which are passed on as they are read, always as JSON.
Text that turns out not to be a call before that is content; if the arguments of a call that has begun break off, they
end there, and what follows is content. Spaces next to a mark are dropped with it. The result does not depend on the
pieces in which the text arrives, because it is read character by character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.dialect.calls import CallReader
from octavo.dialect.events import Arguments, CallBegins, Content, Event, Reasoning
from octavo.dialect.formats import CallFormat, ReasoningFormat
from octavo.dialect.values import SPACES, Characters, MalformedError, Reader
from octavo.structured_outputs import ReasoningPart

# Tokens that may begin a message's header in harmony, and those that end a message.
_HEADERS = ("<|channel|>", "<|start|>", "<|constrain|>", "<|message|>", "to=")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The facts about model and request that a parser needs.

    Attributes:
        calls: the format of calls; None if the text is not searched for calls.
        reasoning: the format of reasoning; None if the text is not searched for reasoning.
        in_reasoning: whether the prompt ended within reasoning.
        has_reasoned: whether the prompt ended with complete reasoning.
        tools: types of each tool's parameters, as in its schema; needed for XML, which writes all types alike.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool = False
    tools: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    has_reasoned: bool = False

    def reasoning_part(self, *, calls: bool = False) -> ReasoningPart | None:
        """Return the reasoning with which an answer may begin, for its grammar, or that of its calls; None if none."""
        if self.reasoning is None or self.has_reasoned:
            return None
        closing = self.reasoning.closing + self.reasoning.message + ("" if calls else self.reasoning.answer)
        return ReasoningPart(self.reasoning.opening, closing, self.in_reasoning)

    @property
    def channels(self) -> bool:
        """Whether the text is harmony's messages."""
        return any(each is not None and each.channels for each in (self.calls, self.reasoning))

    @property
    def dropped(self) -> tuple[str, ...]:
        """Marks that are left out of the content."""
        return tuple({mark: None for each in (self.calls, self.reasoning) if each for mark in each.dropped})

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must include special tokens, because they are the marks."""
        return any(each is not None and each.marks_are_special for each in (self.calls, self.reasoning))

    def __bool__(self) -> bool:
        return self.calls is not None or self.reasoning is not None


class OutputParser:
    """Parses one completion."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._chars = Characters()
        self._events: list[Event] = []
        self._calls = CallReader(self._chars, self._pass_on, dialect.tools)
        self._text = self._read()
        next(self._text)

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._calls.num_begun

    def feed(self, text: str) -> list[Event]:
        """Parse more text, and return the events that it completes."""
        for character in text:
            self._text.send(character)
        return self._take()

    def finish(self) -> list[Event]:
        """Return the last events, when no text follows."""
        for _ in range(2):
            # Twice, because characters that are given back at the end are read again.
            try:
                self._text.send("")
            except StopIteration:
                break
        return self._take()

    def _pass_on(self, event: Event) -> None:
        self._events.append(event)

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return list(_merged(events))

    def _read(self) -> Reader[None]:
        if self._dialect.channels:
            yield from self._messages()
            return
        if self._dialect.reasoning is not None:
            yield from self._reasoning(self._dialect.reasoning)
        at_beginning = True
        calls = self._dialect.calls
        while True:
            found = yield from self._content(calls, at_beginning=at_beginning)
            at_beginning = False
            if calls is None or not found:
                return
            before = self._calls.num_begun
            try:
                yield from self._calls.run(calls, marked=found == "marked")
            except MalformedError:
                self._break_off(begun=self._calls.num_begun > before)

    def _break_off(self, *, begun: bool) -> None:
        """Handle text that is not a call after all, ends within a call, or follows one without being another."""
        text = self._chars.unsettled()
        if begun and self._chars.at_end:
            if (take := self._calls.takes_arguments) is not None:
                take(text)
        elif text:
            self._events.append(Content(text, self._chars.num_read))
        self._calls.takes_arguments = None

    def _reasoning(self, reasoning: ReasoningFormat) -> Reader[None]:
        chars = self._chars
        yield from chars.skip_space()
        mark = ""
        try:
            # The closing mark alone: the model begins with an answer, and says so.
            mark = yield from chars.one_of((reasoning.opening, reasoning.closing))
        except MalformedError:
            chars.give_back_all()
            if not self._dialect.in_reasoning:
                return
        chars.settle()
        if mark != reasoning.closing:
            yield from chars.skip_space()
            chars.settle()
            yield from self._until((reasoning.closing,), Reasoning)
        chars.settle()
        yield from chars.skip_space()
        chars.settle()

    def _content(self, calls: CallFormat | None, *, at_beginning: bool) -> Reader[str]:
        """Pass on text up to a run of calls; return "marked" or "unmarked", or "" at the end of the text."""
        if calls is not None and calls.unmarked and at_beginning:
            first = yield from self._chars.skip_space()
            if any(form.may_begin(first) for form in calls.forms):
                return "unmarked"
        opening = "" if calls is None else calls.mark
        marks = (*((opening,) if opening else ()), *self._dialect.dropped)
        while found := (yield from self._until(marks, Content)):
            if found == opening:
                return "marked"
            self._chars.settle()
            yield from self._chars.skip_space()
            self._chars.settle()
        return ""

    def _messages(self) -> Reader[None]:
        """Read harmony, from where the prompt has ended with `<|start|>assistant`.

        <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant to=functions.f<|channel|>commentary
        json<|message|>{"a": 1}<|call|>       or       <|channel|>final<|message|>content<|return|>
        """
        chars, calls = self._chars, self._dialect.calls
        while True:
            chars.settle()
            yield from chars.skip_space()
            try:
                header = yield from chars.one_of(_HEADERS)
            except MalformedError:
                chars.give_back_all()
                if not (yield from self._until(_ENDS, Content)):
                    return
                continue
            while not header.endswith("<|message|>"):
                character = yield from chars.next()
                header += character
                chars.settle()
                if not character:
                    return  # nothing was said in the message that it announces
            recipient = re.search(r"to=([\w.-]+)", header)
            if recipient and recipient[1].startswith("functions.") and calls is not None:
                before = self._calls.num_begun
                try:
                    yield from self._calls.channel_call(recipient[1].removeprefix("functions."))
                    yield from chars.skip_space()
                    yield from chars.one_of(_ENDS)
                except MalformedError:
                    self._break_off(begun=self._calls.num_begun > before)
                continue
            thinks = self._dialect.reasoning is not None and (recipient or "<|channel|>analysis" in header)
            chars.settle()
            if not (yield from self._until(_ENDS, Reasoning if thinks else Content)):
                return

    def _until(self, marks: Sequence[str], kind: type[Content] | type[Reasoning]) -> Reader[str]:
        """Pass on text up to one of `marks`, and return that; "" if the text ends first.

        Unsettled characters are spaces, followed by text that may become the mark.
        """
        chars = self._chars
        only_spaces = not "".join(chars.taken).strip(SPACES)
        while character := (yield from chars.next()):
            if only_spaces and character in SPACES:
                continue  # without joining what is held, of which there may be thousands
            held = "".join(chars.taken)
            while rest := held.lstrip(SPACES):
                if any(mark.startswith(rest) for mark in marks):
                    break
                # The first character after the spaces begins no mark; a mark may begin after it.
                size = len(held) - len(rest) + 1
                self._events.append(kind(held[:size], chars.num_read - len(held) + size))
                held = held[size:]
            chars.taken[:] = [held] if held else []
            only_spaces = not rest
            if rest and rest in marks:
                return rest
        held = chars.unsettled()
        # Spaces at the end of an answer that called a tool belong to the call.
        if held and not (self._calls.num_begun and not held.strip(SPACES)):
            self._events.append(kind(held, chars.num_read))
        return ""


def _merged(events: list[Event]) -> Iterator[Event]:
    """Merge adjacent events of one kind."""
    pieces: list[str] = []
    for place, event in enumerate(events):
        if isinstance(event, CallBegins):
            yield event
            continue
        pieces.append(event.text)
        following = events[place + 1] if place + 1 < len(events) else None
        if type(following) is not type(event) or (
            isinstance(event, Arguments) and isinstance(following, Arguments) and event.index != following.index
        ):
            text = "".join(pieces)
            pieces.clear()
            yield Arguments(event.index, text) if isinstance(event, Arguments) else type(event)(text, event.end)

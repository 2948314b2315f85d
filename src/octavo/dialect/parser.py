"""One streaming parser for every format: text in, as it is generated; content, reasoning and tool calls out.

    text      Let me <think> see.\\n<tool_call>{"name": "f", "argu   ments": {"a"   : 1}}</tool_call>
    events    Content                            held back            CallBegins     Arguments

A call begins once its name is known and its arguments follow, and these come as they are read, always as JSON. What
only looks like a call until then is content, whole; where the arguments of one that has begun break off, they end
there, and what follows is content. Spaces beside a mark are dropped with it. In which pieces a text comes makes no
difference: it is read character by character.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from octavo.dialect.events import Arguments, CallBegins, Content, Event, Reasoning
from octavo.dialect.formats import CallFormat, JsonCalls, NamedJsonCall, PythonCalls, ReasoningFormat, XmlCall
from octavo.dialect.values import JSON, PYTHON, SPACES, Characters, MalformedError, Reader, Take
from octavo.structured_outputs import ReasoningPart


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a parser must know of the model and the request.

    Attributes:
        calls: None where the text is not searched for calls.
        reasoning: None where it is not searched for reasoning.
        in_reasoning: the prompt ended within reasoning.
        has_reasoned: the prompt ended with reasoning that is over.
        tools: for each tool, the types of its parameters as its schema names them: what XML spells alike.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool = False
    tools: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    has_reasoned: bool = False

    @property
    def reasoning_part(self) -> ReasoningPart | None:
        """The reasoning with which an answer may begin, for its grammar."""
        if self.reasoning is None or self.has_reasoned:
            return None
        return ReasoningPart(self.reasoning.opening, self.reasoning.closing, self.in_reasoning)

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must hold special tokens, for they are the marks."""
        return any(each is not None and each.marks_are_special for each in (self.calls, self.reasoning))

    def __bool__(self) -> bool:
        return self.calls is not None or self.reasoning is not None


class OutputParser:
    """Parses one completion."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._chars = Characters()
        self._events: list[Event] = []
        self._num_calls = 0
        # Takes the arguments of a call that has begun, until they are complete.
        self._open: Take | None = None
        self._text = self._read()
        next(self._text)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def feed(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        for character in text:
            self._text.send(character)
        return self._take()

    def finish(self) -> list[Event]:
        """The last events, once no text follows."""
        for _ in range(2):
            # Twice: what is given back at the end is read again.
            try:
                self._text.send("")
            except StopIteration:
                break
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return list(_merged(events))

    def _read(self) -> Reader[None]:
        if self._dialect.reasoning is not None:
            yield from self._reasoning(self._dialect.reasoning)
        at_beginning = True
        calls = self._dialect.calls
        while True:
            found = yield from self._content(calls, at_beginning=at_beginning)
            at_beginning = False
            if calls is None or not found:
                return
            before = self._num_calls
            try:
                yield from self._run(calls, marked=found == "marked")
            except MalformedError:
                self._break_off(begun=self._num_calls > before)

    def _break_off(self, *, begun: bool) -> None:
        """What was read is no call; or the text ended within one, or the next does not follow."""
        text = self._chars.unsettled()
        if begun and self._chars.at_end:
            if self._open is not None:
                self._open(text)
        elif text:
            self._events.append(Content(text))
        self._open = None

    def _reasoning(self, reasoning: ReasoningFormat) -> Reader[None]:
        chars = self._chars
        yield from chars.skip_space()
        try:
            yield from chars.expect(reasoning.opening)
        except MalformedError:
            chars.give_back_all()
            if not self._dialect.in_reasoning:
                return
        chars.settle()
        yield from chars.skip_space()
        chars.settle()
        yield from self._until(reasoning.closing, Reasoning)
        chars.settle()
        yield from chars.skip_space()
        chars.settle()

    def _content(self, calls: CallFormat | None, *, at_beginning: bool) -> Reader[str]:
        """Text up to a run of calls, which is "marked" or "unmarked"; "" at the end of the text."""
        if calls is not None and calls.unmarked and at_beginning:
            first = yield from self._chars.skip_space()
            if any(_begins(body, first) for body in calls.bodies):
                return "unmarked"
        found = yield from self._until("" if calls is None else calls.opening, Content)
        return "marked" if found else ""

    def _until(self, mark: str, kind: type[Content] | type[Reasoning]) -> Reader[bool]:
        """Pass on text up to a mark; False where the text ends first.

        What has been read and not accounted for is spaces, and then what may become the mark.
        """
        chars = self._chars
        while (yield from chars.next()):
            held = "".join(chars.taken)
            while rest := held.lstrip(SPACES):
                if mark and mark.startswith(rest):
                    break
                # A space longer, so that what follows may begin a mark again.
                size = len(held) - len(rest) + 1
                self._events.append(kind(held[:size]))
                held = held[size:]
            chars.taken[:] = [held]
            if rest and rest == mark:
                return True
        held = chars.unsettled()
        # Spaces at the end of an answer that called a tool belong to the call.
        if held and not (self._num_calls and not held.strip(SPACES)):
            self._events.append(kind(held))
        return False

    def _run(self, calls: CallFormat, *, marked: bool) -> Reader[None]:
        """A run of calls, after its opening mark."""
        first = yield from self._chars.skip_space()
        body = next((body for body in calls.bodies if _begins(body, first)), None)
        if body is None:
            yield from self._chars.next()
            self._chars.fail()
        if isinstance(body, JsonCalls):
            yield from self._json_calls(body, known_only=not marked)
        elif isinstance(body, NamedJsonCall):
            yield from self._named_json(body)
        elif isinstance(body, XmlCall):
            yield from self._xml_call()
        else:
            yield from self._python_calls()
        self._chars.settle()
        if calls.closing:
            yield from self._chars.skip_space()
            yield from self._chars.expect(calls.closing)
            self._chars.settle()

    def _begin(self, name: str, *, known_only: bool = False) -> Take:
        """A call begins; returns what takes its arguments. Everything before it is accounted for."""
        if not name or (known_only and name not in self._dialect.tools):
            raise MalformedError
        index = self._num_calls
        self._num_calls += 1
        self._chars.settle()
        self._events.append(CallBegins(index, name))

        def take(text: str) -> None:
            self._chars.settle()
            if text:
                self._events.append(Arguments(index, text))

        self._open = take
        return take

    def _complete(self) -> None:
        """A call's arguments are complete."""
        self._chars.settle()
        self._open = None

    def _json_calls(self, body: JsonCalls, *, known_only: bool) -> Reader[None]:
        yield from self._chars.expect(body.brackets[0])
        while True:
            yield from self._chars.skip_space()
            yield from self._json_call(body, known_only=known_only)
            self._chars.settle()
            if not body.separator:
                return
            following = yield from self._chars.skip_space()
            if following != body.separator:
                break
            yield from self._chars.next()
        yield from self._chars.expect(body.brackets[1])

    def _json_call(self, body: JsonCalls, *, known_only: bool) -> Reader[None]:
        chars = self._chars
        yield from chars.expect("{")
        name: str | None = None
        early: str | None = None
        begun = False
        while True:
            yield from chars.skip_space()
            key = yield from chars.string(JSON, _drop)
            yield from chars.skip_space()
            yield from chars.expect(":")
            first = yield from chars.skip_space()
            if key == "name" and not begun:
                name = yield from chars.string(JSON, _drop)
            elif key in body.arguments and not begun:
                if name is not None and first == "{":
                    take, begun = self._begin(name, known_only=known_only), True
                    yield from chars.value(JSON, take)
                    self._complete()
                else:
                    early = yield from self._early(first)
            else:
                yield from chars.value(JSON, _drop)
            if (yield from chars.skip_space()) != ",":
                break
            yield from chars.next()
        yield from chars.expect("}")
        if not begun:
            self._begin(name or "", known_only=known_only)(early or "{}")
            self._complete()

    def _early(self, first: str) -> Reader[str]:
        """Arguments that come before the name, or as JSON within a string."""
        pieces: list[str] = []
        if first == '"':
            text = yield from self._chars.string(JSON, _drop)
            try:
                if not isinstance(json.loads(text), dict):
                    raise MalformedError
            except (ValueError, RecursionError):
                raise MalformedError from None
            return text
        yield from self._chars.value(JSON, pieces.append)
        if first != "{" and pieces != ["null"]:
            raise MalformedError
        return "".join(pieces) if first == "{" else "{}"

    def _named_json(self, body: NamedJsonCall) -> Reader[None]:
        chars = self._chars
        name = yield from chars.until("[{")
        if (yield from chars.skip_space()) == "[":
            tag = yield from self._tag()
            if tag == "[CALL_ID]":
                yield from chars.until("[")
                tag = yield from self._tag()
            if tag != body.tag:
                raise MalformedError
        if (yield from chars.skip_space()) != "{":
            yield from chars.next()
            chars.fail()
        yield from chars.value(JSON, self._begin(name.strip()))
        self._complete()

    def _tag(self) -> Reader[str]:
        inside = yield from self._chars.until("]")
        yield from self._chars.next()
        return inside + "]"

    def _xml_call(self) -> Reader[None]:
        chars = self._chars
        yield from chars.expect("<function=")
        name = yield from chars.until(">\n<")
        yield from chars.expect(">")
        take = self._begin(name.strip())
        types = self._dialect.tools.get(name.strip(), {})
        opened = False
        while True:
            yield from chars.skip_space()
            yield from chars.expect("<")
            if (yield from chars.skip_space()) == "/":
                yield from chars.expect("/function>")
                break
            yield from chars.expect("parameter=")
            key = (yield from chars.until(">\n<")).strip()
            yield from chars.expect(">")
            take(("," if opened else "{") + json.dumps(key, ensure_ascii=False) + ":")
            opened = True
            if types.get(key) == "string":
                yield from self._xml_text(take)
            else:
                yield from self._xml_value(take, types.get(key))
        take("}" if opened else "{}")
        self._complete()

    def _xml_value(self, take: Take, kind: str | None) -> Reader[None]:
        """A parameter that is no text: known once it is whole."""
        pieces: list[str] = []
        try:
            yield from self._xml_text(pieces.append)
        except MalformedError:
            take("".join(pieces))
            raise
        take(_typed(json.loads("".join(pieces)), kind))

    def _xml_text(self, take: Take) -> Reader[None]:
        """A parameter's text as a JSON string: without one line break at either end."""
        chars = self._chars
        take('"')
        closing = "</parameter>"
        # What may be the end: a line break, and the closing tag's beginning.
        held = ""
        first = True
        while True:
            character = yield from chars.next()
            if not character:
                # Cut off here: nothing of the text is lost.
                take(json.dumps(held, ensure_ascii=False)[1:-1])
                raise MalformedError
            chars.settle()
            if first and character == "\n":
                first = False
                continue
            first = False
            held += character
            while held:
                tag = held.removeprefix("\n")
                if tag == closing:
                    take('"')
                    return
                if closing.startswith(tag):
                    break
                take(json.dumps(held[0], ensure_ascii=False)[1:-1])
                held = held[1:]

    def _python_calls(self) -> Reader[None]:
        chars = self._chars
        yield from chars.expect("[")
        while True:
            yield from chars.skip_space()
            name = yield from chars.until("(,=[]{}'\"")
            yield from chars.expect("(")
            yield from self._python_arguments(self._begin(name.strip(), known_only=True))
            chars.settle()
            if (yield from chars.skip_space()) != ",":
                break
            yield from chars.next()
        yield from chars.expect("]")

    def _python_arguments(self, take: Take) -> Reader[None]:
        chars = self._chars
        before = "{"
        while (yield from chars.skip_space()) != ")":
            key = (yield from chars.until("=,()")).strip()
            yield from chars.expect("=")
            if not key.isidentifier():
                raise MalformedError
            take(f"{before}{json.dumps(key, ensure_ascii=False)}:")
            before = ","
            yield from chars.value(PYTHON, take)
            if (yield from chars.skip_space()) != ",":
                break
            yield from chars.next()
        yield from chars.expect(")")
        take("}" if before == "," else "{}")
        self._complete()


def _drop(text: str) -> None:
    """Take nothing."""


def _begins(body: object, first: str) -> bool:
    """Whether a run of calls of that form may begin with a character."""
    if isinstance(body, JsonCalls):
        return first == (body.brackets[0] or "{")
    if isinstance(body, XmlCall):
        return first == "<"
    if isinstance(body, PythonCalls):
        return first == "["
    return first.isidentifier()


def _typed(text: str, kind: str | None) -> str:
    """A parameter's text as JSON: as what it reads, unless its type says text."""
    if kind != "string":
        # Models write Python's words too.
        words = {"True": "true", "False": "false", "None": "null"}
        try:
            return json.dumps(json.loads(words.get(text.strip(), text)), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass  # it reads as nothing but text
    return json.dumps(text, ensure_ascii=False)


def _merged(events: list[Event]) -> Iterator[Event]:
    """Neighbours of one kind in one."""
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
            yield Arguments(event.index, text) if isinstance(event, Arguments) else type(event)(text)

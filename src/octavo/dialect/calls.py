"""Parses runs of calls, in all the formats of `formats.py`, into events.

hermes      <tool_call> {"name": "f", "argu   ments": {"a"   : 1}} </tool_call>
events                       held back        CallBegins  Arguments
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from octavo.dialect.events import Arguments, CallBegins, Event
from octavo.dialect.formats import BareCall, CallFormat, JsonCalls, NamedJsonCall, PythonCalls, XmlCall
from octavo.dialect.values import JSON, MAX_DEPTH, PYTHON, Characters, MalformedError, Reader, Take, whole_value


class CallReader:
    """Parses the calls of one completion.

    Args:
        chars: the characters of the whole text.
        pass_on: called with each event.
        tools: types of the parameters of each tool.

    Attributes:
        num_begun: number of calls that have begun.
        takes_arguments: receives the arguments of the open call; None if no call is open.
    """

    def __init__(
        self, chars: Characters, pass_on: Callable[[Event], None], tools: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._chars = chars
        self._pass_on = pass_on
        self._tools = tools
        self.num_begun = 0
        self.takes_arguments: Take | None = None

    def run(self, calls: CallFormat, *, marked: bool) -> Reader[None]:
        """Parse a run of calls, after its opening mark; raise `MalformedError` if it is not one, or breaks off."""
        first = yield from self._chars.skip_space()
        body = next((body for body in calls.bodies if may_begin(body, first)), None)
        if body is None:
            yield from self._chars.next()
            self._chars.fail()
        is_closed = False
        if isinstance(body, JsonCalls):
            yield from self._json_calls(body, known_only=not marked)
        elif isinstance(body, NamedJsonCall) and body.before:
            is_closed = yield from self._marked_json(body, calls.closing)
        elif isinstance(body, NamedJsonCall):
            yield from self._named_json(body)
        elif isinstance(body, XmlCall):
            is_closed = yield from self._xml_calls(body, calls.closing)
        elif isinstance(body, BareCall):
            yield from self._bare_call(body)
        else:
            yield from self._python_calls(known_only=not marked)
        self._chars.settle()
        if calls.closing and not is_closed:
            yield from self._chars.skip_space()
            yield from self._chars.expect(calls.closing)
            self._chars.settle()

    def _begin(self, name: str, *, known_only: bool = False) -> Take:
        """Begin a call, and return the function that receives its arguments. Everything before it is settled."""
        if not name or (known_only and name not in self._tools):
            raise MalformedError
        index = self.num_begun
        self.num_begun += 1
        self._chars.settle()
        self._pass_on(CallBegins(index, name))

        def take(text: str) -> None:
            self._chars.settle()
            if text:
                self._pass_on(Arguments(index, text))

        self.takes_arguments = take
        return take

    def _complete(self) -> None:
        """End a call, whose arguments are complete."""
        self._chars.settle()
        self.takes_arguments = None

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
            if key == body.name and not begun:
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
        """Parse arguments that come before the name, or as JSON within a string."""
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

    def _marked_json(self, body: NamedJsonCall, closing: str) -> Reader[bool]:
        """Parse calls with marks around each; return whether the mark after the run was read too."""
        chars = self._chars
        yield from chars.expect(body.before)
        while True:
            name = yield from chars.until(body.tag[0] + "\n")
            yield from chars.skip_space()
            yield from chars.expect(body.tag.strip())
            if (yield from chars.skip_space()) != "{":
                yield from chars.next()
                chars.fail()
            name = name.strip()
            yield from chars.value(JSON, self._begin(re.sub(r":\d+$", "", name) if body.numbered else name))
            self._complete()
            yield from chars.skip_space()
            yield from chars.expect(body.after.strip())
            chars.settle()
            yield from chars.skip_space()
            if (yield from chars.one_of((body.separator or body.before, closing))) == closing:
                return True
            if body.separator:
                yield from chars.skip_space()
                yield from chars.expect(body.before)

    def channel_call(self, name: str) -> Reader[None]:
        """Parse the arguments of a call in harmony, whose message may be empty."""
        take = self._begin(name)
        if (yield from self._chars.skip_space()) == "{":
            yield from self._chars.value(JSON, take)
        else:
            take("{}")
        self._complete()

    def _tag(self) -> Reader[str]:
        inside = yield from self._chars.until("]")
        yield from self._chars.next()
        return inside + "]"

    def _xml_calls(self, body: XmlCall, closing: str) -> Reader[bool]:
        """Parse one or several calls; return whether the mark after the run was read too."""
        chars = self._chars
        if not body.name:
            yield from self._xml_call(body, (yield from chars.until("\n<")))
            return False
        opening, end = body.name
        yield from chars.expect(opening)
        while True:
            name = yield from chars.until(end[0] + "\n<")
            yield from chars.expect(end)
            yield from self._xml_call(body, name)
            chars.settle()
            yield from chars.skip_space()
            if (yield from chars.one_of((opening, closing))) == closing:
                return True

    def _xml_call(self, body: XmlCall, name: str) -> Reader[None]:
        chars = self._chars
        take = self._begin(name.strip())
        types = self._tools.get(name.strip(), {})
        opened = False
        while True:
            yield from chars.skip_space()
            yield from chars.expect("<")
            if (yield from chars.skip_space()) == "/":
                if body.end:
                    yield from chars.expect(body.end[1:])
                else:
                    chars.give_back_all()
                break
            yield from chars.expect(body.key[1:])
            key = (yield from chars.until(body.between[0][0] + "\n<")).strip()
            for mark in body.between:
                yield from chars.skip_space()
                yield from chars.expect(mark)
            is_text = types.get(key) == "string"
            if body.typed:
                is_text = 'string="true"' in (yield from chars.until(">"))
                yield from chars.next()
            take(("," if opened else "{") + json.dumps(key, ensure_ascii=False) + ":")
            opened = True
            if is_text:
                yield from self._xml_text(take, body.value_end)
            else:
                yield from self._xml_value(take, types.get(key), body.value_end)
        take("}" if opened else "{}")
        self._complete()

    def _xml_value(self, take: Take, kind: str | None, closing: str) -> Reader[None]:
        """Parse a parameter that is not a string, and so can only be passed on once it is complete."""
        pieces: list[str] = []
        try:
            yield from self._xml_text(pieces.append, closing)
        except MalformedError:
            take("".join(pieces))
            raise
        take(_typed(json.loads("".join(pieces)), kind))

    def _xml_text(self, take: Take, closing: str, *, lines: bool = True) -> Reader[None]:
        """Parse a parameter's text into a JSON string; `lines`: without one line break at either end."""
        chars = self._chars
        take('"')
        # Text that may be the end: a line break, and the beginning of the closing tag.
        held = ""
        first = True
        while True:
            character = yield from chars.next()
            if not character:
                # The output was cut off here: pass on what was held back.
                take(json.dumps(held, ensure_ascii=False)[1:-1])
                raise MalformedError
            chars.settle()
            if lines and first and character == "\n":
                first = False
                continue
            first = False
            held += character
            while held:
                tag = held.removeprefix("\n") if lines else held
                if tag == closing:
                    take('"')
                    return
                if closing.startswith(tag):
                    break
                take(json.dumps(held[0], ensure_ascii=False)[1:-1])
                held = held[1:]

    def _bare_call(self, body: BareCall) -> Reader[None]:
        yield from self._chars.expect("call:")
        name = yield from self._chars.until("{")
        yield from self._bare_value(body.quote, self._begin(name.strip()), 0)
        self._complete()

    def _bare_value(self, quote: str, take: Take, depth: int) -> Reader[None]:
        """Parse a value whose strings stand between `quote`, or are JSON's."""
        chars = self._chars
        first = yield from chars.skip_space()
        if first == quote[0]:
            yield from chars.expect(quote)
            yield from self._xml_text(take, quote, lines=False)
            return
        if first not in ("{", "["):
            yield from chars.value(JSON, take)
            return
        if depth == MAX_DEPTH:
            raise MalformedError
        yield from chars.next()
        take(first)
        end, comma = "}" if first == "{" else "]", ""
        while (yield from chars.skip_space()) != end:
            if comma:
                yield from chars.expect(",")
                yield from chars.skip_space()
            if first == "{":
                if (yield from chars.skip_space()) == '"':
                    key = yield from chars.string(JSON, _drop)
                    yield from chars.skip_space()
                else:
                    key = (yield from chars.until(":")).strip()
                yield from chars.expect(":")
                take(f"{comma}{json.dumps(key, ensure_ascii=False)}:")
            elif comma:
                take(comma)
            yield from self._bare_value(quote, take, depth + 1)
            comma = ","
        yield from chars.next()
        take(end)

    def _python_calls(self, *, known_only: bool) -> Reader[None]:
        chars = self._chars
        yield from chars.expect("[")
        while True:
            yield from chars.skip_space()
            name = yield from chars.until("(,=[]{}'\"")
            yield from chars.expect("(")
            yield from self._python_arguments(self._begin(name.strip(), known_only=known_only))
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
    """Ignore a piece of JSON."""


def may_begin(body: object, first: str) -> bool:
    """Return whether a run of calls in this form may begin with the character `first`."""
    if isinstance(body, JsonCalls):
        return first == (body.brackets[0] or "{")
    if isinstance(body, XmlCall) and body.name:
        return first == "<"
    if isinstance(body, NamedJsonCall) and body.before:
        return first == body.before[0]
    if isinstance(body, PythonCalls):
        return first == "["
    if isinstance(body, BareCall):
        return first == "c"
    return first.isidentifier()


def _typed(text: str, kind: str | None) -> str:
    """Return a parameter's text as JSON: parsed if possible, unless its type is string."""
    if kind != "string":
        # Models write Python's values too, but `(1, 2)` may also be text where no type is declared.
        for syntax in (JSON, PYTHON) if kind or text.strip() in PYTHON.words else (JSON,):
            with suppress(MalformedError):
                return whole_value(text, syntax)
    return json.dumps(text, ensure_ascii=False)

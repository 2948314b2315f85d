"""Parses runs of calls, in all the formats of `formats.py`, into events.

hermes      <tool_call> {"name": "f", "argu   ments": {"a"   : 1}} </tool_call>
events                       held back        CallBegins  Arguments
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from octavo.dialect.events import Arguments, CallBegins, Event
from octavo.dialect.formats import CallForm, CallFormat
from octavo.dialect.notations import drop
from octavo.dialect.values import JSON, MAX_NAME, Characters, MalformedError, Reader, Take


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
        chars = self._chars
        first = yield from chars.skip_space()
        form = next((form for form in calls.forms if form.may_begin(first)), None)
        if form is None:
            yield from chars.next()
            chars.fail()
        yield from chars.expect(form.brackets[0])
        end = form.brackets[1] or calls.closing.strip()
        while True:
            yield from chars.skip_space()
            if form.members:
                yield from self._json_call(form, known_only=not marked)
            else:
                yield from self._call(form, end, known_only=not marked)
            chars.settle()
            if not (yield from self._another(form, end)):
                break
        chars.settle()
        for mark in (form.brackets[1], calls.closing.strip()):
            if mark:
                yield from chars.skip_space()
                yield from chars.expect(mark)
                chars.settle()

    def _another(self, form: CallForm, end: str) -> Reader[bool]:
        """Read the separator before another call of a run; return whether there is one.

        Where a run should be one call between marks, several are read too.
        """
        chars, begins = self._chars, "{" if form.members else form.before
        if form.separator is None and not (begins and end):
            return False
        if separator := (form.separator or "").strip():
            following = yield from chars.skip_space()
            if following == separator:
                yield from chars.next()
            return following == separator or bool(form.members and following == "{")
        if begins and end:
            return (yield from chars.ahead((begins, end))) == begins
        following = yield from chars.skip_space()
        return following == begins[0] if begins else following not in ("", end[0])

    def _call(self, form: CallForm, end: str, *, known_only: bool) -> Reader[None]:
        chars = self._chars
        yield from chars.expect(form.before)
        name, id = form.head_parts((yield from self._head(form)))
        yield from chars.skip_space()
        take = self._begin(name, id, known_only=known_only)
        yield from form.arguments.read(chars, take, self._tools.get(name, {}), form.after.strip() or end)
        self._complete()
        if form.after:
            yield from chars.skip_space()
            yield from chars.expect(form.after.strip())

    def _head(self, form: CallForm) -> Reader[str]:
        """Read what stands for a function's name, and the mark after it, which may be missing before arguments."""
        chars, mark, head = self._chars, form.between.strip(), ""
        ends = set(form.arguments.begins if mark else form.arguments.begins + "\n") - set(mark)
        while not (mark and head.endswith(mark)):
            character = yield from chars.next()
            if character in ends:
                chars.give_back()
                return head
            is_break = character == "\n" and form.between.startswith("\n")
            in_name = character.isprintable() and (character in mark or character not in ",='\"")
            if not character or not (is_break or in_name) or len(head) > MAX_NAME:
                chars.fail()
            head += character
        return head.removesuffix(mark)

    def _begin(self, name: str, id: str = "", *, known_only: bool = False) -> Take:
        """Begin a call, and return the function that receives its arguments. Everything before it is settled."""
        if not name or (known_only and name not in self._tools):
            raise MalformedError
        index = self.num_begun
        self.num_begun += 1
        self._chars.settle()
        self._pass_on(CallBegins(index, name, id))

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

    def _json_call(self, form: CallForm, *, known_only: bool) -> Reader[None]:
        chars = self._chars
        yield from chars.expect("{")
        name: str | None = None
        early: str | None = None
        begun = False
        while True:
            yield from chars.skip_space()
            key = yield from chars.string(JSON, drop)
            yield from chars.skip_space()
            yield from chars.expect(":")
            first = yield from chars.skip_space()
            if key == form.members[0] and not begun:
                name = yield from chars.string(JSON, drop)
            elif key in form.members[1:] and not begun:
                if name is not None and first == "{":
                    take, begun = self._begin(name, known_only=known_only), True
                    yield from chars.value(JSON, take)
                    self._complete()
                else:
                    early = yield from self._early(first)
            else:
                yield from chars.value(JSON, drop)
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
            text = yield from self._chars.string(JSON, drop)
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

    def channel_call(self, name: str) -> Reader[None]:
        """Parse the arguments of a call in harmony, whose message may be empty."""
        take = self._begin(name)
        if (yield from self._chars.skip_space()) == "{":
            yield from self._chars.value(JSON, take)
        else:
            take("{}")
        self._complete()

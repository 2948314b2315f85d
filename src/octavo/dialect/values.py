"""Values read character by character and passed on as JSON: from JSON as models write it, or from Python's literals.

A reader is a generator that is sent one character at a time, and "" when the text ends, so that it makes no difference
in which pieces a text comes. What it has passed on stays; the first character that cannot follow raises
`MalformedError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

T = TypeVar("T")
Reader = Generator[None, str, T]
"""Reads characters; `return`s what it made of them."""

# Arrays and objects within each other.
MAX_DEPTH = 64
# Characters of a name or a key.
MAX_NAME = 256

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
SPACES = " \t\r\n"
_SPACE = frozenset(SPACES)
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-.")
_SURROGATES = range(0xD800, 0xE000)


class MalformedError(Exception):
    """A text is not what its beginning promised. Never leaves this room."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """How values are written.

    Attributes:
        quotes: what a string may stand between.
        words: what a bare word means, in JSON.
        lists: opening -> closing.
        escapes: what a character after a backslash stands for.
        keeps_unknown_escapes: a backslash before any other character is itself.
        trailing_comma: one may end a list or an object.
    """

    quotes: str
    words: dict[str, str]
    lists: dict[str, str]
    escapes: dict[str, str]
    keeps_unknown_escapes: bool
    trailing_comma: bool


_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
JSON = Syntax(
    quotes='"',
    words={"true": "true", "false": "false", "null": "null"},
    lists={"[": "]"},
    escapes=_ESCAPES,
    keeps_unknown_escapes=False,
    trailing_comma=False,
)
PYTHON = Syntax(
    quotes="\"'",
    words={"True": "true", "False": "false", "None": "null", **JSON.words},
    lists={"[": "]", "(": ")"},
    escapes={"\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"},
    keeps_unknown_escapes=True,
    trailing_comma=True,
)

Take = Callable[[str], None]
"""Takes the next piece of JSON."""


class Characters:
    """The characters of a text, which may be given back and read again.

    Attributes:
        taken: those that were read and not yet accounted for by `settle`.
        at_end: the text has ended.
    """

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.at_end = False
        self._back: list[str] = []

    def next(self) -> Reader[str]:
        """The next character, or "" at the end of the text."""
        if self._back:
            character = self._back.pop()
        else:
            character = yield
            self.at_end = not character
        self.taken.append(character)
        return character

    def give_back(self) -> None:
        """Read the last character again."""
        self._back.append(self.taken.pop())

    def give_back_all(self) -> None:
        """Read all again that has not been accounted for."""
        while self.taken:
            self.give_back()

    def settle(self) -> None:
        """What was read has been understood."""
        self.taken.clear()

    def unsettled(self) -> str:
        text = "".join(self.taken)
        self.taken.clear()
        return text

    def skip_space(self) -> Reader[str]:
        """The first character that is no space, which is read again."""
        while (character := (yield from self.next())) in _SPACE:
            pass
        self.give_back()
        return character

    def expect(self, text: str) -> Reader[None]:
        for wanted in text:
            if (yield from self.next()) != wanted:
                self.fail()

    def until(self, ends: str) -> Reader[str]:
        """A name: the characters before the first of `ends`, which is read again."""
        name: list[str] = []
        while (character := (yield from self.next())) not in ends:
            if not character.isprintable() or len(name) == MAX_NAME:
                self.fail()
            name.append(character)
        if not character:
            self.fail()
        self.give_back()
        return "".join(name)

    def fail(self) -> NoReturn:
        """The last character may begin something else."""
        self.give_back()
        raise MalformedError

    def value(self, syntax: Syntax, take: Take, depth: int = 0) -> Reader[str]:
        """A value, passed on as JSON as it comes; returns its first character."""
        first = yield from self.skip_space()
        if first and first in syntax.quotes:
            yield from self.string(syntax, take)
        elif first == "{" or first in syntax.lists:
            if depth == MAX_DEPTH:
                raise MalformedError
            yield from self.next()
            take("{" if first == "{" else "[")
            if first == "{":
                yield from self._members(syntax, take, depth)
            else:
                yield from self._items(syntax, take, syntax.lists[first], depth)
        else:
            yield from self._word(syntax, take)
        return first

    def string(self, syntax: Syntax, take: Take) -> Reader[str]:
        """A quoted string, passed on as JSON; returns what it says. Lone surrogates become U+FFFD."""
        quote = yield from self.next()
        if not quote or quote not in syntax.quotes:
            self.fail()
        take('"')
        pieces: list[str] = []
        high = 0
        while (character := (yield from self.next())) != quote:
            if not character:
                self.fail()
            if character == "\\":
                character = yield from self._escaped(syntax)
            code = ord(character) if len(character) == 1 else 0
            if high and 0xDC00 <= code < 0xE000:
                character, high = chr(0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00)), 0
            elif high:
                pieces.append("\ufffd")
                take("\ufffd")
                high = 0
            if code in _SURROGATES and len(character) == 1 and ord(character) in _SURROGATES:
                if code < 0xDC00:
                    high = code
                    continue
                character = "\ufffd"
            pieces.append(character)
            take(json.dumps(character, ensure_ascii=False)[1:-1])
        if high:
            pieces.append("\ufffd")
            take("\ufffd")
        take('"')
        return "".join(pieces)

    def _escaped(self, syntax: Syntax) -> Reader[str]:
        kind = yield from self.next()
        digits = {"u": 4} if syntax is JSON else {"u": 4, "x": 2, "U": 8}
        if kind in digits:
            code = ""
            for _ in range(digits[kind]):
                digit = yield from self.next()
                if not digit or digit not in "0123456789abcdefABCDEF":
                    self.fail()
                code += digit
            if int(code, 16) > 0x10FFFF:
                raise MalformedError
            return chr(int(code, 16))
        if kind in syntax.escapes:
            return syntax.escapes[kind]
        if not kind or not syntax.keeps_unknown_escapes:
            self.fail()
        return "\\" + kind

    def _members(self, syntax: Syntax, take: Take, depth: int) -> Reader[None]:
        first = yield from self.skip_space()
        while first != "}":
            yield from self.string(syntax, take)
            yield from self.skip_space()
            yield from self.expect(":")
            take(":")
            yield from self.value(syntax, take, depth + 1)
            first = yield from self._comma(syntax, take, "}")
        yield from self.next()
        take("}")

    def _items(self, syntax: Syntax, take: Take, end: str, depth: int) -> Reader[None]:
        first = yield from self.skip_space()
        while first != end:
            yield from self.value(syntax, take, depth + 1)
            first = yield from self._comma(syntax, take, end)
        yield from self.next()
        take("]")

    def _comma(self, syntax: Syntax, take: Take, end: str) -> Reader[str]:
        """The first character of the next part, or `end`, which is read again."""
        if (yield from self.skip_space()) == end:
            return end
        yield from self.expect(",")
        first = yield from self.skip_space()
        if first == end:
            if not syntax.trailing_comma:
                yield from self.next()
                self.fail()
            return first
        take(",")
        return first

    def _word(self, syntax: Syntax, take: Take) -> Reader[None]:
        word = ""
        while (character := (yield from self.next())) and character in _WORD and len(word) < MAX_NAME:
            word += character
        self.give_back()
        if _NUMBER.fullmatch(word):
            take(word)
        elif word in syntax.words:
            take(syntax.words[word])
        else:
            raise MalformedError

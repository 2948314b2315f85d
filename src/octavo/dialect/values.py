"""Parses values character by character, from JSON as models write it or Python literals, and passes them on as JSON.

A reader is a generator that is sent one character at a time, and "" when the text ends, so that the pieces in which a
text arrives make no difference. Output that was passed on is not revoked; the first invalid character raises
`MalformedError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

T = TypeVar("T")
Reader = Generator[None, str, T]
"""Reads characters and `return`s the parsed result."""

# Maximum nesting of arrays and objects.
MAX_DEPTH = 64
# Maximum length of a name or a key.
MAX_NAME = 256

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
SPACES = " \t\r\n"
_SPACE = frozenset(SPACES)
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-.")
_SURROGATES = range(0xD800, 0xE000)


class MalformedError(Exception):
    """The text is not valid in the format that its beginning suggested. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """The notation of values.

    Attributes:
        quotes: characters that may enclose a string.
        words: JSON of each bare word.
        lists: closing bracket of a list by its opening bracket.
        escapes: meaning of each character after a backslash.
        keeps_unknown_escapes: whether a backslash before any other character stands for itself.
        trailing_comma: whether a list or an object may end with a comma.
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
"""Receives the next piece of JSON."""


class Characters:
    """The characters of a text, which may be given back and read again.

    Attributes:
        taken: characters that were read, but not yet settled with `settle`.
        at_end: whether the text has ended.
        num_read: number of characters read since the beginning of the text, without those that were given back.
    """

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.at_end = False
        self.num_read = 0
        self._back: list[str] = []

    def next(self) -> Reader[str]:
        """Read the next character, or "" at the end of the text."""
        if self._back:
            character = self._back.pop()
        else:
            character = yield
            self.at_end = not character
        self.num_read += len(character)
        self.taken.append(character)
        return character

    def give_back(self) -> None:
        """Give the last character back, to be read again."""
        self._back.append(self.taken.pop())
        self.num_read -= len(self._back[-1])

    def give_back_all(self) -> None:
        """Give all unsettled characters back, to be read again."""
        while self.taken:
            self.give_back()

    def settle(self) -> None:
        """Mark the characters read so far as consumed, so that they are not given back."""
        self.taken.clear()

    def unsettled(self) -> str:
        text = "".join(self.taken)
        self.taken.clear()
        return text

    def skip_space(self) -> Reader[str]:
        """Skip spaces, and return the next character, which will be read again."""
        while (character := (yield from self.next())) in _SPACE:
            pass
        self.give_back()
        return character

    def expect(self, text: str) -> Reader[None]:
        for wanted in text:
            if (yield from self.next()) != wanted:
                self.fail()

    def one_of(self, texts: Sequence[str]) -> Reader[str]:
        """Read and return one of `texts`, none of which begins another."""
        read = ""
        while read not in texts:
            character = yield from self.next()
            read += character
            if not character or not any(text.startswith(read) for text in texts):
                self.fail()
        return read

    def ahead(self, texts: Sequence[str]) -> Reader[str]:
        """Return which of `texts` follows after spaces; it will be read again with all that is unsettled."""
        yield from self.skip_space()
        text = yield from self.one_of(texts)
        self.give_back_all()
        return text

    def until(self, ends: str) -> Reader[str]:
        """Read a name: the characters before the first of `ends`, which will be read again."""
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
        """Give the last character back, which may begin something else, and raise `MalformedError`."""
        self.give_back()
        raise MalformedError

    def value(self, syntax: Syntax, take: Take, depth: int = 0) -> Reader[str]:
        """Read a value and pass it on as JSON piece by piece; return its first character."""
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
        """Read a quoted string, pass it on as JSON, and return its text. Lone surrogates become U+FFFD."""
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
        """Read a comma; return the first character of the next part, or `end`, which will be read again."""
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


def whole_value(text: str, syntax: Syntax) -> str:
    """Return the JSON of a text that is one value; raise `MalformedError` if it is not."""
    chars, pieces = Characters(), list[str]()

    def read() -> Reader[None]:
        yield from chars.value(syntax, pieces.append)
        if (yield from chars.skip_space()):
            raise MalformedError

    reader = read()
    next(reader)
    with suppress(StopIteration):
        for character in (*text, ""):
            reader.send(character)
    return "".join(pieces)

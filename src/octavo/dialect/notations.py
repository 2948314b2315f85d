"""How the arguments of a call are written: each notation writes them, makes their grammar, and reads them as JSON.

JsonArguments   {"city": "Paris", "days": 3}
Tags            <parameter=city>Paris</parameter><parameter=days>3</parameter>
Keywords        city="Paris", days=3
BareKeys        {city:<|"|>Paris<|"|>,days:3}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.dialect.bare_text import text_rule
from octavo.dialect.values import JSON, MAX_DEPTH, PYTHON, Characters, MalformedError, Reader, Take, whole_value
from octavo.structured_outputs import json_rule


class Notation(Protocol):
    """A notation of arguments."""

    @property
    def begins(self) -> str:
        """Characters with which arguments may begin, and which are in no function's name."""

    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments as a model writes them."""

    def grammar(self, number: int, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return an expression of llguidance's Lark for arguments that fit a schema, and the rules that it needs, whose
        names end with `number`."""

    def read(self, chars: Characters, take: Take, types: Mapping[str, str], end: str) -> Reader[None]:
        """Read arguments and pass them on as JSON; `end` is the mark that follows, and is read by the caller."""


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """Arguments as a JSON object."""

    begins: str = "{"

    def write(self, arguments: Mapping[str, Any]) -> str:
        return to_json(dict(arguments))

    def grammar(self, number: int, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        return f"arguments_{number}", [_json_rule(f"arguments_{number}", schema)]

    def read(self, chars: Characters, take: Take, types: Mapping[str, str], end: str) -> Reader[None]:
        if (yield from chars.skip_space()) != "{":
            yield from chars.next()
            chars.fail()
        yield from chars.value(JSON, take)


JSON_OBJECT = JsonArguments()


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments in tags, whose values have no quotes.

    Attributes:
        key: mark before a parameter's name.
        between: marks between a parameter's name and its value.
        end: mark after a value.
        padded: whether values stand on lines of their own.
        typed: whether `string="true"` or `string="false"` follows a parameter's name.
        raw: marks around a text with special characters; ("", "") if there are none.
    """

    key: str = "<parameter="
    between: tuple[str, ...] = (">",)
    end: str = "</parameter>"
    padded: bool = False
    typed: bool = False
    raw: tuple[str, str] = ("", "")
    begins: str = "<"

    def write(self, arguments: Mapping[str, Any]) -> str:
        pad = "\n" if self.padded else ""
        return "".join(
            f"{self.key}{key}{self._opening(isinstance(value, str))}{pad}"
            f"{value if isinstance(value, str) else to_json(value)}{pad}{self.end}\n"
            for key, value in arguments.items()
        )

    def grammar(self, number: int, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        pad = "\n" if self.padded else ""
        parts, rules = [], []
        properties, needed = _properties(schema)
        for i, (key, part) in enumerate(properties.items()):
            name = f"value_{number}_{i}"
            is_text = isinstance(part, Mapping) and part.get("type") == "string"
            rules.append(text_rule(name, part) if is_text else _json_rule(name, _with_definitions(part, schema)))
            opening, after = f"{self.key}{key}{self._opening(is_text)}{pad}", f"{pad}{self.end}\n"
            written = f"{quoted(opening)} {name} {quoted(after)}"
            parts.append(written if key in needed else f"({written})?")
        return " ".join(parts), rules

    def _opening(self, is_text: bool) -> str:
        """Return what stands between a parameter's name and its value."""
        return "\n".join(self.between) + (f' string="{"true" if is_text else "false"}">' if self.typed else "")

    def read(self, chars: Characters, take: Take, types: Mapping[str, str], end: str) -> Reader[None]:
        before = "{"
        while (yield from chars.ahead((self.key, end))) == self.key:
            yield from chars.skip_space()
            yield from chars.expect(self.key)
            key = (yield from chars.until(self.between[0][0] + "\n<")).strip()
            for mark in self.between:
                yield from chars.skip_space()
                yield from chars.expect(mark)
            kind = types.get(key)
            if self.typed:
                kind = "string" if 'string="true"' in (yield from chars.until(">")) else None
                yield from chars.next()
            take(f"{before}{to_json(key)}:")
            before = ","
            if kind == "string" and not self.raw[0]:
                yield from read_text(chars, take, self.end)
            else:
                yield from self._value(chars, take, kind)
        take("}" if before == "," else "{}")

    def _value(self, chars: Characters, take: Take, kind: str | None) -> Reader[None]:
        """Read a parameter that is not a string, and so can only be passed on once it is complete."""
        pieces: list[str] = []
        try:
            yield from read_text(chars, pieces.append, self.end)
        except MalformedError:
            take("".join(pieces))
            raise
        text = json.loads("".join(pieces))
        if self.raw[0] and text.startswith(self.raw[0]) and text.endswith(self.raw[1]):
            text, kind = text.removeprefix(self.raw[0]).removesuffix(self.raw[1]), "string"
        take(_typed(text, kind))


@dataclass(frozen=True, slots=True)
class Keywords:
    """Arguments as Python's, with literals as values."""

    begins: str = ""

    def write(self, arguments: Mapping[str, Any]) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())

    def grammar(self, number: int, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        named, needed = _properties(schema)
        rules = [
            _json_rule(f"value_{number}_{i}", _with_definitions(part, schema)) for i, part in enumerate(named.values())
        ]
        # Required arguments come first, so that commas only appear between arguments. If none is required, only the
        # first optional argument can stand without a comma before it.
        inside = ""
        order = sorted(enumerate(named), key=lambda item: item[1] not in needed)
        for place, (i, key) in reversed(list(enumerate(order))):
            comma = f"{quoted(', ')} " if place else ""
            text = f"{comma}{quoted(key + '=')} value_{number}_{i} {inside}".strip()
            inside = text if key in needed else f"({text})?"
        return inside, rules

    def read(self, chars: Characters, take: Take, types: Mapping[str, str], end: str) -> Reader[None]:
        before = "{"
        while (yield from chars.skip_space()) != end:
            key = (yield from chars.until("=,()")).strip()
            yield from chars.expect("=")
            if not key.isidentifier():
                raise MalformedError
            take(f"{before}{to_json(key)}:")
            before = ","
            yield from chars.value(PYTHON, take)
            if (yield from chars.skip_space()) != ",":
                break
            yield from chars.next()
        if (yield from chars.skip_space()) != end:
            yield from chars.next()
            chars.fail()
        take("}" if before == "," else "{}")


@dataclass(frozen=True, slots=True)
class BareKeys:
    """Arguments as an object whose keys have no quotes, and whose strings have the marker `quote` instead."""

    quote: str
    begins: str = "{"

    def write(self, arguments: Mapping[str, Any]) -> str:
        return self._write(dict(arguments))

    def _write(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            return f"{{{','.join(f'{key}:{self._write(each)}' for key, each in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._write, value))}]"
        return to_json(value)

    def grammar(self, number: int, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        return JSON_OBJECT.grammar(number, schema)  # which is read too

    def read(self, chars: Characters, take: Take, types: Mapping[str, str], end: str) -> Reader[None]:
        yield from self._value(chars, take, 0)

    def _value(self, chars: Characters, take: Take, depth: int) -> Reader[None]:
        first = yield from chars.skip_space()
        if first == self.quote[0]:
            yield from chars.expect(self.quote)
            yield from read_text(chars, take, self.quote, lines=False)
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
                    key = yield from chars.string(JSON, drop)
                    yield from chars.skip_space()
                else:
                    key = (yield from chars.until(":")).strip()
                yield from chars.expect(":")
                take(f"{comma}{to_json(key)}:")
            elif comma:
                take(comma)
            yield from self._value(chars, take, depth + 1)
            comma = ","
        yield from chars.next()
        take(end)


def read_text(chars: Characters, take: Take, closing: str, *, lines: bool = True) -> Reader[None]:
    """Read text up to `closing` into a JSON string; `lines`: without one line break at either end."""
    take('"')
    # Text that may be the end: a line break, and the beginning of the closing tag.
    held = ""
    first = True
    while True:
        character = yield from chars.next()
        if not character:
            # The output was cut off here: pass on what was held back.
            take(to_json(held)[1:-1])
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
            take(to_json(held[0])[1:-1])
            held = held[1:]


def _typed(text: str, kind: str | None) -> str:
    """Return a parameter's text as JSON: parsed if possible, unless its type is string."""
    if kind != "string":
        # Models write Python's values too, but `(1, 2)` may also be text where no type is declared.
        for syntax in (JSON, PYTHON) if kind or text.strip() in PYTHON.words else (JSON,):
            with suppress(MalformedError):
                return whole_value(text, syntax)
    return to_json(text)


def _properties(schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return a schema's properties, and the names of those that are required."""
    schema = schema if isinstance(schema, Mapping) else {}
    properties, required = schema.get("properties"), schema.get("required")
    named = dict(properties) if isinstance(properties, Mapping) else {}
    return named, set(required) if isinstance(required, list) else set()


def _with_definitions(part: Any, schema: Mapping[str, Any]) -> Any:
    """Return a property's schema with the definitions that it may refer to."""
    if not isinstance(part, Mapping):
        return part
    return {**part, **{name: schema[name] for name in ("$defs", "definitions") if name in schema}}


def _json_rule(name: str, schema: Any) -> str:
    return f"{name}: {json_rule(schema, lenient=True)}"


def drop(text: str) -> None:
    """Ignore a piece of JSON."""


def quoted(text: str) -> str:
    """Return a literal of llguidance's Lark."""
    return json.dumps(text, ensure_ascii=False)


def to_json(value: Any) -> str:
    """Return the JSON of a value as models write it."""
    return json.dumps(value, ensure_ascii=False)

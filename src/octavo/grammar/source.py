"""Translates structured outputs into llguidance's notation: Lark grammars with embedded JSON Schemas."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from octavo.errors import RequestError
from octavo.structured_outputs import DATA_KEYWORDS, StructuredOutputsParams, json_rule, whitespace_options

# Formats of strings that llguidance enforces. All others are only annotations, as JSON Schema allows.
_ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Maximum number of characters that a grammar may force in one run; a mask within it costs 0.5 µs per character.
_LONGEST_RUN = 4096
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


def to_lark(wanted: StructuredOutputsParams) -> str:
    """Return the grammar for llguidance, which may still refuse it.

    Raises:
        RequestError: a GBNF grammar is invalid.
    """
    lark = _output(wanted)
    if (reasoning := wanted.reasoning) is None:
        return lark
    # Nested as a separate grammar, so that the names of its rules do not matter.
    return f"start: {reasoning.prefix} octavo_answer\n{reasoning.rules}\noctavo_answer: %lark {{\n{lark}\n}}\n"


def _output(wanted: StructuredOutputsParams) -> str:
    if wanted.kind == "regex":
        from llguidance import regex_to_lark

        return f"start: /{regex_to_lark(wanted.regex or '')}/"
    if wanted.kind == "choice":
        # A terminal: its alternatives are one item of the parser. Lark reads strings like JSON, except for pairs of \u
        # escapes.
        return "start: CHOICE\nCHOICE: " + " | ".join(
            json.dumps(text, ensure_ascii=False) for text in wanted.choice or ()
        )
    if wanted.kind == "grammar":
        return _from_grammar(wanted.grammar or "")
    if wanted.kind == "json_object":
        schema: Any = {"type": "object"}
    else:
        assert isinstance(wanted.json, str)
        schema = json.loads(wanted.json)
        # Only if needed: with a large schema, this and `may_force_long_runs` hold the interpreter's lock for 10 ms.
        if wanted.disable_additional_properties or '"format"' in wanted.json:
            schema = _as_enforced(schema, closes_objects=wanted.disable_additional_properties)
    return "start: " + json_rule(schema, whitespace_options(wanted), lenient=not wanted.strict)


def _from_grammar(text: str) -> str:
    if "::=" not in text or re.search(r"^\s*(start|%\w+)\b.*:(?!:=)", text, re.MULTILINE):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # its parser may raise anything
        raise RequestError(f"grammar is not valid GBNF: {error}", param="structured_outputs") from error


def _as_enforced(schema: Any, *, closes_objects: bool) -> Any:
    """Return a schema without formats that are not enforced and, with `closes_objects`, without unlisted properties."""
    if isinstance(schema, list):
        return [_as_enforced(each, closes_objects=closes_objects) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: value if name in DATA_KEYWORDS else _as_enforced(value, closes_objects=closes_objects)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value not in _ENFORCED_FORMATS)
    }
    if closes_objects and isinstance(kept.get("properties"), dict) and "patternProperties" not in kept:
        kept.setdefault("additionalProperties", False)
    return kept


def without_forcing(lark: str) -> str:
    """Return the grammar with masks that allow all spellings of forced text, not only the tokenizer's own."""
    return lark if lark.startswith("%llguidance") else _NO_FORCING + lark


def may_force_long_runs(wanted: StructuredOutputsParams) -> bool:
    """Return whether the grammar may force so many tokens in one place that finding them would delay a step."""
    texts: Iterator[str] | list[str] = [text for text in (wanted.regex, wanted.grammar) if text is not None]
    if wanted.kind == "choice":
        texts = list(wanted.choice or ())
    elif isinstance(wanted.json, str):
        if _has_short_strings(wanted.json):
            return False
        texts = _strings(json.loads(wanted.json))
    return any(len(text) > _LONGEST_RUN or _repetitions(text) > _LONGEST_RUN for text in texts)


def _has_short_strings(text: str) -> bool:
    """Return whether, by a quick check, all strings of a compact JSON text are short and without quantifiers."""
    if '\\"' in text or re.search(r'\{[^"}]', text):
        return False
    return all(len(part) <= _LONGEST_RUN for part in text.split('"'))


def _repetitions(text: str) -> float:
    """Return how often the quantifiers of an expression could repeat something if they were nested."""
    return math.prod(float(count) for count in re.findall(r"\{\s*(\d{1,300})", text) if int(count))


def _strings(value: Any) -> Iterator[str]:
    """Yield every string of a JSON value, including names of properties."""
    level = [value]
    while level:
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str):
                yield each
            elif isinstance(each, dict):
                yield from each
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
        level = inner

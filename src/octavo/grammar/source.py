"""A structured output in llguidance's own notation: Lark, with JSON Schemas inside."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputsParams, json_rule, whitespace_options

# Formats of strings that llguidance enforces. JSON Schema makes all others mere annotations.
_ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# Keywords of a JSON Schema whose values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})
# Characters that a grammar may force in one run. Each mask within it costs a microsecond for every two of them.
_LONGEST_RUN = 4096
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


def to_lark(wanted: StructuredOutputsParams) -> str:
    """The grammar that llguidance compiles. It may still refuse it.

    Raises:
        RequestError: a GBNF grammar that cannot be read.
    """
    lark = _output(wanted)
    if (reasoning := wanted.reasoning) is None:
        return lark
    # In a grammar of its own, whatever its rules are called.
    return f"start: {reasoning.prefix} octavo_answer\n{reasoning.rules}\noctavo_answer: %lark {{\n{lark}\n}}\n"


def _output(wanted: StructuredOutputsParams) -> str:
    if wanted.kind == "regex":
        from llguidance import regex_to_lark

        return f"start: /{regex_to_lark(wanted.regex or '')}/"
    if wanted.kind == "choice":
        # Lark reads strings as JSON does, but for pairs of \u escapes.
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice or ())
    if wanted.kind == "grammar":
        return _from_grammar(wanted.grammar or "")
    if wanted.kind == "json_object":
        schema: Any = {"type": "object"}
    else:
        assert isinstance(wanted.json, str)
        schema = json.loads(wanted.json)
        # A large schema takes this and `may_force_long_runs` ten milliseconds, in which no other Python code runs.
        if wanted.disable_additional_properties or '"format"' in wanted.json:
            schema = _as_enforced(schema, closes_objects=wanted.disable_additional_properties)
    return "start: " + json_rule(schema, whitespace_options(wanted), lenient=not wanted.strict)


def _from_grammar(text: str) -> str:
    if "::=" not in text or re.search(r"^\s*(start|%\w+)\b.*:(?!:=)", text, re.MULTILINE):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # whatever its parser raises
        raise RequestError(f"grammar is no valid GBNF: {error}", param="structured_outputs") from error


def _as_enforced(schema: Any, *, closes_objects: bool) -> Any:
    """A schema without formats that only annotate; with `closes_objects`, without unlisted properties either."""
    if isinstance(schema, list):
        return [_as_enforced(each, closes_objects=closes_objects) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: value if name in _DATA else _as_enforced(value, closes_objects=closes_objects)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value not in _ENFORCED_FORMATS)
    }
    if closes_objects and isinstance(kept.get("properties"), dict) and "patternProperties" not in kept:
        kept.setdefault("additionalProperties", False)
    return kept


def without_forcing(lark: str) -> str:
    """The same grammar, whose masks allow every way to spell what must come next, not only the tokenizer's own."""
    return lark if lark.startswith("%llguidance") else _NO_FORCING + lark


def may_force_long_runs(wanted: StructuredOutputsParams) -> bool:
    """Whether so much may have to come next at one place that looking at it would delay a step."""
    texts: Iterator[str] | list[str] = [text for text in (wanted.regex, wanted.grammar) if text is not None]
    if wanted.kind == "choice":
        texts = list(wanted.choice or ())
    elif isinstance(wanted.json, str):
        if _has_short_strings(wanted.json):
            return False
        texts = _strings(json.loads(wanted.json))
    return any(len(text) > _LONGEST_RUN or _repetitions(text) > _LONGEST_RUN for text in texts)


def _has_short_strings(text: str) -> bool:
    """Whether every string of a compact JSON text is short and has no quantifier, as far as a glance tells."""
    if '\\"' in text or re.search(r'\{[^"}]', text):
        return False
    return all(len(part) <= _LONGEST_RUN for part in text.split('"'))


def _repetitions(text: str) -> float:
    """How often the quantifiers of an expression could repeat something, one inside the other."""
    return math.prod(float(count) for count in re.findall(r"\{\s*(\d{1,300})", text) if int(count))


def _strings(value: Any) -> Iterator[str]:
    """Every string of a JSON value, names of properties too."""
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

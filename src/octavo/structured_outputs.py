"""Constraints on outputs as plain values, with the names and meanings of vLLM's `StructuredOutputsParams`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from octavo.errors import FieldError, RequestError, shortened, shown
from octavo.option import nearest

GrammarKind = Literal["json", "regex", "choice", "grammar", "json_object"]
KINDS: tuple[GrammarKind, ...] = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Free text before a structured output: a model's reasoning, up to its closing mark.

    Attributes:
        is_open: whether it has begun in the prompt; if not, the output may begin with `opening`, or without reasoning.
    """

    opening: str
    closing: str
    is_open: bool

    @property
    def prefix(self) -> str:
        """The beginning of a Lark grammar's start rule, which refers to the rule in `rules`."""
        thought = f"octavo_thought ({_SPACE_AFTER_REASONING})?"
        return thought if self.is_open else f"({json.dumps(self.opening, ensure_ascii=False)} {thought})?"

    @property
    def rules(self) -> str:
        closing = re.escape(self.closing).replace("/", r"\/")
        return f"octavo_thought[lazy]: /(?s:.*){closing}/"


_SPACE_AFTER_REASONING = r"/[ \n]{1,4}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint; exactly one of the first five fields is given.

    Validated at construction; raises `RequestError` naming the field.

    Attributes:
        json: a JSON Schema, as an object or as its text; stored as text.
        regex: a regular expression that the whole output matches (Rust's syntax: no look-around, no back references).
        choice: strings to choose the output from; stored as a tuple.
        grammar: a context-free grammar in Lark's or GBNF's notation.
        json_object: whether the output is any JSON object.
        strict: if False, keywords of a JSON Schema that cannot be enforced are ignored instead of refused.
        disable_any_whitespace: whether JSON has no white space at all.
        whitespace_pattern: a regular expression for the white space between JSON's tokens.
        disable_additional_properties: whether objects must not have properties that the JSON Schema does not list.
        reasoning: reasoning that may precede the output; vLLM has no such field, because its engine knows the server's
            reasoning parser.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    strict: bool = True
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    reasoning: ReasoningPart | None = None

    @classmethod
    def of(cls, given: object) -> StructuredOutputsParams:
        """Build from a JSON object, in which null means not given; raises `RequestError`, also for unknown fields."""
        if not isinstance(given, Mapping):
            raise FieldError("structured_outputs", f"must be an object, got {shown(given)}")
        known = [field.name for field in fields(cls) if field.name != "reasoning"]
        for name in given:
            if name not in known:
                raise RequestError(
                    f"structured_outputs.{shortened(str(name))} is not supported{nearest(str(name), known)}",
                    param="structured_outputs",
                )
        return cls(**{name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        for name in ("json_object", "strict", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {shown(value)}", param="structured_outputs")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        given = self._given
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise FieldError("structured_outputs", f"needs exactly one of {', '.join(KINDS)}, got {said}")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError(f"{name} must be a non-empty string, got {shown(value)}", param="structured_outputs")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                "whitespace_pattern cannot be combined with disable_any_whitespace", param="structured_outputs"
            )

    @property
    def _given(self) -> list[GrammarKind]:
        return [kind for kind in KINDS if getattr(self, kind) not in (None, False)]

    @property
    def kind(self) -> GrammarKind:
        return self._given[0]

    @property
    def num_bytes(self) -> int:
        """The total length of its texts in bytes of UTF-8."""
        texts = [self.json, self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ())]
        return sum(len(text.encode(errors="surrogatepass")) for text in texts if isinstance(text, str))

    @property
    def depth(self) -> int:
        """The deepest nesting of brackets in its texts; in a schema, of objects and arrays."""
        texts = [self.regex, self.grammar, self.whitespace_pattern]
        depths = [_bracket_depth(text) for text in texts if text is not None]
        if isinstance(self.json, str):
            depths.append(_json_depth(json.loads(self.json)))
        return max(depths, default=0)


WHITESPACE = r"[ ]?|\n(?:[ ]{0,20}|\t{0,8})"
"""The white space allowed between JSON's tokens: indentation as programs write it, so that a model cannot write white
space for long."""


def whitespace_options(wanted: StructuredOutputsParams | None = None) -> dict[str, Any]:
    """Return llguidance's options for white space in JSON; the default ones if `wanted` is None."""
    if wanted is not None and wanted.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = None if wanted is None else wanted.whitespace_pattern
    return {"whitespace_pattern": pattern or WHITESPACE}


def json_rule(schema: Any, options: Mapping[str, Any] | None = None, *, lenient: bool = False) -> str:
    """Return a JSON Schema as an expression of a Lark grammar.

    A JSON value can then be part of a larger `grammar`: `start: "<call>" ` + json_rule(schema) + ` "</call>"`.

    Args:
        options: options of llguidance's JSON compiler; `whitespace_options()` if None.
        lenient: ignore keywords that cannot be enforced, and treat `oneOf` as `anyOf`.
    """
    if schema is True:
        schema = {}
    if isinstance(schema, Mapping):
        given = schema.get("x-guidance")
        said = {
            **(whitespace_options() if options is None else options),
            **(given if isinstance(given, Mapping) else {}),
        }
        if lenient:
            said |= {"lenient": True, "coerce_one_of": True}
        schema = {**schema, "x-guidance": said}
    text = json.dumps(schema, ensure_ascii=False)
    if any(f'"{form}"' in text for form in DATE_PATTERNS):  # only if needed, because large schemas take milliseconds
        text = json.dumps(with_real_dates(schema), ensure_ascii=False)
    return f"%json {text}"


# Dates and times as RFC 3339 has them, but without leap seconds, which most libraries refuse; llguidance's own formats
# allow February 29 in any year, the year 0, and a 60th second in any minute.
_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-(?:{_DAY})|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR}:[0-5][0-9])"
DATE_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""Regular expressions of the formats that are dates and times."""
DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords of a JSON Schema whose values are data, not schemas."""


def with_real_dates(schema: Any) -> Any:
    """Return a schema with patterns in place of the formats date, time and date-time."""
    if isinstance(schema, list):
        return [with_real_dates(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {name: value if name in DATA_KEYWORDS else with_real_dates(value) for name, value in schema.items()}
    form = schema.get("format")
    if isinstance(form, str) and form in DATE_PATTERNS:
        del changed["format"]
        pattern = f"^(?:{DATE_PATTERNS[form]})$"
        if "pattern" in changed:
            others = changed.get("allOf")
            changed["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": pattern}]
        else:
            changed["pattern"] = pattern
    return changed


_MOST_CHARACTERS, _CHARACTERS_OF_VALUE, _MOST_NESTED = 16_384, 32, 16  # so that a small schema takes little time
_TEXT, _VALUE = "\0", "\1"  # where a string's text stands, and where any other value does
_GAPS = re.compile(r'\\u0000|"\\u0001"')  # the same in JSON


def json_outline(schema: str, *, indent: int | None = None, compact: bool = False) -> list[str]:
    """Return what a JSON Schema says of the text itself, in pieces between values: names, and how values begin and end.

        {"name": string, "ages": [integer]}       {"name": "      ", "ages": [      ,       ]}

    It is a guess: arrays have two elements, and white space is that of `json.dumps`.

    Args:
        indent: spaces by which each level is indented, on lines of its own; None for a single line.
        compact: without white space.
    """
    root, left = json.loads(schema), _MOST_CHARACTERS

    def example(given: Any, depth: int) -> Any:
        nonlocal left
        left -= _CHARACTERS_OF_VALUE
        if not isinstance(given, dict) or depth > _MOST_NESTED or left < 0:
            return _VALUE
        if isinstance(path := given.get("$ref"), str):
            left -= len(path)
            found: Any = root
            for name in path.removeprefix("#/").split("/"):
                found = found.get(name) if isinstance(found, dict) else None
            return example(found, depth + 1)
        if isinstance(properties := given.get("properties"), dict) and properties:
            members = {}
            for name, value in properties.items():
                if (left := left - len(name)) < 0:
                    break
                members[name] = example(value, depth + 1)
            return members
        if isinstance(items := given.get("items"), dict):
            return [example(items, depth + 1) for _ in range(2)]
        return _TEXT if given.get("type") == "string" else _VALUE

    separators = (",", ":") if compact else None
    return _GAPS.split(json.dumps(example(root, 0), ensure_ascii=False, indent=indent, separators=separators))


def _schema_text(schema: object) -> str:
    """Return a schema as compact JSON, so that equal schemas are found in caches."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(parsed, (Mapping, bool)):
            return json.dumps(parsed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"json is not a valid JSON Schema: {shown(str(error))}", param="structured_outputs"
        ) from error
    except RecursionError as error:
        raise RequestError("json is nested too deeply to be read", param="structured_outputs") from error
    raise RequestError(
        f"json must be a JSON Schema, an object or its text, got {shown(parsed)}", param="structured_outputs"
    )


def _choices(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str) or not isinstance(choice, Iterable):
        raise RequestError(f"choice must be a list of strings, got {shown(choice)}", param="structured_outputs")
    choices = tuple(choice)
    for text in choices:
        if not isinstance(text, str) or not text:
            raise RequestError(f"choice must contain non-empty strings, got {shown(text)}", param="structured_outputs")
    if not choices:
        raise RequestError("choice must contain at least one string", param="structured_outputs")
    return choices


def _json_depth(value: object) -> int:
    depth, level = 0, [value]
    while level := [container for container in level if isinstance(container, (dict, list))]:
        depth += 1
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return depth


def _bracket_depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest

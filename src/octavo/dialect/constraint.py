"""Grammars for answers that must call a tool, made from the same descriptions of formats that the parser uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.dialect.bare_text import text_rule
from octavo.dialect.formats import BareCall, CallFormat, JsonCalls, NamedJsonCall, PythonCalls, XmlCall
from octavo.dialect.writing import value_opening
from octavo.structured_outputs import ReasoningPart, json_rule

# Maximum number of calls of one answer.
MOST_CALLS = 16
# The parameters of a function that declares none.
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_grammar(
    calls: CallFormat,
    functions: Sequence[Mapping[str, Any]],
    *,
    parallel: bool = True,
    reasoning: ReasoningPart | None = None,
) -> str:
    """Return a grammar, in llguidance's Lark, for one or several calls of these functions.

    Args:
        functions: OpenAI's function objects, with `name` and `parameters`.
        parallel: whether the answer may have several calls.
        reasoning: the reasoning with which the answer may begin.
    """
    body = calls.bodies[0]
    rules = [_rule(body, number, function) for number, function in enumerate(functions)]
    one = f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}"
    before = ""
    if reasoning is not None:
        if calls.channels:  # instead of a message with the answer
            reasoning = replace(reasoning, closing=reasoning.closing.partition("<|channel|>")[0])
        before = f"{reasoning.prefix} "
        rules.append(reasoning.rules)
    return "\n".join([f"start: {before}{_run(calls, parallel=parallel)}", one, *rules])


def _run(calls: CallFormat, *, parallel: bool) -> str:
    body = calls.bodies[0]
    if calls.closing and not calls.is_one_run:
        single = f"{_quoted(calls.opening + calls.padding)} call {_quoted(calls.padding + calls.closing)}"
        between = "<|start|>assistant" if calls.channels else "\n"
        return f"({single}) {_repeated(f'{_quoted(between)} {single}', parallel)}"
    opening, closing, separator = "", "", ", "
    if isinstance(body, JsonCalls):
        opening = "" if calls.unmarked else calls.opening + body.brackets[0]
        closing, separator = body.brackets[1] + calls.closing, f"{body.separator} "
        parallel = parallel and bool(body.separator)
    elif isinstance(body, PythonCalls):
        opening, closing = calls.opening + "[", "]" + calls.closing
    elif isinstance(body, NamedJsonCall) and calls.is_one_run:
        opening, closing, separator = calls.opening, calls.closing, body.separator
    else:
        opening, separator = calls.opening, calls.opening
    before = f"{_quoted(opening)} " if opening else ""
    after = f" {_quoted(closing)}" if closing else ""
    again = f"{_quoted(separator)} call" if separator else "call"
    return f"{before}call {_repeated(again, parallel)}{after}"


def _repeated(rule: str, parallel: bool) -> str:
    return f"({rule}){{0,{MOST_CALLS - 1}}}" if parallel else ""


def _rule(body: object, number: int, function: Mapping[str, Any]) -> str:
    """Return the rule `call_N` of a function, and the rules that it needs."""
    name, schema = str(function["name"]), function.get("parameters") or _NOTHING
    head = f"call_{number}:"
    if isinstance(body, JsonCalls):
        opening = f"{{{_quoted(body.name)}: {_quoted(name)}, {_quoted(body.arguments[0])}: "
        return f"{head} {_quoted(opening)} arguments_{number} {_quoted('}')}\n{_json(f'arguments_{number}', schema)}"
    if isinstance(body, NamedJsonCall):
        opening = f"{body.before}{name}{':0' if body.numbered else ''}{body.tag}"
        after = _quoted(body.after) if body.after else ""
        return f"{head} {_quoted(opening)} arguments_{number} {after}\n{_json(f'arguments_{number}', schema)}"
    if isinstance(body, BareCall):  # whose reader takes JSON too
        return f"{head} {_quoted(f'call:{name}')} arguments_{number}\n{_json(f'arguments_{number}', schema)}"
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    named = dict(properties) if isinstance(properties, Mapping) else {}
    required = schema.get("required") if isinstance(schema, Mapping) else None
    needed = set(required) if isinstance(required, list) else set()
    rules = [
        text_rule(f"value_{number}_{i}", part)
        if isinstance(body, XmlCall) and _is_text(part)
        else _json(f"value_{number}_{i}", _with_definitions(part, schema))
        for i, part in enumerate(named.values())
    ]
    if isinstance(body, XmlCall):
        pad = "\n" if body.padded else ""
        after = _quoted(f"{pad}{body.value_end}\n")
        parts = [
            _optional(
                f"{_quoted(f'{body.key}{key}{value_opening(body, is_text=_is_text(part))}{pad}')} "
                f"value_{number}_{i} {after}",
                key in needed,
            )
            for i, (key, part) in enumerate(named.items())
        ]
        opening, end = body.name or ("", "")
        inside = " ".join([_quoted(f"{opening}{name}{end}\n"), *parts, *([_quoted(body.end)] if body.end else [])])
        return "\n".join([f"{head} {inside}", *rules])
    # Required arguments come first, so that commas only appear between arguments.
    order = sorted(range(len(named)), key=lambda i: list(named)[i] not in needed)
    keys = list(named)
    texts: list[str] = []
    for place, i in enumerate(order):
        argument = f"{_quoted(keys[i] + '=')} value_{number}_{i}"
        # If none is required, only the first optional argument can stand without a comma before it.
        comma = f"{_quoted(', ')} " if place else ""
        texts.append(argument if place == 0 and keys[i] in needed else f"{comma}{argument}")
    inside = ""
    for place in range(len(order) - 1, -1, -1):
        text = f"{texts[place]} {inside}".strip()
        inside = text if keys[order[place]] in needed else f"({text})?"
    return "\n".join([f"{head} {_quoted(name + '(')} {inside} {_quoted(')')}", *rules])


def _optional(rule: str, needed: bool) -> str:
    return rule if needed else f"({rule})?"


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _with_definitions(part: Any, schema: Mapping[str, Any]) -> Any:
    """Return a property's schema with the definitions that it may refer to."""
    if not isinstance(part, Mapping):
        return part
    return {**part, **{name: schema[name] for name in ("$defs", "definitions") if name in schema}}


def _json(name: str, schema: Any) -> str:
    return f"{name}: {json_rule(schema, lenient=True)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

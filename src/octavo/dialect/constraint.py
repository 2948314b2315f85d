"""Grammars for answers that must call a tool, made from the same descriptions of formats that the parser uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.dialect.formats import CallForm, CallFormat
from octavo.dialect.notations import quoted
from octavo.structured_outputs import ReasoningPart

# Maximum number of calls of one answer.
MOST_CALLS = 16
# What a model may write for them in a call's head.
_PLACEHOLDERS = {"{id}": "/[a-z0-9]{10}/", "{index}": "/[0-9]/"}
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
    rules = [_rule(calls.form, number, function) for number, function in enumerate(functions)]
    one = f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}"
    before = ""
    if reasoning is not None:
        before = f"{reasoning.prefix} "
        rules.append(reasoning.rules)
    return "\n".join([f"start: {before}{_run(calls, parallel=parallel)}", one, *rules])


def _run(calls: CallFormat, *, parallel: bool) -> str:
    before, after = (f" {quoted(text)} " if text else " " for text in calls.around_run)
    separator = calls.form.separator
    if separator is None:
        run = f"{before}call{after}"
        return run + _repeated(f"{quoted(calls.between_runs)} {run}", parallel)
    again = _repeated(f"{quoted(separator)} call" if separator else "call", parallel)
    return f"{before}call {again}{after}"


def _repeated(rule: str, parallel: bool) -> str:
    return f"({rule}){{0,{MOST_CALLS - 1}}}" if parallel else ""


def _rule(form: CallForm, number: int, function: Mapping[str, Any]) -> str:
    """Return the rule `call_N` of a function, and the rules that it needs."""
    arguments, rules = form.arguments.grammar(number, function.get("parameters") or _NOTHING)
    head = form.head.replace("{name}", str(function["name"]))
    parts = re.split(r"(\{id\}|\{index\})", form.before + head + form.between)
    written = " ".join(_PLACEHOLDERS.get(part) or quoted(part) for part in parts if part)
    after = quoted(form.after) if form.after else ""
    return "\n".join([f"call_{number}: {written} {arguments} {after}", *rules])

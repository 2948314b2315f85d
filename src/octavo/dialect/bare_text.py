"""Grammars of strings that a call holds without quotes, as in `<parameter=city>Paris</parameter>`.

A JSON Schema's `enum`, `const`, `pattern`, `minLength`, `maxLength` and the formats of dates and times are enforced;
other keywords are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.structured_outputs import DATE_PATTERNS

# Text without a closing tag.
_TEXT = r"/([^<]|<[^\/])*/"
_CLOSING = "</"
# Unsupported by Rust's regular expressions, or would end the pattern early.
_UNSUPPORTED = re.compile(r"\(\?(?![:isx])|\\[1-9bBkAzZ]|(?<!\\)\$|(?<![\\\[])\^")
# Longer ranges of lengths make large automata.
_LONGEST_COUNTED = 1024


def text_rule(name: str, schema: Mapping[str, Any]) -> str:
    """Return a rule `name` of llguidance's Lark, with the terminal that it needs, for a schema of type string."""
    if (choices := _choices(schema)) is not None:
        return f"{name}: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"
    terminal = name.upper()
    return f"{name}: {terminal}\n{terminal}: {' & '.join([_TEXT, *_bounds(schema)])}"


def _choices(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the strings that the schema allows, if it lists them and they can be written."""
    given = schema.get("enum") if "enum" in schema else [schema["const"]] if "const" in schema else None
    if not isinstance(given, list):
        return None
    return [each for each in given if isinstance(each, str) and each and _CLOSING not in each] or None


def _bounds(schema: Mapping[str, Any]) -> list[str]:
    bounds = []
    if isinstance(pattern := schema.get("pattern"), str) and (whole := _whole(pattern)) is not None:
        bounds.append(f"/{whole}/")
    if (date := DATE_PATTERNS.get(str(schema.get("format")))) is not None:
        bounds.append(f"/{date}/")
    least, most = _count(schema.get("minLength")) or 0, _count(schema.get("maxLength"))
    if least or most is not None:
        bounds.append(f"/(?s:.){{{least},{'' if most is None else most}}}/")
    return bounds


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LONGEST_COUNTED else None


def _whole(pattern: str) -> str | None:
    """Return an expression of whole strings in which the pattern is found; None if it cannot be enforced.

    If the pattern has alternatives outside its anchors (`^a|b$`), only strings that one of them matches whole are
    allowed, which is less than the schema allows.
    """
    inner = pattern.removeprefix("^")
    before = "" if inner != pattern else "(?s:.*)"
    end = re.search(r"(?<!\\)\$\Z", inner)
    inner, after = (inner[:-1], "") if end else (inner, "(?s:.*)")
    if _UNSUPPORTED.search(inner):
        return None
    inner = re.sub(r"\\?/", r"\\/", inner).replace("\n", r"\n")
    return f"{before}(?:{inner}){after}"

"""Random request bodies, made from the server's own OpenAPI description. Part of `fuzz_bodies.py`.

A field that a body's type gains is fuzzed by itself: its values come from its schema. Fields that the description
only calls an object, or that mean something together, have makers in `fuzz_fields.py`. Most values are valid; otherwise
nearly all bodies would be refused for the first field that is not.

    description ──> fields of a body ──> by schema, or by a maker ──> some replaced by anything that JSON can represent
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from octavo.request_limits import DEFAULT_LIMITS
from octavo.server.app import create_app
from octavo.server.bodies.fields import Served
from octavo.server.openapi import UNSUPPORTED, describe
from tests.server.fake_engine import FakeEngine

VOCAB_SIZE, MAX_MODEL_LEN, HIDDEN_SIZE = 256, 512, 64

Schema = Mapping[str, Any]
Maker = Callable[["Values"], Any]

ODD_TEXTS = [
    *("", " ", "\x00", "é", "北京", "😀", "\u202e\u2028", "a" * 300, "{", "</s>", "%s%n"),
    *("../../etc/passwd", "\r\n", "auto", "text", "function", "user", "<tool_call>", "</think>"),
]
ODD_NUMBERS = [0, -1, 1, 2, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, -0.5, 1e-300, 1e308, float("nan"), float("inf")]
# The member names that the server looks for in objects, so that odd objects get past the first look.
KNOWN_NAMES = [
    *("type", "role", "content", "text", "name", "id", "function", "arguments", "tool_calls", "cache_control", "ttl"),
    *("input", "tool_use_id", "schema", "json_schema", "format", "tools", "mode", "parameters", "properties", "items"),
]


@dataclass
class Values:
    """Values of fields; `faults` is the share that are of the wrong kind or out of range."""

    rng: random.Random
    faults: float

    def of(self, schema: Schema) -> Any:
        """A value that a schema allows, mostly; now and then one at or beyond its limits."""
        if "$ref" in schema:
            return self.of(description()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        if alternatives := schema.get("anyOf") or schema.get("oneOf"):
            given = [each for each in alternatives if each.get("type") != "null"]
            return self.of(self.rng.choice(alternatives if self.rng.random() < 0.1 else given))
        maker = _BY_TYPE.get(schema.get("type", ""))
        return self.odd() if maker is None else maker(self, schema)

    def odd(self, depth: int = 0) -> Any:
        """Anything that JSON can represent."""
        rng = self.rng
        kind = rng.randrange(8 if depth < 4 else 5)
        if kind == 0:
            return None
        if kind == 1:
            return rng.random() < 0.5
        if kind == 2:
            return rng.choice(ODD_NUMBERS)
        if kind == 3:
            return rng.choice(ODD_TEXTS)
        if kind == 4:
            return rng.randrange(-3, 100)
        if kind == 5:
            return [self.odd(depth + 1) for _ in range(rng.choice([0, 1, 3, 20]))]
        if kind == 6:
            return {rng.choice(ODD_TEXTS + KNOWN_NAMES): self.odd(depth + 1) for _ in range(rng.choice([0, 1, 3]))}
        value: Any = []
        for _ in range(rng.choice([5, 40, 150])):
            value = [value]
        return value

    def grafted(self, value: Any) -> Any:
        """The value with `odd` ones, or none, in place of some of its parts, however deep they lie."""
        if self.rng.random() < self.faults / 2:
            return self.odd()
        if isinstance(value, dict):
            return {k: self.grafted(v) for k, v in value.items() if self.rng.random() >= self.faults / 4}
        if isinstance(value, list) and len(value) < 100:
            return [self.grafted(each) for each in value]
        return value

    def text(self, most: int = 40) -> str:
        if self.rng.random() < 0.05:
            return self.rng.choice(ODD_TEXTS)
        return "".join(self.rng.choices("abc the.\n{}é😀", k=self.rng.randrange(1, most)))

    def ids(self, most: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randrange(1, most))]

    def at(self, limit: int, share: float = 0.1) -> int:
        """A count around a limit in a share of cases, otherwise far below it."""
        rng = self.rng
        return rng.choice([limit, limit + 1, limit - 1]) if rng.random() < share else rng.randrange(1, 4)

    def number(self, low: float, high: float) -> float:
        return self.rng.choice([low, high, 1.0, self.rng.uniform(low, high)])

    def maybe(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def some(self, **makers: Maker) -> dict[str, Any]:
        """Half of some members."""
        return {name: make(self) for name, make in makers.items() if self.maybe()}


@cache
def description() -> dict[str, Any]:
    """The description of the server that is fuzzed."""
    endpoints = create_app(FakeEngine()).state.endpoints
    return describe("", Served(DEFAULT_LIMITS, MAX_MODEL_LEN, VOCAB_SIZE, HIDDEN_SIZE), endpoints)


@cache
def body_schema(path: str) -> Schema:
    """The schema of the body that a path takes."""
    content = description()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema: Schema = description()["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    return schema


def _integer(v: Values, schema: Schema) -> int:
    low, high = schema.get("minimum"), schema.get("maximum")
    if v.maybe(0.1):
        return v.rng.choice([end + by for end in (low, high) if end is not None for by in (-1, 0, 1)] or [0, -1, 2**64])
    # Most small: large counts are slow to serve, and few limits are near 0.
    least = max(low if low is not None else 0, 0)
    return v.rng.randint(least, min(least + 4, high if high is not None else least + 4))


def _number(v: Values, schema: Schema) -> float:
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 0.01)
    return v.number(low, schema.get("maximum", 2)) if v.maybe(0.95) else low - 0.1


def _string(v: Values, schema: Schema) -> str:
    limit = schema.get("maxLength")
    return "s" * v.at(limit, 1.0) if limit is not None and v.maybe(0.05) else v.text(20)[:limit]


def _array(v: Values, schema: Schema) -> list[Any]:
    count = v.at(schema.get("maxItems", 20), 0.02)
    return [v.of(schema.get("items", {})) for _ in range(count)]


def _object(v: Values, schema: Schema) -> dict[str, Any]:
    if (properties := schema.get("properties")) is not None:
        needed = schema.get("required", ())
        return {name: v.of(part) for name, part in properties.items() if name in needed or v.maybe()}
    if schema.get("propertyNames", {}).get("pattern") == "^[0-9]+$":
        first = v.rng.randrange(VOCAB_SIZE)
        values = schema["additionalProperties"]
        return {str((first + i) % (VOCAB_SIZE + 1)): v.of(values) for i in range(v.at(schema["maxProperties"], 0.02))}
    return {v.text(8): v.odd(2) for _ in range(v.rng.randrange(3))}


_BY_TYPE: dict[str, Callable[[Values, Schema], Any]] = {
    "integer": _integer,
    "number": _number,
    "string": _string,
    "array": _array,
    "object": _object,
    "boolean": lambda v, schema: v.maybe(),
    "null": lambda v, schema: None,
}


def is_unsupported(schema: Schema) -> bool:
    """Whether a field is known only to be refused."""
    return schema == UNSUPPORTED


def damaged(rng: random.Random, body: bytes) -> bytes:
    """The body with a part cut off, overwritten or repeated."""
    start = rng.randrange(len(body) + 1)
    end = min(len(body), start + rng.randrange(30))
    middle = rng.choice(
        [b"", bytes(rng.choices(range(256), k=5)), body[start:end] * 2, b"NaN", b"[" * 300, b'"\\ud800"']
    )
    return body[:start] + middle + body[end:]


def as_body(value: Any) -> bytes:
    return json.dumps(value).encode()

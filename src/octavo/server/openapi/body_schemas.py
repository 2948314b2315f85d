"""The schemas of request bodies in the OpenAPI description, with this server's ranges, from their declarations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_origin

from octavo.option import Option, options_of
from octavo.sampling_params import SamplingParams
from octavo.server.bodies.fields import (
    Declared,
    Field,
    JsonType,
    Schema,
    Served,
    fields_of,
    token_count,
    token_ids,
)

# Of a field that is known and not supported, so that it must be empty.
UNSUPPORTED: Schema = {"enum": [None, False, "", [], {}], "description": "known, and not supported"}
# Constraints on several fields of a body together.
_TOGETHER: Mapping[str, Schema] = {
    "TokenizeBody": {
        "oneOf": [
            {
                "required": [given],
                "properties": {given: {"not": {"type": "null"}}, **{name: {"type": "null"} for name in others}},
            }
            for given, others in (
                ("prompt", ("content", "messages")),
                ("content", ("prompt", "messages")),
                ("messages", ("prompt", "content")),
            )
        ]
    },
}


def body_schema(declared: type[Declared], server: Served) -> Schema:
    """Return the schema of a body, or of an object in one."""
    known = fields_of(declared)
    schema: Schema = {
        "type": "object",
        "properties": {name: _field_schema(each, server) for name, each in known.items()},
    }
    if required := [name for name, each in known.items() if each.required]:
        schema["required"] = required
    return schema | _TOGETHER.get(declared.__name__, {})


def _field_schema(each: Field, server: Served) -> Schema:
    if each.by_presence is not None:
        return UNSUPPORTED
    ranges: dict[str, Schema] = {}
    if (option := each.parameter or options_of(SamplingParams).get(each.like or "")) is not None:
        ranges = _parameter_ranges(option, server)
    if each.limit is not None:
        ranges["string"] = {"maxLength": getattr(server.limits, each.limit)}
    if each.ranges is not None:
        ranges |= each.ranges(server)
    schema: Schema = {"description": each.help} if each.help else {}
    if (whole := ranges.get("any")) is not None:
        return schema | whole
    if not each.types:
        return schema
    alternatives = [_type_schema(kind, server) | ranges.get(kind.name, {}) for kind in each.types]
    if "or" in ranges:
        alternatives.append(ranges["or"])
    if not each.required:
        alternatives.append({"type": "null"})
    return schema | (alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives})


def _type_schema(kind: JsonType, server: Served) -> Schema:
    if kind.record is not None:
        return body_schema(kind.record, server)
    schema: Schema = {"enum": list(kind.choices)} if kind.choices else {"type": kind.name}
    if kind.inside:
        alternatives = [_type_schema(each, server) for each in kind.inside]
        inside = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
        schema["items" if kind.name == "array" else "additionalProperties"] = inside
    if kind.has_token_keys:
        schema["propertyNames"] = {"pattern": "^[0-9]+$"}
    return schema


def _parameter_ranges(option: Option, server: Served) -> dict[str, Schema]:
    """Return the ranges of a sampling parameter."""
    bounds = {"minimum": option.least, "exclusiveMinimum": option.above, "maximum": option.most}
    number = {name: bound for name, bound in bounds.items() if bound is not None}
    most = None if option.limit is None else getattr(server.limits, option.limit)
    if option.name == "max_tokens":
        return token_count(server)
    if int in option.types:
        return {"integer": number if most is None else {**number, "maximum": most}}
    text: Schema = {"minLength": 1}
    if option.text_limit is not None:
        text["maxLength"] = getattr(server.limits, option.text_limit)
    several: Schema = {"items": {"type": "string", **text}}
    if any(get_origin(each) is Collection for each in option.types):
        several = token_ids(server, least=1 if option.default is None else 0)
    if most is not None:
        several["maxItems"] = most
    members = {} if most is None else {"maxProperties": most}
    if option.name == "logit_bias":
        members["additionalProperties"] = {"type": "number", "minimum": -100, "maximum": 100}
    return {"number": number, "string": text, "array": several, "object": members}

"""The OpenAPI description of the API, from the declared endpoints, bodies and ranges."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.option import Option, options_of
from octavo.sampling_params import SamplingParams
from octavo.server.answer_json import json_bytes
from octavo.server.answer_schemas import SCHEMAS
from octavo.server.apis import api_of_path
from octavo.server.bodies.fields import (
    Declared,
    Field,
    RequestBody,
    Schema,
    Served,
    fields_of,
    record_of,
    token_count,
    token_ids,
)
from octavo.server.route import Access, Endpoint, Handlers, get, json_response
from octavo.value_type import ValueType

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


def _type_schema(kind: ValueType, server: Served) -> Schema:
    if (record := record_of(kind)) is not None:
        return body_schema(record, server)
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
    if "integer" in option.type_names:
        return {"integer": number if most is None else {**number, "maximum": most}}
    text: Schema = {"minLength": 1}
    if option.text_limit is not None:
        text["maxLength"] = getattr(server.limits, option.text_limit)
    several: Schema = {"items": {"type": "string", **text}}
    if any(each.is_unordered for each in option.types):
        several = token_ids(server, least=1 if option.default is None else 0)
    if most is not None:
        several["maxItems"] = most
    members = {} if most is None else {"maxProperties": most}
    if option.name == "logit_bias":
        members["additionalProperties"] = {"type": "number", "minimum": -100, "maximum": 100}
    return {"number": number, "string": text, "array": several, "object": members}


_KEYS = {Access.ADMIN: " (admin key)", Access.OPERATOR: " (admin key, where the server has keys)"}
# Why a request may be refused, by status; all other statuses are error objects too.
_REFUSALS = {
    "400": "The body is wrong, or asks for what cannot be served",
    "401": "No API key, or a wrong one",
    "403": "The key, or the web page, may not do this",
    "404": "There is no such model, response, item or pin",
    "413": "The body is too large",
    "415": "Bodies must not be compressed, and without API keys be of the type application/json",
    "429": "The tenant is over a limit",
    "503": "The server has no room, stops, or its engine does not run",
}


class Description(Handlers):
    """The handler of the description of one server.

    Args:
        described: all endpoints of the server; those of the description may be added later.
    """

    def __init__(self, server: Served, described: Sequence[Endpoint]) -> None:
        self._server = server
        self._endpoints = described

    @cached_property
    def _described(self) -> bytes:
        return json_bytes(describe(octavo.__version__, self._server, self._endpoints))

    @get("/openapi.json", "Description", access=Access.PUBLIC)
    async def openapi(self, request: Request) -> Response:
        """This description."""
        # Made once; it takes a tenth of a second, so it runs in a thread and streams need not wait.
        return json_response(await asyncio.to_thread(lambda: self._described))


def describe(version: str, server: Served, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI description of the API."""
    paths: dict[str, Any] = {}
    bodies: dict[str, type[RequestBody]] = {}
    for endpoint in endpoints:
        # Without the converters of Starlette's routes.
        path = re.sub(r":\w+}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(path, endpoint)
        if endpoint.body is not None:
            bodies[endpoint.body.__name__] = endpoint.body
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version},
        "paths": paths,
        "components": {"schemas": {**{name: body_schema(body, server) for name, body in bodies.items()}, **SCHEMAS}},
    }


def _operation(path: str, endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": endpoint.summary + _KEYS.get(endpoint.access, "")}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in endpoint.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {"schema": _reference(endpoint.body.__name__), "example": endpoint.body.EXAMPLE}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    operation["responses"] = _responses(endpoint)
    return operation


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    api = api_of_path(endpoint.path)
    content: dict[str, Any] = {"application/json": {"schema": _reference(endpoint.answer)}}
    if "/" in endpoint.answer:
        content = {endpoint.answer: {"schema": {"type": "string"}}}
    if endpoint.streams:
        content[api.stream] = {}
    errors = [_reference(name) for name in api.error_schemas]
    refused = {"application/json": {"schema": errors[0] if len(errors) == 1 else {"anyOf": errors}}}
    return {
        "200": {"description": "The answer", "content": content},
        **{status: {"description": why, "content": refused} for status, why in _REFUSALS.items()},
        "default": {"description": "Any other error", "content": refused},
    }


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}

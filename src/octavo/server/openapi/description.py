"""The OpenAPI description of the API: paths, bodies with this server's ranges, and answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.server.answer_json import json_bytes
from octavo.server.apis import api_of_path
from octavo.server.bodies.fields import RequestBody, Served
from octavo.server.openapi.body_schemas import body_schema
from octavo.server.openapi.docs_page import DOCS_PAGE
from octavo.server.openapi.schema_answers import SCHEMAS
from octavo.server.route import Access, Endpoint, json_response

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


class Description:
    """The description of one server, and the page that shows it.

    Args:
        described: all endpoints of the server; those of the description may be added later.
    """

    def __init__(self, server: Served, described: Sequence[Endpoint]) -> None:
        self._server = server
        self._endpoints = described

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/openapi.json", self._openapi, "Description", "This description", Access.PUBLIC),
            Endpoint("GET", "/docs", self._docs, "text/html", "A page that shows it", Access.PUBLIC),
        ]

    @cached_property
    def _described(self) -> bytes:
        return json_bytes(describe(octavo.__version__, self._server, self._endpoints))

    async def _openapi(self, request: Request) -> Response:
        # Made once; it takes a tenth of a second, so it runs in a thread and streams need not wait.
        return json_response(await asyncio.to_thread(lambda: self._described))

    async def _docs(self, request: Request) -> Response:
        return Response(DOCS_PAGE, media_type="text/html")


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
        content = {"schema": _reference(endpoint.body.__name__), "example": endpoint.example}
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

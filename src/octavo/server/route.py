"""Endpoints, the routes made from them, and how many requests of each were answered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, compile_path
from starlette.types import Scope

from octavo.server.answer_json import json_bytes
from octavo.server.apis import path_of
from octavo.server.bodies.fields import RequestBody, fields_of
from octavo.server.errors import ApiError, Checked

Handler = Callable[[Request], Awaitable[Response]]
Method = TypeVar("Method", bound=Callable[[Any, Request], Awaitable[Response]])

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Access(Enum):
    """Who may use an endpoint of a server that has keys; without keys, only `ADMIN` endpoints are closed."""

    PUBLIC = "everyone"
    CLIENT = "clients, with an API key"
    OPERATOR = "operators, with an admin key"
    ADMIN = "operators, with an admin key; closed if the server has none"
    ROUTER = "routers, with the router's key; closed if the server has none"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path: its route, who may use it, and its part of the API's description.

    Attributes:
        answer: name of the answer's schema in `answer_schemas.py`, or its media type.
        summary: its purpose, in one line.
        body: the type of the request's body, which has an example; None if there is none.
        query: schemas of the fields of the query.
    """

    method: str
    path: str
    handler: Handler
    answer: str
    summary: str
    access: Access = Access.CLIENT
    body: type[RequestBody] | None = None
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether the body may ask for a stream."""
        return self.body is not None and "stream" in fields_of(self.body)


def endpoint(
    method: str,
    path: str,
    answer: str,
    body: type[RequestBody] | None = None,
    access: Access = Access.CLIENT,
    query: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[Method], Method]:
    """Declare that a method of `Handlers` answers an endpoint, whose summary is the method's docstring."""

    def declare(handler: Method) -> Method:
        summary = (handler.__doc__ or "").removesuffix(".")
        row = partial(
            Endpoint, method, path, answer=answer, summary=summary, access=access, body=body, query=query or {}
        )
        handler.__dict__.setdefault("rows", []).append(row)
        return handler

    return declare


get, post, delete = (partial(endpoint, method) for method in ("GET", "POST", "DELETE"))


class Handlers:
    """Base of the classes whose methods answer endpoints."""

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints in the order in which they are declared."""
        methods = vars(type(self)).items()
        return [row(getattr(self, name)) for name, method in methods for row in getattr(method, "rows", ())]


def routes(endpoints: Iterable[Endpoint], check: Callable[[Access, Scope], None], metered: Middleware) -> list[Route]:
    """Return one route per path, so that a 405 lists all methods of the path.

    Args:
        check: raises `ApiError` if a request may not use an endpoint of this access.
        metered: applies the limits of tenants, where clients make the server work.
    """
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [_route(path, methods, check, metered) for path, methods in by_path.items()]


def _route(
    path: str, methods: dict[str, Endpoint], check: Callable[[Access, Scope], None], metered: Middleware
) -> Route:
    async def handle(request: Request) -> Response:
        return await methods[_method(request.scope)].handler(request)

    checked = Middleware(Checked, check=lambda scope: check(methods[_method(scope)].access, scope))
    is_work = any(endpoint.method == "POST" and endpoint.access is Access.CLIENT for endpoint in methods.values())
    return Route(path, handle, methods=list(methods), middleware=[checked, metered] if is_work else [checked])


def _method(scope: Scope) -> str:
    """Return the method of the endpoint that answers a request; Starlette has GET's answer HEAD too."""
    return "GET" if scope["method"] == "HEAD" else str(scope["method"])


def public_requests(endpoints: Iterable[Endpoint]) -> frozenset[tuple[str, str]]:
    """Return the methods and paths that need no key; a path with parameters cannot be public."""
    public = {(endpoint.method, endpoint.path) for endpoint in endpoints if endpoint.access is Access.PUBLIC}
    assert not any("{" in path for _, path in public)
    return frozenset(public | {("HEAD", path) for method, path in public if method == "GET"})


def refuse_control_characters(scope: Scope) -> None:
    """Raise `ApiError` for a path with control characters: `$` in a route's pattern matches before a newline too."""
    if found := _CONTROL.search(scope["path"]):
        message = f"The path has a control character (U+{ord(found[0]):04X})."
        raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_path")


def json_response(value: Any) -> Response:
    """Return a JSON response; bytes are taken to be JSON already."""
    return Response(value if isinstance(value, bytes) else json_bytes(value), media_type="application/json")


# Unknown paths and methods are counted together, because clients choose them.
_NONE = "none"


class ResponseCounts:
    """Counts responses. Used only from the event loop.

    Attributes:
        counts: by path, method and class of status, such as ("/v1/completions", "POST", "2xx").
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self._paths: set[str] = set()
        self._methods = {"HEAD", "OPTIONS"}
        self._templates: list[tuple[re.Pattern[str], str]] = []

    def expect(self, endpoints: Iterable[Endpoint]) -> None:
        """Count each of these endpoints separately; a path may have parameters, as `/v1/models/{model}` has."""
        for endpoint in endpoints:
            self._methods.add(endpoint.method)
            self._paths.add(endpoint.path)
            if "{" in endpoint.path:
                self._templates.append((compile_path(endpoint.path)[0], endpoint.path))

    def add(self, scope: Scope, status: int) -> None:
        """Count a response; a request whose client left before it was answered has none."""
        if status:
            method = scope["method"] if scope["method"] in self._methods else _NONE
            self.counts[self._path(path_of(scope)), method, f"{status // 100}xx"] += 1

    def _path(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((template for regex, template in self._templates if regex.match(path)), _NONE)

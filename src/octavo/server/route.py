"""Endpoints, and the routes made from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """One method of one path, and its handler."""

    method: str
    path: str
    handler: Handler


def routes(endpoints: Iterable[Endpoint]) -> list[Route]:
    """Return one route per path, so that a 405 lists all methods of the path."""
    by_path: dict[str, dict[str, Handler]] = {}
    for method, path, handler in endpoints:
        by_path.setdefault(path, {})[method] = handler
    return [Route(path, _by_method(handlers), methods=list(handlers)) for path, handlers in by_path.items()]


def _by_method(handlers: dict[str, Handler]) -> Handler:
    if len(handlers) == 1:
        return next(iter(handlers.values()))

    async def handle(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](request)

    return handle


def json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")

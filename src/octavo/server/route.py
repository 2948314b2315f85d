"""What an endpoint is: a method, a path, and its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """One method of one path, and its handler."""

    method: str
    path: str
    handler: Handler


def json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")

"""The APIs that the server speaks: their paths, and the form of their errors, streams and ids.

OpenAI's       {"error": {"message", "type", "param", "code"}}
Anthropic's    {"type": "error", "error": {"type", "message"}, "request_id"}
Ollama's       {"error": message}
llama.cpp's    {"error": {"code": status, "type", "message"}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Scope

import uuid

INVALID_REQUEST = "invalid_request_error"
# The media types of server-sent events, and of a line of JSON for each part of an answer.
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
REQUEST_ID_HEADER = b"x-request-id"

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LLAMACPP_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

# Ollama's and llama.cpp's sampling defaults, where neither request nor model sets them. For their own APIs only.
OLLAMA_DEFAULTS: dict[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
LLAMACPP_DEFAULTS: dict[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

ErrorFields = Mapping[str, str | None]
"""OpenAI's error object: message, type, param and code."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    Attributes:
        paths: what belongs to it, with all below.
        error: makes the JSON value of an error from its status, its fields and the request's id.
        error_schemas: names of an error's schemas in the description; refusals before routing may be OpenAI's.
        frame: what stands before and after an error in a stream.
        stream: the media type of its streams.
        id_headers: headers of a response that carry the request's id.
    """

    paths: tuple[str, ...]
    error: Callable[[int, ErrorFields, str | None], dict[str, Any]]
    error_schemas: tuple[str, ...]
    frame: tuple[bytes, bytes] = (b"data: ", b"\n\n")
    stream: str = EVENTS
    id_headers: tuple[bytes, ...] = (REQUEST_ID_HEADER,)

    def error_body(self, status: int, fields: ErrorFields, request_id: str | None = None) -> bytes:
        return json.dumps(self.error(status, fields, request_id)).encode()

    def error_event(self, status: int, fields: ErrorFields) -> bytes:
        """Return an error as the last part of a stream."""
        before, after = self.frame
        return before + self.error_body(status, fields) + after


def _anthropic_error(status: int, fields: ErrorFields, request_id: str | None) -> dict[str, Any]:
    error = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": fields["message"]}
    return {"type": "error", "error": error, "request_id": request_id}


def _llamacpp_error(status: int, fields: ErrorFields, request_id: str | None) -> dict[str, Any]:
    kind = _LLAMACPP_TYPES.get(status, INVALID_REQUEST if status < 500 else "server_error")
    return {"error": {"code": status, "message": fields["message"], "type": kind}}


OPENAI = Api(
    paths=(),  # all that are no other API's
    error=lambda status, fields, request_id: {"error": fields},
    error_schemas=("Error",),
    frame=(b"data: ", b"\n\n" + DONE),
)
ANTHROPIC = Api(
    paths=("/v1/messages",),
    error=_anthropic_error,
    error_schemas=("MessageError", "Error"),
    frame=(b"event: error\ndata: ", b"\n\n"),
    id_headers=(REQUEST_ID_HEADER, b"request-id"),
)
OLLAMA = Api(
    paths=("/api",),
    error=lambda status, fields, request_id: {"error": fields["message"]},
    error_schemas=("OllamaError",),
    frame=(b"", b"\n"),
    stream=LINES,
)
LLAMACPP = Api(
    # Those that are not OpenAI's; those that are not served too.
    paths=("/completion", "/completions", "/infill", "/props", "/slots", "/lora-adapters", "/apply-template"),
    error=_llamacpp_error,
    error_schemas=("LlamaCppError",),
)


def path_of(scope: Scope) -> str:
    """Return the path as the router sees it, without the prefix that a proxy removes (--root-path)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def api_of(scope: Scope) -> Api:
    """Return the API of a request, which decides the form of its answer.

    OpenAI and Anthropic both have /v1/models, where Anthropic's clients are recognised by the header
    `anthropic-version`.
    """
    path = path_of(scope)
    if _is_under(path, "/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"]):
        return ANTHROPIC
    return api_of_path(path)


def api_of_path(path: str) -> Api:
    found = (api for api in (ANTHROPIC, OLLAMA, LLAMACPP) if any(_is_under(path, own) for own in api.paths))
    return next(found, OPENAI)


def _is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def new_id(prefix: str) -> str:
    """Return a unique id: 'cmpl' -> 'cmpl-4f1c…'."""
    return f"{prefix}-{uuid.uuid4().hex}"

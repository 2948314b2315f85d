"""Errors for clients, and what turns exceptions into them; `apis` has the form of each API."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import (
    EngineDeadError,
    GrammarError,
    LogitsError,
    OctavoError,
    OverloadedError,
    RequestError,
    RequestFailedError,
    TenantOverloadedError,
    UnreadError,
    shortened,
)
from octavo.server.apis import INVALID_REQUEST, LLAMACPP, api_of, path_of

logger = logging.getLogger("octavo.server")

# Short, because a full queue has room again as soon as any waiting request is admitted.
RETRY_AFTER_SECONDS = 1


class ApiError(OctavoError):
    """An error that is meant for the client, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled when they come from another process, and subclasses take other arguments than this class.
        return _api_error, (self.status, self.message, self.type, self.param, self.code, self.headers)

    def fields(self) -> dict[str, str | None]:
        """Return OpenAI's error object."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def response(self, scope: Scope) -> Response:
        """Return the response to a request, in the form of the API that the request used."""
        body = api_of(scope).error_body(self.status, self.fields(), scope.get("state", {}).get("request_id"))
        return Response(body, self.status, self.headers, media_type="application/json")


def _api_error(
    status: int, message: str, type: str, param: str | None, code: str | None, headers: Mapping[str, str] | None
) -> ApiError:
    return ApiError(status, message, type=type, param=param, code=code, headers=headers)


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """A reason why the server refuses or ends a request; called with what its message names, it is the error.

    Attributes:
        message: with a place, `{}`, for each argument.
        type: OpenAI's kind of error; by default that of the status.
        retry: whether the client should try again soon.
    """

    status: HTTPStatus
    code: str
    message: str
    type: str | None = None
    param: str | None = None
    retry: bool = False

    def __call__(self, *values: object, param: str | None = None, wait: float = RETRY_AFTER_SECONDS) -> ApiError:
        """Return the error; `wait`: seconds after which the client may retry."""
        return ApiError(
            self.status,
            self.message.format(*values),
            type=self.type or _TYPES.get(self.status, "server_error" if self.status >= 500 else INVALID_REQUEST),
            param=param or self.param,
            code=self.code,
            headers={"Retry-After": str(max(1, math.ceil(wait)))} if self.retry else None,
        )


_TYPES = {HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error"}

BODY_TOO_LARGE = ErrorKind(
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "request_too_large",
    "The request body is larger than {} bytes, the maximum (--server-limits max_body_size).",
)
BODY_TOO_SLOW = ErrorKind(
    HTTPStatus.BAD_REQUEST,
    "request_too_expensive",
    "Parsing this request's body took longer than {:g} s, the maximum (--server-limits max_body_seconds).",
)
BODY_TOO_COSTLY = ErrorKind(
    HTTPStatus.BAD_REQUEST,
    "request_too_expensive",
    "Parsing this request's body took more than {} bytes of memory, the maximum (--server-limits max_body_memory).",
)
TOO_MANY_BODIES = ErrorKind(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "too_many_bodies",
    "The request bodies that this server is receiving exceed {} bytes together, the maximum "
    "(--server-limits max_total_body_size): try again later.",
    retry=True,
)
TOO_MANY_TENANT_BODIES = ErrorKind(
    HTTPStatus.TOO_MANY_REQUESTS,
    "too_many_tenant_bodies",
    "The request bodies of this API key's tenant exceed {} bytes together, half of the server's maximum "
    "(--server-limits max_total_body_size): try again later.",
    retry=True,
)
MODEL_MISSING = ErrorKind(
    HTTPStatus.NOT_FOUND,
    "model_not_found",
    "The model `{}` does not exist; GET /v1/models lists the served models.",
    param="model",
)
ITEM_MISSING = ErrorKind(
    HTTPStatus.NOT_FOUND,
    "item_not_found",
    "There is no item `{}`; its response may not have been stored (store: false), have been dropped for newer ones "
    "(--server-limits max_stored_responses), or been lost in a restart.",
)
SHUTTING_DOWN = ErrorKind(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "shutting_down",
    "The server is shutting down and cancelled this request.",
)
REQUEST_TIMED_OUT = ErrorKind(
    HTTPStatus.GATEWAY_TIMEOUT,
    "request_timeout",
    "The request did not finish within {:g} s, the maximum (--request-timeout).",
)
# In place of a `LogitsError`, whose message names other clients' requests. The same request may well fail again.
FAILED_SAMPLING = ErrorKind(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "unusable_logits",
    "The model gave no usable probabilities for this request (NaN or infinite logits, or every token masked), so it "
    "was ended; the server's log names the likely causes.",
)
# The description came with the request, and another description may work.
FAILED_GRAMMAR = ErrorKind(
    HTTPStatus.BAD_REQUEST,
    "grammar_too_complex",
    "This request's structured output became too complex to parse{}. Use a less ambiguous schema or grammar.",
    param="structured_outputs",
)
FAILED_STEP = ErrorKind(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "step_failed",
    "The engine failed while computing request {} and ended it. Other requests continue; the server's log has the "
    "details under that id.",
)
LOST_RANK = ErrorKind(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "rank_lost",
    "A process that computes a part of the model died, which ended this request. The process is being restarted: "
    "send the request again.",
    retry=True,
)
ENGINE_DEAD = ErrorKind(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "engine_dead",
    "The engine has stopped after an internal error: restart the server.",
)
INTERNAL_ERROR = ErrorKind(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "internal_error",
    "The server had an internal error while processing the request; its log has the details.",
)
QUEUE_FULL = ErrorKind(HTTPStatus.SERVICE_UNAVAILABLE, "queue_full", "{}", retry=True)
TENANT_QUEUE_FULL = ErrorKind(HTTPStatus.TOO_MANY_REQUESTS, "tenant_queue_full", "{}", retry=True)
RATE_LIMITED = ErrorKind(HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_exceeded", "{}", retry=True)
ANSWER_NOT_READ = ErrorKind(HTTPStatus.REQUEST_TIMEOUT, "answer_not_read", "{}")


def to_api_error(error: Exception) -> ApiError:
    """Return the error response for `error`. Unexpected exceptions are logged, and reported without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.param, code=error.code)
    if isinstance(error, OverloadedError):
        return (TENANT_QUEUE_FULL if isinstance(error, TenantOverloadedError) else QUEUE_FULL)(error)
    if isinstance(error, UnreadError):
        return ANSWER_NOT_READ(error)
    if isinstance(error, GrammarError):
        return FAILED_GRAMMAR("")
    if isinstance(error, LogitsError):
        # The engine ends such a request by itself and logs the causes; this is for callers that drive one directly.
        return FAILED_SAMPLING()
    if isinstance(error, RequestFailedError):
        return FAILED_STEP(error.request_id)
    if isinstance(error, EngineDeadError):
        # The engine logged its traceback when it died.
        logger.error("a request failed because the engine has stopped: %s", error)
        return ENGINE_DEAD()
    logger.error("unexpected error while answering a request", exc_info=error)
    return INTERNAL_ERROR()


async def answer_octavo_error(request: Request, error: Exception) -> Response:
    """Exception handler for Octavo's own errors."""
    return to_api_error(error).response(request.scope)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for the router's errors: unknown path or method."""
    if not isinstance(error, HTTPException):
        return to_api_error(error).response(request.scope)
    # Not `request.url`: some versions of Starlette parse the Host header with it, and fail if that is not an address.
    path = path_of(request.scope)
    where = f"{request.method} {shortened(path)}"
    message = {
        404: f"Invalid URL ({where}){_hint(path, _paths(request))}",
        405: f"Method not allowed ({where})",
    }.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response(request.scope)


_OLLAMA_MANAGEMENT = ("/api/create", "/api/copy", "/api/delete", "/api/push")


def _paths(request: Request) -> list[str]:
    """Return the paths of the server's endpoints."""
    return [route.path for route in request.app.routes if isinstance(route, Route)]


def _hint(path: str, known: Iterable[str]) -> str:
    """Return what to use instead of an unknown path: for clients of other servers' APIs, and for a misspelt one."""
    if path in _OLLAMA_MANAGEMENT or path.startswith("/api/blobs/"):
        return (
            ". Octavo serves one model, chosen at start (octavo serve MODEL, --served-model-name NAME), and cannot "
            "create, copy, delete or push models."
        )
    if path.startswith("/api/"):
        return (
            ". Of Ollama's API, chat, generate, embed, embeddings, show, tags, ps, version and pull are served: the "
            "model is chosen when the server starts (octavo serve MODEL)."
        )
    if path.startswith("/v1/v1/"):
        return ". Is /v1 in the base URL twice? Anthropic's clients add it themselves."
    if path in LLAMACPP.paths:
        return ". Of llama.cpp's own API, /completion, /infill, /props, /slots, /tokenize and /detokenize are served."
    if path in ("/chat/completions", "/responses", "/embeddings", "/models"):
        return f". OpenAI's API is below /v1: is the base URL without it? Use /v1{path}."
    nearest = difflib.get_close_matches(path[:80], known, n=1, cutoff=0.8)
    return f". Did you mean {nearest[0]}?" if nearest else ""


class Checked:
    """Middleware that answers a request with the `ApiError` that `check` raises for it, if it raises one."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], object]) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                app = error.response(scope)
        await app(scope, receive, send)

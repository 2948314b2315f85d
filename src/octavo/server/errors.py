"""Errors for clients, and what turns exceptions into them; `apis` has the form of each API."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
from octavo.server.apis import INVALID_REQUEST, LLAMACPP, api_of

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


class BodyTooLargeError(ApiError):
    """The request's body exceeds the server's limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The request body is larger than {limit} bytes, the most this server accepts (--max-body-size).",
            code="request_too_large",
        )


class BodyTooSlowError(ApiError):
    """Reading the request's body took longer than the server allows."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            HTTPStatus.BAD_REQUEST,
            f"Reading this request's body took longer than {seconds:g} s, the most this server allows "
            "(--max-body-seconds).",
            code="request_too_expensive",
        )


class BodyTooCostlyError(ApiError):
    """Reading the request's body took more memory than the server allows."""

    def __init__(self, most: int) -> None:
        super().__init__(
            HTTPStatus.BAD_REQUEST,
            f"Reading this request's body took more than {most} bytes of memory, the most this server allows "
            "(--max-body-memory).",
            code="request_too_expensive",
        )


class ModelMissingError(ApiError):
    """The request names a model that this server does not serve."""

    def __init__(self, model: str) -> None:
        message = f"The model `{shortened(model)}` does not exist; GET /v1/models lists what is served."
        super().__init__(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")


class ShuttingDownError(ApiError):
    """The request was still running when the grace period of a shutdown ended."""

    def __init__(self) -> None:
        message = "The server is shutting down and had to cancel this request."
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, message, type="server_error", code="shutting_down")


class RequestTimedOutError(ApiError):
    """The request ran longer than the server allows."""

    def __init__(self, seconds: float) -> None:
        message = f"The request was not finished within {seconds:g} s, the most this server allows (--request-timeout)."
        super().__init__(HTTPStatus.GATEWAY_TIMEOUT, message, type="server_error", code="request_timeout")


class GenerationFailedError(ApiError):
    """The model's logits for this request cannot be sampled; the engine ended the request and continues.

    Clients see this error in place of a `LogitsError`, whose message names other clients' requests. The status is 500,
    because the same request may well fail again.
    """

    def __init__(self) -> None:
        message = (
            "The model gave no usable probabilities for this request (NaN or infinite logits, or every token masked), "
            "so it was ended; the server's log names the likely causes."
        )
        super().__init__(HTTPStatus.INTERNAL_SERVER_ERROR, message, type="server_error", code="unusable_logits")


class GrammarTooComplexError(ApiError):
    """The grammar of a request's structured output became too complex; the engine ended the request and continues.

    The status is 400, because the description came with the request, and another description may work.
    """

    def __init__(self, reason: str | None) -> None:
        message = (
            "The structured output that this request describes became too complex to follow"
            f"{'' if reason is None else f' {reason}'}. Describe it with fewer ways to read the same text."
        )
        super().__init__(HTTPStatus.BAD_REQUEST, message, param="structured_outputs", code="grammar_too_complex")


class StepFailedError(ApiError):
    """An exception was raised while the engine computed or reported this request; the engine ended it and continues."""

    def __init__(self, request_id: str) -> None:
        message = (
            f"The engine failed while it computed request {request_id}, and ended it. Other requests go on; the "
            "server's log has the details under that id."
        )
        super().__init__(HTTPStatus.INTERNAL_SERVER_ERROR, message, type="server_error", code="step_failed")


def to_api_error(error: Exception) -> ApiError:
    """Return the error response for `error`. Unexpected exceptions are logged, and reported without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.param, code=error.code)
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        if isinstance(error, TenantOverloadedError):
            status, kind, code = HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "tenant_queue_full"
        else:
            status, kind, code = HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "queue_full"
        return ApiError(status, str(error), type=kind, code=code, headers=headers)
    if isinstance(error, UnreadError):
        return ApiError(HTTPStatus.REQUEST_TIMEOUT, str(error), code="answer_not_read")
    if isinstance(error, GrammarError):
        return GrammarTooComplexError(None)
    if isinstance(error, LogitsError):
        # The engine ends such a request by itself and logs the causes; this is for callers that drive one directly.
        return GenerationFailedError()
    if isinstance(error, RequestFailedError):
        return StepFailedError(error.request_id)
    if isinstance(error, EngineDeadError):
        logger.error("a request met a dead engine: %s", error)  # the engine logged its traceback when it died
        message = "The engine has stopped after an internal error and serves no more requests; restart the server."
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, type="server_error", code="engine_dead")
    logger.error("unexpected error while answering a request", exc_info=error)
    message = "The server had an internal error while processing the request; its log has the details."
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, type="server_error", code="internal_error")


async def answer_octavo_error(request: Request, error: Exception) -> Response:
    """Exception handler for Octavo's own errors."""
    return to_api_error(error).response(request.scope)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for the router's errors: unknown path or method."""
    if not isinstance(error, HTTPException):
        return to_api_error(error).response(request.scope)
    where = f"{request.method} {shortened(request.url.path)}"
    message = {
        404: f"Invalid URL ({where}){_hint(request.url.path, _paths(request))}",
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
            ". Models are not created, copied, deleted or pushed here: there is one, which is chosen when the server "
            "starts (octavo serve MODEL, --served-model-name NAME)."
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


class LastResort:
    """Outermost middleware: turns any escaped exception into a 500 without details instead of a dropped connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watching_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watching_send)
        except Exception as error:
            answer = to_api_error(error)
            if started or scope["type"] != "http":
                # A started answer cannot be replaced; uvicorn closes the connection, so the client sees that it is cut.
                return
            await answer.response(scope)(scope, receive, send)

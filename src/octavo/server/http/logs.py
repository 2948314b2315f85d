"""The server's log: its format, and a line for every request, which never contains a prompt, an answer or a key."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from octavo.server.apis import REQUEST_ID_HEADER, api_of, path_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from octavo.server.route import ResponseCounts

access_logger = logging.getLogger("octavo.access")

# A client's own id must match, because it is copied into headers and log lines.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
# Polled by machines every few seconds, so logged at debug level only.
_PROBES = frozenset({"/health", "/ready", "/metrics"})
_LONGEST_PATH = 200


def configure_logging(level: str, form: str) -> None:
    """Log to standard error: Octavo's messages from `level` up, and libraries' from warnings up.

    Args:
        form: "text", or "json" for one object per line.
    """
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("octavo").setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; if the record has `fields`, they replace the message."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        entry |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class RequestLog:
    """Outermost middleware: gives every request an id, the client's `X-Request-Id` or a new one, and logs how it ended.

    An exception that escaped becomes a 500 without details instead of a dropped connection.

    Args:
        responses: counts how requests were answered.
        writes: whether to log requests; if False, they only get ids and are counted.
    """

    def __init__(self, app: ASGIApp, responses: ResponseCounts, writes: bool = True) -> None:
        self._app = app
        self._responses = responses
        self._writes = writes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name, request_id.encode()) for name in api_of(scope).id_headers]
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # Here, because commands that only need their options import this module.
            from octavo.server.errors import to_api_error

            answer = to_api_error(error)
            # A started answer cannot be replaced; uvicorn closes the connection, so the client sees that it is cut.
            if not status:
                await answer.response(scope)(scope, receive, send_with_id)
        finally:
            self._responses.add(scope, status)
            if self._writes:
                self._write(scope, request_id, status, time.perf_counter() - began)

    def _write(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        level = logging.DEBUG if path_of(scope) in _PROBES else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        state = scope["state"]
        client, charge = state.get("client"), state.get("charge")
        fields: dict[str, Any] = {
            "request_id": request_id,
            "method": scope["method"],
            # Still percent-encoded, so that it holds no line break.
            "path": raw_path.decode("ascii", "replace")[:_LONGEST_PATH],
            # None if the client disconnected before it was answered.
            "status": status or None,
            "seconds": round(seconds, 4),
            "tenant": client.tenant if client is not None else None,
        }
        spent = charge.spent if charge is not None else None
        if spent is not None:
            fields |= {"prompt_tokens": spent.prompt_tokens, "completion_tokens": spent.completion_tokens}
        words = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        access_logger.log(level, "%s", words, extra={"fields": fields})


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _REQUEST_ID.fullmatch(value):
            given: str = value.decode()
            return given
    return uuid.uuid4().hex

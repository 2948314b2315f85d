"""Shared by the handlers of all APIs: reading a body, sending an answer, and reporting ignored fields."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError, shown
from octavo.server.access import client_of
from octavo.server.answers.generation import AT_ONCE, Answer, Job, Read
from octavo.server.answers.logprobs import TokenTexts
from octavo.server.apis import api_of, new_id
from octavo.server.bodies.body_reader import frame
from octavo.server.bodies.fields import RequestBody
from octavo.server.bodies.foreign_fields import header_value
from octavo.server.bodies.local_reader import LocalApisReader
from octavo.server.bodies.openai_bodies import OLDEST_MESSAGES
from octavo.server.bodies.read_bodies import EmbeddingRequest, ReadAnswer
from octavo.server.bodies.reader_pool import ReaderPool
from octavo.server.config import ServerConfig
from octavo.server.engine_client import EngineClient, TokenizerLike
from octavo.server.errors import ApiError
from octavo.server.http.connection import BodyIntake, EventStream, InFlight, WholeAnswer
from octavo.server.http.turnstile import Turnstile
from octavo.server.keys import KeyRing
from octavo.server.quotas import charge_of
from octavo.server.routers import RoutedPrompts

logger = logging.getLogger("octavo.server")

IGNORED_HEADER = "X-Octavo-Ignored-Fields"
# Maximum number of names that are logged, so that clients cannot fill the log by sending ever new ones.
MAX_LOGGED = 256

AnyResponse = TypeVar("AnyResponse", bound=Response)


class IgnoredFields:
    """Reports ignored fields to clients and in the log."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def add_header(self, body: RequestBody, response: AnyResponse) -> AnyResponse:
        """Return the response, with a header that names the fields of the request's body that were ignored, if any."""
        if body.ignored:
            response.headers[IGNORED_HEADER] = header_value(body.ignored)
            for name in body.ignored:
                self._log(name)
        return response

    def _log(self, name: str) -> None:
        if name in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(name)
        if name == OLDEST_MESSAGES:
            logger.warning("chats of Ollama's API are longer than the context: their oldest messages are left out")
        else:
            logger.warning("unknown request field %s is ignored (--strict-requests rejects it)", shown(name))
        if len(self._logged) == MAX_LOGGED:
            logger.warning("%d fields have been ignored: further ones are not logged", MAX_LOGGED)


# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,128})?")


class Handling:
    """Reads bodies and sends answers, for one engine.

    Attributes:
        names: the names under which the model is served; the first is used if a body names none.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig, in_flight: InFlight, routers: KeyRing) -> None:
        self._config = config
        self._in_flight = in_flight
        self.names = served_names(engine, config)
        self.reader = LocalApisReader(
            tokenizer=_tokenizer_of(engine),
            vocab_size=engine.info.vocab_size,
            hidden_size=engine.info.hidden_size,
            max_model_len=engine.info.max_model_len,
            limits=engine.info.limits,
            names=self.names,
            strict=config.strict_requests,
            default_sampling=engine.info.default_sampling,
            tool_call_parser=config.tool_call_parser if config.enable_auto_tool_choice else "none",
            reasoning_parser=config.reasoning_parser,
        )
        self._ignored = IgnoredFields()
        self._engine = engine
        self._texts = TokenTexts(engine)
        # Shared by all bodies with several prompts.
        self._turnstile = Turnstile(AT_ONCE, lambda: engine.is_planning, lambda: engine.is_stepping)
        limits = config.server_limits
        self.intake = BodyIntake(limits.max_body_size, limits.max_total_body_size)
        self.reading = ReaderPool(self.reader, limits.max_body_seconds, limits.max_body_memory)
        self.routed = RoutedPrompts(routers, self.reader.prompt_fingerprint, config.role)

    async def read(self, request: Request, method: str) -> Any:
        """Receive the request's body and return the result of `BodyReader.<method>`."""
        async with self.intake.body(request) as raw:
            return await self.read_received(request, raw, method)

    async def read_received(self, request: Request, raw: bytes, method: str) -> Any:
        """Return the result of `BodyReader.<method>` for a body that was received, perhaps with its prompt's tokens."""
        tenant = client_of(request.scope).tenant
        if (given := self.routed.token_bytes(request.headers, raw)) is None:
            return await self.reading.read(method, raw, tenant=tenant)
        framed = frame(method.encode(), given, raw[: len(raw) - len(given)])
        return await self.reading.read("given", *framed, tenant=tenant)

    def job(self, request: Request, read: Read, prefix: str) -> Job[Read]:
        """Return the engine requests of a body that was read, whose response's id begins with `prefix`.

        Raises:
            RequestError: the client's key does not allow as many prompts, or the priority.
        """
        client = client_of(request.scope)
        client.check_prompts(len(read.prompts))
        context = replace(
            client.context(read.request_id or new_id(prefix), read.body.priority, read.cache_salt),
            traceparent=self.traceparent(request),
            pins=tuple(pin for prompt in read.prompts for pin in prompt.pins),
            predicted_ids=read.predicted_ids,
            kv_hint=self.routed.kv_hint(request.headers),
            pooling=self._engine.info.pooling if isinstance(read, EmbeddingRequest) else None,
        )
        return Job(self._engine, read, context, self._texts, turnstile=self._turnstile)

    async def answer(
        self, request: Request, method: str, prefix: str, make_answer: Callable[[Job[Any]], Answer[Any]]
    ) -> Response:
        """Read the request's body by `BodyReader.<method>`, and send the answer that is made of its job."""
        read = await self.read(request, method)
        return await self.respond(request, make_answer(self.job(request, read, prefix)))

    async def respond(
        self, request: Request, answer: Answer[Any], error_event: Callable[[ApiError], bytes] | None = None
    ) -> Response:
        """Send the answer, whole or, if the body asks for one, as a stream.

        Args:
            error_event: formats an error as an event of the stream; if None, as the request's API does.
        """
        charge_of(request.scope).begin(answer.usage)
        sent: RequestBody = answer.job.read.sent
        if not sent.streams:
            whole = WholeAnswer(await self._in_flight.run(request.receive, answer.whole()))
            return self._ignored.add_header(sent, whole)
        api = api_of(request.scope)
        stream = EventStream(
            answer.events(),
            self._in_flight,
            error_event or (lambda error: api.error_event(error.status, error.fields())),
            api.stream,
        )
        return self._ignored.add_header(sent, stream)

    def respond_read(self, read: ReadAnswer) -> Response:
        """Send what answers a body without the engine."""
        return self.respond_json(read.body, read.content)

    def respond_json(self, body: RequestBody, content: bytes, media_type: str = "application/json") -> Response:
        return self._ignored.add_header(body, Response(content, media_type=media_type))

    def traceparent(self, request: Request) -> str | None:
        """Return the request's `traceparent` header, or None if it is absent or invalid, or tracing is off."""
        given = request.headers.get("traceparent", "") if self._config.otlp_traces_endpoint is not None else ""
        return given if _TRACEPARENT.fullmatch(given) else None


def served_names(engine: EngineClient, config: ServerConfig) -> tuple[str, ...]:
    """Return the names under which the model is served; the first is used if a body names none."""
    return tuple(config.served_model_name) or (engine.info.model_name,)


def _tokenizer_of(engine: EngineClient) -> TokenizerLike | None:
    try:
        return engine.tokenizer
    except RequestError:
        return None  # bodies that need a tokenizer are refused with the reason

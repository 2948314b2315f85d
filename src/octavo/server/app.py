"""The HTTP application: routes and their handlers. Engine and transport are passed in."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import octavo
from octavo.errors import OctavoError, RequestError, shortened
from octavo.server.access import Access
from octavo.server.auth import AdminAccess, RequireApiKey, client_of
from octavo.server.body_reading import BodyReading
from octavo.server.chat import ChatCompletions
from octavo.server.completions import Completions
from octavo.server.config import ServerConfig
from octavo.server.connection import EventStream, InFlight, WholeAnswer
from octavo.server.engine_client import EngineClient, TokenizerLike
from octavo.server.errors import ApiError, LastResort, answer_http_error, answer_octavo_error
from octavo.server.generation import json_bytes
from octavo.server.ignored_fields import IGNORED_HEADER, IgnoredFields
from octavo.server.intake import BodyIntake
from octavo.server.logprobs import TokenTexts
from octavo.server.logs import RequestLog
from octavo.server.messages import MessagesAnswer, MessageStream, message_error
from octavo.server.messages_body import MessagesBody
from octavo.server.openapi import DOCS_PAGE, describe
from octavo.server.origin import RefuseWebPages
from octavo.server.protocol import GenerationBody
from octavo.server.quota import Metered, Quotas, charge_of
from octavo.server.reading import (
    BodyReader,
    ChatRequest,
    CompletionRequest,
    FollowUp,
    ReadAnswer,
    after,
)
from octavo.server.response_store import ResponseStore, StoredResponse
from octavo.server.responses import ResponseAnswer
from octavo.server.responses_body import ResponsesBody

# Of a damaged cache's audit, which may name every block.
_MAX_HEALTH_DETAIL = 1000

# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,128})?")

Handler = Callable[[Request], Awaitable[Response]]


StreamableBody = GenerationBody | ResponsesBody


class Answer(Protocol):
    """What answers one body, whole or as a stream; one of the two is asked for."""

    def whole(self) -> Coroutine[Any, Any, list[bytes]]: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...


def create_app(
    engine: EngineClient,
    config: ServerConfig | None = None,
    in_flight: InFlight | None = None,
    access: Access | None = None,
) -> Starlette:
    """The application over a started engine.

    Args:
        in_flight: lets the caller end all requests at shutdown.
        access: lets the caller reread the keys.
    """
    config = ServerConfig() if config is None else config
    access = Access(config) if access is None else access
    # Not `in_flight or …`: one that holds nothing yet is false.
    api = Api(engine, config, InFlight(config.request_timeout) if in_flight is None else in_flight, access)
    middleware = [Middleware(RequestLog, writes=config.access_log), Middleware(LastResort)]
    if config.allowed_origins:
        middleware.append(_cors(config))
    if access.needs_key:
        middleware.append(Middleware(RequireApiKey, keys=access.clients))
    else:
        middleware.append(Middleware(RefuseWebPages, hosts=config.allowed_hosts, origins=config.allowed_origins))
    middleware.append(Middleware(Metered, quotas=api.quotas))
    app = Starlette(
        routes=[Route(path, handler, methods=[method]) for method, path, handler in api.routes()],
        exception_handlers={OctavoError: answer_octavo_error, HTTPException: answer_http_error},
        middleware=middleware,
    )
    # OpenAI's paths are exact: a redirect from /v1/models/ would lose the body of a POST in many clients.
    app.router.redirect_slashes = False
    # For whoever serves it: the first chat need not wait until a process has started.
    app.state.warm_up = api.warm_up
    return app


def _cors(config: ServerConfig) -> Middleware:
    """CORS headers for the allowed origins. Keys travel in headers that pages set: no cookies."""
    from starlette.middleware.cors import CORSMiddleware

    return Middleware(
        CORSMiddleware,
        allow_origins=list(config.allowed_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-Id", IGNORED_HEADER],
    )


class Api:
    """The request handlers. Each reads its body itself, so that a body over the limit is never buffered."""

    def __init__(self, engine: EngineClient, config: ServerConfig, in_flight: InFlight, access: Access) -> None:
        self._engine = engine
        self._config = config
        self._in_flight = in_flight
        self._names = tuple(config.served_model_name) or (engine.model_name,)
        self._created = int(time.time())
        texts = TokenTexts(engine)
        self._completions = Completions(engine, texts)
        self._chat = ChatCompletions(engine, texts)
        reader = BodyReader(
            tokenizer=_tokenizer_of(engine),
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            limits=engine.limits,
            names=self._names,
            strict=config.strict_requests,
            default_sampling=engine.default_sampling,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self._ignored = IgnoredFields()
        self._responses = ResponseStore(config.stored_responses_limit, config.stored_tenant_responses_limit)
        self._intake = BodyIntake(config.body_limit, config.total_body_limit)
        self._reading = BodyReading(reader, config.max_body_seconds, config.body_memory)
        self._admin = AdminAccess(access.admins)
        self.quotas = Quotas()
        self._metrics: dict[bool, Any] = {}

    def warm_up(self) -> None:
        """Start what would otherwise start with the first chat. Waits for nothing."""
        self._reading.warm_up()

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler) of every route."""
        return [
            ("POST", "/v1/completions", self.create_completion),
            ("POST", "/v1/chat/completions", self.create_chat_completion),
            ("POST", "/v1/responses", self.create_response),
            ("GET", "/v1/responses/{response_id}", self.retrieve_response),
            ("DELETE", "/v1/responses/{response_id}", self.delete_response),
            ("POST", "/v1/messages", self.create_message),
            ("POST", "/v1/messages/count_tokens", self.count_tokens),
            ("GET", "/v1/models", self.list_models),
            ("GET", "/v1/models/{model:path}", self.retrieve_model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/ping", self.health),
            ("GET", "/load", self.load),
            ("GET", "/version", self.show_version),
            ("GET", "/metrics", self.metrics),
            ("GET", "/debug/kv", self.debug_kv),
            ("GET", "/debug/pins", self.list_pins),
            ("DELETE", "/debug/pins/{pin_id}", self.unpin),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/docs", self.docs),
        ]

    async def create_completion(self, request: Request) -> Response:
        read: CompletionRequest = await self._read(request, "completion")
        answer = self._completions.answer(read, client_of(request.scope), self._traceparent(request))
        charge_of(request.scope).begin(answer.usage)
        return await self._respond(request, read.body, answer)

    async def create_chat_completion(self, request: Request) -> Response:
        read: ChatRequest = await self._read(request, "chat")
        answer = self._chat.answer(read, client_of(request.scope), self._traceparent(request))
        charge_of(request.scope).begin(answer.usage)
        return await self._respond(request, read.body, answer)

    async def create_response(self, request: Request) -> Response:
        tenant = client_of(request.scope).tenant
        async with self._intake.body(request) as raw:
            read: ChatRequest | FollowUp = await self._reading.read("response", raw, tenant)
            if isinstance(read, FollowUp):
                before = self._stored(tenant, read.previous_response_id, "previous_response_id")
                read = await self._reading.read("next_response", after(before.items, raw), tenant)
        assert isinstance(read, ChatRequest)
        store = partial(self._responses.put, tenant)
        answer = ResponseAnswer(self._engine, read, client_of(request.scope), self._traceparent(request), store)
        charge_of(request.scope).begin(answer.usage)
        body = read.origin
        assert isinstance(body, ResponsesBody)
        return await self._respond(request, body, answer)

    async def retrieve_response(self, request: Request) -> Response:
        tenant = client_of(request.scope).tenant
        return _json(self._stored(tenant, request.path_params["response_id"], "response_id").response)

    async def delete_response(self, request: Request) -> Response:
        tenant, response_id = client_of(request.scope).tenant, request.path_params["response_id"]
        self._stored(tenant, response_id, "response_id")
        self._responses.delete(tenant, response_id)
        return _json(json_bytes({"id": response_id, "object": "response", "deleted": True}))

    def _stored(self, tenant: str, response_id: str, param: str) -> StoredResponse:
        if (stored := self._responses.get(tenant, response_id)) is None:
            raise ApiError(
                404,
                f"There is no response `{shortened(response_id)}`; it may have made room for newer ones "
                "(--max-stored-responses, --max-stored-tenant-responses), or been lost with a restart.",
                param=param,
                code="response_not_found",
            )
        return stored

    async def create_message(self, request: Request) -> Response:
        try:
            read: ChatRequest = await self._read(request, "message")
            answer = MessagesAnswer(self._engine, read, client_of(request.scope), self._traceparent(request))
            charge_of(request.scope).begin(answer.usage)
            body = read.origin
            assert isinstance(body, MessagesBody)
            if body.streams:
                events = MessageStream(answer.events(), self._in_flight)
                return self._ignored.told(body, events)
            return self._ignored.told(body, WholeAnswer(await self._in_flight.run(request.receive, answer.whole())))
        except OctavoError as error:
            return message_error(error)

    async def count_tokens(self, request: Request) -> Response:
        try:
            return self._answer_read(await self._read(request, "count_tokens"))
        except OctavoError as error:
            return message_error(error)

    async def _respond(self, request: Request, body: StreamableBody, answer: Answer) -> Response:
        """The answer, whole or as a stream, as the body asks for it."""
        if body.streams:
            return self._ignored.told(body, EventStream(answer.events(), self._in_flight))
        return self._ignored.told(body, WholeAnswer(await self._in_flight.run(request.receive, answer.whole())))

    def _traceparent(self, request: Request) -> str | None:
        """The trace that a request says it is part of, where traces are made."""
        given = request.headers.get("traceparent", "") if self._config.otlp_traces_endpoint is not None else ""
        return given if _TRACEPARENT.fullmatch(given) else None

    async def list_models(self, request: Request) -> Response:
        models = [self._model_card(name) for name in self._names]
        return _json(json_bytes({"object": "list", "data": models}))

    async def retrieve_model(self, request: Request) -> Response:
        return _json(json_bytes(self._model_card(self._reading.reader.served_name(request.path_params["model"]))))

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "root": self._engine.model_name,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        return self._answer_read(await self._read(request, "tokenize"))

    async def detokenize(self, request: Request) -> Response:
        return self._answer_read(await self._read(request, "detokenize"))

    def _answer_read(self, read: ReadAnswer) -> Response:
        return self._ignored.told(read.body, _json(read.content))

    async def health(self, request: Request) -> Response:
        if not self._engine.is_alive:
            raise ApiError(503, "The engine is not running.", type="server_error", code="engine_dead")
        if (problem := self._engine.stats.audit_problem) is not None:
            # It serves on, so that this is no 503: whoever watches decides when to restart it.
            return _json(json_bytes({"status": "degraded", "detail": problem[:_MAX_HEALTH_DETAIL]}))
        if (seconds := self._engine.stats.hung_step_seconds) is not None:
            detail = f"A step of the engine has been running for {seconds:.0f} s; the log says where."
            return _json(json_bytes({"status": "degraded", "detail": detail}))
        return _json(b'{"status":"ok"}')

    async def ready(self, request: Request) -> Response:
        if not self._engine.is_alive:
            raise ApiError(503, "The engine is not running.", type="server_error", code="engine_dead")
        if self._in_flight.draining:
            raise ApiError(503, "The server is shutting down.", type="server_error", code="shutting_down")
        if self._engine.stats.hung_step_seconds is not None:
            raise ApiError(503, "A step of the engine hangs.", type="server_error", code="step_hangs")
        return _json(b'{"status":"ready"}')

    async def load(self, request: Request) -> Response:
        stats = self._engine.stats
        load = {"server_load": len(self._in_flight), "running": stats.num_running, "waiting": stats.num_waiting}
        return _json(json_bytes({**load, "kv_cache_usage": stats.kv_usage}))

    async def show_version(self, request: Request) -> Response:
        return _json(json_bytes({"version": octavo.__version__}))

    async def metrics(self, request: Request) -> Response:
        if self._config.metrics_access == "admin":
            self._admin.check(request)
        page = self._metrics_page(with_tenants=self._admin.admits(request))
        content, content_type = page.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    def _metrics_page(self, *, with_tenants: bool) -> Any:
        """The metrics of the whole server; those of its tenants too, which are nobody's business but an admin's."""
        if with_tenants not in self._metrics:
            # Imported at the first scrape: prometheus_client costs start-up a tenth of a second.
            from octavo.observe.metrics import MetricsPage
            from octavo.server.tenant_metrics import TenantCollector

            stats, name = self._engine.stats, self._names[0]
            others = [TenantCollector(self.quotas, stats.waiting, name)] if with_tenants else []
            self._metrics[with_tenants] = MetricsPage(stats, name, others)
        return self._metrics[with_tenants]

    async def debug_kv(self, request: Request) -> Response:
        self._admin.check(request)
        return _json(json_bytes(await self._engine.kv_report()))

    async def list_pins(self, request: Request) -> Response:
        self._admin.check(request)
        pins = [{"id": pin.pin_id, **_without_id(asdict(pin))} for pin in await self._engine.pins()]
        return _json(json_bytes({"object": "list", "data": pins}))

    async def unpin(self, request: Request) -> Response:
        self._admin.check(request)
        pin_id = request.path_params["pin_id"]
        if not await self._engine.unpin(pin_id):
            raise ApiError(
                404, f"There is no pin `{shortened(pin_id)}`; it may have expired.", param="pin_id", code="no_such_pin"
            )
        return _json(json_bytes({"id": pin_id, "object": "pin", "deleted": True}))

    async def reset_prefix_cache(self, request: Request) -> Response:
        self._admin.check(request)
        return _json(json_bytes({"evicted_blocks": await self._engine.reset_prefix_cache()}))

    async def openapi(self, request: Request) -> Response:
        return _json(json_bytes(describe(octavo.__version__)))

    async def docs(self, request: Request) -> Response:
        return Response(DOCS_PAGE, media_type="text/html")

    async def _read(self, request: Request, method: str) -> Any:
        """What `BodyReader.<method>` makes of the request's body."""
        async with self._intake.body(request) as raw:
            return await self._reading.read(method, raw, client_of(request.scope).tenant)


def _tokenizer_of(engine: EngineClient) -> TokenizerLike | None:
    try:
        return engine.tokenizer
    except RequestError:
        return None  # then bodies that need one are refused, each with the reason


def _without_id(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "pin_id"}


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")

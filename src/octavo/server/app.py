"""The HTTP application: its endpoints behind its middleware. Engine and transport are passed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Scope

from octavo.errors import OctavoError
from octavo.server.access import AcceptedKeys, WebPages
from octavo.server.apis import path_of
from octavo.server.bodies.fields import Served
from octavo.server.config import ServerConfig
from octavo.server.engine_client import EngineClient
from octavo.server.errors import Checked, answer_http_error, answer_octavo_error
from octavo.server.handling import IGNORED_HEADER, Handling
from octavo.server.http.connection import InFlight
from octavo.server.http.logs import RequestLog
from octavo.server.live_page import LivePage
from octavo.server.llamacpp_api import LlamaCppApi
from octavo.server.ollama_api import OllamaApi
from octavo.server.openai_api import OpenAIApi
from octavo.server.openapi import Description
from octavo.server.operations import Operations
from octavo.server.quotas import Metered, Quotas
from octavo.server.route import ResponseCounts, public_requests, refuse_control_characters, routes


def create_app(
    engine: EngineClient,
    config: ServerConfig | None = None,
    in_flight: InFlight | None = None,
    access: AcceptedKeys | None = None,
) -> Starlette:
    """Create the application for an engine.

    Args:
        in_flight: the registry of running requests, if the caller wants to cancel them at shutdown.
        access: the accepted keys, if the caller wants to reread them.
    """
    config = ServerConfig() if config is None else config
    access = AcceptedKeys(config) if access is None else access
    # Not `in_flight or …`: an `InFlight` without requests is falsy.
    in_flight = InFlight(config.request_timeout) if in_flight is None else in_flight
    several = len({client.tenant for client in access.clients.clients}) > 1
    # Each request has a connection: one tenant's leave half of them to the others.
    quotas = Quotas(max_requests=max(1, config.server_limits.max_connections // 2) if several else None)
    handling = Handling(engine, config, in_flight, access.routers)
    name, info = handling.names[0], engine.info
    responses = ResponseCounts()
    endpoints = [
        *OpenAIApi(engine, config, handling).endpoints(),
        *OllamaApi(engine, handling).endpoints(),
        *LlamaCppApi(engine, handling).endpoints(),
        *Operations(engine, config, in_flight, access, quotas, responses, name).endpoints(),
        *handling.routed.endpoints(engine, handling.reader, needs_key=access.needs_key),
        *LivePage(engine, in_flight, access, name, shows_text=config.live_page_text).endpoints(),
    ]
    server = Served(info.limits, info.max_model_len, info.vocab_size, info.hidden_size)
    endpoints += Description(server, endpoints).endpoints()
    responses.expect(endpoints)
    public = public_requests(endpoints)

    def identify(scope: Scope) -> None:
        if (scope["method"], path_of(scope)) not in public:
            access.identify(scope)

    check = identify if access.needs_key else WebPages(config.allowed_hosts, config.allowed_origins).refuse
    app = application(routes(endpoints, access.check, Middleware(Metered, quotas=quotas)), config, responses, check)
    app.state.endpoints = endpoints
    # Called by the server at start-up, so that the first chat need not wait until a process has started.
    app.state.warm_up = handling.reading.warm_up
    return app


def application(
    routes: Sequence[Route], config: ServerConfig, responses: ResponseCounts, check: Callable[[Scope], object]
) -> Starlette:
    """Return an application, a server's or a router's, with its middleware.

    Args:
        check: raises `ApiError` for a request that must not be answered.
    """

    def admit(scope: Scope) -> None:
        refuse_control_characters(scope)
        check(scope)

    middleware = [Middleware(RequestLog, responses=responses, writes=config.access_log)]
    if config.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        # Keys are sent as headers, not as cookies.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id", IGNORED_HEADER],
        )
        middleware.append(cors)
    app = Starlette(
        routes=routes,
        exception_handlers={OctavoError: answer_octavo_error, HTTPException: answer_http_error},
        middleware=[*middleware, Middleware(Checked, check=admit)],
    )
    # OpenAI's paths are exact: a redirect from /v1/models/ would lose the body of a POST in many clients.
    app.router.redirect_slashes = False
    return app

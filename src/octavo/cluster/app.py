"""The router's application and its life: endpoints, metrics, and health checks in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.cluster.config import RouterConfig
from octavo.cluster.relayed_answer import Relay
from octavo.cluster.router import RELAYED, NoWorkerError, Readers, Router
from octavo.cluster.selection import PrefixSelection, make_selection
from octavo.cluster.workers import Workers
from octavo.errors import ConfigError, RequestError
from octavo.server.access import AcceptedKeys, WebPages, authenticated
from octavo.server.app import application
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.http.connection import InFlight
from octavo.server.http.listening import bound, listen, log_failed_accepts
from octavo.server.interpreter_settings import settle_interpreter
from octavo.server.route import Access, ResponseCounts, json_response
from octavo.server.run import Server, check_certificate


def route(router_config: RouterConfig, config: ServerConfig) -> None:
    """Route until SIGINT or SIGTERM; returns when every request has finished or was cancelled.

    Raises:
        ConfigError: the address cannot be listened on, a package is missing, or there is no router key.
    """
    if config.router_key is None:
        raise ConfigError(
            "router_key is missing: set it to the servers' router key (--router-key or $OCTAVO_ROUTER_KEY)"
        )
    check_certificate(config)
    with bound(config) as listener:
        settle_interpreter()
        asyncio.run(_route_on(listener, router_config, config))


async def _route_on(listener: Any, router_config: RouterConfig, config: ServerConfig) -> None:
    log_failed_accepts(asyncio.get_running_loop())
    in_flight = InFlight(config.request_timeout)
    access = AcceptedKeys(config)
    router = make_router(router_config, config, access, in_flight)
    server = Server(create_router_app(router, router_config, config, access, in_flight), config, in_flight, "a router")
    server.on_hangup = access.reread if config.keys_file is not None else None
    await router.workers.check_all()
    checks = asyncio.ensure_future(router.workers.run())
    try:
        with server.handled_signals():
            listen(listener)
            await server.serve(sockets=[listener])
    finally:
        checks.cancel()
        with suppress(asyncio.CancelledError):
            await checks
        router.workers.close()
        await router.selection.close()


def make_router(router_config: RouterConfig, config: ServerConfig, access: AcceptedKeys, in_flight: InFlight) -> Router:
    workers = Workers(router_config, config.router_key or "")
    readers = Readers(config, router_config.tokenizer)
    selection = make_selection(router_config)
    return Router(config, access, workers, selection, readers, in_flight, router_config.prefill_tokens)


def create_router_app(
    router: Router, router_config: RouterConfig, config: ServerConfig, access: AcceptedKeys, in_flight: InFlight
) -> Starlette:
    """Create the application around a router."""
    started = int(time.time())

    async def health(request: Request) -> Response:
        healthy = router.workers.healthy()
        status = {"status": "ok" if healthy else "degraded", "workers": len(healthy)}
        return json_response(status)

    async def ready(request: Request) -> Response:
        if in_flight.draining:
            raise ApiError(503, "The router is shutting down.", type="server_error", code="shutting_down")
        if not router.workers.healthy():
            raise NoWorkerError(None)
        return json_response(b'{"status":"ready"}')

    async def models(request: Request) -> Response:
        if access.needs_key:
            access.identify(request.scope)
            access.check(Access.CLIENT, request.scope)
        found = {name: worker for worker in router.workers.healthy() for name in worker.names}
        cards = [
            {
                "id": name,
                "object": "model",
                "created": started,
                "owned_by": "octavo",
                "root": worker.facts["model"],
                "max_model_len": worker.facts["prompt_settings"]["max_model_len"],
            }
            for name, worker in found.items()
        ]
        return json_response({"object": "list", "data": cards})

    async def metrics(request: Request) -> Response:
        if config.metrics_access == "admin":
            access.check(Access.ADMIN, request.scope)
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(router, len(in_flight)))
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    async def register(request: Request) -> Response:
        if not router_config.accept_workers:
            raise ApiError(HTTPStatus.FORBIDDEN, "Servers cannot register here (--accept-workers).", code="closed")
        authenticated(access.routers, request.scope)
        url = (await request.json()).get("url")
        if not isinstance(url, str):
            raise RequestError("url must be the URL of a server", param="url")
        try:
            (router.workers.register if request.method == "POST" else router.workers.unregister)(url)
        except ConfigError as error:
            raise RequestError(str(error), param="url") from error
        return json_response({"url": url, "registered": request.method == "POST"})

    routes = [
        *(Route(path, Relay(router), methods=["POST"]) for path in RELAYED),
        Route("/v1/models", models, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/workers", register, methods=["POST", "DELETE"]),
    ]
    pages = WebPages(config.allowed_hosts, config.allowed_origins)
    # With keys, each endpoint checks its own.
    check = (lambda scope: None) if access.needs_key else pages.refuse
    return application(routes, config, ResponseCounts(), check)


class _Collector:
    """Collects the router's metrics when they are scraped."""

    def __init__(self, router: Router, num_in_flight: int) -> None:
        self._router = router
        self._num_in_flight = num_in_flight

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def counter(name: str, help: str, labels: list[str], values: Iterable[tuple[Any, float]]) -> Any:
            family = CounterMetricFamily(f"octavo:router_{name}", help, labels=labels)
            for label, value in values:
                family.add_metric([label] if isinstance(label, str) else list(label), value)
            return family

        stats, selection, workers = self._router.stats, self._router.selection, list(self._router.workers)
        yield counter("requests", "Answers relayed.", ["worker", "status"], stats.requests.items())
        yield counter("retries", "Requests tried elsewhere or again.", ["reason"], stats.retries.items())
        fallbacks = selection.fallbacks.items()
        yield counter("fallbacks", "Servers chosen without reading the prompt.", ["reason"], fallbacks)
        yield counter("broken_streams", "Answers that a server left unfinished.", [], [((), stats.broken_streams)])
        yield counter("choices", "Servers chosen.", [], [((), stats.choices)])
        yield counter("choice_seconds", "Time spent choosing them.", [], [((), stats.choice_seconds)])
        yield counter("prompt_tokens", "Tokens of prompts that were read.", [], [((), stats.prompt_tokens)])
        hints = "Requests sent with the address of another server that has more of their prompt."
        yield counter("kv_hints", hints, [], [((), stats.hints)])
        yield counter("prefills", "Prompts computed by another server first.", ["status"], stats.prefills.items())
        cached = "Of these, tokens that the chosen server had cached, as the index knew."
        yield counter("cached_tokens", cached, [], [((), stats.cached_tokens)])
        up = GaugeMetricFamily("octavo:router_worker_up", "Whether a server takes requests.", labels=["worker"])
        busy = GaugeMetricFamily("octavo:router_worker_requests", "Requests in progress there.", labels=["worker"])
        for worker in workers:
            up.add_metric([worker.url], worker.is_healthy)
            busy.add_metric([worker.url], worker.in_flight)
        yield from (up, busy)
        yield GaugeMetricFamily("octavo:router_in_flight", "Requests being relayed.", self._num_in_flight)
        if isinstance(selection, PrefixSelection):
            reserved = "Requests that the index counts at servers."
            yield GaugeMetricFamily("octavo:router_reservations", reserved, selection.num_reserved())

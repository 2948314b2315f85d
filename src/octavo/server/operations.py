"""The operator's endpoints: health, load, metrics, and those for admins only."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.engine.inspection import list_pins
from octavo.errors import shortened
from octavo.server.access import AcceptedKeys
from octavo.server.config import ServerConfig
from octavo.server.engine_client import EngineClient
from octavo.server.errors import ApiError
from octavo.server.http.connection import InFlight
from octavo.server.quotas import Quotas
from octavo.server.route import Access, Endpoint, Handlers, ResponseCounts, delete, get, json_response, post

# Maximum length of a damaged cache's audit in /health; the audit may name every block.
_MAX_HEALTH_DETAIL = 1000
# Access to totals over all tenants, which `--metrics-access` sets.
TOTALS = Access.OPERATOR


class Operations(Handlers):
    """The handlers of these endpoints."""

    def __init__(
        self,
        engine: EngineClient,
        config: ServerConfig,
        in_flight: InFlight,
        access: AcceptedKeys,
        quotas: Quotas,
        responses: ResponseCounts,
        model_name: str,
    ) -> None:
        self._engine = engine
        self._config = config
        self._in_flight = in_flight
        self._access = access
        self._quotas = quotas
        self._responses = responses
        self._model_name = model_name
        self._metrics: dict[bool, Any] = {}

    def endpoints(self) -> list[Endpoint]:
        # With few tenants, the cache's usage reveals what another one sends: /load is as closed as /metrics.
        totals = Access.ADMIN if self._config.metrics_access == "admin" else Access.PUBLIC
        return [replace(each, access=totals) if each.access is TOTALS else each for each in super().endpoints()]

    @get("/health", "Status", access=Access.PUBLIC)
    @get("/ping", "Status", access=Access.PUBLIC)
    async def health(self, request: Request) -> Response:
        """200 while the engine runs, 503 when it does not; status "degraded" where its block accounting is wrong."""
        if not self._engine.is_alive:
            raise ApiError(503, "The engine is not running.", type="server_error", code="engine_dead")
        if (problem := self._engine.stats.audit_problem) is not None:
            # Not a 503, because the engine continues to serve: monitoring decides when to restart it.
            return json_response({"status": "degraded", "detail": problem[:_MAX_HEALTH_DETAIL]})
        if (seconds := self._engine.stats.hung_step_seconds) is not None:
            detail = f"A step of the engine has been running for {seconds:.0f} s; the log says where."
            return json_response({"status": "degraded", "detail": detail})
        return json_response(b'{"status":"ok"}')

    @get("/ready", "Status", access=Access.PUBLIC)
    async def ready(self, request: Request) -> Response:
        """200 while the server takes requests, 503 while it stops or its engine does not run."""
        if not self._engine.is_alive:
            raise ApiError(503, "The engine is not running.", type="server_error", code="engine_dead")
        if self._in_flight.draining:
            raise ApiError(503, "The server is shutting down.", type="server_error", code="shutting_down")
        if self._engine.stats.hung_step_seconds is not None:
            raise ApiError(503, "An engine step hangs.", type="server_error", code="step_hangs")
        return json_response(b'{"status":"ready"}')

    @get("/load", "Load", access=TOTALS)
    async def load(self, request: Request) -> Response:
        """Requests in flight, running and waiting, and the share of the KV cache in use."""
        gauges = self._engine.stats.gauges()
        load = {"server_load": len(self._in_flight), "running": gauges.num_running, "waiting": gauges.num_waiting}
        return json_response({**load, "kv_cache_usage": gauges.kv_usage})

    @get("/version", "Version", access=Access.PUBLIC)
    async def show_version(self, request: Request) -> Response:
        """The version of Octavo."""
        return json_response({"version": octavo.__version__})

    @get("/metrics", "text/plain", access=TOTALS)
    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics, under vLLM's names."""
        page = self._metrics_page(with_tenants=self._access.admits_admin(request))
        content, content_type = page.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    def _metrics_page(self, *, with_tenants: bool) -> Any:
        """Return the metrics of the whole server and, with `with_tenants`, of its tenants."""
        if with_tenants not in self._metrics:
            # Imported at the first scrape, because importing prometheus_client takes a tenth of a second.
            from octavo.observe.metrics import MetricsPage
            from octavo.server.server_metrics import ResponseCollector, TenantCollector

            stats, name = self._engine.stats, self._model_name
            others = [TenantCollector(self._quotas, stats, name)] if with_tenants else []
            self._metrics[with_tenants] = MetricsPage(stats, name, [*others, ResponseCollector(self._responses)])
        return self._metrics[with_tenants]

    @get("/debug/kv", "KVReport", access=Access.ADMIN)
    async def debug_kv(self, request: Request) -> Response:
        """Bytes of the KV cache by state and tenant, and its hits."""
        return json_response(await self._engine.ask(lambda core: core.kv_report()))

    @get("/debug/pins", "PinList", access=Access.ADMIN)
    async def list_pins(self, request: Request) -> Response:
        """Every pinned prefix."""
        found = await self._engine.ask(lambda core: list_pins(core.scheduler.kv))
        pins = [{"id": pin.pin_id, **_without_id(asdict(pin))} for pin in found]
        return json_response({"object": "list", "data": pins})

    @delete("/debug/pins/{pin_id}", "DeletedPin", access=Access.ADMIN)
    async def unpin(self, request: Request) -> Response:
        """Let a pin go before its time."""
        pin_id = request.path_params["pin_id"]
        if not await self._engine.ask(lambda core: core.scheduler.kv.pins.unpin(pin_id)):
            raise ApiError(
                404, f"There is no pin `{shortened(pin_id)}`; it may have expired.", param="pin_id", code="no_such_pin"
            )
        return json_response({"id": pin_id, "object": "pin", "deleted": True})

    @post("/reset_prefix_cache", "Evicted", access=Access.ADMIN)
    async def reset_prefix_cache(self, request: Request) -> Response:
        """Give up every cached block."""
        return json_response({"evicted_blocks": await self._engine.ask(lambda core: core.reset_prefix_cache())})


def _without_id(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "pin_id"}

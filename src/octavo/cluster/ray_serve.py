"""Octavo on Ray Serve: replicas with an engine each, behind the application of `octavo route` as ingress.

    client ── HTTP ──> ingress: reads the prompt ── handle ──> PrefixRouter ──> replica: `octavo serve`'s application
           <── bytes ─────── all bytes that a replica has ready, as one item ─────────┘

Ray starts, watches, scales and replaces the replicas. `docs/operate/ray.md` shows how to use it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from starlette.types import Message, Scope

from octavo.cluster.app import create_router_app
from octavo.cluster.config import RouterConfig
from octavo.cluster.connections import Connections, Headers, Receiver, ServerAnswer
from octavo.cluster.router import Readers, Router
from octavo.cluster.selection import Selection
from octavo.cluster.workers import RoutedPrompt, Worker, Workers
from octavo.config import SERVER_DEFAULTS, EngineConfig
from octavo.errors import ConfigError, EngineDeadError
from octavo.server.access import AcceptedKeys
from octavo.server.config import ServerConfig
from octavo.server.engine_options import share_among_tenants
from octavo.server.http.connection import InFlight
from octavo.server.routers import WORKER_PATH

ITEM_SECONDS = 0.02
"""Least time between two items of one answer: Ray takes about a millisecond of processor time for each."""

WAITING_TOKENS = 2048
"""Tokens of prompts that may wait at each replica before another one is started, unless `replicas` says otherwise."""

_STATS_SECONDS = 1.0
_MOST_TRIES = 3
_HEALTH_SECONDS = 2.0
# Requests of one replica or ingress at a time: the engine's own queue has its limits.
_MOST_ONGOING = 4096
# A replica listens on no port, so that only the ingress can send it tokens in place of a prompt.
_ROUTER_KEY = "ingress-of-the-same-application"


def _free_ports(count: int) -> list[int]:
    """Return free ports, because their numbers must be known before the servers listen."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def waiting_tokens_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy: as many replicas as bring the waiting prompt tokens of each to `target_ongoing_requests`."""
    waiting = context.aggregated_metrics.get("waiting_tokens", {})
    busy = context.aggregated_metrics.get("running_requests", {})
    wanted = -(-int(sum(waiting.values())) // int(context.config.target_ongoing_requests))
    # A replica with requests is kept until the others have room for them.
    return max(wanted, sum(count > 0 for count in busy.values()), 1), {}


class RayReplica:
    """One engine and the application of `octavo serve`, which is called without HTTP."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine_options: Mapping[str, Any], server_options: Mapping[str, Any]
    ) -> None:
        from octavo.engine.async_engine import AsyncEngine
        from octavo.engine.builder import build_engine
        from octavo.server.app import create_app

        host, (events, replay) = ray.util.get_node_ip_address(), _free_ports(2)
        # Listens beyond loopback only if Ray does.
        bound = "127.0.0.1" if host.startswith("127.") else "*"
        published = {"enable_kv_cache_events": True, "endpoint": f"tcp://{bound}:{events}"}
        published["replay_endpoint"] = f"tcp://{bound}:{replay}"
        server = ServerConfig(**{**server_options, "router_key": _ROUTER_KEY})
        options = {**SERVER_DEFAULTS, "kv_events_config": published, **engine_options}
        config = share_among_tenants(EngineConfig.from_options(options), server)
        self._engine = AsyncEngine(
            build_engine(config), config.model, watchdog_seconds=server.watchdog_timeout or None, prepare_grammars=True
        )
        access = AcceptedKeys(server)
        self._in_flight = InFlight(server.request_timeout)
        self._app = create_app(self._engine, server, self._in_flight, access)
        self._drain_seconds = server.shutdown_timeout
        self._url = f"http://{host}:{events}"
        limits = self._engine.resolve_kv_limits(access.kv_amounts)
        await self._engine.ask(lambda core: core.set_kv_limits(limits))
        await self._engine.start()
        self._app.state.warm_up()

    async def answer(
        self, target: str, headers: Headers, body: bytes, prompt: RoutedPrompt | None = None
    ) -> AsyncIterator[list[Message]]:
        """Answer a POST; yields the bytes that the application has sent since the last item.

        Args:
            prompt: for `PrefixRouter`, which has read it.
        """
        path, _, query = target.partition("?")
        async for messages in self._call("POST", path, query, headers, body):
            yield messages

    async def record_routing_stats(self) -> dict[str, Any]:
        """Describe this replica to `PrefixRouter`."""
        headers = [(b"authorization", f"Bearer {_ROUTER_KEY}".encode())]
        messages = [each async for item in self._call("GET", WORKER_PATH, "", headers, b"") for each in item]
        if messages[0]["status"] != 200:
            raise RuntimeError(f"{WORKER_PATH} answers {messages[0]['status']}")
        facts: dict[str, Any] = json.loads(b"".join(message.get("body", b"") for message in messages[1:]))
        return {**facts, "url": self._url}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures that `waiting_tokens_policy` reads."""
        stats = self._engine.stats
        return {"waiting_tokens": float(stats.waiting.total.tokens), "running_requests": float(len(self._in_flight))}

    def check_health(self) -> None:
        """Raise if there is work but no step has ended recently, so that Ray replaces this replica."""
        if not self._engine.is_alive:
            raise EngineDeadError("the engine is not running")
        if (seconds := self._engine.stats.hung_step_seconds) is not None:
            raise EngineDeadError(f"a step of the engine has been running for {seconds:.0f} s")

    async def __del__(self) -> None:
        """Called by Ray once no request is left, or its grace period is over."""
        if hasattr(self, "_engine"):  # or it did not start
            await self._engine.shutdown(self._drain_seconds)

    async def _call(
        self, method: str, path: str, query: str, headers: Headers, body: bytes
    ) -> AsyncIterator[list[Message]]:
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": list(headers),
            "client": None,
            "server": ("localhost", 80),
            "state": {},
        }
        if method == "POST":
            scope["headers"].append((b"content-length", str(len(body)).encode()))
        sent: list[Message] = []
        news, left = asyncio.Event(), asyncio.Event()
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(received, None)) is None:
                await left.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Message) -> None:
            sent.append(message)
            news.set()

        task = asyncio.ensure_future(self._app(scope, receive, send))
        task.add_done_callback(lambda _: news.set())
        try:
            while not task.done() or sent:
                await news.wait()
                news.clear()
                if sent:
                    items, sent[:] = list(sent), []
                    yield items
                    if not task.done():
                        await asyncio.sleep(ITEM_SECONDS)
            task.result()
        finally:
            left.set()
            with suppress(Exception):
                await task


class RayIngress:
    """The application of `octavo route` in front of the replicas, which to it are one server."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, replicas: serve.handle.DeploymentHandle, server_options: Mapping[str, Any], tokenizers: list[str]
    ) -> None:
        config = ServerConfig(**{**server_options, "router_key": _ROUTER_KEY})
        router_config = RouterConfig(accept_workers=True, tokenizer=tokenizers)
        access, in_flight = AcceptedKeys(config), InFlight(config.request_timeout)
        facts = await replicas.record_routing_stats.remote()
        handle = replicas.options(stream=True)
        unused = Connections(facts["url"])
        worker = _AllReplicas(facts["url"], unused, {**facts, "kv_events": None}, is_healthy=True, replicas=handle)
        workers = _OneWorker(worker)
        readers = Readers(config, tokenizers)
        router = Router(config, access, workers, Selection(), readers, in_flight, router_config.prefill_tokens)
        await workers.on_up(worker)
        self._app = create_router_app(router, router_config, config, access, in_flight)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app


class _OneWorker(Workers):
    """The only worker: Ray finds and watches the replicas."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(RouterConfig(accept_workers=True), _ROUTER_KEY)
        self._by_url = {worker.url: worker}

    async def suspect(self, worker: Worker) -> None:
        """Do nothing: the next request goes to another replica."""


@dataclass(eq=False, slots=True)
class _AllReplicas(Worker):
    """All replicas as one worker, which is not connected to.

    Attributes:
        replicas: Ray's handle.
    """

    replicas: Any = None

    @asynccontextmanager
    async def post(
        self, target: str, headers: Headers, body: bytes, prompt: RoutedPrompt
    ) -> AsyncIterator[ServerAnswer]:
        for attempt in range(_MOST_TRIES):
            items = self.replicas.answer.remote(target, headers, body, prompt=prompt)
            answer = _HandleAnswer(items)
            try:
                await answer.begin()
                break
            except (RayError, RayServeException, StopAsyncIteration) as error:
                if attempt == _MOST_TRIES - 1:
                    raise ConnectionError(f"no replica answers: {error}") from error
        try:
            yield answer
        finally:
            items.cancel()


class _HandleAnswer(ServerAnswer):
    """An answer from a handle's items."""

    def __init__(self, items: Any) -> None:
        self._items = items

    async def begin(self) -> None:
        first, *self._pieces = await anext(self._items)
        self.status, self.headers = first["status"], first.get("headers", ())

    async def relay(self, take: Receiver) -> None:
        await take(self._joined(self._pieces), False)
        try:
            async for pieces in self._items:
                await take(self._joined(pieces), False)
        except (RayError, RayServeException) as error:
            raise ConnectionError(f"the replica has gone: {error}") from error
        await take(b"", True)

    def _joined(self, messages: list[Message]) -> bytes:
        return b"".join(message.get("body", b"") for message in messages)


@dataclass(frozen=True)
class _ApplicationArguments:
    """The arguments of an application; see `app`."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    route: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: list[str] = field(default_factory=list)
    replicas: int | Mapping[str, Any] = 1
    num_cpus: float = 1
    num_gpus: float = 0


def app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application, for `serve run octavo.cluster.ray_serve:app` or a `RayService`.

    Args:
        args: `engine`, `server` and `route`, the options of `EngineConfig`, `ServerConfig` and `RouterConfig`;
            `tokenizer`, what the ingress tokenises with (default: the model); `replicas`, a number or options of Ray's
            `AutoscalingConfig`, whose `target_ongoing_requests` counts waiting tokens of prompts; `num_cpus` and
            `num_gpus` of a replica.

    Raises:
        ConfigError: an argument is unknown, or an option is invalid.
    """
    try:
        given = _ApplicationArguments(**args)
    except TypeError as error:
        raise ConfigError(f"octavo.cluster.ray_serve: {error}") from error
    threads = {"num_threads": max(1, int(given.num_cpus))}
    engine = {**threads, **given.engine}
    EngineConfig.from_options({**SERVER_DEFAULTS, **engine})
    ServerConfig(**given.server)
    routing = RequestRouterConfig(
        request_router_class="octavo.cluster.ray_router:PrefixRouter",
        request_router_kwargs=dict(given.route),
        request_routing_stats_period_s=_STATS_SECONDS,
    )
    options: dict[str, Any] = {
        "request_router_config": routing,
        "ray_actor_options": {"num_cpus": given.num_cpus, "num_gpus": given.num_gpus},
        "max_ongoing_requests": _MOST_ONGOING,
        "health_check_period_s": _HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": ServerConfig(**given.server).shutdown_timeout,
    }
    if isinstance(given.replicas, int):
        options["num_replicas"] = given.replicas
    else:
        policy = {"policy_function": "octavo.cluster.ray_serve:waiting_tokens_policy"}
        defaults = {"policy": policy, "target_ongoing_requests": WAITING_TOKENS}
        options["autoscaling_config"] = AutoscalingConfig(**{**defaults, **given.replicas})
    replicas = serve.deployment(RayReplica, name="Replica").options(**options).bind(dict(engine), dict(given.server))
    ingress = serve.deployment(serve.ingress()(RayIngress)).options(
        name="Ingress", max_ongoing_requests=_MOST_ONGOING, ray_actor_options={"num_cpus": 0.1}
    )
    return ingress.bind(replicas, dict(given.server), list(given.tokenizer))

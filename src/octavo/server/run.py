"""Serve an engine on a socket, from start-up to the last request."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from octavo.errors import ConfigError, EngineDeadError
from octavo.server.access import Access
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.connection import InFlight
from octavo.server.engine_client import EngineClient
from octavo.server.listening import bound, listen, require_keys_beyond_loopback, shown_address
from octavo.server.memory import settle_interpreter
from octavo.server.transport import ConnectionCounters, guarded_protocol

# Connections that are accepted before other callbacks of the event loop have a turn, and that may wait for it.
_ACCEPTED_AT_ONCE = 16
_MOST_WAITING = 2048
# How long after the last request was cancelled its client may take to read the error.
FAREWELL_SECONDS = 2.0


def _nothing() -> None: ...


def serve(
    make_engine: Callable[[], EngineClient], config: ServerConfig, check_interrupt: Callable[[], None] = _nothing
) -> None:
    """Serve one engine until SIGINT or SIGTERM; returns when every request has finished or was cancelled.

    The port is taken before `make_engine` loads a model, so that one in use fails at once. The first signal stops
    accepting, and lets what runs finish within `config.shutdown_timeout`; the second ends the process on the spot,
    with exit code 128 + the signal's number.

    Args:
        check_interrupt: raises `KeyboardInterrupt` where Ctrl-C came, and was lost, before signals were handled here.

    Raises:
        ConfigError: the address cannot be listened on.
        EngineDeadError: the engine died while it served. Its clients have been told by then.
        Exception: whatever `make_engine` raises.
    """
    access = Access(config)
    check_certificate(config)
    with bound(config) as listener:
        require_keys_beyond_loopback(listener, config, access)
        engine = make_engine()
        settle_interpreter()
        asyncio.run(serve_on(listener, engine, config, access, check_interrupt))


def check_certificate(config: ServerConfig) -> None:
    """Refuse a certificate or key that cannot be used, before a model is loaded; raises `ConfigError`."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # SSLError is one
        files = f"{config.ssl_certfile} with {config.ssl_keyfile}"
        raise ConfigError(f"cannot serve HTTPS with {files}: {error.strerror or error}") from error


async def serve_on(
    listener: socket.socket,
    engine: EngineClient,
    config: ServerConfig,
    access: Access | None = None,
    check_interrupt: Callable[[], None] = _nothing,
) -> None:
    """`serve`, with a bound socket and an engine that is not yet started.

    Raises:
        ConfigError: another process began to listen on the same port meanwhile, or the tenants' floors and caps do not
            go into the cache.
        EngineDeadError: the engine died while it served.
    """
    in_flight = InFlight(config.request_timeout)
    access = Access(config) if access is None else access
    app = create_app(engine, config, in_flight, access)
    server = Server(app, config, in_flight, engine.model_name)
    server.has_engine = lambda: engine.is_alive
    server.is_engine_planning = lambda: engine.is_planning
    # Without a file to reread, a hangup ends the process, as ever.
    server.on_hangup = None if config.keys_file is None else partial(_reread, access, engine)
    await engine.set_kv_limits(engine.resolve_kv_limits(access.kv_amounts))
    with server.handled_signals():
        check_interrupt()
        await engine.start()
        try:
            listen(listener)
            app.state.warm_up()
            await server.serve(sockets=[listener])
            if not engine.is_alive:
                raise EngineDeadError("the engine died, and the server with it; the log says why")
        finally:
            await engine.shutdown(0)


def _reread(access: Access, engine: EngineClient) -> None:
    """Reread the keys, and tell the engine of the tenants' floors and caps."""
    if access.reread(engine.resolve_kv_limits):
        limits = engine.resolve_kv_limits(access.kv_amounts)
        _tellings.add(task := asyncio.ensure_future(engine.set_kv_limits(limits)))
        task.add_done_callback(_tellings.discard)


# The event loop itself holds its tasks by weak references only.
_tellings: set[asyncio.Future[None]] = set()


class Server(uvicorn.Server):
    """uvicorn with Octavo's shutdown: requests get a grace period, and a second signal ends it at once."""

    def __init__(self, app: ASGIApp, config: ServerConfig, in_flight: InFlight, model_name: str) -> None:
        self.connections = ConnectionCounters()
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded_protocol(config, self.connections, lambda: self.is_engine_planning()),
                ws="none",
                root_path=config.root_path,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # any number of seconds
                lifespan="off",  # the engine is started and stopped by `serve_on`
                log_config=None,  # logging belongs to the process, not to a library
                log_level="warning",
                access_log=False,
                backlog=_ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=int(config.shutdown_timeout + FAREWELL_SECONDS),
            )
        )
        self._model_name = model_name
        self.has_engine: Callable[[], bool] = lambda: True
        self.is_engine_planning: Callable[[], bool] = lambda: False
        self._in_flight = in_flight
        self._shutdown_timeout = config.shutdown_timeout
        self.on_hangup: Callable[[], None] | None = None

    @contextmanager
    def handled_signals(self) -> Generator[None, None, None]:
        """SIGINT and SIGTERM end this server meanwhile, SIGHUP calls `on_hangup`. Only the main thread may ask for
        signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        if (on_hangup := self.on_hangup) is not None:
            loop = asyncio.get_running_loop()
            # In the loop: what a signal interrupts may be writing to the log.
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(on_hangup))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        """Nothing: uvicorn would raise the signals again after a clean end, and `handled_signals` covers more."""
        return nullcontext()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # Threads that compute, and clients that do not read, would hold up any orderly way out.
            sys.stdout.flush()
            os._exit(128 + sig)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Several times a second: whether to leave. Without its engine a server has nothing left to serve."""
        return await super().on_tick(counter) or not self.has_engine()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio accepts as many connections in one go as may wait; more may wait than that.
            listener.listen(_MOST_WAITING)
        if self.started and sockets:
            scheme = "http" if self.config.ssl is None else "https"
            where = shown_address(sockets[0], scheme, self.config.root_path)
            print(f"Octavo serving {self._model_name} on {where}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Pages that watch would keep their connections open for good.
        self._in_flight.draining = True
        if self._in_flight:
            running = f"{len(self._in_flight)} running request{'s' if len(self._in_flight) > 1 else ''}"
            wait = f"up to {self._shutdown_timeout:g} s for {running}; once more leaves at once"
            print(f"Octavo stops: waiting {wait}", file=sys.stderr, flush=True)
        out_of_time = asyncio.get_running_loop().call_later(self._shutdown_timeout, self._in_flight.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            out_of_time.cancel()

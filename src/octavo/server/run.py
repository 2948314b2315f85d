"""Serve an engine on a socket, from start-up to the last request."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from octavo.errors import ConfigError, EngineDeadError
from octavo.server.access import AcceptedKeys
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.engine_client import EngineClient
from octavo.server.http.connection import InFlight
from octavo.server.http.listening import bound, listen, log_failed_accepts, require_keys_beyond_loopback, shown_address
from octavo.server.http.transport import MAX_HEADER_BYTES, ConnectionCounters, guarded_protocol
from octavo.server.interpreter_settings import return_free_memory, settle_interpreter
from octavo.server.routers import registered
from octavo.units import counted

logger = logging.getLogger(__name__)

# Number of connections that are accepted before other callbacks of the event loop run, and that may wait for that.
_ACCEPTED_AT_ONCE = 16
_MOST_WAITING = 2048
# Ticks, of a tenth of a second each, between two returns of freed memory to the operating system.
_RETURNED_EVERY = 300
# Seconds that clients of cancelled requests have to read the error at shutdown.
FAREWELL_SECONDS = 2.0


def _nothing() -> None: ...


def serve(
    make_engine: Callable[[], EngineClient], config: ServerConfig, check_interrupt: Callable[[], None] = _nothing
) -> None:
    """Serve one engine until SIGINT or SIGTERM; returns when every request has finished or was cancelled.

    The port is bound before `make_engine` loads a model, so that a port in use fails at once. On the first signal the
    server stops accepting connections and lets running requests finish within `config.shutdown_timeout`; a second
    signal ends the process at once, with exit code 128 + the signal's number.

    Args:
        check_interrupt: raises `KeyboardInterrupt` if a Ctrl-C arrived, and was lost, before signals were handled here.

    Raises:
        ConfigError: the server cannot listen on the address.
        EngineDeadError: the engine died while it served; its clients have been answered.
        Exception: whatever `make_engine` raises.
    """
    access = AcceptedKeys(config)
    check_certificate(config)
    with bound(config) as listener, _hangups_noted(config) as hangups:
        require_keys_beyond_loopback(listener, config, access)
        engine = make_engine()
        settle_interpreter()
        asyncio.run(serve_on(listener, engine, config, access, check_interrupt, hangups))


@contextmanager
def _hangups_noted(config: ServerConfig) -> Generator[list[int], None, None]:
    """Record SIGHUPs that arrive before the server handles them, while the model is loaded, which may take minutes."""
    noted: list[int] = []
    if not _survives_hangups(config) or threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGHUP, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGHUP, before)


def _survives_hangups(config: ServerConfig) -> bool:
    """Whether the server goes on after a SIGHUP: it has keys to reread, or was not started from a terminal.

    A closed terminal sends one, and so does a service manager that reloads a server without a keys file.
    """
    return config.keys_file is not None or sys.stdin is None or not sys.stdin.isatty()


def check_certificate(config: ServerConfig) -> None:
    """Raise `ConfigError` for an unusable certificate or key; called before a model is loaded."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # includes SSLError
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise ConfigError(f"cannot serve HTTPS with {files}: {error.strerror or error}") from error


async def serve_on(
    listener: socket.socket,
    engine: EngineClient,
    config: ServerConfig,
    access: AcceptedKeys | None = None,
    check_interrupt: Callable[[], None] = _nothing,
    hangups: Sequence[int] = (),
) -> None:
    """Serve like `serve`, on a bound socket and with an engine that is not yet started.

    Args:
        hangups: SIGHUPs that arrived before the call; if there are any, they are handled once.

    Raises:
        ConfigError: another process has started to listen on the same port, or the tenants' floors and caps do not fit
            into the cache.
        EngineDeadError: the engine died while it served.
    """
    log_failed_accepts(asyncio.get_running_loop())
    in_flight = InFlight(config.request_timeout)
    access = AcceptedKeys(config) if access is None else access
    app = create_app(engine, config, in_flight, access)
    server = Server(app, config, in_flight, engine.info.model_name, engine)
    server.on_hangup = partial(_reread, config, access, engine) if _survives_hangups(config) else None
    limits = engine.resolve_kv_limits(access.kv_amounts)
    await engine.ask(lambda core: core.set_kv_limits(limits))
    with server.handled_signals():
        check_interrupt()
        await engine.start()
        try:
            if hangups and server.on_hangup is not None:
                server.on_hangup()
            listen(listener)
            app.state.warm_up()
            async with registered(config, listener):
                await server.serve(sockets=[listener])
            if not engine.is_alive:
                raise EngineDeadError("the engine died, so the server has stopped; see the log for the cause")
        finally:
            await engine.shutdown(server.grace_left)


def _reread(config: ServerConfig, access: AcceptedKeys, engine: EngineClient) -> None:
    """Reread the keys, and pass the tenants' floors and caps to the engine."""
    if config.keys_file is None:
        logger.warning("SIGHUP: there is no --keys-file to reread; the server continues")
    elif access.reread(engine.resolve_kv_limits):
        limits = engine.resolve_kv_limits(access.kv_amounts)
        _tellings.add(task := asyncio.ensure_future(engine.ask(lambda core: core.set_kv_limits(limits))))
        task.add_done_callback(_tellings.discard)


# Keeps references to tasks, because the event loop itself holds only weak ones.
_tellings: set[asyncio.Future[None]] = set()


class Server(uvicorn.Server):
    """A uvicorn server with Octavo's shutdown: requests get a grace period, which a second signal cuts short.

    Args:
        engine: the engine that is served; None for a router.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        in_flight: InFlight,
        model_name: str,
        engine: EngineClient | None = None,
    ) -> None:
        self.connections, limits = ConnectionCounters(), config.server_limits
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded_protocol(
                    limits,
                    self.connections,
                    gives_way=lambda: engine is not None and engine.is_planning,
                    shares=lambda: engine is not None and engine.is_stepping,
                ),
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ws="none",
                root_path=config.root_path,
                proxy_headers=False,  # nothing here uses a client's address or scheme
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
                timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]  # any number of seconds
                lifespan="off",  # the engine is started and stopped by `serve_on`
                log_config=None,  # logging belongs to the process, not to a library
                log_level="warning",
                access_log=False,
                backlog=_ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=int(config.shutdown_timeout + FAREWELL_SECONDS),
            )
        )
        self._model_name = model_name
        self._engine = engine
        self._in_flight = in_flight
        self._shutdown_timeout = config.shutdown_timeout
        self._stops_by: float | None = None
        self.on_hangup: Callable[[], object] | None = None

    @property
    def grace_left(self) -> float:
        """The rest of the grace period, in seconds; 0 unless the server is stopping."""
        return 0.0 if self._stops_by is None else max(0.0, self._stops_by - time.monotonic())

    @contextmanager
    def handled_signals(self) -> Generator[None, None, None]:
        """Handle signals within the context: SIGINT and SIGTERM end this server; SIGHUP calls `on_hangup`, or ends
        the process if that is None.

        Does nothing outside the main thread, which alone may install handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        if (on_hangup := self.on_hangup) is not None:
            loop = asyncio.get_running_loop()
            # Called from the loop, because the code that a signal interrupts may be writing to the log.
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(on_hangup))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        """Do nothing, because uvicorn would raise the signals again at the end; `handled_signals` replaces this."""
        return nullcontext()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # Exit at once: computing threads and clients that do not read would delay an orderly shutdown.
            sys.stdout.flush()
            os._exit(128 + sig)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop, which is also the case if the engine has died; called ten times a second."""
        if counter % _RETURNED_EVERY == _RETURNED_EVERY - 1:
            await asyncio.to_thread(return_free_memory)
        return await super().on_tick(counter) or not (self._engine is None or self._engine.is_alive)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio accepts up to `backlog` connections at a time; this lets more than that wait.
            listener.listen(_MOST_WAITING)
        if self.started and sockets:
            scheme = "http" if self.config.ssl is None else "https"
            where = shown_address(sockets[0], scheme, self.config.root_path)
            print(f"Octavo serving {self._model_name} on {where}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Live pages would otherwise keep their connections open forever.
        self._in_flight.draining = True
        self._stops_by = time.monotonic() + self._shutdown_timeout
        if self._in_flight:
            running = counted(len(self._in_flight), "running request")
            wait = f"up to {self._shutdown_timeout:g} s for {running}; a second signal stops at once"
            print(f"Octavo stops: waiting {wait}", file=sys.stderr, flush=True)
        out_of_time = asyncio.get_running_loop().call_later(self._shutdown_timeout, self._in_flight.cancel_all)
        try:
            await super().shutdown(sockets)
        finally:
            out_of_time.cancel()

"""The socket that a server listens on: a port, or a path in the file system."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.server.access import AcceptedKeys
from octavo.server.config import ServerConfig

logger = logging.getLogger("octavo.server")

# asyncio's message when `accept` fails for lack of descriptors or memory.
_FAILED_ACCEPT = "socket.accept() out of system resource"
# Permissions of a Unix socket: its owner and group may connect, if the folder's permissions let them.
UNIX_SOCKET_MODE = 0o660


@contextmanager
def bound(config: ServerConfig) -> Iterator[socket.socket]:
    """Bind the socket of a server's options, without listening yet; a Unix socket's path is removed at the end."""
    if config.uds is None:
        with bind(config.host, config.port) as listener:
            yield listener
        return
    with bind_unix(config.uds) as listener:
        made = os.stat(config.uds)
        try:
            yield listener
        finally:
            # Another server may have bound the same path meanwhile.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(config.uds), made):
                    os.unlink(config.uds)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to host:port, not yet listening; raise `ConfigError` if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror or error}") from error
    try:
        # A restarted server need not wait for its predecessor's last connections to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(f"{host}:{port}", error) from error
    return listener


def bind_unix(path: str) -> socket.socket:
    """Return a Unix socket bound to `path`, not yet listening; raise `ConfigError` if that fails.

    A socket left behind by a killed server is replaced; one on which a server listens, or any other file, is not.
    """
    _remove_abandoned(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Nobody may connect between `bind` and `chmod`.
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, UNIX_SOCKET_MODE)
    except OSError as error:
        listener.close()
        raise _cannot_listen(path, error) from error
    return listener


def _remove_abandoned(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # nothing is there, or `bind` will say what is wrong
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on {path}: that file exists, and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except OSError as error:
            raise _cannot_listen(path, error) from error
    raise ConfigError(f"cannot listen on {path}: a server listens there already")


def listen(listener: socket.socket) -> None:
    """Start accepting connections; raises `ConfigError` if another process already listens there."""
    try:
        listener.listen()
    except OSError as error:
        raise _cannot_listen(_place(listener), error) from error


def log_failed_accepts(loop: asyncio.AbstractEventLoop) -> None:
    """Log at most once a second that connections cannot be accepted, because the process has no descriptors left.

    asyncio reports it with a traceback for each of the connections that it tries to accept, and tries again a second
    later.
    """
    silent_until = 0.0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal silent_until
        if context.get("message") != _FAILED_ACCEPT:
            loop.default_exception_handler(context)
        elif loop.time() >= silent_until:
            silent_until = loop.time() + 1.0
            logger.error(
                "cannot accept connections: %s; raise the limit of open files (ulimit -n), or lower max_connections "
                "(--server-limits)",
                context.get("exception"),
            )

    loop.set_exception_handler(handle)


def shown_address(listener: socket.socket, scheme: str, root_path: str) -> str:
    """Return where a listening socket is reached: a URL, or unix:PATH."""
    place = _place(listener)
    return f"unix:{place}" if listener.family == socket.AF_UNIX else f"{scheme}://{place}{root_path}"


def _place(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return name
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _cannot_listen(place: str, error: OSError) -> ConfigError:
    reason = (error.strerror or str(error)).lower()
    in_use = error.errno == errno.EADDRINUSE and not place.startswith("/")
    advice = "; choose another port with --port, or 0 for a free one" if in_use or error.errno == errno.EACCES else ""
    return ConfigError(f"cannot listen on {place}: {reason}{advice}")


def require_keys_beyond_loopback(listener: socket.socket, config: ServerConfig, access: AcceptedKeys) -> None:
    """Raise `ConfigError` if other machines would be served without keys and that was not explicitly allowed."""
    if listener.family == socket.AF_UNIX:
        return  # the file's permissions control who may connect
    host = listener.getsockname()[0]
    if access.needs_key or config.allow_unauthenticated or ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return
    raise ConfigError(
        f"{host} can be reached from other machines, but no API key is required: give --api-key or --keys-file, or "
        "--allow-unauthenticated to serve anyone who can connect"
    )

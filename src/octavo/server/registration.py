"""Registers a server with routers, again and again while it serves."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from octavo.server.config import ServerConfig

logger = logging.getLogger("octavo.server")

# A router forgets a server that has not registered for 30 seconds.
RENEWED_SECONDS = 10.0
_ANSWER_SECONDS = 5.0


@asynccontextmanager
async def registered(config: ServerConfig, listener: socket.socket) -> AsyncIterator[None]:
    """Register with the routers of the options within the context, and leave them at its end."""
    if not config.register_with:
        yield
        return
    url = config.advertised_url or _own_url(config, listener)
    keeping = asyncio.ensure_future(_keep(config, url))
    try:
        yield
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await _tell(config, url, "DELETE")


async def _keep(config: ServerConfig, url: str) -> None:
    while True:
        await _tell(config, url, "POST")
        await asyncio.sleep(RENEWED_SECONDS)


async def _tell(config: ServerConfig, url: str, method: str) -> None:
    for router in config.register_with:
        try:
            await asyncio.to_thread(_send, f"{router.rstrip('/')}/workers", url, config.router_key or "", method)
        except (OSError, ValueError) as error:  # a router that is away gets it the next time
            logger.warning("cannot register %s with the router %s: %s", url, router, error)


def _send(address: str, url: str, key: str, method: str) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps({"url": url}).encode(), headers, method=method)
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS):
        pass


def _own_url(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL of the address that is listened on; where that is every interface, with the host's name."""
    host, port = listener.getsockname()[:2]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"

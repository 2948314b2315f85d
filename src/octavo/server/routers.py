"""A server's services for routers in front of it: registration, prompts as token ids, and facts for routing.

A router tokenises a prompt to find out where its prefix is cached. It sends the client's body unchanged, followed by
the token ids, so that nothing is tokenised twice:

    Octavo-Prompt: FINGERPRINT NUMBER        whose tokenizer and template, and how many tokens
    Octavo-Router-Key: KEY                   clients cannot give other tokens than their text has

    {"messages": [...], ...}<NUMBER x 4 bytes, little-endian>

    Octavo-KV-Hint: HOST:PORT                a neighbour that has more of the prompt cached; with the router's key
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.core import EngineCore
from octavo.server.bodies.body_reader import BodyReader
from octavo.server.config import ServerConfig
from octavo.server.engine_client import EngineClient
from octavo.server.errors import ApiError
from octavo.server.keys import KeyRing
from octavo.server.route import Access, Endpoint, json_response

PROMPT_HEADER, KEY_HEADER, HINT_HEADER = "octavo-prompt", "octavo-router-key", "octavo-kv-hint"
WORKER_PATH = "/router/worker"
TOKEN_BYTES = 4
_HINT = re.compile(r"[0-9A-Za-z.:_\[\]-]{1,255}:[0-9]{1,5}")
_PROMPT = re.compile(r"([0-9a-f]{32}) ([0-9]{1,9})")


class RoutedPrompts:
    """The prompts that routers have tokenised.

    Args:
        routers: the router's key.
        fingerprint: returns that of the server's own prompts, see `BodyReader.prompt_fingerprint`.
        role: see `ServerConfig.role`.
    """

    def __init__(self, routers: KeyRing, fingerprint: Callable[[], str], role: str) -> None:
        self._routers = routers
        self._role = role
        self._compute_fingerprint = fingerprint
        self._instance = secrets.token_hex(8)

    @cached_property
    def _fingerprint(self) -> str:
        return self._compute_fingerprint()

    def token_bytes(self, headers: Headers, body: bytes) -> bytes | None:
        """Return the packed token ids at the end of a body; None if it has none.

        Raises:
            ApiError: they do not come from the router (403), were made with another tokenizer or template (409), or are
                not as many as the header says (400).
        """
        if (given := headers.get(PROMPT_HEADER)) is None:
            return None
        self._prove(headers, "Token ids in place of a prompt")
        match = _PROMPT.fullmatch(given)
        size = TOKEN_BYTES * int(match[2]) if match is not None else 0
        if match is None or not 0 < size < len(body):
            message = f"{PROMPT_HEADER} must give a fingerprint and the number of token ids that follow the body."
            raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_prompt_header")
        if match[1] != self._fingerprint:
            message = "The router's tokenizer, chat template or options differ from this server's: send the body alone."
            raise ApiError(HTTPStatus.CONFLICT, message, code="other_tokenizer")
        return body[len(body) - size :]

    def kv_hint(self, headers: Headers) -> str | None:
        """Return the address of a neighbour that has more of the prompt cached; None if the request names none.

        Raises:
            ApiError: it does not come from the router (403), or is not an address (400).
        """
        if (given := headers.get(HINT_HEADER)) is None:
            return None
        self._prove(headers, "Addresses of neighbours")
        if _HINT.fullmatch(given) is None:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"{HINT_HEADER} must be HOST:PORT.", code="invalid_kv_hint")
        return given

    def _prove(self, headers: Headers, what: str) -> None:
        if self._routers.find(headers.get(KEY_HEADER, "")) is None:
            message = f"{what} are accepted only with the router key (--router-key)."
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="not_the_router")

    def endpoints(self, engine: EngineClient, reader: BodyReader, *, needs_key: bool) -> list[Endpoint]:
        facts: dict[str, Any] = {}  # they do not change, and the engine answers only between two steps

        async def describe(request: Request) -> Response:
            if not facts:
                facts.update(await engine.ask(_engine_facts))
            worker = {
                "instance": self._instance,
                "role": self._role,
                "names": reader.names,
                "fingerprint": self._fingerprint,
                "prompt_settings": reader.prompt_settings,
                "needs_key": needs_key,
                **facts,
            }
            return json_response(worker)

        summary = "What a router must know of this server"
        return [Endpoint("GET", WORKER_PATH, describe, "Worker", summary, Access.ROUTER)]


def _engine_facts(core: EngineCore) -> dict[str, Any]:
    """Return the facts about an engine that a router needs; `kv_events` and `kv_neighbours` may be null."""
    events, kv = core.config.kv_events, core.scheduler.kv
    return {
        "model": core.config.model,
        "block_size": kv.spec.block_size,
        "num_blocks": kv.pool.num_blocks - 1,
        "max_num_batched_tokens": core.config.max_num_batched_tokens,
        "kv_neighbours": core.config.kv_neighbours,
        "kv_events": None
        if events is None
        else {"endpoint": events.endpoint, "replay_endpoint": events.replay_endpoint, "topic": events.topic},
    }


logger = logging.getLogger("octavo.server")

# A router forgets a server that has not registered for 30 seconds.
RENEWED_SECONDS = 10.0
_ANSWER_SECONDS = 5.0


@asynccontextmanager
async def registered(config: ServerConfig, listener: socket.socket) -> AsyncIterator[None]:
    """Register with the configured routers within the context, and deregister at its end."""
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
    """Return the URL of the address that the server listens on; with the host's name if that is every interface."""
    host, port = listener.getsockname()[:2]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"

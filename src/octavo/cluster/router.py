"""The router: reads prompts, and finds the servers that may answer them.

    client ── body ──> tokens (as the server would make them) ──> Selection ──> server
           <── bytes as they come ───────────────────────────────────────────────┘

Tenants' keys and quotas are checked by the server. The router only looks up whose key it is, because a tenant's prompts
are cached under its own scope.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np
from jiter import from_json
from starlette.requests import Request

from octavo.checkpoint.model_source import tokenizer_of
from octavo.cluster.connections import Headers
from octavo.cluster.selection import Selection, Ticket
from octavo.cluster.workers import RoutedPrompt, Worker, Workers
from octavo.config import EngineConfig
from octavo.errors import shortened
from octavo.request import cache_scope
from octavo.request_limits import DEFAULT_LIMITS
from octavo.server.access import AcceptedKeys, presented_key
from octavo.server.apis import REQUEST_ID_HEADER
from octavo.server.bodies.local_reader import LocalApisReader
from octavo.server.bodies.read_bodies import ReadRequest
from octavo.server.bodies.reader_pool import ReaderPool
from octavo.server.config import ServerConfig
from octavo.server.errors import MODEL_MISSING, RETRY_AFTER_SECONDS, ApiError
from octavo.server.http.connection import BodyIntake, InFlight
from octavo.server.keys import ANYBODY
from octavo.server.routers import HINT_HEADER, KEY_HEADER, PROMPT_HEADER
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.route")

OF_CONNECTION = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
    }
)
"""Headers that belong to one connection."""

READ_BY = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "message",
    "/v1/responses": "response",
}
"""Paths whose prompts are looked at, and the method of `BodyReader` that reads the body."""

RELAYED = (
    *READ_BY,
    *("/v1/embeddings", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"),
)
"""All paths that are passed on to a server."""

_PROMPT, _KEY, _HINT = (name.encode() for name in (PROMPT_HEADER, KEY_HEADER, HINT_HEADER))
_NOT_SENT = OF_CONNECTION | {b"host", b"content-length", b"expect", REQUEST_ID_HEADER, _PROMPT, _KEY, _HINT}


class NoWorkerError(ApiError):
    """No server accepts requests for the model at present."""

    def __init__(self, model: str | None) -> None:
        super().__init__(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"No server is available{f' for `{model}`' if model else ''}: try again later.",
            type="server_error",
            code="no_worker",
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )


@dataclass(slots=True)
class RelayedRequest:
    """A request on its way.

    Attributes:
        packed: token ids, sent after the body; empty if only the body is sent.
        cache_salt: that of the body, which is part of the prompt's scope.
    """

    request: Request
    body: bytes
    model: str | None
    workers: list[Worker]
    prompt: RoutedPrompt = field(default_factory=RoutedPrompt)
    packed: bytes = b""
    cache_salt: str = ""


class RouterStats:
    """Counts, for `/metrics`."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by server and class of status
        self.retries: Counter[str] = Counter()  # by reason
        self.broken_streams = 0
        self.choices, self.choice_seconds = 0, 0.0
        self.hints = 0  # requests sent with the address of another server that has more of their prompt
        self.prefills: Counter[str] = Counter()  # prompts sent to another server first, by how that ended
        self.prompt_tokens = self.cached_tokens = 0  # of prompts that were looked at; as the index knew it


class Readers:
    """Tokenizers of request bodies, one for each group of servers whose tokenizer the router has."""

    def __init__(self, config: ServerConfig, tokenizers: Sequence[str]) -> None:
        self._config = config
        self._names = tokenizers
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self._by_group: dict[str, ReaderPool | None] = {}

    def __getitem__(self, worker: Worker) -> ReaderPool | None:
        """Return the reader that tokenises bodies as this server would; None if the router has none."""
        return self._by_group.get(worker.group)

    async def add(self, worker: Worker) -> None:
        """Load the tokenizer that the server uses, if the router can."""
        if worker.group not in self._by_group:
            self._by_group[worker.group] = await asyncio.to_thread(self._reader, worker)

    def _reader(self, worker: Worker) -> ReaderPool | None:
        facts = worker.facts
        for name in self._names or (str(facts["model"]),):
            tokenizer = self._tokenizer(name)
            if tokenizer is None:
                continue
            reader = LocalApisReader(
                tokenizer=tokenizer, limits=DEFAULT_LIMITS, names=worker.names, **facts["prompt_settings"]
            )
            if reader.prompt_fingerprint() == facts["fingerprint"]:
                limits = self._config.server_limits
                pool = ReaderPool(reader, limits.max_body_seconds, limits.max_body_memory)
                pool.warm_up()
                return pool
        logger.error(
            "no tokenizer here produces the tokens of %s, so it is routed to by load only: name its model with "
            "--tokenizer, and run the same version of Octavo",
            worker.url,
        )
        return None

    def _tokenizer(self, name: str) -> Tokenizer | None:
        if name not in self._tokenizers:
            try:
                self._tokenizers[name] = Tokenizer.from_source(tokenizer_of(EngineConfig(model=name)))
            except Exception as error:  # of a file that a server named
                logger.error("cannot load the tokenizer of %s: %s", name, error)
                self._tokenizers[name] = None
        return self._tokenizers[name]


class Router:
    """Finds servers for requests, and what to send them.

    Args:
        access: identifies the owner of a request's key.
        prefill_tokens: see `RouterConfig.prefill_tokens`.
    """

    def __init__(
        self,
        config: ServerConfig,
        access: AcceptedKeys,
        workers: Workers,
        selection: Selection,
        readers: Readers,
        in_flight: InFlight,
        prefill_tokens: int,
    ) -> None:
        self.workers = workers
        self.selection = selection
        self.stats = RouterStats()
        self._readers = readers
        self._access = access
        self._router_key = config.router_key or ""
        self.in_flight = in_flight
        self._prefill_tokens = prefill_tokens
        self._intake = BodyIntake(config.server_limits.max_body_size, config.server_limits.max_total_body_size)
        workers.on_up = self._on_up
        workers.on_down = selection.remove

    async def _on_up(self, worker: Worker) -> None:
        await self._readers.add(worker)
        await self.selection.add(worker)

    async def job(self, request: Request) -> RelayedRequest:
        """Read a request, and find the servers that may answer it."""
        async with self._intake.body(request) as body:
            return await self._job(request, body)

    async def _job(self, request: Request, body: bytes) -> RelayedRequest:
        names = {name for worker in self.workers.healthy() for name in worker.names}
        model = _model_of(body) if len(names) > 1 else None
        workers = self.workers.answering(model)
        if not workers:
            if model is not None and names:
                raise MODEL_MISSING(shortened(model))
            raise NoWorkerError(model)
        # During a rolling update, servers may differ in template or tokenizer: the majority decides.
        groups: dict[str, list[Worker]] = {}
        for worker in workers:
            groups.setdefault(worker.group, []).append(worker)
        largest = max(groups.values(), key=len)
        job = RelayedRequest(request, body, model, largest)
        key = presented_key(request.scope)
        client = ANYBODY if key is None else self._access.clients.find(key)
        method, reader = READ_BY.get(request.scope["path"]), self._readers[largest[0]]
        if method is None or reader is None or client is None or (key is None and self._access.needs_key):
            return job
        try:
            read = await reader.read(method, body, tenant=client.tenant)
        except Exception as error:  # the server finds the same error, and answers it
            logger.debug("a body could not be read: %s", error)
            return job
        if isinstance(read, ReadRequest) and len(read.prompts) == 1:
            ids = read.prompts[0].token_ids
            job.prompt = RoutedPrompt(ids, cache_scope(client.tenant, client.cache_group, read.cache_salt))
            job.packed, job.cache_salt = np.asarray(ids, "<i4").tobytes(), read.cache_salt
        return job

    def headers(self, job: RelayedRequest, ticket: Ticket) -> Headers:
        """Return the headers to send: the client's, and with token ids the router's own."""
        given = [header for header in job.request.scope["headers"] if header[0] not in _NOT_SENT]
        return [*given, *self._own_headers(job, ticket)]

    def _own_headers(self, job: RelayedRequest, ticket: Ticket) -> Headers:
        headers = {REQUEST_ID_HEADER: job.request.scope["state"]["request_id"]}
        if job.packed:
            headers[_PROMPT] = f"{ticket.worker.facts['fingerprint']} {len(job.prompt.token_ids)}"
            headers[_KEY] = self._router_key
            if ticket.kv_hint is not None:
                headers[_HINT] = ticket.kv_hint
                self.stats.hints += 1
        return [(name, value.encode()) for name, value in headers.items()]

    async def prefill(self, job: RelayedRequest, ticket: Ticket) -> None:
        """Let another server compute a long prompt first, if the one that answers is for decoding, which fetches the
        blocks. If that fails, it computes the prompt itself.
        """
        worker, num_tokens = ticket.worker, len(job.prompt.token_ids)
        if worker.role != "decode" or not job.packed or num_tokens - ticket.cached_tokens < self._prefill_tokens:
            return
        group = [each for each in self.workers.answering(job.model) if each.group == worker.group]
        if not (others := [each for each in group if each.role != "decode" and each.neighbour_address is not None]):
            return
        own = await self.selection.choose(others, job.prompt)
        try:
            if num_tokens - own.cached_tokens >= self._prefill_tokens:
                self.stats.prefills[await self._compute_prompt(job, own)] += 1
            ticket.kv_hint = own.worker.neighbour_address
        finally:
            self.selection.done(own)

    async def _compute_prompt(self, job: RelayedRequest, ticket: Ticket) -> str:
        """Let a server compute a prompt, as for a completion of one token; returns the outcome."""
        body: dict[str, Any] = {"model": ticket.worker.names[0], "prompt": "-", "max_tokens": 1}
        if job.cache_salt:
            body["cache_salt"] = job.cache_salt
        headers = [(b"content-type", b"application/json"), *self._own_headers(job, ticket)]
        if (key := presented_key(job.request.scope)) is not None:
            headers.append((b"authorization", f"Bearer {key}".encode("latin-1")))
        sent = json.dumps(body).encode() + job.packed
        try:
            async with ticket.worker.post("/v1/completions", headers, sent, job.prompt) as answer:
                await answer.read()
                return f"{answer.status // 100}xx"
        except OSError as error:
            logger.warning("lost %s while it computed a prompt: %s", ticket.worker.url, error)
            await self.workers.suspect(ticket.worker)
            return "lost"


def _model_of(body: bytes) -> str | None:
    """Return the model that a body names; None if it names none or is not JSON, which the server reports."""
    try:
        model = from_json(body).get("model")
    except (ValueError, AttributeError):
        return None
    return model if isinstance(model, str) else None

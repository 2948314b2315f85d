"""The router's HTTP application: reads a prompt, chooses a server, and relays bytes both ways.

    client ── body ──> tokens (as the server would make them) ──> Selection ──> server
           <── bytes as they come ───────────────────────────────────────────────┘

Tenants' keys and quotas are checked by the server. The router only looks up whose key it is, because a tenant's prompts
are cached under its own scope.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
from jiter import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.checkpoint.model_source import tokenizer_of
from octavo.cluster.selection import Selection, Ticket
from octavo.cluster.workers import RoutedPrompt, Worker, Workers
from octavo.config import EngineConfig
from octavo.errors import shortened
from octavo.request import cache_scope
from octavo.request_limits import DEFAULT_LIMITS
from octavo.server.access import AcceptedKeys, presented_key
from octavo.server.apis import EVENTS, REQUEST_ID_HEADER, api_of
from octavo.server.bodies.local_reader import LocalApisReader
from octavo.server.bodies.read_bodies import ChatRequest, CompletionRequest
from octavo.server.bodies.reader_pool import ReaderPool
from octavo.server.config import ServerConfig
from octavo.server.errors import MODEL_MISSING, RETRY_AFTER_SECONDS, ApiError
from octavo.server.http.connection import BodyIntake, ClientLeftError, InFlight
from octavo.server.keys import ANYBODY
from octavo.server.routers import HINT_HEADER, KEY_HEADER, PROMPT_HEADER
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger("octavo.route")

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

MOST_EVENT_BYTES = 64 * 1024 * 1024
"""Of one event, which is held until it is whole. The longest is the last of a response, which repeats all of it."""

# Attempts for one request: a server may fail before it answers.
_MOST_TRIES = 3
# Headers that belong to one connection, or that the other side sets itself.
_OF_CONNECTION = frozenset(
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
_NOT_SENT = _OF_CONNECTION | {
    *(b"host", b"content-length", b"expect", REQUEST_ID_HEADER),
    *(name.encode() for name in (PROMPT_HEADER, KEY_HEADER, HINT_HEADER)),
}
_NOT_RETURNED = _OF_CONNECTION | {b"date", b"server", REQUEST_ID_HEADER, b"request-id"}


class NoWorkerError(ApiError):
    """No server accepts requests for the model at present."""

    def __init__(self, model: str | None) -> None:
        super().__init__(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"No server takes requests{f' for `{model}`' if model else ''} now: try again later.",
            type="server_error",
            code="no_worker",
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )


class WorkerLostError(ApiError):
    """The server was lost while it answered."""

    def __init__(self) -> None:
        message = "The server that was answering this request has gone, so the answer is cut short: send it again."
        super().__init__(HTTPStatus.BAD_GATEWAY, message, type="server_error", code="worker_lost")


class EventTooLargeError(ApiError):
    """A server sent more than `MOST_EVENT_BYTES` without the end of an event."""

    def __init__(self) -> None:
        message = f"The server sent an event of more than {MOST_EVENT_BYTES:,} bytes, so the answer is cut short."
        super().__init__(HTTPStatus.BAD_GATEWAY, message, type="server_error", code="event_too_large")


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
    prompt: RoutedPrompt
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


class Router:
    """Relays requests to servers.

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
        self._in_flight = in_flight
        self._prefill_tokens = prefill_tokens
        self._intake = BodyIntake(config.server_limits.max_body_size, config.server_limits.max_total_body_size)
        workers.on_up = self._on_up
        workers.on_down = selection.remove

    async def relay(self, request: Request) -> Response:
        """Send a request to a server, and relay its answer."""
        async with self._intake.body(request) as body:
            job = await self._job(request, body)
        return _Relayed(self, job, self._in_flight)

    async def _on_up(self, worker: Worker) -> None:
        await self._readers.add(worker)
        await self.selection.add(worker)

    async def _job(self, request: Request, body: bytes) -> RelayedRequest:
        names = {name for worker in self.workers.healthy() for name in worker.names}
        model = _model_of(body) if len(names) > 1 else None
        workers = self.workers.answering(model)
        if not workers:
            if model is not None and names:
                raise MODEL_MISSING(shortened(model))
            raise NoWorkerError(model)
        # During a rolling update, servers may differ in template or tokenizer: the majority decides.
        groups = Counter(worker.group for worker in workers)
        largest = [worker for worker in workers if worker.group == groups.most_common(1)[0][0]]
        key = presented_key(request.scope)
        client = ANYBODY if key is None else self._access.clients.find(key)
        method, reader = READ_BY.get(request.scope["path"]), self._readers[largest[0]]
        is_known = client is not None and (key is not None or not self._access.needs_key)
        if method is None or reader is None or not is_known:
            return RelayedRequest(request, body, model, largest, RoutedPrompt((), ""))
        assert client is not None
        try:
            read = await reader.read(method, body, tenant=client.tenant)
        except Exception as error:  # the server finds the same error, and answers it
            logger.debug("a body could not be read: %s", error)
            return RelayedRequest(request, body, model, largest, RoutedPrompt((), ""))
        if isinstance(read, ChatRequest):
            ids = read.prompt.token_ids
        elif isinstance(read, CompletionRequest) and len(read.prompts) == 1:
            ids = read.prompts[0].token_ids
        else:
            return RelayedRequest(request, body, model, largest, RoutedPrompt((), ""))
        scope = cache_scope(client.tenant, client.cache_group, read.cache_salt)
        packed = np.asarray(ids, "<i4").tobytes()
        return RelayedRequest(request, body, model, largest, RoutedPrompt(ids, scope), packed, read.cache_salt)

    def headers(self, job: RelayedRequest, ticket: Ticket) -> list[tuple[str, str]]:
        """Return the headers to send: the client's, and with token ids the router's own."""
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in job.request.scope["headers"]
            if name not in _NOT_SENT
        ]
        return headers + self._own_headers(job, ticket)

    def _own_headers(self, job: RelayedRequest, ticket: Ticket) -> list[tuple[str, str]]:
        headers = [(REQUEST_ID_HEADER.decode(), job.request.scope["state"]["request_id"])]
        if job.packed:
            given = f"{ticket.worker.facts['fingerprint']} {len(job.prompt.token_ids)}"
            headers += [(PROMPT_HEADER, given), (KEY_HEADER, self._router_key)]
            if ticket.kv_hint is not None:
                headers.append((HINT_HEADER, ticket.kv_hint))
                self.stats.hints += 1
        return headers

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
            await asyncio.shield(self.selection.done(own))

    async def _compute_prompt(self, job: RelayedRequest, ticket: Ticket) -> str:
        """Let a server compute a prompt, as for a completion of one token; returns the outcome."""
        body: dict[str, Any] = {"model": ticket.worker.names[0], "prompt": "-", "max_tokens": 1}
        if job.cache_salt:
            body["cache_salt"] = job.cache_salt
        headers = [("content-type", "application/json"), *self._own_headers(job, ticket)]
        if (key := presented_key(job.request.scope)) is not None:
            headers.append(("authorization", f"Bearer {key}"))
        sent = json.dumps(body).encode() + job.packed
        try:
            async with ticket.worker.post("/v1/completions", headers, sent, job.prompt) as answer:
                await answer.read()
                return f"{answer.status // 100}xx"
        except (OSError, _client_error()) as error:
            logger.warning("lost %s while it computed a prompt: %s", ticket.worker.url, error)
            await self.workers.suspect(ticket.worker)
            return "lost"


class _Relayed(Response):
    """A server's answer, relayed as it comes; a server that fails before it answers is replaced by another."""

    def __init__(self, router: Router, job: RelayedRequest, in_flight: InFlight) -> None:
        super().__init__()
        self._router = router
        self._job = job
        self._in_flight = in_flight
        self._started = self._is_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._in_flight.run(receive, self._run(send))
        except ClientLeftError:
            return
        except ApiError as error:
            if not self._started:
                await error.response(scope)(scope, receive, send)
            elif self._is_stream:
                last = api_of(scope).error_event(error.status, error.fields())
                await send({"type": "http.response.body", "body": last, "more_body": False})
            # Else the answer stays unfinished: its connection is closed, so the client sees that it is cut.

    async def _run(self, send: Send) -> None:
        job, left = self._job, list(self._job.workers)
        for _ in range(_MOST_TRIES):
            left = [worker for worker in left if worker.is_healthy]
            if not left:
                left = [worker for worker in self._router.workers.answering(job.model) if worker not in job.workers]
            if not left:
                break
            began = time.perf_counter()
            for_answers = [worker for worker in left if worker.role != "prefill"] or left
            ticket = await self._router.selection.choose(for_answers, job.prompt)
            self._router.stats.choices += 1
            self._router.stats.choice_seconds += time.perf_counter() - began
            try:
                await self._router.prefill(job, ticket)
                if await self._send_to(ticket, send, is_last=len(left) == 1):
                    return
            finally:
                await asyncio.shield(self._router.selection.done(ticket))
            left.remove(ticket.worker)
        raise NoWorkerError(job.model)

    async def _send_to(self, ticket: Ticket, send: Send, *, is_last: bool) -> bool:
        """Send the request to a server and relay its answer; False if another server should be tried."""
        job, worker, stats = self._job, ticket.worker, self._router.stats
        scope = job.request.scope
        target = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        try:
            headers = self._router.headers(job, ticket)
            async with worker.post(target, headers, job.body + job.packed, job.prompt) as answer:
                if answer.status == HTTPStatus.CONFLICT and job.packed:
                    stats.retries["other_tokenizer"] += 1
                    job.packed = b""
                    return await self._send_to(ticket, send, is_last=is_last)
                if answer.status == HTTPStatus.SERVICE_UNAVAILABLE and not is_last:
                    stats.retries["unavailable"] += 1
                    return False
                stats.requests[worker.url, f"{answer.status // 100}xx"] += 1
                if job.prompt.token_ids:
                    stats.prompt_tokens += len(job.prompt.token_ids)
                    stats.cached_tokens += ticket.cached_tokens
                worker.answers.add(answer)
                try:
                    await self._relay(answer, ticket, send)
                finally:
                    worker.answers.discard(answer)
                return True
        except ApiError:
            raise
        except (OSError, _client_error()) as error:
            logger.warning("lost %s while it had a request: %s %s", worker.url, type(error).__name__, error)
            await self._router.workers.suspect(worker)
            if not self._started:
                stats.retries["lost"] += 1
                return False
            stats.broken_streams += 1
            raise WorkerLostError from error

    async def _relay(self, answer: Any, ticket: Ticket, send: Send) -> None:
        headers = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in _NOT_RETURNED]
        self._is_stream = answer.content_type == EVENTS
        self._started = True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        events = _WholeEvents() if self._is_stream else None
        is_first = ticket.selection_id is not None
        async for received in answer.content.iter_any():
            if chunk := received if events is None else events.feed(received):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if is_first:
                    is_first = False
                    await self._router.selection.first_token(ticket)
        await send({"type": "http.response.body", "body": b"" if events is None else events.rest(), "more_body": False})


class _WholeEvents:
    """Holds half an event back: a server that is lost may leave one, after which a client could not read an error."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> bytes:
        """Return the events that are whole; raises `EventTooLargeError`."""
        if not self._held and received.endswith(b"\n\n"):
            return received
        # The end of an event may have arrived in two pieces.
        last = self._held[-1][-1:] if self._held else b""
        end = (last + received).rfind(b"\n\n")
        if end < 0:
            self._hold(received)
            return b""
        end += 2 - len(last)
        whole = b"".join((*self._held, received[:end]))
        self._held, self._size = [], 0
        if end < len(received):
            self._hold(received[end:])
        return whole

    def rest(self) -> bytes:
        return b"".join(self._held)

    def _hold(self, part: bytes) -> None:
        self._held.append(part)
        self._size += len(part)
        if self._size > MOST_EVENT_BYTES:
            raise EventTooLargeError


def _client_error() -> type[Exception]:
    import aiohttp

    error: type[Exception] = aiohttp.ClientError
    return error


def _model_of(body: bytes) -> str | None:
    """Return the model that a body names; None if it names none or is not JSON, which the server reports."""
    try:
        model = from_json(body).get("model")
    except (ValueError, AttributeError):
        return None
    return model if isinstance(model, str) else None

"""The endpoints that clients use: OpenAI's, Anthropic's, and the tokenizer's."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError, shortened
from octavo.server.auth import client_of
from octavo.server.body_reading import BodyReading
from octavo.server.chat import ChatCompletions
from octavo.server.completions import Completions
from octavo.server.config import ServerConfig
from octavo.server.connection import EventStream, InFlight, WholeAnswer
from octavo.server.embeddings import Embeddings
from octavo.server.engine_client import EngineClient, TokenizerLike
from octavo.server.errors import ApiError
from octavo.server.generation import json_bytes
from octavo.server.ignored_fields import IgnoredFields
from octavo.server.intake import BodyIntake
from octavo.server.logprobs import TokenTexts
from octavo.server.messages import MessagesAnswer
from octavo.server.messages import error_event as message_error_event
from octavo.server.messages_body import MessagesBody
from octavo.server.paths import is_anthropic
from octavo.server.protocol import GenerationBody
from octavo.server.quota import charge_of
from octavo.server.reading import (
    BodyReader,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    FollowUp,
    ReadAnswer,
    frame,
)
from octavo.server.response_store import ResponseStore, StoredResponse
from octavo.server.responses import ResponseAnswer
from octavo.server.responses_body import ResponsesBody
from octavo.server.route import Endpoint, json_response

# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,128})?")

StreamableBody = GenerationBody | ResponsesBody | MessagesBody


class Answer(Protocol):
    """The answer to one body, whole or as a stream; only one of the two is used."""

    def whole(self) -> Coroutine[Any, Any, list[bytes]]: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...


class Api:
    """The request handlers. Each reads its body itself, so that a body over the limit is never buffered."""

    def __init__(self, engine: EngineClient, config: ServerConfig, in_flight: InFlight) -> None:
        self._engine = engine
        self._config = config
        self._in_flight = in_flight
        self._names = served_names(engine, config)
        self._created = int(time.time())
        self._texts = TokenTexts(engine)
        self._completions = Completions(engine, self._texts)
        self._chat = ChatCompletions(engine, self._texts)
        self._embeddings = Embeddings(engine)
        reader = BodyReader(
            tokenizer=_tokenizer_of(engine),
            vocab_size=engine.vocab_size,
            hidden_size=engine.hidden_size,
            max_model_len=engine.max_model_len,
            limits=engine.limits,
            names=self._names,
            strict=config.strict_requests,
            default_sampling=engine.default_sampling,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self._ignored = IgnoredFields()
        self._responses = ResponseStore(config.stored_responses_limit, config.stored_tenant_responses_limit)
        self._intake = BodyIntake(config.body_limit, config.total_body_limit)
        self._reading = BodyReading(reader, config.max_body_seconds, config.body_memory)

    def warm_up(self) -> None:
        """Start the process that reads chats in the background, so that the first chat need not wait for it."""
        self._reading.warm_up()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/completions", self.create_completion),
            Endpoint("POST", "/v1/chat/completions", self.create_chat_completion),
            Endpoint("POST", "/v1/embeddings", self.create_embeddings),
            Endpoint("POST", "/v1/responses", self.create_response),
            Endpoint("POST", "/v1/responses/input_tokens", self.count_input_tokens),
            Endpoint("GET", "/v1/responses/{response_id}", self.retrieve_response),
            Endpoint("DELETE", "/v1/responses/{response_id}", self.delete_response),
            Endpoint("GET", "/v1/responses/{response_id}/input_items", self.list_input_items),
            Endpoint("POST", "/v1/messages", self.create_message),
            Endpoint("POST", "/v1/messages/count_tokens", self.count_tokens),
            Endpoint("GET", "/v1/models", self.list_models),
            Endpoint("GET", "/v1/models/{model:path}", self.retrieve_model),
            Endpoint("POST", "/tokenize", self.tokenize),
            Endpoint("POST", "/detokenize", self.detokenize),
        ]

    async def create_completion(self, request: Request) -> Response:
        read: CompletionRequest = await self._read(request, "completion")
        answer = self._completions.answer(read, client_of(request.scope), self._traceparent(request))
        charge_of(request.scope).begin(answer.usage)
        return await self._respond(request, read.body, answer)

    async def create_chat_completion(self, request: Request) -> Response:
        read: ChatRequest = await self._read(request, "chat")
        answer = self._chat.answer(read, client_of(request.scope), self._traceparent(request))
        charge_of(request.scope).begin(answer.usage)
        return await self._respond(request, read.body, answer)

    async def create_embeddings(self, request: Request) -> Response:
        read: EmbeddingRequest = await self._read(request, "embedding")
        answer = self._embeddings.answer(read, client_of(request.scope), self._traceparent(request))
        charge_of(request.scope).begin(answer.usage)
        whole = await self._in_flight.run(request.receive, answer.whole())
        return self._ignored.told(read.body, WholeAnswer(whole))

    async def create_response(self, request: Request) -> Response:
        tenant = client_of(request.scope).tenant
        read = await self._read_response(request, tenant)
        store = partial(self._responses.put, tenant)
        answer = ResponseAnswer(
            self._engine, self._texts, read, client_of(request.scope), self._traceparent(request), store
        )
        charge_of(request.scope).begin(answer.usage)
        body = read.origin
        assert isinstance(body, ResponsesBody)
        return await self._respond(request, body, answer, answer.error_event)

    async def count_input_tokens(self, request: Request) -> Response:
        read = await self._read_response(request, client_of(request.scope).tenant)
        assert isinstance(read.origin, ResponsesBody)
        # Otherwise checked when the engine takes the request.
        if (given := read.params.max_tokens or 0) > self._engine.max_model_len:
            raise RequestError(
                f"max_output_tokens is {given}, but this model's maximum context length is "
                f"{self._engine.max_model_len} tokens",
                param="max_output_tokens",
            )
        counted = {"object": "response.input_tokens", "input_tokens": len(read.prompt.token_ids)}
        return self._ignored.told(read.origin, json_response(json_bytes(counted)))

    async def _read_response(self, request: Request, tenant: str) -> ChatRequest:
        async with self._intake.body(request) as raw:
            read: ChatRequest | FollowUp = await self._reading.read("response", raw, tenant=tenant)
            if isinstance(read, FollowUp):
                read = await self._reading.read(
                    "next_response", *frame(*self._before(tenant, read), raw), tenant=tenant
                )
        assert isinstance(read, ChatRequest)
        return read

    def _before(self, tenant: str, read: FollowUp) -> tuple[bytes, bytes]:
        """Return the items of the previous response, and those of the responses to whose items a body refers."""
        previous = read.previous_response_id
        before = b"" if previous is None else self._stored(tenant, previous, "previous_response_id").items
        found = [self._responses.get(tenant, response_id) for response_id in read.referenced if response_id != previous]
        return before, b",".join(stored.items for stored in found if stored is not None)

    async def list_input_items(self, request: Request) -> Response:
        tenant = client_of(request.scope).tenant
        stored = self._stored(tenant, request.path_params["response_id"], "response_id")
        query = json_bytes(dict(request.query_params))
        framed = frame(stored.input_items, query)
        return json_response(await self._reading.read("input_items", *framed, tenant=tenant))

    async def retrieve_response(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise RequestError("a stored response cannot be streamed: its events are not kept", param="stream")
        tenant = client_of(request.scope).tenant
        return json_response(self._stored(tenant, request.path_params["response_id"], "response_id").response)

    async def delete_response(self, request: Request) -> Response:
        tenant, response_id = client_of(request.scope).tenant, request.path_params["response_id"]
        self._stored(tenant, response_id, "response_id")
        self._responses.delete(tenant, response_id)
        return json_response(json_bytes({"id": response_id, "object": "response", "deleted": True}))

    def _stored(self, tenant: str, response_id: str, param: str) -> StoredResponse:
        if (stored := self._responses.get(tenant, response_id)) is None:
            raise ApiError(
                404,
                f"There is no response `{shortened(response_id)}`; it may have made room for newer ones "
                "(--max-stored-responses, --max-stored-tenant-responses), or been lost with a restart.",
                param=param,
                code="response_not_found",
            )
        return stored

    async def create_message(self, request: Request) -> Response:
        read: ChatRequest = await self._read(request, "message")
        answer = MessagesAnswer(self._engine, read, client_of(request.scope), self._traceparent(request))
        charge_of(request.scope).begin(answer.usage)
        body = read.origin
        assert isinstance(body, MessagesBody)
        return await self._respond(request, body, answer, message_error_event)

    async def count_tokens(self, request: Request) -> Response:
        return self._answer_read(await self._read(request, "count_tokens"))

    async def _respond(
        self,
        request: Request,
        body: StreamableBody,
        answer: Answer,
        error_event: Callable[[ApiError], bytes] | None = None,
    ) -> Response:
        """Send the answer, whole or as a stream, as the body asks.

        Args:
            error_event: formats an error as an event of the stream; if None, errors are sent as in chat completions.
        """
        if body.streams:
            return self._ignored.told(body, EventStream(answer.events(), self._in_flight, error_event))
        return self._ignored.told(body, WholeAnswer(await self._in_flight.run(request.receive, answer.whole())))

    def _traceparent(self, request: Request) -> str | None:
        """Return the request's `traceparent` header, or None if it is absent or invalid, or tracing is off."""
        given = request.headers.get("traceparent", "") if self._config.otlp_traces_endpoint is not None else ""
        return given if _TRACEPARENT.fullmatch(given) else None

    async def list_models(self, request: Request) -> Response:
        if is_anthropic(request.scope):
            listed = [self._anthropic_card(name) for name in self._names]
            ends = {"first_id": self._names[0], "last_id": self._names[-1]}
            return json_response(json_bytes({"data": listed, "has_more": False, **ends}))
        models = [self._model_card(name) for name in self._names]
        return json_response(json_bytes({"object": "list", "data": models}))

    async def retrieve_model(self, request: Request) -> Response:
        name = self._reading.reader.served_name(request.path_params["model"])
        card = self._anthropic_card(name) if is_anthropic(request.scope) else self._model_card(name)
        return json_response(json_bytes(card))

    def _anthropic_card(self, name: str) -> dict[str, Any]:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "max_input_tokens": self._engine.max_model_len,
        }

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "root": self._engine.model_name,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        return self._answer_read(await self._read(request, "tokenize"))

    async def detokenize(self, request: Request) -> Response:
        return self._answer_read(await self._read(request, "detokenize"))

    def _answer_read(self, read: ReadAnswer) -> Response:
        return self._ignored.told(read.body, json_response(read.content))

    async def _read(self, request: Request, method: str) -> Any:
        """Receive the request's body and return the result of `BodyReader.<method>`."""
        async with self._intake.body(request) as raw:
            return await self._reading.read(method, raw, tenant=client_of(request.scope).tenant)


def served_names(engine: EngineClient, config: ServerConfig) -> tuple[str, ...]:
    """Return the names under which the model is served; the first is used if a body names none."""
    return tuple(config.served_model_name) or (engine.model_name,)


def _tokenizer_of(engine: EngineClient) -> TokenizerLike | None:
    try:
        return engine.tokenizer
    except RequestError:
        return None  # bodies that need a tokenizer are refused with the reason

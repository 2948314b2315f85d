"""The endpoints that clients use: OpenAI's, Anthropic's, and the tokenizer's."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import OctavoError, RequestError, shortened
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
from octavo.server.messages import MessagesAnswer, MessageStream, message_error
from octavo.server.messages_body import MessagesBody
from octavo.server.protocol import GenerationBody
from octavo.server.quota import charge_of
from octavo.server.reading import (
    BodyReader,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    FollowUp,
    ReadAnswer,
    after,
)
from octavo.server.response_store import ResponseStore, StoredResponse
from octavo.server.responses import ResponseAnswer
from octavo.server.responses_body import ResponsesBody
from octavo.server.route import Endpoint, json_response

# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,128})?")

StreamableBody = GenerationBody | ResponsesBody


class Answer(Protocol):
    """What answers one body, whole or as a stream; one of the two is asked for."""

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
        texts = TokenTexts(engine)
        self._completions = Completions(engine, texts)
        self._chat = ChatCompletions(engine, texts)
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
        """Start what would otherwise start with the first chat. Waits for nothing."""
        self._reading.warm_up()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/completions", self.create_completion),
            Endpoint("POST", "/v1/chat/completions", self.create_chat_completion),
            Endpoint("POST", "/v1/embeddings", self.create_embeddings),
            Endpoint("POST", "/v1/responses", self.create_response),
            Endpoint("GET", "/v1/responses/{response_id}", self.retrieve_response),
            Endpoint("DELETE", "/v1/responses/{response_id}", self.delete_response),
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
        async with self._intake.body(request) as raw:
            read: ChatRequest | FollowUp = await self._reading.read("response", raw, tenant)
            if isinstance(read, FollowUp):
                before = self._stored(tenant, read.previous_response_id, "previous_response_id")
                read = await self._reading.read("next_response", after(before.items, raw), tenant)
        assert isinstance(read, ChatRequest)
        store = partial(self._responses.put, tenant)
        answer = ResponseAnswer(self._engine, read, client_of(request.scope), self._traceparent(request), store)
        charge_of(request.scope).begin(answer.usage)
        body = read.origin
        assert isinstance(body, ResponsesBody)
        return await self._respond(request, body, answer)

    async def retrieve_response(self, request: Request) -> Response:
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
        try:
            read: ChatRequest = await self._read(request, "message")
            answer = MessagesAnswer(self._engine, read, client_of(request.scope), self._traceparent(request))
            charge_of(request.scope).begin(answer.usage)
            body = read.origin
            assert isinstance(body, MessagesBody)
            if body.streams:
                events = MessageStream(answer.events(), self._in_flight)
                return self._ignored.told(body, events)
            return self._ignored.told(body, WholeAnswer(await self._in_flight.run(request.receive, answer.whole())))
        except OctavoError as error:
            return message_error(error)

    async def count_tokens(self, request: Request) -> Response:
        try:
            return self._answer_read(await self._read(request, "count_tokens"))
        except OctavoError as error:
            return message_error(error)

    async def _respond(self, request: Request, body: StreamableBody, answer: Answer) -> Response:
        """The answer, whole or as a stream, as the body asks for it."""
        if body.streams:
            return self._ignored.told(body, EventStream(answer.events(), self._in_flight))
        return self._ignored.told(body, WholeAnswer(await self._in_flight.run(request.receive, answer.whole())))

    def _traceparent(self, request: Request) -> str | None:
        """The trace that a request says it is part of, where traces are made."""
        given = request.headers.get("traceparent", "") if self._config.otlp_traces_endpoint is not None else ""
        return given if _TRACEPARENT.fullmatch(given) else None

    async def list_models(self, request: Request) -> Response:
        models = [self._model_card(name) for name in self._names]
        return json_response(json_bytes({"object": "list", "data": models}))

    async def retrieve_model(self, request: Request) -> Response:
        return json_response(
            json_bytes(self._model_card(self._reading.reader.served_name(request.path_params["model"])))
        )

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
        """What `BodyReader.<method>` makes of the request's body."""
        async with self._intake.body(request) as raw:
            return await self._reading.read(method, raw, client_of(request.scope).tenant)


def served_names(engine: EngineClient, config: ServerConfig) -> tuple[str, ...]:
    """What the model is called here; the first is used where a body names none."""
    return tuple(config.served_model_name) or (engine.model_name,)


def _tokenizer_of(engine: EngineClient) -> TokenizerLike | None:
    try:
        return engine.tokenizer
    except RequestError:
        return None  # then bodies that need one are refused, each with the reason

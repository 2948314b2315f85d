"""The endpoints that clients use: OpenAI's, Anthropic's, and the tokenizer's."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import FieldError, shortened
from octavo.server.access import client_of
from octavo.server.answer_json import json_bytes
from octavo.server.answers.chat import ChatAnswer
from octavo.server.answers.completions import CompletionAnswer, EmbeddingAnswer
from octavo.server.answers.messages import MessagesAnswer
from octavo.server.answers.responses import ResponseAnswer, ResponseStore, StoredResponse
from octavo.server.apis import ANTHROPIC, api_of
from octavo.server.bodies.body_reader import frame
from octavo.server.bodies.messages_body import CountTokensBody, MessagesBody
from octavo.server.bodies.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from octavo.server.bodies.read_bodies import ChatRequest, FollowUp
from octavo.server.bodies.responses_body import PAGE_QUERY, ResponsesBody
from octavo.server.config import ServerConfig
from octavo.server.engine_client import EngineClient
from octavo.server.errors import ApiError
from octavo.server.handling import Handling
from octavo.server.route import Handlers, delete, get, json_response, post


class OpenAIApi(Handlers):
    """The request handlers. Each reads its body itself, so that a body over the limit is never buffered."""

    def __init__(self, engine: EngineClient, config: ServerConfig, handling: Handling) -> None:
        self._engine = engine
        self._handling = handling
        self._names = handling.names
        self._created = int(time.time())
        self._responses = ResponseStore(config.server_limits.max_stored_responses)

    @post("/v1/completions", "Completion", CompletionBody)
    async def create_completion(self, request: Request) -> Response:
        """Continue one or several prompts."""
        return await self._handling.answer(request, "completion", "cmpl", CompletionAnswer)

    @post("/v1/chat/completions", "ChatCompletion", ChatBody)
    async def create_chat_completion(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._handling.answer(request, "chat", "chatcmpl", ChatAnswer)

    @post("/v1/embeddings", "EmbeddingList", EmbeddingBody)
    async def create_embeddings(self, request: Request) -> Response:
        """An embedding of each input."""
        return await self._handling.answer(request, "embedding", "embd", EmbeddingAnswer)

    @post("/v1/responses", "Response", ResponsesBody)
    async def create_response(self, request: Request) -> Response:
        """Answer a chat, by OpenAI's responses API."""
        tenant = client_of(request.scope).tenant
        read = await self._read_response(request, tenant)
        answer = ResponseAnswer(self._handling.job(request, read, "resp"), partial(self._responses.put, tenant))
        return await self._handling.respond(request, answer, answer.error_event)

    @post("/v1/responses/input_tokens", "InputTokens", ResponsesBody)
    async def count_input_tokens(self, request: Request) -> Response:
        """Number of input tokens of a response."""
        read = await self._read_response(request, client_of(request.scope).tenant)
        # Otherwise checked when the engine takes the request.
        if (given := read.params.max_tokens or 0) > self._engine.info.max_model_len:
            longest = self._engine.info.max_model_len
            problem = f"must be at most {longest}, this model's maximum context length, got {given}"
            raise FieldError("max_output_tokens", problem)
        counted = {"object": "response.input_tokens", "input_tokens": len(read.prompt.token_ids)}
        return self._handling.respond_json(read.sent, json_bytes(counted))

    async def _read_response(self, request: Request, tenant: str) -> ChatRequest:
        async with self._handling.intake.body(request) as raw:
            read: ChatRequest | FollowUp = await self._handling.read_received(request, raw, "response")
            if isinstance(read, FollowUp):
                read = await self._handling.reading.read(
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

    @get("/v1/responses/{response_id}/input_items", "ItemList", query=PAGE_QUERY)
    async def list_input_items(self, request: Request) -> Response:
        """The items that a stored response answers."""
        tenant = client_of(request.scope).tenant
        stored = self._stored(tenant, request.path_params["response_id"], "response_id")
        query = json_bytes(dict(request.query_params))
        framed = frame(stored.input_items, query)
        return json_response(await self._handling.reading.read("input_items", *framed, tenant=tenant))

    @get("/v1/responses/{response_id}", "Response")
    async def retrieve_response(self, request: Request) -> Response:
        """A stored response."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise FieldError("stream", "must be false for a stored response: its events are not kept")
        tenant = client_of(request.scope).tenant
        return json_response(self._stored(tenant, request.path_params["response_id"], "response_id").response)

    @delete("/v1/responses/{response_id}", "DeletedResponse")
    async def delete_response(self, request: Request) -> Response:
        """Forget a stored response."""
        tenant, response_id = client_of(request.scope).tenant, request.path_params["response_id"]
        self._stored(tenant, response_id, "response_id")
        self._responses.delete(tenant, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    def _stored(self, tenant: str, response_id: str, param: str) -> StoredResponse:
        if (stored := self._responses.get(tenant, response_id)) is None:
            raise ApiError(
                404,
                f"There is no response `{shortened(response_id)}`; it may have been dropped for newer ones "
                "(--server-limits max_stored_responses), or lost in a restart.",
                param=param,
                code="response_not_found",
            )
        return stored

    @post("/v1/messages", "Message", MessagesBody)
    async def create_message(self, request: Request) -> Response:
        """Answer a chat, by Anthropic's API."""
        return await self._handling.answer(request, "message", "msg", MessagesAnswer)

    @post("/v1/messages/count_tokens", "TokenCount", CountTokensBody)
    async def count_tokens(self, request: Request) -> Response:
        """Number of input tokens of a message."""
        return self._handling.respond_read(await self._handling.read(request, "count_tokens"))

    @get("/v1/models", "ModelList")
    async def list_models(self, request: Request) -> Response:
        """The models served."""
        if api_of(request.scope) is ANTHROPIC:
            listed = [self._anthropic_card(name) for name in self._names]
            ends = {"first_id": self._names[0], "last_id": self._names[-1]}
            return json_response({"data": listed, "has_more": False, **ends})
        models = [self._model_card(name) for name in self._names]
        return json_response({"object": "list", "data": models})

    @get("/v1/models/{model:path}", "Model")
    async def retrieve_model(self, request: Request) -> Response:
        """One model."""
        name = self._handling.reader.served_name(request.path_params["model"])
        card = self._anthropic_card(name) if api_of(request.scope) is ANTHROPIC else self._model_card(name)
        return json_response(card)

    def _anthropic_card(self, name: str) -> dict[str, Any]:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "max_input_tokens": self._engine.info.max_model_len,
        }

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "root": self._engine.info.model_name,
            "parent": None,
            "max_model_len": self._engine.info.max_model_len,
        }

    @post("/tokenize", "Tokens", TokenizeBody)
    async def tokenize(self, request: Request) -> Response:
        """A prompt's or a chat's token ids."""
        return self._handling.respond_read(await self._handling.read(request, "tokenize"))

    @post("/detokenize", "Text", DetokenizeBody)
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return self._handling.respond_read(await self._handling.read(request, "detokenize"))

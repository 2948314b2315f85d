"""The endpoints of Ollama's API, of which the official clients use these to talk to a model and to ask about it.

Models are not managed: there is one, which was chosen when the server started. Pulling it succeeds at once, because
many programs do that at their start.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.server.answer_json import json_bytes
from octavo.server.answers.logprobs import TokenTexts
from octavo.server.answers.ollama import OllamaAnswer, OllamaEmbedAnswer, embeddings, line
from octavo.server.apis import OLLAMA
from octavo.server.bodies.body_reader import ChatRequest, EmbeddingRequest, ReadAnswer
from octavo.server.bodies.local_apis_reader import NamedModel, ReadEmpty
from octavo.server.bodies.ollama_body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaModelBody,
    now,
)
from octavo.server.engine_client import EngineClient
from octavo.server.handling import Handling
from octavo.server.route import Endpoint, json_response
from octavo.server.tenants.auth import client_of

# The tag that names have which the client gives none.
_TAG = ":latest"
# As in Ollama for a model that stays loaded.
_NEVER = "2318-04-07T00:00:00Z"


class OllamaApi:
    """The request handlers."""

    def __init__(self, engine: EngineClient, handling: Handling) -> None:
        self._engine = engine
        self._handling = handling
        self._texts = TokenTexts(engine)
        self._started = now()
        # Ollama's command shows the first twelve characters, and fails where there are fewer.
        identity = f"{engine.info.model_name} {engine.info.architecture} {engine.info.weight_bytes}"
        self._digest = hashlib.sha256(identity.encode()).hexdigest()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                *("POST", "/api/chat", self.chat, "OllamaChat", "Answer a chat, by Ollama's API"),
                body=OllamaChatBody,
                example={
                    "messages": [{"role": "user", "content": "What is a block?"}],
                    "options": {"num_predict": 32},
                    "stream": False,
                },
                streams=True,
            ),
            Endpoint(
                *("POST", "/api/generate", self.generate, "OllamaCompletion", "Answer a prompt, by Ollama's API"),
                body=OllamaGenerateBody,
                example={"prompt": "Once upon a time", "options": {"num_predict": 16}, "stream": False},
                streams=True,
            ),
            Endpoint(
                *("POST", "/api/embed", self.embed, "OllamaEmbeddings", "An embedding of each input, by Ollama's API"),
                body=OllamaEmbedBody,
                example={"input": ["one text", "another"]},
            ),
            Endpoint(
                *("POST", "/api/embeddings", self.embed_one),
                *("OllamaEmbedding", "An embedding, by Ollama's older API"),
                body=OllamaEmbeddingsBody,
                example={"prompt": "one text"},
            ),
            Endpoint(
                *("POST", "/api/show", self.show, "OllamaModel", "What the model is, by Ollama's API"),
                body=OllamaModelBody,
                example={},
            ),
            Endpoint(
                *("POST", "/api/pull", self.pull, "Status", "Does nothing, for the model that is served"),
                body=OllamaModelBody,
                example={"stream": False},
                streams=True,
            ),
            Endpoint("GET", "/api/tags", self.list_models, "OllamaModels", "The models served, by Ollama's API"),
            Endpoint("GET", "/api/ps", self.list_running, "OllamaModels", "As /api/tags"),
            Endpoint("GET", "/api/version", self.show_version, "Version", "The version of Octavo"),
        ]

    async def chat(self, request: Request) -> Response:
        return await self._generation(request, "ollama_chat")

    async def generate(self, request: Request) -> Response:
        return await self._generation(request, "ollama_generate")

    async def _generation(self, request: Request, method: str) -> Response:
        began = time.monotonic()
        read: ChatRequest | ReadAnswer = await self._handling.read(request, method)
        if isinstance(read, ReadAnswer):
            return self._handling.respond_read(read)
        traceparent = self._handling.traceparent(request)
        answer = OllamaAnswer(self._engine, self._texts, read, client_of(request.scope), traceparent, began)
        body = read.origin
        assert isinstance(body, OllamaGenerationBody)
        return await self._handling.respond(request, body, answer, streams=body.streams)

    async def embed(self, request: Request) -> Response:
        return await self._embedding(request, "ollama_embed", is_single=False)

    async def embed_one(self, request: Request) -> Response:
        return await self._embedding(request, "ollama_embeddings", is_single=True)

    async def _embedding(self, request: Request, method: str, *, is_single: bool) -> Response:
        began = time.monotonic()
        read: EmbeddingRequest | ReadEmpty = await self._handling.read(request, method)
        if isinstance(read, ReadEmpty):
            empty = [b'{"embedding":[]}'] if is_single else embeddings(read.model, [], began, 0)
            return self._handling.respond_json(read.body, b"".join(empty))
        job = self._handling.embedding_job(request, read)
        answer = OllamaEmbedAnswer(self._engine, job, began, is_single=is_single)
        assert read.origin is not None
        return await self._handling.respond_whole(request, read.origin, answer)

    async def show(self, request: Request) -> Response:
        named: NamedModel = await self._handling.read(request, "model")
        return self._handling.respond_json(named.body, json_bytes(self._description()))

    async def pull(self, request: Request) -> Response:
        named: NamedModel = await self._handling.read(request, "model")
        payload = line({"status": "success"})
        if named.body.streams:
            return Response(payload, media_type=OLLAMA.stream)
        return self._handling.respond_json(named.body, payload)

    async def list_models(self, request: Request) -> Response:
        return json_response(json_bytes({"models": [self._card(name) for name in self._handling.names]}))

    async def list_running(self, request: Request) -> Response:
        running = {"expires_at": _NEVER, "size_vram": 0, "context_length": self._engine.info.max_model_len}
        return json_response(json_bytes({"models": [{**self._card(name), **running} for name in self._handling.names]}))

    async def show_version(self, request: Request) -> Response:
        return json_response(json_bytes({"version": octavo.__version__}))

    def _card(self, name: str) -> dict[str, Any]:
        tagged = name if ":" in name else name + _TAG
        card = {"name": tagged, "model": tagged, "modified_at": self._started, "size": self._engine.info.weight_bytes}
        return {**card, "digest": self._digest, "details": self._details()}

    def _details(self) -> dict[str, Any]:
        family = self._engine.info.architecture
        return {
            "parent_model": "",
            "format": "",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        }

    def _description(self) -> dict[str, Any]:
        reader, family = self._handling.reader, self._engine.info.architecture
        tokenizer = reader.tokenizer
        capabilities = {"tools": reader.has_tools, "thinking": reader.has_reasoning}
        return {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in self._engine.info.default_sampling.items()),
            "template": "" if tokenizer is None else tokenizer.chat_template_text,
            "details": self._details(),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": self._engine.info.max_model_len,
                f"{family}.embedding_length": self._engine.info.hidden_size,
                f"{family}.vocab_size": self._engine.info.vocab_size,
            },
            "capabilities": ["completion", *(name for name, has in capabilities.items() if has)],
            "modified_at": self._started,
        }

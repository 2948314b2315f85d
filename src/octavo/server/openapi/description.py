"""The OpenAPI description of the API: paths, bodies with this server's ranges, and answers."""

from __future__ import annotations

import asyncio
import re
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.server.answer_json import json_bytes
from octavo.server.answers.ollama import LINES
from octavo.server.bodies.infill import InfillBody
from octavo.server.bodies.llamacpp_body import LlamaCppBody
from octavo.server.bodies.messages_body import CountTokensBody, MessagesBody
from octavo.server.bodies.ollama_body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaModelBody,
)
from octavo.server.bodies.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RequestBody,
    TokenizeBody,
)
from octavo.server.bodies.response_items import LARGEST_PAGE, PAGE
from octavo.server.bodies.responses_body import ResponsesBody
from octavo.server.http.connection import EVENTS
from octavo.server.openapi.docs_page import DOCS_PAGE
from octavo.server.openapi.schema_answers import EXAMPLES, SCHEMAS
from octavo.server.openapi.schema_ranges import (
    TOGETHER,
    Described,
    body_ranges,
    field_ranges,
    narrow,
    unsupported,
)
from octavo.server.paths import LLAMACPP_PATHS
from octavo.server.route import Access, Endpoint, json_response


class _Post(NamedTuple):
    body: type[RequestBody]
    answer: str
    summary: str


_POSTS = {
    "/v1/completions": _Post(CompletionBody, "Completion", "Continue one or several prompts"),
    "/v1/chat/completions": _Post(ChatBody, "ChatCompletion", "Answer a chat"),
    "/v1/embeddings": _Post(EmbeddingBody, "EmbeddingList", "An embedding of each input"),
    "/v1/responses": _Post(ResponsesBody, "Response", "Answer a chat, by OpenAI's responses API"),
    "/v1/responses/input_tokens": _Post(ResponsesBody, "InputTokens", "How many tokens a response would read"),
    "/v1/messages": _Post(MessagesBody, "Message", "Answer a chat, by Anthropic's API"),
    "/v1/messages/count_tokens": _Post(CountTokensBody, "TokenCount", "How many tokens the prompt of a message has"),
    "/api/chat": _Post(OllamaChatBody, "OllamaChat", "Answer a chat, by Ollama's API"),
    "/api/generate": _Post(OllamaGenerateBody, "OllamaCompletion", "Answer a prompt, by Ollama's API"),
    "/api/embed": _Post(OllamaEmbedBody, "OllamaEmbeddings", "An embedding of each input, by Ollama's API"),
    "/api/embeddings": _Post(OllamaEmbeddingsBody, "OllamaEmbedding", "An embedding, by Ollama's older API"),
    "/api/show": _Post(OllamaModelBody, "OllamaModel", "What the model is, by Ollama's API"),
    "/api/pull": _Post(OllamaModelBody, "Status", "Does nothing, for the model that is served"),
    "/completion": _Post(LlamaCppBody, "LlamaCppCompletion", "Continue a prompt, by llama.cpp's API"),
    "/completions": _Post(LlamaCppBody, "LlamaCppCompletion", "As /completion"),
    "/infill": _Post(InfillBody, "LlamaCppCompletion", "Text between a prefix and a suffix, by llama.cpp's API"),
    "/tokenize": _Post(TokenizeBody, "Tokens", "A prompt's or a chat's token ids"),
    "/detokenize": _Post(DetokenizeBody, "Text", "The text of token ids"),
}
# (path, method): (the answer's schema, or its media type, and a summary)
_OTHERS = {
    ("/v1/responses/{response_id}", "get"): ("Response", "A stored response"),
    ("/v1/responses/{response_id}", "delete"): ("DeletedResponse", "Forget a stored response"),
    ("/v1/responses/{response_id}/input_items", "get"): ("ItemList", "The items that a stored response answers"),
    ("/v1/models", "get"): ("ModelList", "The models served"),
    ("/v1/models/{model}", "get"): ("Model", "One model"),
    ("/api/tags", "get"): ("OllamaModels", "The models served, by Ollama's API"),
    ("/api/ps", "get"): ("OllamaModels", "As /api/tags"),
    ("/api/version", "get"): ("Version", "The version of Octavo"),
    ("/props", "get"): ("LlamaCppProperties", "What the server serves, by llama.cpp's API"),
    ("/slots", "get"): ("LlamaCppSlots", "How many sequences can run, and which places are taken"),
    ("/health", "get"): (
        "Status",
        '200 while the engine runs, 503 when it does not; status "degraded" where its block accounting is wrong',
    ),
    ("/ready", "get"): (
        "Status",
        "200 while the server takes requests, 503 while it stops or its engine does not run",
    ),
    ("/ping", "get"): ("Status", "As /health"),
    ("/load", "get"): ("Load", "Requests in flight, running and waiting, and the share of the KV cache in use"),
    ("/version", "get"): ("Version", "The version of Octavo"),
    ("/", "get"): ("text/html", "A page that shows the KV cache and the requests as they are"),
    ("/live/blocks.js", "get"): ("text/javascript", "Its script for the blocks"),
    ("/live/details.js", "get"): ("text/javascript", "Its script for what is chosen and what has happened"),
    ("/live/page.js", "get"): ("text/javascript", "Its main script"),
    ("/live/page.css", "get"): ("text/css", "Its style"),
    ("/live/events", "get"): (
        "text/event-stream",
        "What it shows, as server-sent events (admin key, where the server has keys)",
    ),
    ("/live/requests/{request_id}", "get"): (
        "application/json",
        "The block tables of a request (admin key, where the server has keys)",
    ),
    ("/live/blocks", "get"): (
        "application/json",
        "Which request computed each of some blocks (admin key, where the server has keys)",
    ),
    ("/live/blocks/{block_id}", "get"): (
        "application/json",
        "Who holds a block, and what it is (admin key, where the server has keys)",
    ),
    ("/debug/kv", "get"): (
        "KVReport",
        "Who holds which bytes of the KV cache, and how much it helped (admin key)",
    ),
    ("/debug/pins", "get"): ("PinList", "Every pinned prefix (admin key)"),
    ("/debug/pins/{pin_id}", "delete"): ("DeletedPin", "Let a pin go before its time (admin key)"),
    ("/reset_prefix_cache", "post"): ("Evicted", "Give up every cached block (admin key)"),
    ("/metrics", "get"): ("text/plain", "Prometheus metrics, under vLLM's names"),
    ("/openapi.json", "get"): ("Description", "This description"),
    ("/docs", "get"): ("text/html", "A page that shows it"),
}
# The fields of a query, by path.
_QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/responses/{response_id}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": LARGEST_PAGE, "default": PAGE},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string"},
    },
    "/live/blocks": {"ids": {"type": "string", "pattern": r"^\d{1,9}(,\d{1,9}){0,255}$"}},
}
_STREAMS = {
    **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"), EVENTS),
    **dict.fromkeys(("/completion", "/completions", "/infill"), EVENTS),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/pull"), LINES),
}
# Why a request may be refused, by status; all other statuses are error objects too.
_REFUSALS = {
    "400": "The body is wrong, or asks for what cannot be served",
    "401": "No API key, or a wrong one",
    "403": "The key, or the web page, may not do this",
    "404": "There is no such model, response, item or pin",
    "413": "The body is too large",
    "415": "Bodies must not be compressed, and without API keys be of the type application/json",
    "429": "The tenant is over a limit",
    "503": "The server has no room, stops, or its engine does not run",
}


class Description:
    """The description of one server, and the page that shows it."""

    def __init__(self, server: Described) -> None:
        self._server = server

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", "/openapi.json", self._openapi, Access.PUBLIC),
            Endpoint("GET", "/docs", self._docs, Access.PUBLIC),
        ]

    @cached_property
    def _described(self) -> bytes:
        return json_bytes(describe(octavo.__version__, self._server))

    async def _openapi(self, request: Request) -> Response:
        # Made once; it takes a tenth of a second, so it runs in a thread and streams need not wait.
        return json_response(await asyncio.to_thread(lambda: self._described))

    async def _docs(self, request: Request) -> Response:
        return Response(DOCS_PAGE, media_type="text/html")


def describe(version: str, server: Described) -> dict[str, Any]:
    """Return the OpenAPI description of the API."""
    paths: dict[str, Any] = {}
    for path, post in _POSTS.items():
        content = {"schema": _reference(post.body.__name__), "example": EXAMPLES[path]}
        paths[path] = {
            "post": {
                "summary": post.summary,
                "requestBody": {"required": True, "content": {"application/json": content}},
                "responses": _responses(post.answer, stream=_STREAMS.get(path), error=_error_of(path)),
            }
        }
    for (path, method), (answer, summary) in _OTHERS.items():
        paths.setdefault(path, {})[method] = {
            "summary": summary,
            "responses": _responses(answer, error=_error_of(path)),
        }
    for path, methods in paths.items():
        for operation in methods.values():
            parameters: list[dict[str, Any]] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in re.findall(r"{(\w+)}", path)
            ]
            parameters += [
                {"name": name, "in": "query", "schema": schema} for name, schema in _QUERIES.get(path, {}).items()
            ]
            if parameters:
                operation["parameters"] = parameters
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version},
        "paths": paths,
        "components": {"schemas": {**_bodies(server), **SCHEMAS}},
    }


def _bodies(server: Described) -> dict[str, Any]:
    """Return the schemas of all bodies, with ranges."""
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [(p.body, "validation") for p in _POSTS.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = definitions["$defs"]
    ranges = field_ranges(server)
    own = body_ranges(server.limits)
    for post in _POSTS.values():
        body = post.body.__name__
        properties = schemas[body]["properties"]
        here = {**ranges, **own.get(body, {})}
        for name, schema in properties.items():
            if name in post.body.unsupported:
                properties[name] = unsupported()
            elif name in here:
                properties[name] = narrow(schema, here[name])
        schemas[body] |= TOGETHER.get(body, {})
    return schemas


def _responses(answer: str, *, error: dict[str, Any], stream: str | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _reference(answer)}}
    if "/" in answer:
        content = {answer: {"schema": {"type": "string"}}}
    if stream is not None:
        content[stream] = {}
    refused = {"application/json": {"schema": error}}
    return {
        "200": {"description": "The answer", "content": content},
        **{status: {"description": why, "content": refused} for status, why in _REFUSALS.items()},
        "default": {"description": "Any other error", "content": refused},
    }


def _error_of(path: str) -> dict[str, Any]:
    """Return the schema of a path's errors; refusals before routing, such as of a wrong key, are OpenAI's object."""
    anthropic = {"anyOf": [_reference("MessageError"), _reference("Error")]}
    if path.startswith("/v1/messages"):
        return anthropic
    if path.startswith("/api/"):
        return _reference("OllamaError")
    return _reference("LlamaCppError") if path in LLAMACPP_PATHS else _reference("Error")


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}

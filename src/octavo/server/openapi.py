"""The documentation page at /docs, and its OpenAPI description."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.server.generation import json_bytes
from octavo.server.messages_body import CountTokensBody, MessagesBody
from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from octavo.server.responses_body import ResponsesBody
from octavo.server.route import Endpoint, json_response

_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue one or several prompts"),
    "/v1/chat/completions": (ChatBody, "Answer a chat"),
    "/v1/embeddings": (EmbeddingBody, "An embedding of each input"),
    "/v1/responses": (ResponsesBody, "Answer a chat, by OpenAI's responses API"),
    "/v1/messages": (MessagesBody, "Answer a chat, by Anthropic's API"),
    "/v1/messages/count_tokens": (CountTokensBody, "How many tokens the prompt of a message has"),
    "/tokenize": (TokenizeBody, "A prompt's or a chat's token ids"),
    "/detokenize": (DetokenizeBody, "The text of token ids"),
}
_PLAIN = {
    "/v1/models": "The models served",
    "/v1/models/{model}": "One model",
    "/health": '200 while the engine runs, 503 when it does not; status "degraded" where its block accounting is wrong',
    "/ready": "200 while the server takes requests, 503 while it stops or its engine does not run",
    "/ping": "As /health",
    "/load": "Requests in flight, running and waiting, and the share of the KV cache in use",
    "/version": "The version of Octavo",
    "/debug/kv": "Who holds which bytes of the KV cache, and how much it helped (admin key)",
    "/debug/pins": "Every pinned prefix (admin key)",
    "/metrics": "Prometheus metrics, under vLLM's names",
    "/openapi.json": "This description",
    "/docs": "A page that shows it",
}
_ACTIONS = {
    ("/v1/responses/{response_id}", "get"): "A stored response",
    ("/v1/responses/{response_id}", "delete"): "Forget a stored response",
    ("/debug/pins/{pin_id}", "delete"): "Let a pin go before its time (admin key)",
    ("/reset_prefix_cache", "post"): "Give up every cached block (admin key)",
}


def description_endpoints() -> list[Endpoint]:
    return [Endpoint("GET", "/openapi.json", _openapi), Endpoint("GET", "/docs", _docs)]


async def _openapi(request: Request) -> Response:
    return json_response(json_bytes(describe(octavo.__version__)))


async def _docs(request: Request) -> Response:
    return Response(DOCS_PAGE, media_type="text/html")


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI description of the API."""
    bodies: list[tuple[type[BaseModel], Literal["validation"]]] = [(body, "validation") for body, _ in _BODIES.values()]
    _, definitions = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for path, (body, summary) in _BODIES.items():
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": _RESPONSES,
            }
        }
    for path, summary in _PLAIN.items():
        paths[path] = {"get": {"summary": summary, "responses": _RESPONSES}}
    for (path, method), summary in _ACTIONS.items():
        paths.setdefault(path, {})[method] = {"summary": summary, "responses": _RESPONSES}
    for path, methods in paths.items():
        if named := re.findall(r"{(\w+)}", path):
            for operation in methods.values():
                operation["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named
                ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


_RESPONSES = {"200": {"description": "As OpenAI's API"}, "default": {"description": "An error object"}}

# Swagger UI comes from its public network, as FastAPI's page does: offline, /openapi.json is there all the same.
DOCS_PAGE = """<!DOCTYPE html>
<html>
<head>
<title>Octavo</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui"})</script>
</body>
</html>
"""

"""The documentation at /docs, made when it is first asked for.

Handlers read and validate their bodies themselves, so FastAPI cannot see the types: they are named here.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue one or several prompts"),
    "/v1/chat/completions": (ChatBody, "Answer a chat"),
    "/tokenize": (TokenizeBody, "A prompt's or a chat's token ids"),
    "/detokenize": (DetokenizeBody, "The text of token ids"),
}
_PLAIN = {
    "/v1/models": "The models served",
    "/v1/models/{model}": "One model",
    "/health": "200 while the engine runs, 503 when it does not",
    "/version": "The version of Octavo",
    "/metrics": "Prometheus metrics, under vLLM's names",
}


def describe(app: FastAPI) -> None:
    """Replace FastAPI's own description of `app`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _schema(app.title, app.version)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(title: str, version: str) -> dict[str, Any]:
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
    paths["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


_RESPONSES = {"200": {"description": "As OpenAI's API"}, "default": {"description": "An error object"}}

"""Responses in the OpenAPI description.

Only members that are always present are required; objects may have more.
"""

from __future__ import annotations

from octavo.server.bodies.fields import Schema

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}
_ANY: Schema = {}


def _object(**members: Schema) -> Schema:
    return {"type": "object", "required": list(members), "properties": members}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(*values: str) -> Schema:
    return {"enum": list(values)}


_DETAILS = _object(cached_tokens=_COUNT)
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT, prompt_tokens_details=_DETAILS)
_MODEL = _object(id=_TEXT, object=_const("model"), created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
_OLLAMA = {"model": _TEXT, "created_at": _TEXT, "done": _FLAG, "done_reason": _TEXT}
_LLAMACPP = _object(
    index=_COUNT,
    content=_TEXT,
    tokens=_list(_COUNT),
    stop=_FLAG,
    stop_type=_const("none", "eos", "limit", "word"),
    tokens_predicted=_COUNT,
    tokens_evaluated=_COUNT,
    timings={"type": "object"},
)
# With llama.cpp's `with_pieces`, a token is an object.
_TOKEN: Schema = {"anyOf": [_COUNT, _object(id=_COUNT)]}

SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))),
    "MessageError": _object(type=_const("error"), error=_object(type=_TEXT, message=_TEXT)),
    "Completion": _object(
        id=_TEXT,
        object=_const("text_completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list(_object(index=_COUNT, text=_TEXT, finish_reason=_TEXT)),
        usage=_USAGE,
    ),
    "ChatCompletion": _object(
        id=_TEXT,
        object=_const("chat.completion"),
        created=_COUNT,
        model=_TEXT,
        choices=_list(
            _object(
                index=_COUNT,
                message=_object(role=_const("assistant"), content=_or_null(_TEXT)),
                finish_reason=_TEXT,
            )
        ),
        usage=_USAGE,
    ),
    "EmbeddingList": _object(
        object=_const("list"),
        model=_TEXT,
        data=_list(
            _object(object=_const("embedding"), index=_COUNT, embedding={"anyOf": [_TEXT, _list({"type": "number"})]})
        ),
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Response": _object(
        id=_TEXT, object=_const("response"), status=_TEXT, model=_TEXT, output=_list(_object(type=_TEXT))
    ),
    "ItemList": _object(
        object=_const("list"),
        data=_list(_object(id=_TEXT, type=_TEXT, status=_TEXT)),
        first_id=_or_null(_TEXT),
        last_id=_or_null(_TEXT),
        has_more=_FLAG,
    ),
    "DeletedResponse": _object(id=_TEXT, object=_const("response"), deleted=_FLAG),
    "Message": _object(
        id=_TEXT,
        type=_const("message"),
        role=_const("assistant"),
        model=_TEXT,
        content=_list(_object(type=_TEXT)),
        stop_reason=_or_null(_TEXT),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "InputTokens": _object(object=_const("response.input_tokens"), input_tokens=_COUNT),
    "TokenCount": _object(input_tokens=_COUNT),
    "OllamaError": _object(error=_TEXT),
    "OllamaChat": _object(**_OLLAMA, message=_object(role=_const("assistant"), content=_TEXT)),
    "OllamaCompletion": _object(**_OLLAMA, response=_TEXT),
    "OllamaEmbeddings": _object(model=_TEXT, embeddings=_list(_list({"type": "number"})), prompt_eval_count=_COUNT),
    "OllamaEmbedding": _object(embedding=_list({"type": "number"})),
    "OllamaModel": _object(template=_TEXT, details={"type": "object"}, capabilities=_list(_TEXT)),
    "OllamaModels": _object(models=_list(_object(name=_TEXT, model=_TEXT, size=_COUNT))),
    "LlamaCppError": _object(error=_object(code=_COUNT, message=_TEXT, type=_TEXT)),
    # Several prompts are answered by a list.
    "LlamaCppCompletion": {"anyOf": [_LLAMACPP, _list(_LLAMACPP)]},
    "LlamaCppProperties": _object(default_generation_settings={"type": "object"}, chat_template=_TEXT),
    "LlamaCppSlots": _list(_object(id=_COUNT, n_ctx=_COUNT, is_processing=_FLAG)),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_TOKEN), token_strs=_or_null(_list(_TEXT))),
    "Text": _object(prompt=_TEXT, content=_TEXT),
    "Model": _MODEL,
    "ModelList": _object(object=_const("list"), data=_list(_MODEL)),
    "Status": _object(status=_TEXT),
    "Worker": {"type": "object"},
    "Load": _object(server_load=_COUNT, running=_COUNT, waiting=_COUNT, kv_cache_usage={"type": "number"}),
    "Version": _object(version=_TEXT),
    "KVReport": {"type": "object"},
    "PinList": _object(object=_const("list"), data=_list(_object(id=_TEXT))),
    "DeletedPin": _object(id=_TEXT, object=_const("pin"), deleted=_FLAG),
    "Evicted": _object(evicted_blocks=_COUNT),
    "Description": _object(openapi=_TEXT, paths={"type": "object"}),
}

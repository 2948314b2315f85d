"""Makers of the fields whose schema does not say enough, and which fields a random body has. Part of `fuzz_bodies.py`.

Chats and tools have three forms: chat completions', the responses API's, and Anthropic's.
"""

from __future__ import annotations

import json
import random
from typing import Any

from octavo.request_limits import DEFAULT_LIMITS as LIMITS
from octavo.server.bodies.foreign_fields import HARMLESS, NEUTRAL, OTHER_NAMES
from tests.campaigns.fuzz_values import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Maker,
    Values,
    as_body,
    body_schema,
    damaged,
    is_unsupported,
)

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
INPUT_TOKENS = "/v1/responses/input_tokens"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
OLLAMA = OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
# Weights of the paths; a path that the server gains and that is not here is a `KeyError` in `ENDPOINTS`.
WEIGHTS = {
    COMPLETIONS: 6,
    CHAT: 5,
    RESPONSES: 4,
    INPUT_TOKENS: 1,
    MESSAGES: 3,
    COUNT_TOKENS: 1,
    "/v1/embeddings": 2,
    OLLAMA_CHAT: 2,
    OLLAMA_GENERATE: 2,
    "/api/embed": 1,
    "/api/embeddings": 1,
    "/api/show": 1,
    "/api/pull": 1,
    "/completion": 2,
    "/completions": 1,
    "/infill": 1,
    "/tokenize": 1,
    "/detokenize": 1,
}
# What the sender replaces by ids of responses, and of their items, that the server stored before.
STORED_RESPONSE, STORED_ITEM = "{a stored response}", "{an item of it}"


def make_body(rng: random.Random, path: str) -> bytes:
    """A random body for a path."""
    v = Values(rng, rng.choice([0.0, 0.0, 0.02, 0.2]))
    schema = body_schema(path)
    share = rng.choice([0.02, 0.1, 0.4])
    given = {}
    for name, field in schema["properties"].items():
        often = share / 8 if name in RARE or is_unsupported(field) else share
        if name in schema.get("required", ()) or (name in USUAL and not is_unsupported(field)) or v.maybe(often):
            maker = OF_PATH.get((path, name)) or MAKERS.get(name)
            given[name] = v.of(field) if maker is None else maker(v)
    if "response_format" in schema["properties"] and v.maybe(0.1):
        # One of them alone: a body with two is refused.
        described = rng.choice([name for name in STRUCTURED if name in schema["properties"]])
        given[described] = MAKERS[described](v)
    if path == "/tokenize" and v.maybe(0.95):
        kept = rng.choice(["prompt", "messages", "content"])
        given = {name: value for name, value in given.items() if name not in ("prompt", "messages", "content")}
        given[kept] = OF_PATH.get((path, kept), MAKERS["messages"])(v)
    if v.maybe(0.03):
        given[rng.choice([*OTHER_NAMES, *NEUTRAL, *HARMLESS, "unknown"])] = v.odd()
    names = list(given)
    rng.shuffle(names)
    body = as_body(v.grafted({name: given[name] for name in names}))
    return damaged(rng, body) if rng.random() < 0.04 else body


def _prompt(v: Values) -> Any:
    kind = v.rng.randrange(7)
    if kind == 0:
        return v.text(400)
    if kind == 1:
        return v.ids(40)
    if kind == 2:
        return [v.text() for _ in range(v.at(LIMITS.max_body_prompts, 0.01))]
    if kind == 3:
        return [v.ids(10) for _ in range(v.rng.randrange(1, 5))]
    if kind == 4:
        return v.ids(v.rng.choice([MAX_MODEL_LEN, MAX_MODEL_LEN + 40]))
    return v.text()


def _stop(v: Values) -> Any:
    if v.maybe():
        return v.text(6)
    return [v.text(LIMITS.max_stop_string_length + 3) for _ in range(v.at(LIMITS.max_stop_strings))]


def _cache_control(v: Values) -> Any:
    return {"type": "ephemeral", "ttl": v.rng.choice(["5m", "1h", "1s", "x", "0s", "99h"])}


# ---- Chats ----


def _messages(v: Values) -> list[Any]:
    return [_message(v) for _ in range(v.at(LIMITS.max_messages, 0.003))]


def _message(v: Values) -> dict[str, Any]:
    content: Any = v.text()
    if v.maybe(0.2):
        content = [{"type": "text", "text": v.text(), **_marked(v)} for _ in range(v.at(5))]
    message = {"role": v.rng.choice(["user", "assistant", "system", "developer", "tool"]), "content": content}
    message |= _marked(v)
    if v.maybe(0.15):
        message |= v.some(
            name=lambda v: v.text(),
            tool_call_id=lambda v: "call_1",
            refusal=lambda v: v.text(),
            reasoning_content=lambda v: v.text(),
            tool_calls=lambda v: [_call(v) for _ in range(v.at(3))],
        )
    return message


def _marked(v: Values) -> dict[str, Any]:
    return {"cache_control": _cache_control(v)} if v.maybe(0.05) else {}


def _call(v: Values) -> dict[str, Any]:
    arguments = v.rng.choice([{"a": 1}, '{"a": 1}', '{"a":', "", None, [1]])
    return {"id": "call_1", "type": "function", "function": {"name": _tool_name(v), "arguments": arguments}}


def _ollama_messages(v: Values) -> list[Any]:
    return [_ollama_message(v) for _ in range(v.at(LIMITS.max_messages, 0.003))]


def _ollama_message(v: Values) -> dict[str, Any]:
    message = {"role": v.rng.choice(["user", "user", "assistant", "system", "tool"]), "content": v.text()}
    if v.maybe(0.15):
        message |= v.some(
            thinking=lambda v: v.text(),
            tool_name=_tool_name,
            images=lambda v: [] if v.maybe(0.9) else ["aGk="],
            tool_calls=lambda v: [{"function": {"name": _tool_name(v), "arguments": {"a": 1}}}],
        )
    return message


def _ollama_options(v: Values) -> dict[str, Any]:
    return {
        "num_predict": v.rng.choice([1, 4, 16]),
        **v.some(
            temperature=lambda v: v.rng.choice([0, 0.8, 2]),
            seed=lambda v: v.at(100),
            stop=_stop,
            num_ctx=lambda v: 4096,
            top_k=lambda v: v.rng.choice([0, 40, -1]),
            repeat_penalty=lambda v: v.rng.choice([1.1, 1, 0]),
            mirostat=lambda v: 0 if v.maybe(0.9) else 1,
        ),
    }


def _anthropic_messages(v: Values) -> list[Any]:
    roles = ["user", "assistant"]
    return [{"role": v.rng.choice(roles), "content": _blocks(v)} for _ in range(v.at(LIMITS.max_messages, 0.003))]


def _blocks(v: Values) -> Any:
    if v.maybe(0.6):
        return v.text()
    kinds: list[Maker] = [
        lambda v: {"type": "text", "text": v.text()},
        lambda v: {"type": "tool_use", "id": "t1", "name": _tool_name(v), "input": {"a": v.text()}},
        lambda v: {"type": "tool_result", "tool_use_id": "t1", "content": v.rng.choice([v.text(), _parts(v), None])},
        lambda v: {"type": "thinking", "thinking": v.text(), "signature": "x"},
        lambda v: {"type": "redacted_thinking", "data": "x"},
        lambda v: {"type": v.rng.choice(["image", "document"]), "source": {}},
    ]
    return [{**v.rng.choice(kinds)(v), **_marked(v)} for _ in range(v.at(6))]


def _parts(v: Values) -> list[Any]:
    return [{"type": "text", "text": v.text(), **_marked(v)} for _ in range(v.at(3))]


def _items(v: Values) -> Any:
    if v.maybe(0.4):
        return v.text()
    return [_item(v) for _ in range(v.at(LIMITS.max_messages, 0.003))]


def _item(v: Values) -> dict[str, Any]:
    part = v.rng.choice(["input_text", "output_text", "text", "refusal", "summary_text", "input_image"])
    text = v.text()
    content = text if v.maybe() else [{"type": part, ("refusal" if part == "refusal" else "text"): text}]
    kinds: list[Maker] = [
        lambda v: {"role": v.rng.choice(["user", "assistant", "system", "developer"]), "content": content},
        lambda v: {"type": "message", "role": "user", "content": content, "id": v.rng.choice(["a", v.text()])},
        lambda v: {"type": "function_call", "name": _tool_name(v), "arguments": '{"a": 1}', "call_id": "c"},
        lambda v: {"type": "function_call_output", "call_id": "c", "output": content},
        lambda v: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
        lambda v: {"type": "item_reference", "id": v.rng.choice([STORED_ITEM, STORED_ITEM, "msg_x"])},
        lambda v: {"id": STORED_ITEM},
    ]
    item: dict[str, Any] = v.rng.choices(kinds, [6, 3, 1, 1, 1, 1, 1])[0](v)
    return item


def _bias_pairs(v: Values) -> Any:
    return [[v.rng.randrange(VOCAB_SIZE), v.rng.choice([1.5, -3, False])] for _ in range(v.at(5))]


def _template_variables(v: Values) -> dict[str, Any]:
    return {v.rng.choice(["a", "enable_thinking", "messages", "loop"]): v.odd()}


# ---- Tools ----


def _tool_name(v: Values) -> str:
    return v.rng.choice(["f", "g", "get_weather", "x" * 128, "", "no name"]) if v.maybe(0.3) else "f"


def _functions(v: Values) -> list[dict[str, Any]]:
    count = v.at(LIMITS.max_tools, 0.02)
    names = [_tool_name(v), *(f"tool_{i}" for i in range(count - 1))]
    extra = v.some(description=lambda v: v.text(), strict=Values.maybe, parameters=_object_schema)
    return [{"name": name, **extra} for name in names]


def _tools(v: Values) -> list[dict[str, Any]]:
    return [{"type": "function", "function": each} for each in _functions(v)]


def _flat_tools(v: Values) -> list[dict[str, Any]]:
    return [{"type": "function", **each} for each in _functions(v)]


def _anthropic_tools(v: Values) -> list[dict[str, Any]]:
    return [{"name": each["name"], "input_schema": _object_schema(v), **_marked(v)} for each in _functions(v)]


def _tool_choice(v: Values) -> Any:
    named = {"type": "function", "function": {"name": _tool_name(v)}}
    flat = {"type": "function", "name": _tool_name(v)}
    allowed = {"mode": v.rng.choice(["auto", "required", "x"]), "tools": [v.rng.choice([named, flat])]}
    choices = [named, flat, {"type": "allowed_tools", **allowed}, {"type": "allowed_tools", "allowed_tools": allowed}]
    return v.rng.choice(["none", "auto", "required", "required", *choices])


def _anthropic_tool_choice(v: Values) -> Any:
    kind = {"type": v.rng.choice(["auto", "any", "tool", "none"])}
    return kind | v.some(name=_tool_name, disable_parallel_tool_use=Values.maybe)


# ---- Structured outputs ----


def _schema(v: Values, depth: int = 0) -> Any:
    """A JSON Schema of the kinds that clients send, some of them without a solution or unsupported."""
    inner = {"type": "integer"} if depth > 2 else _schema(v, depth + 1)
    kinds: list[Maker] = [
        _object_schema,
        lambda v: {"type": "array", "items": inner} | v.some(minItems=lambda v: v.at(5), maxItems=lambda v: v.at(5)),
        lambda v: (
            {"type": "string"} | v.some(maxLength=lambda v: v.at(10), pattern=_regex, minLength=lambda v: v.at(6))
        ),
        lambda v: {"type": "integer"} | v.some(minimum=lambda v: v.at(10), maximum=lambda v: v.at(9)),
        lambda v: {"type": ["string", "null"]},
        lambda v: {"enum": [v.text(), 1, None]},
        lambda v: {"const": v.odd(3)},
        lambda v: {v.rng.choice(["anyOf", "oneOf", "allOf"]): [inner, {"type": "boolean"}]},
        lambda v: {"not": inner},
        lambda v: {"$ref": v.rng.choice(["#", "#/$defs/d", "#/none", "http://x/y"]), "$defs": {"d": inner}},
        lambda v: {"type": "string", "format": v.rng.choice(["date-time", "email", "uuid", "x"])},
        lambda v: {v.rng.choice(["multipleOf", "uniqueItems", "patternProperties", "x-guidance"]): v.odd(3)},
        lambda v: v.maybe(),
    ]
    return v.rng.choice(kinds)(v)


def _object_schema(v: Values) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}}
    if v.maybe():
        schema["properties"][v.text(6)] = _schema(v, 2)
    return schema | v.some(required=lambda v: ["a"], additionalProperties=Values.maybe)


def _regex(v: Values) -> str:
    pieces = [
        *("[a-z]{1,3}", r"\d+", "(a|b)*", ".", r"\p{L}", "é", "(x|)", "a?", "[^a]", "yes|no"),
        *("(?=x)", r"\1", "[", "a{1000000}", "(a*)*", "^a$", "\x00", "(?i)a", "((((a))))", "a{5,2}"),
    ]
    return "".join(v.rng.choice(pieces[:10] if v.maybe(0.9) else pieces) for _ in range(v.rng.randrange(4)))


def _grammar(v: Values) -> str:
    return v.rng.choice(
        [
            'start: "yes" | "no"',
            "start: /[a-z]{1,5}/",
            'start: x+\nx: "a" | "b" x',
            'root ::= "a" [0-9]+',
            'root ::= ("a" | root)',
            "start: start",
            'start: ""',
            "start: missing",
            'start: %json {"type": "integer"}',
            "start: %json " + json.dumps(_schema(v)),
            "start: /" + _regex(v) + "/",
            v.text(),
        ]
    )


def _choice(v: Values) -> list[str]:
    return [v.text(12) for _ in range(v.at(200, 0.03))]


def _json(v: Values) -> Any:
    return _schema(v) if v.maybe() else json.dumps(_schema(v))


def _structured_outputs(v: Values) -> dict[str, Any]:
    kinds: dict[str, Maker] = {
        "json": _json,
        "regex": _regex,
        "choice": _choice,
        "grammar": _grammar,
        "json_object": Values.maybe,
    }
    name = v.rng.choice(list(kinds))
    options = {}
    if v.maybe(0.2):
        flags = ("strict", "disable_any_whitespace", "disable_additional_properties")
        options = v.some(**dict.fromkeys(flags, Values.maybe), whitespace_pattern=_regex)
    return {name: kinds[name](v), **options}


def _response_format(v: Values) -> dict[str, Any]:
    kind = v.rng.choice(["text", "json_object", "json_schema", "json_schema"])
    described = {"name": "n", "schema": _schema(v), **v.some(strict=Values.maybe)}
    return {"type": kind, **({"json_schema": described} if kind == "json_schema" else {})}


def _flat_format(v: Values) -> dict[str, Any]:
    kind = v.rng.choice(["text", "json_object", "json_schema"])
    return {"type": kind, **({"name": "n", "schema": _schema(v)} if kind == "json_schema" else {})}


MAKERS: dict[str, Maker] = {
    "prompt": _prompt,
    "input": _prompt,
    "messages": _messages,
    "stop": _stop,
    "stop_sequences": lambda v: [v.text(6) for _ in range(v.at(LIMITS.max_stop_strings))],
    # Not served by most names.
    "model": lambda v: v.rng.choice(["x", None, "m" * v.at(LIMITS.max_name_length)]) if v.maybe(0.1) else None,
    "max_tokens": lambda v: v.rng.choice([1, 1, 2, 4, 5, 16, 16, 16, 16, MAX_MODEL_LEN]),
    "max_completion_tokens": lambda v: v.rng.choice([1, 4]),
    "max_output_tokens": lambda v: v.rng.choice([1, 4, 16]),
    "n": lambda v: v.at(LIMITS.max_n, 0.05),
    "best_of": lambda v: v.at(LIMITS.max_n, 0.05),
    "use_beam_search": lambda v: v.maybe(0.7),
    "truncate_prompt_tokens": lambda v: v.rng.choice([-1, 1, 5, MAX_MODEL_LEN, 0, MAX_MODEL_LEN + 1]),
    "allowed_token_ids": lambda v: list({v.rng.randrange(VOCAB_SIZE) for _ in range(v.at(300))}),
    "bad_words": lambda v: [v.text(5) for _ in range(v.at(LIMITS.max_bad_words))],
    "cache_salt": lambda v: "s" * v.at(LIMITS.max_cache_salt_length),
    "tools": _tools,
    "tool_choice": _tool_choice,
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "guided_whitespace_pattern": _regex,
    "chat_template_kwargs": _template_variables,
    "reasoning_effort": lambda v: v.rng.choice(["none", "low", "high"]),
    "modalities": lambda v: ["text"] if v.maybe(0.9) else ["audio"],
    "previous_response_id": lambda v: v.rng.choice([STORED_RESPONSE, STORED_RESPONSE, STORED_RESPONSE, "resp_x"]),
    "include": lambda v: [v.rng.choice(["message.output_text.logprobs", "reasoning.encrypted_content"])],
    "text": lambda v: v.some(format=_flat_format, verbosity=lambda v: v.rng.choice(["low", "high"])),
    "reasoning": lambda v: v.some(effort=lambda v: v.rng.choice(["low", "none"]), summary=lambda v: "auto"),
    "thinking": lambda v: {"type": v.rng.choice(["enabled", "disabled", "adaptive"]), "budget_tokens": v.at(20)},
    "output_config": lambda v: v.some(effort=lambda v: "low", format=_flat_format),
    "output_format": _flat_format,
    "system": lambda v: v.text() if v.maybe() else _parts(v),
    "truncation": lambda v: v.rng.choice(["auto", "disabled", "x"]),
    "cache_control": _cache_control,
    "encoding_format": lambda v: v.rng.choice(["float", "base64"]),
    "options": _ollama_options,
    "keep_alive": lambda v: v.rng.choice(["5m", 0, -1]),
    "think": lambda v: v.rng.choice([True, False, "low", "x"]),
    "grammar": _grammar,
    "json_schema": _object_schema,
    "n_predict": lambda v: v.rng.choice([1, 4, 16, -1]),
}
OF_PATH: dict[tuple[str, str], Maker] = {
    **{(path, "input"): _items for path in (RESPONSES, INPUT_TOKENS)},
    **{(path, "tools"): _flat_tools for path in (RESPONSES, INPUT_TOKENS)},
    **{(path, "messages"): _anthropic_messages for path in (MESSAGES, COUNT_TOKENS)},
    **{(path, "tools"): _anthropic_tools for path in (MESSAGES, COUNT_TOKENS)},
    **{(path, "tool_choice"): _anthropic_tool_choice for path in (MESSAGES, COUNT_TOKENS)},
    (OLLAMA_CHAT, "messages"): _ollama_messages,
    **{(path, "format"): lambda v: v.rng.choice(["json", "", _object_schema(v)]) for path in OLLAMA},
    **{(path, "prompt"): lambda v: v.text(400) for path in (OLLAMA_GENERATE, "/api/embeddings", "/infill")},
    (OLLAMA_GENERATE, "context"): lambda v: v.ids(40),
    ("/api/embed", "input"): lambda v: v.rng.choice([v.text(400), [v.text() for _ in range(v.at(20))]]),
    **{(path, "logit_bias"): _bias_pairs for path in ("/completion", "/completions", "/infill")},
    ("/tokenize", "content"): lambda v: v.text(3000),
    ("/tokenize", "prompt"): lambda v: v.text(3000),
    ("/detokenize", "tokens"): lambda v: v.ids(400),
}
STRUCTURED = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
# Fields that nearly all bodies have, though none need them.
USUAL = {"input", "prompt", "messages", "max_tokens", "max_output_tokens", "n_predict", "options"}
# Fields that most bodies leave out; with them in half of all, few bodies would be served.
RARE = {
    *STRUCTURED,
    *("format", "grammar", "json_schema", "guided_whitespace_pattern", "model", "stream_options"),
    *("use_beam_search", "prompt_logprobs", "priority"),
    *("continue_final_message", "tool_choice", "previous_response_id", "truncate_prompt_tokens", "output_format"),
    *("top_logprobs", "dimensions", "allowed_token_ids", "text", "output_config"),
    *("cache_control", "length_penalty", "early_stopping", "best_of", "stop", "truncation"),
}

"""Ranges of request fields for the OpenAPI description, from this server's limits and general validity.

pydantic knows only the types; values are checked after parsing. The ranges of `SamplingParams` come from its fields;
this module restates the other checks field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.limits import RequestLimits
from octavo.option import Option, options_of
from octavo.sampling_params import SamplingParams
from octavo.server.bodies.prompt_forms import ROLES

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Described:
    """The properties of a server that its description depends on."""

    limits: RequestLimits
    max_model_len: int
    vocab_size: int
    hidden_size: int


def unsupported() -> Schema:
    """Return the schema of a field that is known but not supported, so that it must be empty."""
    return {"enum": [None, False, "", [], {}], "description": "known, and not supported"}


def field_ranges(server: Described) -> Mapping[str, Schema]:
    """Return ranges by field name, in any body: what to add to the alternatives of its schema that have a type."""
    return {
        **_names(server.limits),
        **_inputs(server),
        **_sampling(server.limits),
        **_lengths(server),
        **_strings_and_tokens(server),
        "priority": {"integer": {"minimum": -server.limits.max_priority, "maximum": server.limits.max_priority}},
        "cache_salt": {"string": {"maxLength": server.limits.max_cache_salt_length}},
        "dimensions": {"integer": {"minimum": server.hidden_size, "maximum": server.hidden_size}},
        "modalities": {"array": {"items": {"const": "text"}}},
        "truncation": {"string": {"enum": ["auto", "disabled"]}},
        "response_format": {"object": response_format()},
    }


def _names(limits: RequestLimits) -> dict[str, Schema]:
    """Return ranges of fields that hold a name or an identifier."""
    fields = (
        *("model", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("guided_decoding_backend", "reasoning_effort"),
    )
    return {field: {"string": {"maxLength": limits.max_name_length}} for field in fields}


def _inputs(server: Described) -> dict[str, Schema]:
    """Return ranges of what a model reads: prompts, messages, tools."""
    limits = server.limits
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "items": _token_id(server)}

    def several(item: Schema) -> Schema:
        return {"type": "array", "minItems": 1, "maxItems": limits.max_body_prompts, "items": item}

    prompts = {"any": {"anyOf": [text, several(text), ids, several(ids)]}}
    return {
        "prompt": prompts,
        "input": prompts,
        "messages": {"array": {"minItems": 1, "maxItems": limits.max_messages, "items": message(limits)}},
        "tools": {"array": {"maxItems": limits.max_tools}},
        "tokens": {"array": {"items": _token_id(server)}},
    }


def _lengths(server: Described) -> dict[str, Schema]:
    """Return ranges of numbers of tokens."""
    length = {"type": "integer", "minimum": 1, "maximum": server.max_model_len}
    unlimited = {"const": -1}
    return {
        "max_tokens": {"integer": length, "or": unlimited},
        "max_completion_tokens": {"integer": length, "or": unlimited},
        "max_output_tokens": {"integer": length},
        "truncate_prompt_tokens": {"integer": length, "or": unlimited},
    }


def _sampling(limits: RequestLimits) -> dict[str, Schema]:
    """Return ranges of the numbers that `SamplingParams` declares, under their names in other APIs too."""
    ranges = {each.name: _range(each) for each in options_of(SamplingParams).values() if {int, float} & {*each.types}}
    count = {"integer": {"minimum": 1, "maximum": limits.max_n}}
    others = {"repeat_penalty": "repetition_penalty", "top_logprobs": "logprobs", "n_probs": "logprobs"}
    return {**ranges, "n": count, "best_of": count, **{other: ranges[name] for other, name in others.items()}}


def _range(number: Option) -> Schema:
    bounds = {"minimum": number.least, "exclusiveMinimum": number.above, "maximum": number.most}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return {"integer" if int in number.types else "number": given}


def _strings_and_tokens(server: Described) -> dict[str, Schema]:
    """Return ranges of the strings and tokens that end an output, are kept out of it or become likelier."""
    limits, token_id = server.limits, _token_id(server)
    stop = {"type": "string", "minLength": 1, "maxLength": limits.max_stop_string_length}
    stops = {"maxItems": limits.max_stop_strings, "items": stop}
    bad_word = {"type": "string", "minLength": 1, "maxLength": limits.max_bad_word_length}
    return {
        "stop": {"string": stop, "array": stops},
        "stop_sequences": {"array": stops},
        "stop_token_ids": {"array": {"maxItems": limits.max_stop_token_ids, "items": token_id}},
        "allowed_token_ids": {"array": {"minItems": 1, "maxItems": limits.max_allowed_token_ids, "items": token_id}},
        "bad_words": {"array": {"maxItems": limits.max_bad_words, "items": bad_word}},
        "logit_bias": {
            "object": {
                "maxProperties": limits.max_logit_bias,
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            }
        },
    }


def _token_id(server: Described) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": server.vocab_size - 1}


def body_ranges(limits: RequestLimits) -> Mapping[str, Mapping[str, Schema]]:
    """Return ranges by body, for fields that differ from those of the same name in other bodies."""
    item = {"type": "object", "required": ["role", "content"], "properties": {"role": {"enum": list(ROLES)}}}
    choice = {"required": ["type"], "properties": {"type": {"enum": ["auto", "any", "none"]}}}
    anthropic = {"tool_choice": {"object": choice}}
    return {
        "TokenizeBody": {"prompt": {}},
        "OllamaChatBody": {"messages": {}, "tools": {"array": {"maxItems": limits.max_tools}}},
        "OllamaGenerateBody": {"prompt": {}},
        "OllamaEmbedBody": {"input": {}},
        "OllamaEmbeddingsBody": {"prompt": {}},
        "LlamaCppBody": {"max_tokens": {}, "logit_bias": {}},
        "InfillBody": {"max_tokens": {}, "logit_bias": {}, "prompt": {}},
        "ResponsesBody": {
            "input": {"any": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": item}]}},
            "tool_choice": {"string": {"enum": ["none", "auto", "required"]}},
        },
        "MessagesBody": anthropic,
        "CountTokensBody": anthropic,
        "ChatBody": {"tool_choice": {"string": {"enum": ["none", "auto", "required"]}}},
    }


# Constraints on several fields of a body together.
TOGETHER: Mapping[str, Schema] = {
    "ResponsesBody": {"required": ["input"]},
    "TokenizeBody": {
        "oneOf": [
            {
                "required": [given],
                "properties": {given: {"not": {"type": "null"}}, **{name: {"type": "null"} for name in others}},
            }
            for given, others in (
                ("prompt", ("content", "messages")),
                ("content", ("prompt", "messages")),
                ("messages", ("prompt", "content")),
            )
        ]
    },
}


def message(limits: RequestLimits) -> Schema:
    """Return the schema of a chat's message, OpenAI's or Anthropic's."""
    part = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
    return {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": [*ROLES, "function"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": part}]},
            "name": {"type": "string", "maxLength": limits.max_name_length},
        },
    }


def response_format() -> Schema:
    """Return the schema of OpenAI's `response_format`."""
    described = {
        "type": "object",
        "required": ["schema"],
        "properties": {"schema": {"type": "object"}},
    }
    plain = {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}}
    by_schema = {
        "type": "object",
        "required": ["type", "json_schema"],
        "properties": {"type": {"const": "json_schema"}, "json_schema": described},
    }
    return {"anyOf": [plain, by_schema]}


def narrow(field: Schema, ranges: Schema) -> Schema:
    """Return a field's schema with ranges.

    Ranges under a type's name go to the alternative of that type; "any" replaces all alternatives, and "or" adds an
    alternative if there are several.
    """
    if (whole := ranges.get("any")) is not None:
        kept = {name: value for name, value in field.items() if name not in ("anyOf", "type")}
        return {**kept, **whole}
    if "anyOf" in field:
        more = [ranges["or"]] if "or" in ranges else []
        return {**field, "anyOf": [_of_type(part, ranges) for part in field["anyOf"]] + more}
    return _of_type(field, ranges)


def _of_type(schema: Schema, ranges: Schema) -> Schema:
    return {**schema, **ranges.get(schema.get("type", ""), {})}

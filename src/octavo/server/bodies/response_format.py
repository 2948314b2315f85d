"""Structured outputs of a body: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from octavo.errors import FieldError, RequestError, shown
from octavo.server.bodies.fields import Declared, taken
from octavo.structured_outputs import StructuredOutputsParams

_FORMATS = ("text", "json_object", "json_schema")
_GUIDED = "guided_"


@dataclass(kw_only=True)
class Guided(Declared):
    """vLLM's older names of the fields of `structured_outputs`."""

    guided_json: dict[str, Any] | str | None = taken("a JSON Schema of the answer", bulky=True)
    guided_regex: str | None = taken("a regular expression that the answer matches", bulky=True)
    guided_choice: list[str] | None = taken("the answers to choose from", bulky=True)
    guided_grammar: str | None = taken("a grammar of the answer", bulky=True)
    guided_whitespace_pattern: str | None = taken("the white space in JSON", bulky=True)
    guided_decoding_backend: str | None = taken("has no effect", limit="max_name_length")


_OPTIONS = {each.name: each.name.removeprefix(_GUIDED) for each in fields(Guided) if each.metadata["taken"]["bulky"]}


def structured_outputs_of(
    body: Guided, response_format: dict[str, Any] | None, described: Mapping[str, Any] | None
) -> StructuredOutputsParams | None:
    """Return the structured output that a body asks for, or None.

    Args:
        described: its field `structured_outputs`.

    Raises:
        RequestError: a description is invalid, or the body has several.
    """
    found = {
        "response_format": _of_response_format(response_format),
        "structured_outputs": StructuredOutputsParams.of(described) if described else None,
        "guided_*": _of_guided(body),
    }
    given = [name for name, wanted in found.items() if wanted is not None]
    if len(given) > 1:
        raise RequestError(f"the output is described more than once: by {' and '.join(given)}", param=given[1])
    return found[given[0]] if given else None


def _of_response_format(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if given is None or given.get("type") == "text":
        return None
    # llama.cpp's form: the schema beside the type.
    direct = given.get("schema") if "json_schema" not in given else None
    if given.get("type") == "json_object" and not direct:
        return StructuredOutputsParams(json_object=True)
    if given.get("type") not in ("json_object", "json_schema"):
        raise FieldError(
            "response_format",
            f"of type {shown(given.get('type'))} is not supported by this server, only "
            + " and ".join(map(repr, _FORMATS)),
        )
    described = given.get("json_schema") if direct is None else {"schema": direct}
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(described, dict) or not isinstance(schema, (dict, bool)):
        raise RequestError(
            'response_format must hold {"type": "json_schema", "json_schema": {"schema": {…}}}',
            param="response_format.json_schema",
        )
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise FieldError("response_format.json_schema.strict", f"must be true or false, got {shown(strict)}")
    # Strict by default, as in vLLM: a client that sends a schema expects it to hold.
    return StructuredOutputsParams(json=schema, strict=strict is not False)


def _of_guided(body: Guided) -> StructuredOutputsParams | None:
    given = {option: value for name, option in _OPTIONS.items() if (value := getattr(body, name)) not in (None, "", [])}
    return StructuredOutputsParams(**given) if given else None

"""Structured outputs of a body: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from octavo.errors import RequestError, shown
from octavo.structured_outputs import StructuredOutputsParams

# vLLM's older names of fields, and their names in `StructuredOutputsParams`.
GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
_FORMATS = ("text", "json_object", "json_schema")


class DescribesOutput(Protocol):
    """The fields of a body that `structured_outputs_of` reads."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None


def structured_outputs_of(body: DescribesOutput) -> StructuredOutputsParams | None:
    """Return the structured output that a body asks for, or None.

    Raises:
        RequestError: a description is invalid, or the body has several.
    """
    found = {
        "response_format": _of_response_format(body.response_format),
        "structured_outputs": StructuredOutputsParams.of(body.structured_outputs) if body.structured_outputs else None,
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
        raise RequestError(
            f"response_format of type {shown(given.get('type'))} is not supported by this server, only "
            + " and ".join(map(repr, _FORMATS)),
            param="response_format",
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
        raise RequestError(
            f"response_format.json_schema.strict must be true or false, got {shown(strict)}",
            param="response_format.json_schema.strict",
        )
    # Strict by default, as in vLLM: a client that sends a schema expects it to hold.
    return StructuredOutputsParams(json=schema, strict=strict is not False)


def _of_guided(body: DescribesOutput) -> StructuredOutputsParams | None:
    options = {
        name: value for guided, name in GUIDED_FIELDS.items() if (value := getattr(body, guided)) not in (None, "", [])
    }
    return StructuredOutputsParams(**options) if options else None

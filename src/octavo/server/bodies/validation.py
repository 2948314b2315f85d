"""Parses a body into its type, with errors that name the field.

Unknown fields are dropped and noted in `RequestBody.ignored`; a strict server refuses them, so that a misspelt option
is never overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from octavo.errors import RequestError, shortened
from octavo.server.bodies.foreign_fields import named, translate
from octavo.server.bodies.openai_bodies import RequestBody
from octavo.server.errors import ApiError

# How pydantic's messages describe a JSON object and a JSON array.
_DICTIONARY, _LIST = re.compile(r"a valid dictionary( or instance of \w+)?"), re.compile(r"\ba valid list\b")
# The levels of nested objects and arrays that pydantic's JSON parser accepts.
MOST_NESTED = 201
# Larger integers may have been rounded when they became floats.
_LARGEST_EXACT = 2**53
# Maximum number of ignored fields that are noted per body.
MOST_NOTED = 64

Body = TypeVar("Body", bound=RequestBody)


def parse_body(body_type: type[Body], raw: bytes, *, strict: bool = False) -> Body:
    """Parse a body into its type.

    Args:
        strict: refuse fields that the type does not have.

    Raises:
        ApiError: the body is invalid (400); the message names the field and what is wrong with it.
        RequestError: a field asks for a feature that Octavo does not have.
    """
    try:
        given = from_json(raw)
    except ValueError as error:
        if str(error).startswith("recursion limit"):
            raise _bad_request(f"The request body is nested more than {MOST_NESTED} levels deep.") from None
        raise _bad_request(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(given, dict):
        raise _bad_request("The request body must be a JSON object.")
    if not strict:
        translate(given, body_type.model_fields)
    # Before pydantic validates: there may be a million unknown fields, which must not become an error each.
    unknown = drop_unknown(body_type, given, strict=strict)
    body = validated(body_type, given)
    body.note_ignored(unknown)
    return body


def drop_unknown(body_type: type[BaseModel], given: dict[str, Any], *, strict: bool) -> tuple[str, ...]:
    """Remove fields that a type does not have, and return their names; raise `ApiError` if they are to be refused."""
    unknown = [name for name, value in _drop_unknown(body_type, given) if strict or value is not None]
    if unknown and strict:
        plural = "s" if len(unknown) > 1 else ""
        message = f"Unrecognized request argument{plural} supplied: {named(unknown)}"
        raise _bad_request(message, shortened(unknown[0]))
    return tuple(map(shortened, unknown[:MOST_NOTED]))


def validated(body_type: type[Body], given: dict[str, Any]) -> Body:
    """Return the fields as a body; raise `ApiError` for one of the wrong type."""
    for name in _integer_fields(body_type) & given.keys():
        # JSON has one kind of number, and so have some clients' languages: 5.0 is an integer, by JSON Schema too.
        if isinstance(value := given[name], float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
            given[name] = int(value)
    try:
        return body_type.model_validate(given)
    except ValidationError as error:
        raise _explain(error) from None


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors from our names to those that the client sent; `names` maps the former to the latter."""
    try:
        yield
    except (ApiError, RequestError) as error:
        field = re.split(r"[.\[]", error.param or "")[0]
        if field in names:
            error.param = names[field] + (error.param or "").removeprefix(field)
        # A word such as "stop" is also an ordinary one, except at the beginning.
        words = "|".join(rf"(?<![\w.'-]){name}\b" if "_" in name else rf"^{name}\b" for name in names)
        words = rf"(?<=^Invalid value for ')(?:{'|'.join(names)})\b|{words}"
        if names:
            message = re.sub(words, lambda found: names[found[0]], str(error))
            error.args = (message,)
            if isinstance(error, ApiError):
                error.message = message
        raise


def _drop_unknown(body_type: type[BaseModel], given: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Remove unknown fields from a body and the objects in it, yielding their names and values."""
    known = body_type.model_fields
    for name in [name for name in given if name not in known]:
        yield prefix + name, given.pop(name)
    for name, inner_type in _inner_types(body_type):
        if isinstance(inner := given.get(name), dict):
            yield from _drop_unknown(inner_type, inner, f"{name}.")


@cache
def _integer_fields(body_type: type[BaseModel]) -> frozenset[str]:
    """Return the fields that may be integers, but no other numbers."""
    types = {name: get_args(field.annotation) or (field.annotation,) for name, field in body_type.model_fields.items()}
    return frozenset(name for name, alternatives in types.items() if int in alternatives and float not in alternatives)


@cache
def _inner_types(body_type: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """Return the fields that are objects with declared fields, and their types."""
    return [
        (name, part)
        for name, field in body_type.model_fields.items()
        for part in get_args(field.annotation)
        if isinstance(part, type) and issubclass(part, BaseModel)
    ]


def _explain(error: ValidationError) -> ApiError:
    problems = error.errors(include_url=False, include_input=False)
    first = problems[0]
    where = tuple(shortened(str(part)) for part in first["loc"])
    if first["type"] == "missing":
        return _bad_request(f"Missing required parameter: '{'.'.join(where)}'.", ".".join(where))
    # In a union, the alternative of which an element is wrong is the one that was meant.
    if wrong := next((problem for problem in problems if _element(problem["loc"])), None):
        problems = [wrong]
    # A union reports one problem for each of its members; together they say what would be valid.
    wishes = [
        _LIST.sub("a valid array", _DICTIONARY.sub("an object", p["msg"].removeprefix("Input should be ")))
        for p in problems
        if p["loc"] and shortened(str(p["loc"][0])) == where[0]
    ]
    name = where[0] + _element(problems[0]["loc"])
    return _bad_request(f"Invalid value for '{name}': it should be {' or '.join(dict.fromkeys(wishes))}.", where[0])


def _element(location: tuple[int | str, ...]) -> str:
    """Return the element of a list in which a problem was found, as in "[3]"; "" if it was in no list."""
    return "".join(f"[{part}]" for part in location if isinstance(part, int))


def _bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param)

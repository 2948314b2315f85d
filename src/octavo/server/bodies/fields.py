"""Fields of request bodies, declared once each.

    @dataclass(kw_only=True)
    class EmbeddingBody(RequestBody):
        user: str | None = taken("who asks; has no effect", limit="max_name_length")

From a declaration come the check of a value and its error, whether it is kept after reading, and its schema with this
server's ranges. Sampling parameters are declared in `SamplingParams`: a body says which of them it takes (`PARAMETERS`)
and under which names (`CALLED`), and has those that were given in `sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, get_type_hints

from jiter import from_json

from octavo.errors import FieldError, RequestError, shortened, shown
from octavo.option import Option, options_of
from octavo.request_limits import RequestLimits
from octavo.sampling_params import SamplingParams
from octavo.value_type import ValueType, plain_classes, types_of, words_of, wrong_element

Schema = dict[str, Any]
Body = TypeVar("Body", bound="Declared")

EXAMPLE_CHAT = [{"role": "user", "content": "What is a block?"}]
# The levels of nested objects and arrays that the JSON parser accepts.
MOST_NESTED = 201
# Larger integers may have been rounded when they became floats.
_LARGEST_EXACT = 2**53
# Maximum number of ignored fields that are noted per body, and that an error or a header names.
MOST_NOTED, NAMED_FIELDS = 64, 8


@dataclass(frozen=True, slots=True)
class Served:
    """The properties of a server that the ranges of fields depend on."""

    limits: RequestLimits
    max_model_len: int
    vocab_size: int
    hidden_size: int


Ranges = Callable[[Served], Mapping[str, Schema]]
"""Returns what a field's schema has in addition to its types: keys for the alternative of a JSON type, by its name;
"or" is one more alternative, and "any" replaces all."""


def taken(
    help: str,
    *,
    default: Any = None,
    limit: str | None = None,
    like: str | None = None,
    ranges: Ranges | None = None,
    bulky: bool = False,
) -> Any:
    """Return the dataclass field of one field of a body. Its type gives the JSON types; null is the same as nothing.

    Args:
        default: MISSING if the field is required.
        limit: entry of `RequestLimits`: the most characters of a text.
        like: the parameter of `SamplingParams` whose range the field has.
        bulky: whether it may be of any size, so that it is dropped once the body has been read.
    """
    declared = {"help": help, "limit": limit, "like": like, "ranges": ranges, "bulky": bulky}
    return field(default=default, metadata={"taken": declared})


def unsupported(*, by_presence: bool = False) -> Any:
    """Return a field that is known, and refused unless it has no effect.

    Args:
        by_presence: whether an empty object asks for the feature too.
    """
    return field(default=None, metadata={"taken": {"help": "known, and not supported", "by_presence": by_presence}})


class Declared:
    """Base of the dataclasses whose fields are declared: bodies, and objects in them.

    Attributes:
        PARAMETERS: parameters of `SamplingParams` that are fields of the body.
        REQUIRED: those of them that must be given.
        CALLED: this API's names of our fields, where they differ.
    """

    PARAMETERS: ClassVar[Collection[str]] = ()
    REQUIRED: ClassVar[Collection[str]] = ()
    CALLED: ClassVar[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body, by its name there.

    Attributes:
        target: the attribute of the body, or the parameter of `SamplingParams`, that it becomes.
        parameter: the declaration of that parameter.
        by_presence: None for a field that is supported; see `unsupported`.
        plain_classes: see `value_type.plain_classes`.
    """

    name: str
    target: str
    types: tuple[ValueType, ...]
    help: str
    parameter: Option | None = None
    required: bool = False
    limit: str | None = None
    like: str | None = None
    ranges: Ranges | None = None
    bulky: bool = False
    by_presence: bool | None = None
    plain_classes: frozenset[type] = frozenset()

    def checked(self, value: Any, limits: RequestLimits, where: str = "") -> Any:
        """Return the value to keep.

        Raises:
            FieldError: it has a wrong type, is out of range or too long a text, or asks for a feature that is not
                supported.
        """
        name = where + self.name
        if self.by_presence is not None and self.asks(value):
            raise FieldError(name, "is not supported by this server")
        if value is None or not self.types:
            return value
        if type(value) is float and value.is_integer() and abs(value) <= _LARGEST_EXACT:
            # JSON has one kind of number, and so have some clients' languages: 5.0 is an integer, by JSON Schema too.
            names = {each.name for each in self.types}
            value = int(value) if "integer" in names and "number" not in names else value
        if type(value) in self.plain_classes:
            if self.limit is not None:
                limits.at_most(self.limit, name, len(value), "characters")
            return value if self.like is None else options_of(SamplingParams)[self.like].checked(value, name)
        matching = [each for each in self.types if each.fits(value)]
        if not matching:
            raise FieldError(name, f"must be {words_of(self.types)}, got {shown(value)}")
        if all(each.inside for each in matching):
            inside = [part for each in matching for part in each.inside]
            if (found := wrong_element(value, inside)) is not None:
                place, wrong = found
                raise FieldError(f"{name}{place}", f"must be {words_of(inside)}, got {shown(wrong)}")
        record = record_of(matching[0])
        return value if record is None else filled(record, value, limits, f"{name}.")

    def asks(self, value: Any) -> bool:
        """Whether the value of an unsupported field asks for the feature: 0 does, and is equal to False."""
        return value is not False and value not in (None, "", []) and (value != {} or bool(self.by_presence))


def record_of(kind: ValueType) -> type[Declared] | None:
    """Return the type of an object whose members are declared; None if they are not."""
    return kind.record if kind.record is not None and issubclass(kind.record, Declared) else None


def token_ids(server: Served, least: int = 0) -> Schema:
    """Return the schema of a list of the vocabulary's ids."""
    item = {"type": "integer", "minimum": 0, "maximum": server.vocab_size - 1}
    return {"items": item, "minItems": least} if least else {"items": item}


def token_count(server: Served) -> dict[str, Schema]:
    """Return the ranges of a number of tokens, where -1 stands for no limit; the most depends on the prompt."""
    return {"integer": {"minimum": 1}, "or": {"const": -1}}


def fields_of(declared: type[Declared]) -> Mapping[str, Field]:
    """Return the fields of a body, or of an object in one, by the names that clients give them."""
    return _fields_of(_as_key(declared))


def _as_key(declared: Any) -> Any:
    """Return a class as a key of a cache: mypy takes it for one of its instances, which cannot be hashed."""
    return declared


@cache
def _fields_of(declared: Any) -> Mapping[str, Field]:
    hints, called = get_type_hints(declared), declared.CALLED
    found = {}
    for each in fields(declared):
        if (declaration := each.metadata.get("taken")) is not None:
            name, types = called.get(each.name, each.name), types_of(hints[each.name])
            plain, required = plain_classes(types), each.default is MISSING
            found[name] = Field(name, each.name, types, plain_classes=plain, required=required, **declaration)
    options = options_of(SamplingParams)
    for parameter in declared.PARAMETERS:
        name, option = called.get(parameter, parameter), options[parameter]
        plain, required = plain_classes(option.types), parameter in declared.REQUIRED
        found[name] = Field(name, parameter, option.types, option.help, option, required, plain_classes=plain)
    return found


def filled(declared: type[Body], given: Mapping[str, Any], limits: RequestLimits, where: str = "") -> Body:
    """Return the body, or the object in one, that has these fields; fields that are not declared must be gone.

    Raises:
        RequestError: a field has a wrong value, or a required one is missing.
    """
    known = fields_of(declared)
    kept: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, value in given.items():
        each = known[name]
        checked = each.checked(value, limits, where)
        if each.parameter is None:
            kept[each.target] = checked
        elif checked is not None or each.parameter.is_optional:
            sampling[each.target] = checked
    for name in _required(_as_key(declared)):
        if given.get(name) is None and (known[name].types or name not in given):
            raise FieldError(where + name, "is required")
    return declared(**kept, **({"sampling": sampling} if declared.PARAMETERS else {}))


def drop_unknown(declared: type[Declared], given: dict[str, Any], *, strict: bool) -> tuple[str, ...]:
    """Remove fields that a body does not have, and return their names; raise `RequestError` if they are refused."""
    unknown = [name for name, value in _drop_unknown(declared, given) if strict or value is not None]
    if unknown and strict:
        words = "are not fields" if len(unknown) > 1 else "is not a field"
        raise RequestError(f"{named(unknown)} {words} of this request", param=shortened(unknown[0]))
    return tuple(map(shortened, unknown[:MOST_NOTED]))


def _drop_unknown(declared: type[Declared], given: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Remove unknown fields from a body and the objects in it, yielding their names and values."""
    known = fields_of(declared)
    for name in [name for name in given if name not in known]:
        yield where + name, given.pop(name)
    for name, inner in given.items():
        for kind in known[name].types if isinstance(inner, dict) else ():
            if (record := record_of(kind)) is not None:
                yield from _drop_unknown(record, inner, f"{where}{name}.")


def named(names: Sequence[str]) -> str:
    """Join names as in 'a, b and 3 more', with at most `NAMED_FIELDS` of them."""
    more = f" and {len(names) - NAMED_FIELDS} more" if len(names) > NAMED_FIELDS else ""
    return ", ".join(shortened(name) for name in names[:NAMED_FIELDS]) + more


def json_object(raw: bytes) -> dict[str, Any]:
    """Parse a body; raises `RequestError` unless it is a JSON object."""
    try:
        given = from_json(raw)
    except ValueError as error:
        if str(error).startswith("recursion limit"):
            raise RequestError(f"the request body must be nested at most {MOST_NESTED} levels deep") from None
        raise RequestError(f"the request body must be valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise RequestError("the request body must be a JSON object")
    return given


@dataclass(kw_only=True)
class RequestBody(Declared):
    """The base of every body.

    Attributes:
        EXAMPLE: a body that is answered.
        SOURCES: of a body that is translated into another, the fields from which that one's fields come.
        sampling: the parameters of `SamplingParams` that were given, by their names there.
        ignored: the names of unknown fields that the client sent.
    """

    EXAMPLE: ClassVar[Mapping[str, Any]] = {}
    SOURCES: ClassVar[Mapping[str, str]] = {}

    model: str | None = taken("the model's name; left out, the one that is served", limit="max_name_length")
    sampling: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def streams(self) -> bool:
        """Whether the answer is sent as it is written."""
        return False

    @contextmanager
    def names_errors(self) -> Iterator[None]:
        """Name fields in errors about what this body was translated into as the client did."""
        try:
            yield
        except RequestError as error:
            error.rename({**self.CALLED, **self.SOURCES})
            raise

    def without_bulk(self) -> Self:
        """Return the body without what may be large, and was read."""
        light = copy(self)
        for name in _bulky(_as_key(type(self))):
            setattr(light, name, None)
        light.sampling = {name: value for name, value in self.sampling.items() if isinstance(value, int | float)}
        return light


@dataclass(kw_only=True)
class StreamedBody(RequestBody):
    """The base of bodies that may ask for a stream."""

    stream: bool | None = taken("send the answer as it is written")

    @property
    def streams(self) -> bool:
        return bool(self.stream)


@cache
def _required(declared: Any) -> tuple[str, ...]:
    return tuple(name for name, each in fields_of(declared).items() if each.required)


@cache
def _bulky(declared: Any) -> tuple[str, ...]:
    return tuple(each.target for each in fields_of(declared).values() if each.bulky)

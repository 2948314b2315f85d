"""The types that a value from outside may have, of an option, a parameter or a field of a body, by its type hint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from octavo.errors import shortened

# By a type's name: the classes of its values in JSON, those that may stand for them in Python, and exceptions.
# `deterministic="false"` must be refused, because it would be true; and a text is no list of its characters.
_CLASSES: dict[str, tuple[tuple[type, ...], tuple[type, ...], tuple[type, ...]]] = {
    "integer": ((int,), (Integral,), (bool,)),
    "number": ((int, float), (Real,), (bool,)),
    "boolean": ((bool,), (), ()),
    "string": ((str,), (str, os.PathLike), ()),
    "array": ((list,), (Iterable,), (str, bytes, Mapping)),
    "object": ((dict,), (Mapping,), ()),
}


@dataclass(frozen=True, slots=True)
class ValueType:
    """One type that a value may have.

    Attributes:
        name: its name in JSON Schema.
        words: what an error calls it.
        inside: the types of elements or members; empty for any.
        choices: the only texts; empty for any.
        record: the dataclass that an object may become, or be already.
        has_token_keys: whether the names of members are token ids.
        is_unordered: whether the order of elements has no meaning.
    """

    name: str
    words: str
    inside: tuple[ValueType, ...] = ()
    choices: tuple[str, ...] = ()
    record: type[Any] | None = None
    has_token_keys: bool = False
    is_unordered: bool = False

    def fits(self, value: Any) -> bool:
        """Whether a value is of this type, apart from what is inside."""
        classes, alike, unlike = _CLASSES[self.name]
        if type(value) not in classes and (not isinstance(value, alike) or isinstance(value, unlike)):
            return self.record is not None and isinstance(value, self.record)
        return not self.choices or value in self.choices


_SCALARS = {
    int: ValueType("integer", "an integer"),
    float: ValueType("number", "a number"),
    bool: ValueType("boolean", "true or false"),
    str: ValueType("string", "a string"),
}


def types_of(hint: Any) -> tuple[ValueType, ...]:
    """Return the types of a hint, without None; none stand for any value."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return tuple(each for arg in args if arg is not NoneType for each in types_of(arg))
    if origin is Literal:
        words = f"one of {', '.join(args)}" if len(args) > 1 else args[0]
        return (ValueType("string", words, choices=args),)
    if hint in _SCALARS:
        return (_SCALARS[hint],)
    if is_dataclass(hint):
        return (ValueType("object", "an object", record=hint if isinstance(hint, type) else None),)
    if not isinstance(origin, type) or not issubclass(origin, Iterable):
        return ()
    if issubclass(origin, Mapping):
        members = types_of(args[1]) if args else ()
        return (ValueType("object", "an object", members, has_token_keys=args[:1] == (int,)),)
    inside = types_of(args[0]) if args else ()
    words = " or ".join(each.words if each.choices else _plural(each.words) for each in inside)
    is_unordered = not issubclass(origin, Sequence)
    return (ValueType("array", f"a list of {words}" if inside else "a list", inside, is_unordered=is_unordered),)


def plain_classes(types: Iterable[ValueType]) -> frozenset[type]:
    """Return the classes whose instances all have one of the types, so that nothing else need be looked at."""
    return frozenset(each for kind in types if kind in _SCALARS.values() for each in _CLASSES[kind.name][0])


def words_of(types: Iterable[ValueType]) -> str:
    """Return what an error calls a value of one of the types."""
    return " or ".join(dict.fromkeys(each.words for each in types))


def _plural(words: str) -> str:
    """Return "lists of integers" for "a list of integers"."""
    noun, of, elements = words.partition(" ")[2].partition(" of ")
    return f"{noun}s{of}{elements}"


def wrong_element(value: Any, types: Iterable[ValueType]) -> tuple[str, Any] | None:
    """Return the place and value of the first element or member that has none of the types; None if all have one."""
    allowed = {each for kind in types for each in _CLASSES[kind.name][0]}
    values = value.values() if isinstance(value, dict) else value
    if set(map(type, values)) <= allowed:
        return None
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    place, wrong = next((place, each) for place, each in entries if type(each) not in allowed)
    return f"[{shortened(str(place))}]", wrong

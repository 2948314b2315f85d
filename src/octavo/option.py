"""Declares options as dataclass fields that carry their own help, from which flags and tables are made."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import field
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.errors import ConfigError, shown


def option(default: Any, help: str, *, metavar: str | None = None, secret: bool = False) -> Any:
    """Return a dataclass field that carries its own `--help` text.

    Args:
        metavar: name of the value in `--help`; if None, it depends on the type.
        secret: whether the value must never be shown.
    """
    return field(default=default, repr=not secret, metadata={"help": help, "metavar": metavar, "secret": secret})


REMOVED_VALUES: dict[str, dict[str, str]] = {
    "eviction_policy": {"lfu": "adaptive", "cost": "adaptive"},
    "scheduling_policy": {"dlpm": "vtc"},
}
"""By option, the values that earlier versions accepted, and what to use instead."""

REMOVED_OPTIONS = {
    "preemption_victim": "the last running sequence in order of service is preempted",
}
"""By name of an option that earlier versions had, what there is instead."""


def replacement_of(name: str, value: object) -> str | None:
    """Return the end of an error about a value that an option no longer accepts; None if it never did."""
    replacement = REMOVED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
    return replacement and f"{value!r} was removed; use {replacement!r}"


def removed_option(name: str) -> str:
    """Return the end of an error about an unknown option, if there once was one of this name; else ''."""
    instead = REMOVED_OPTIONS.get(name.replace("-", "_"))
    return "" if instead is None else f"; it was removed: {instead}"


def flag(name: str) -> str:
    """Return the flag of an option: 'max_num_seqs' -> '--max-num-seqs'."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: '; did you mean max_num_seqs?', or a list of all names."""
    names = list(known)
    if found := difflib.get_close_matches(name[:80], names, n=1, cutoff=0.6):
        return f"; did you mean {found[0]}?"
    return f"; known: {', '.join(names)}"


def check_types(config: Any) -> None:
    """Raise `ConfigError` for the first option whose value is not of its declared type.

    An option of the wrong type may pass for one of the right type: `deterministic="false"` is true.
    """
    options = _types_of(config.__class__)
    for name, (hints, words) in options.items():
        if not any(_fits(value := getattr(config, name), hint) for hint in hints):
            if says := replacement_of(name, value):
                raise ConfigError(f"{name}: {says}")
            raise ConfigError(f"{name} must be {words}, got {shown(value)}")


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


@cache
def _types_of(config: Any) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Return the alternatives of each option's type, and how to say them in an error."""
    found = {}
    for name, hint in get_type_hints(config).items():
        hints = get_args(hint) if get_origin(hint) is not Literal and get_args(hint) else (hint,)
        words = [_WORDS[each] for each in hints if each in _WORDS]
        literals = [repr(value) for each in hints if get_origin(each) is Literal for value in get_args(each)]
        if literals:
            words.append(f"one of {', '.join(literals)}" if len(literals) > 1 else literals[0])
        found[name] = hints, " or ".join(words)
    return found


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, (str, os.PathLike) if hint is str else hint)

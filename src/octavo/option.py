"""Declares options, once each, as fields of a dataclass.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class CacheOptions(Options):
        pin_budget: float = option(0.25, "largest fraction that pins may take", group="cache", least=0, most=1)

From the field come the keyword of `LLM(...)`, the flag, its place in `--help`, the environment variable, the TOML key,
the check and its message: `options_of(CacheOptions)["pin_budget"]` is all that is known of it.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from math import inf, isfinite
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, TypedDict, Union, Unpack, get_args, get_origin, get_type_hints

from octavo.errors import ConfigError, require_packages, shown
from octavo.units import BYTES, SWAP_BYTES, Unit, exact_bytes, parse_count

HIDDEN = "(hidden)"
NONE = "none"
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Declaration(TypedDict, total=False):
    """The attributes of an `Option` that its field may give."""

    group: str
    unit: Unit | None
    metavar: str | None
    least: float | None
    above: float | None
    most: float | None
    read: Callable[[Any], Any] | None
    check: Callable[[Any, str], None] | None
    needs: str | None
    packages: tuple[str, ...]
    removed: Mapping[str, str]
    none: bool
    limit: str | None
    text_limit: str | None
    secret: bool
    internal: bool


def option(default: Any, help: str, **declared: Unpack[Declaration]) -> Any:
    """Return the dataclass field of one option."""
    metadata = {"option": {"help": help, **declared}}
    return field(default=default, repr=not declared.get("secret"), metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One option of a dataclass: its name, type and default, and what `option` was given.

    Attributes:
        hint: the type, which gives its choices, and whether it may be None.
        group: title of its group in `--help`.
        metavar: name of the value in `--help`; if None, it depends on the unit and the type.
        least, above, most: smallest value, or the one it must exceed, and the largest. Only with `most=inf` may it be
            infinite.
        read: converts a value, such as an alias to what it stands for; raises `ConfigError` for an invalid one.
        check: raises `ConfigError` for an invalid value; its arguments are the value, each one of a list, and the name.
        needs: another option without which this one has no meaning.
        packages: the extra of Octavo that it needs, and the modules of that extra.
        removed: words that earlier versions accepted, and what to use instead.
        none: whether the word "none" may be given for None, because a command has another default.
        limit, text_limit: entries of `RequestLimits`: the largest value of a request's parameter, or number of its
            entries; and the largest number of characters in one of them.
        secret: whether the value must never be shown.
        internal: whether the option is a keyword only: no flag, environment variable or TOML key.
    """

    name: str
    hint: Any
    default: Any
    help: str
    group: str = ""
    unit: Unit | None = None
    metavar: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    read: Callable[[Any], Any] | None = None
    check: Callable[[Any, str], None] | None = None
    needs: str | None = None
    packages: tuple[str, ...] = ()
    removed: Mapping[str, str] = field(default_factory=dict)
    none: bool = False
    limit: str | None = None
    text_limit: str | None = None
    secret: bool = False
    internal: bool = False

    @cached_property
    def types(self) -> tuple[Any, ...]:
        """The alternatives of the type, without None."""
        union = get_args(self.hint) if get_origin(self.hint) in (Union, UnionType) else (self.hint,)
        return tuple(each for each in union if each is not NoneType)

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """The words that may be given."""
        return tuple(word for each in self.types if get_origin(each) is Literal for word in get_args(each))

    @property
    def is_switch(self) -> bool:
        return bool in self.types

    @property
    def is_list(self) -> bool:
        """Whether the value is a list of texts."""
        return any(get_origin(each) is Sequence for each in self.types)

    @property
    def is_table(self) -> bool:
        """Whether the value is a table of options."""
        return is_dataclass(self.types[0])

    @property
    def is_choice(self) -> bool:
        """Whether nothing but its choices may be given."""
        return bool(self.choices) and len(self.types) == 1

    @property
    def expected(self) -> str:
        """A description of valid values, for an error."""
        if self.unit is not None:
            return self.unit.words + " or none" * self.none
        if self.is_choice:
            return f"one of {', '.join(self.choices)}"
        words = [_WORDS[each] for each in self.types if each in _WORDS]
        if self.is_list:
            words = ["a text or a list of texts"]
        return " or ".join((*words, *self.choices))

    def argv(self, value: Any) -> list[str]:
        """Return the flag that gives `value`."""
        if isinstance(value, bool):
            return [flag(self.name) if value else flag("no_" + self.name)]
        if value is None and self.none:
            value = NONE
        elif self.is_table:
            value = json.dumps(value if isinstance(value, Mapping) else value.changed())
        elif isinstance(value, int) and self.unit in (BYTES, SWAP_BYTES):
            value = exact_bytes(value)
        return [f"{flag(self.name)}={value}"]

    def parse(self, text: str, where: str) -> Any:
        """Return the value of `text`, from a flag or an environment variable.

        Args:
            where: begins the message of the `ConfigError` that is raised if it has none.
        """
        if self.none and text == NONE:
            return None
        if self.is_switch:
            if text.lower() not in _SWITCH:
                raise self._wrong(text, where)
            return _SWITCH[text.lower()]
        if self.is_list:
            texts = tuple(part for piece in text.split(",") if (part := piece.strip()))
            if not texts:
                raise ConfigError(
                    f"{where} is set but has no {'key' if self.name == 'api_key' else 'value'}: set one, or unset it"
                )
            return texts
        if self.is_table:
            return _parse_table(text, self.types[0], where)
        if text in self.choices or self._is_text_of_unit(text) or (str in self.types and not self.choices):
            return text
        if self.is_choice:
            raise self._wrong(text, where)
        try:
            return float(text) if float in self.types else parse_count(text)
        except ValueError:
            raise self._wrong(text, where) from None

    def accept(self, value: object, where: str) -> Any:
        """Return the value of what a TOML file has; raises `ConfigError` as `parse` does."""
        if self.is_table and not isinstance(value, str):
            return dict(_checked_names(value, self.types[0], where))
        if self.is_list:
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
                raise ConfigError(f"{where} must be {self.expected}")
            if not texts:
                raise ConfigError(f"{where} is an empty list: give a value, or leave the option out")
            return tuple(texts)
        if isinstance(value, str) and not self.is_switch:
            return self.parse(value, where)
        if not any(_fits(value, hint) for hint in self.types):
            raise self._wrong(value, where)
        return float(value) if float in self.types else value  # type: ignore[arg-type]

    def checked(self, value: Any) -> Any:
        """Return the value to keep for a keyword's value; raises `ConfigError` with both in the message."""
        if value is None and NoneType in get_args(self.hint):
            return None
        if self.is_list:
            value = (value,) if isinstance(value, str) else tuple(value)
            if not all(value):
                raise ConfigError(f"{self.name} must not be empty")
        elif self.is_table:
            return value if isinstance(value, self.types[0]) else self._table(value)
        elif not self._is_text_of_unit(value) and not any(_fits(value, hint) for hint in self.types):
            raise self._wrong(value, self.name)
        read = self.read if self.unit is None else self.unit.read
        if read is not None:
            value = read(value)
        if not isinstance(value, str) and (int in self.types or float in self.types):
            self._check_range(value)
        if self.check is not None:
            for each in value if self.is_list else (value,):
                self.check(each, self.name)
        return value

    def _is_text_of_unit(self, value: object) -> bool:
        return isinstance(value, str) and self.unit is not None and self.unit.read is not None

    def _table(self, value: Any) -> Any:
        table = self.types[0]
        entries = _parse_table(value, table, self.name) if isinstance(value, str) else value
        _checked_names(entries, table, self.name)
        try:
            return table(**entries)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _check_range(self, value: Any) -> None:
        least, most = self.least, self.most
        in_range = (least is None or value >= least) and (self.above is None or value > self.above)
        if in_range and (value <= most if most is not None else isfinite(value)):
            return
        if least is not None and most not in (None, inf):
            words = f"between {least} and {most}"
        else:
            low = f"at least {least}" if least is not None else f"above {self.above}" if self.above is not None else ""
            words = " and ".join(part for part in (low, "" if most in (None, inf) else f"at most {most}") if part)
        words = words if isfinite(value) else f"a finite number {words}"
        raise ConfigError(f"{self.name} must be {words}, got {value}")

    def _wrong(self, value: object, where: str) -> ConfigError:
        if isinstance(value, str) and (instead := self.removed.get(value)) is not None:
            return ConfigError(f"{where}: {value!r} was removed; use {instead!r}")
        return ConfigError(f"{where} must be {self.expected}, got {HIDDEN if self.secret else shown(value)}")


def options_of(config: type[Any]) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by name, in their order."""
    key: Any = config  # mypy takes the class for one of its instances, which need not be hashable
    return _options_of(key)


@cache
def _options_of(config: type[Any]) -> Mapping[str, Option]:
    hints = get_type_hints(config)
    return {
        each.name: Option(each.name, hints[each.name], each.default, **each.metadata["option"])
        for each in fields(config)
    }


class Options:
    """Base of the dataclasses whose fields are options. An instance is checked when it is made.

    Attributes:
        REMOVED: what replaces each option that there was once, by its name.
    """

    __slots__ = ()
    REMOVED: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        declared = options_of(self.__class__)
        for name, each in declared.items():
            object.__setattr__(self, name, each.checked(getattr(self, name)))
        for name, each in declared.items():
            if each.needs is None:
                continue
            is_given = getattr(self, name) != each.checked(each.default)
            if is_given and getattr(self, each.needs) is None:
                raise ConfigError(f"{name} needs {each.needs}, which is not given")
        self._check_together()

    def changed(self) -> dict[str, Any]:
        """Return the options that are not at their defaults, by name."""
        default = type(self)()
        return {
            name: value for name in options_of(type(self)) if (value := getattr(self, name)) != getattr(default, name)
        }

    def _check_together(self) -> None:
        """Raise `ConfigError` for options that contradict each other."""

    def require_packages(self) -> None:
        """Raise `ConfigError` if an option that is given needs a package that is not installed."""
        for name, each in options_of(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, Options):
                value.require_packages()
            elif value and each.packages:
                require_packages(name, *each.packages)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build from keywords; raises `ConfigError` for an unknown one."""
        return cls(**_checked_names(options, cls, ""))


def _checked_names(given: Any, config: type[Any], where: str) -> Mapping[str, Any]:
    """Return a table of options, whose names must all be known."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a table of values by name, got {shown(given)}")
    for name in sorted(set(given) - set(options_of(config))):
        raise ConfigError(f"{where and f'{where}: '}unknown option {shown(name)}{unknown_name(name, [config])}")
    return given


def _parse_table(text: str, table: type[Any], where: str) -> dict[str, Any]:
    """Parse 'max_n=128,max_tools=4', or a JSON object."""
    if text.lstrip().startswith("{"):
        return dict(_checked_names(json_object(text, where), table, where))
    entries: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not equals:
            raise ConfigError(
                f"{where} must be a JSON object, or a list such as {next(iter(options_of(table)))}=1, got {shown(part)}"
            )
        _checked_names({name: value}, table, where)
        entries[name] = options_of(table)[name].parse(value, f"{where}: {name}")
    return entries


def json_object(given: object, name: str) -> dict[str, Any]:
    """Read the value of an option that is a JSON object, or its text; raises `ConfigError` if it is not one."""
    try:
        values = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise ConfigError(f"{name} must be a JSON object: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be a JSON object, got {shown(given)}")
    return dict(values)


def check_address(address: str, name: str) -> None:
    """Raise `ConfigError` if an address is not `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{name} must be HOST:PORT, such as 10.0.0.7:8000, got {shown(address)}")


def unknown_name(name: str, configs: Iterable[type[Any]]) -> str:
    """Return the end of an error about an unknown option: what replaces it if it was removed, or the nearest name."""
    known: list[str] = []
    for config in configs:
        if (replaced := config.REMOVED.get(name)) is not None:
            return f"; it was removed: {replaced}"
        known += options_of(config)
    return nearest(name, known)


def flag(name: str) -> str:
    """Return the flag of an option: 'max_num_seqs' -> '--max-num-seqs'."""
    return "--" + name.replace("_", "-")


_MOST_MEANT = 3


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: '; did you mean max_num_seqs?', or a list of all names."""
    names = list(known)
    if len(name) > 1 and 0 < len(longer := [each for each in names if each.startswith(name)]) <= _MOST_MEANT:
        return f"; did you mean {' or '.join(longer)}?"
    if found := difflib.get_close_matches(name[:80], names, n=1, cutoff=0.6):
        return f"; did you mean {found[0]}?"
    return f"; known: {', '.join(names)}"


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type. `deterministic="false"` must be refused: it would be true."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, (str, os.PathLike) if hint is str else get_origin(hint) or hint)

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from math import inf, isfinite
from types import NoneType
from typing import Any, ClassVar, Self, TypedDict, Unpack, get_args, get_type_hints

from octavo.errors import ConfigError, require_packages, shown
from octavo.units import BYTES, SWAP_BYTES, Unit, exact_bytes, parse_count
from octavo.value_type import ValueType, plain_classes, types_of, words_of, wrong_element

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


def config_error(name: str, problem: str) -> ConfigError:
    return ConfigError(f"{name} {problem}")


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
        error: makes an exception of an option's name and what is wrong with its value, "must be …, got …".
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
    error: Callable[[str, str], Exception] = config_error

    @cached_property
    def types(self) -> tuple[ValueType, ...]:
        """The alternatives of the type, without None."""
        return types_of(self.hint)

    @cached_property
    def type_names(self) -> frozenset[str]:
        """Their names in JSON Schema."""
        return frozenset(each.name for each in self.types)

    @cached_property
    def is_optional(self) -> bool:
        """Whether the value may be None."""
        return NoneType in get_args(self.hint)

    @cached_property
    def initial(self) -> Any:
        """The value to keep if none is given."""
        return self.checked(self.default)

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """The words that may be given, or be elements of the list."""
        return tuple(word for kind in self.types for each in (kind, *kind.inside) for word in each.choices)

    @property
    def is_switch(self) -> bool:
        return "boolean" in self.type_names

    @cached_property
    def is_list(self) -> bool:
        """Whether the value is a list of texts or numbers, of which one may be given alone."""
        return any(each.name == "array" and each.inside[0].record is None for each in self.types)

    @cached_property
    def has_texts(self) -> bool:
        """Whether the elements of the list are texts, each given by a flag of its own."""
        return all(each.name == "string" for kind in self.types for each in kind.inside)

    @cached_property
    def record(self) -> type[Any] | None:
        """The dataclass that the value becomes."""
        return next((each.record for each in self.types), None)

    @cached_property
    def is_table(self) -> bool:
        """Whether the value is a table of options."""
        return self.record is not None and issubclass(self.record, Options)

    @property
    def is_choice(self) -> bool:
        """Whether nothing but its choices may be given."""
        return bool(self.types) and all(each.choices for each in self.types)

    @property
    def expected(self) -> str:
        """A description of valid values, for an error."""
        return words_of(self.types) if self.unit is None else self.unit.words + " or none" * self.none

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
            return texts if self.has_texts else tuple(self._parse_one(each, where) for each in texts)
        if self.is_table:
            return _parse_table(text, self.record, where)  # type: ignore[arg-type]
        return self._parse_one(text, where)

    def _parse_one(self, text: str, where: str) -> Any:
        is_text = "string" in self.type_names and not self.choices
        if text in self.choices or self._is_text_of_unit(text) or is_text:
            return text
        if self.is_choice:
            raise self._wrong(text, where)
        numbers = {each.name for kind in self.types for each in (kind, *kind.inside)}
        try:
            return float(text) if "number" in numbers else parse_count(text)
        except ValueError:
            raise self._wrong(text, where) from None

    def accept(self, value: object, where: str) -> Any:
        """Return the value of what a TOML file has; raises `ConfigError` as `parse` does."""
        if self.is_table and not isinstance(value, str):
            return dict(_checked_names(value, self.record, where))  # type: ignore[arg-type]
        if isinstance(value, str) and not self.is_switch and not self.is_list:
            return self.parse(value, where)
        if value == []:
            raise ConfigError(f"{where} is an empty list: give a value, or leave the option out")
        return self.checked(value, where)

    def checked(self, value: Any, where: str = "") -> Any:
        """Return the value to keep for a keyword's value; raises what `error` makes, with both in the message.

        Args:
            where: what the message calls the option, if not by its name.
        """
        if (value is None and self.is_optional) or (self.record is not None and isinstance(value, self.record)):
            return value
        where = where or self.name
        if self.is_list:
            value = self._elements(value, where)
        elif self.is_table:
            return self._table(value)
        elif type(value) not in self._plain_classes and not self._fits(value):
            raise self._wrong(value, where)
        read = self.read if self.unit is None else self.unit.read
        if read is not None:
            value = read(value)
        if self._is_number and not isinstance(value, str):
            value = self._in_range(value, where)
        elif self.is_list and (numbers := [each for each in value if not isinstance(each, str)]):
            self._in_range(min(numbers), where)
            self._in_range(max(numbers), where)
        if self.check is not None:
            for each in value if self.is_list else (value,):
                self.check(each, where)
        return value

    def _elements(self, value: Any, where: str) -> tuple[Any, ...] | frozenset[Any]:
        """Return the elements of a list, or of one that has a single one; None is an empty list."""
        (kind,) = (each for each in self.types if each.name == "array")
        if isinstance(value, str) and kind.inside[0].fits(value):
            value = (value,)
        elif value is not None and not kind.fits(value):
            raise self._wrong(value, where)
        elements = () if value is None else tuple(value)
        if (found := wrong_element(elements, kind.inside)) is not None:
            place, wrong = found
            got = HIDDEN if self.secret else shown(wrong)
            raise self.error(where + place, f"must be {words_of(kind.inside)}, got {got}")
        if "" in elements:
            raise self.error(where, "must not be empty")
        return frozenset(elements) if kind.is_unordered else elements

    @cached_property
    def _plain_classes(self) -> frozenset[type]:
        return plain_classes(self.types)

    def _fits(self, value: object) -> bool:
        return self._is_text_of_unit(value) or any(each.fits(value) for each in self.types)

    @cached_property
    def _is_number(self) -> bool:
        return not self.type_names.isdisjoint(("integer", "number"))

    def _is_text_of_unit(self, value: object) -> bool:
        return isinstance(value, str) and self.unit is not None and self.unit.read is not None

    def _table(self, value: Any) -> Any:
        table: Any = self.record
        entries = _parse_table(value, table, self.name) if isinstance(value, str) else value
        _checked_names(entries, table, self.name)
        try:
            return table(**entries)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _in_range(self, value: Any, where: str) -> int | float:
        """Return the number as the type has it, whoever gave another kind of number."""
        number: int | float = value
        if type(value) is not float and "integer" not in self.type_names:
            try:
                number = float(value)
            except OverflowError:
                number = inf
        elif type(value) not in (int, float):
            number = int(value)
        least, most = self.least, self.most
        in_range = (least is None or number >= least) and (self.above is None or number > self.above)
        is_finite = isinstance(number, int) or isfinite(number)
        if in_range and (number <= most if most is not None else is_finite):
            return number
        if least is not None and most not in (None, inf):
            words = f"between {least} and {most}"
        else:
            low = f"at least {least}" if least is not None else f"above {self.above}" if self.above is not None else ""
            words = " and ".join(part for part in (low, "" if most in (None, inf) else f"at most {most}") if part)
        words = words if is_finite else f"a finite number {words}"
        raise self.error(where, f"must be {words}, got {shown(value)}")

    def _wrong(self, value: object, where: str) -> Exception:
        if isinstance(value, str) and (instead := self.removed.get(value)) is not None:
            return ConfigError(f"{where}: {value!r} was removed; use {instead!r}")
        return self.error(where, f"must be {self.expected}, got {HIDDEN if self.secret else shown(value)}")


def options_of(config: type[Any]) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by name, in their order."""
    key: Any = config  # mypy takes the class for one of its instances, which need not be hashable
    return _options_of(key)


@cache
def _options_of(config: type[Any]) -> Mapping[str, Option]:
    hints, error = get_type_hints(config), getattr(config, "ERROR", config_error)
    return {
        each.name: Option(each.name, hints[each.name], each.default, **each.metadata["option"], error=error)
        for each in fields(config)
    }


@cache
def _defaults_of(config: type[Any]) -> tuple[tuple[str, Any, Any, Option], ...]:
    """Return each option's name, default, and the value that is kept for the default."""
    return tuple((name, each.default, each.initial, each) for name, each in options_of(config).items())


@cache
def _needing(config: type[Any]) -> tuple[tuple[str, str, Option], ...]:
    """Return the options that need another, with its name."""
    return tuple((name, each.needs, each) for name, each in options_of(config).items() if each.needs is not None)


class Options:
    """Base of the dataclasses whose fields are options. An instance is checked when it is made.

    Attributes:
        REMOVED: what replaces each option that there was once, by its name.
        ERROR: see `Option.error`.
    """

    __slots__ = ()
    REMOVED: ClassVar[Mapping[str, str]] = {}
    ERROR: ClassVar[type[Exception] | Callable[[str, str], Exception]] = config_error

    def __post_init__(self) -> None:
        config: Any = self.__class__  # mypy takes the class for one of its instances, which need not be hashable
        for name, default, initial, each in _defaults_of(config):
            value = getattr(self, name)
            kept = initial if value is default else each.checked(value)
            if kept is not value:
                object.__setattr__(self, name, kept)
        for name, needed, each in _needing(config):
            if not getattr(self, needed) and getattr(self, name) != each.initial:
                raise each.error(name, f"needs {needed}, which is not given")
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

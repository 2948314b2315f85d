"""A command's options from flags, the environment and a file, and the source of each.

flag  >  environment variable  >  file  >  default
--max-num-seqs 64
         OCTAVO_MAX_NUM_SEQS=64
                                  max_num_seqs = 64      (TOML; max-num-seqs too)
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from types import MappingProxyType
from typing import Any, get_type_hints

from octavo.commands.common_options import integer
from octavo.commands.options import value_keywords
from octavo.errors import ConfigError, shown
from octavo.option import nearest, removed_option, replacement_of
from octavo.toml_file import read_toml

logger = logging.getLogger("octavo.serve")

PREFIX = "OCTAVO_"
FLAG, ENVIRONMENT, DEFAULT = "flags", "the environment", "defaults"
CONFIG_VARIABLE = "OCTAVO_CONFIG"
# Variables that are not options; they are read elsewhere.
_OTHER_VARIABLES = (CONFIG_VARIABLE, "OCTAVO_MEMORY_LIMIT", "OCTAVO_ISA")
# Variables that Kubernetes sets in every container if there is a service called "octavo".
_SERVICE_LINKS = re.compile(r"OCTAVO_(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_MAX_FILE_BYTES = 2**20
_HIDDEN = "(hidden)"
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of an option and its source: `FLAG`, `ENVIRONMENT`, a file's path, or `DEFAULT`."""

    value: Any
    source: str


class Settings:
    """The options of a command.

    Args:
        configs: the dataclasses that declare the options.
        flags: options given on the command line, by name.
        environment: all environment variables.
        path: the file given by a flag; None for the one that `CONFIG_VARIABLE` names, if any.
        defaults: the command's own defaults, where they differ from those that the dataclasses declare.
        exclusive: groups of options that override each other: if a source gives an option of such a group, all options
            of the group in sources with lower precedence are ignored.

    Raises:
        ConfigError: an option is unknown, or its value is of the wrong type.
    """

    def __init__(
        self,
        configs: Sequence[type[Any]],
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        path: str | None = None,
        exclusive: Sequence[frozenset[str]] = (),
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._fields = {option.name: option for config in configs for option in fields(config)}
        hints = {name: hint for config in configs for name, hint in get_type_hints(config).items()}
        self._kinds = {name: value_keywords(hints[name]) for name in self._fields}
        self.path = path or environment.get(CONFIG_VARIABLE) or None
        from_file = {} if self.path is None else self._of_file(self.path)
        by_source = {FLAG: dict(flags), ENVIRONMENT: self._of_environment(environment), self.path or "": from_file}
        for group in exclusive:
            holders = [given for given in by_source.values() if group & given.keys()]
            for worse in holders[1:]:
                for name in group:
                    worse.pop(name, None)
        self._by_name = {name: Setting(value, DEFAULT) for name, value in defaults.items()} | {
            name: Setting(value, source)
            for source, given in reversed(by_source.items())
            for name, value in given.items()
        }

    def given(self, config: type[Any]) -> dict[str, Any]:
        """Return the options of `config` that were given in any source, by name."""
        names = [option.name for option in fields(config)]
        return {name: self._by_name[name].value for name in names if name in self._by_name}

    def by_source(self) -> dict[str, dict[str, Any]]:
        """Return all options with secrets hidden, grouped by source, the highest precedence first."""
        grouped: dict[str, dict[str, Any]] = {}
        for source in (FLAG, ENVIRONMENT, self.path, DEFAULT):
            told = {}
            for name, option in self._fields.items():
                setting = self._by_name.get(name, Setting(option.default, DEFAULT))
                if setting.source == source:
                    told[name] = _shown(option, setting.value)
            if source is not None and told:
                grouped[source] = told
        return grouped

    def log(self) -> None:
        """Log every option with its source, with secrets hidden; flags and defaults only at debug level.

        The operator knows the flags, having just written them, but may not be aware of the environment and the file.
        """
        for source, told in self.by_source().items():
            words = " ".join(f"{name}={_word(value)}" for name, value in told.items())
            message = {"message": f"options from {source}", "options": told}
            level = logging.DEBUG if source in (FLAG, DEFAULT) else logging.INFO
            logger.log(level, "options from %s: %s", source, words, extra={"fields": message})

    def _of_environment(self, environment: Mapping[str, str]) -> dict[str, Any]:
        given = {}
        for variable in sorted(environment):
            if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES or _SERVICE_LINKS.fullmatch(variable):
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name not in self._fields or variable != variable.upper():
                known = [*_OTHER_VARIABLES, *(PREFIX + known.upper() for known in self._fields)]
                hint = removed_option(name) or nearest(variable.upper(), known)
                raise ConfigError(f"unknown environment variable {shown(variable)}{hint}")
            text = environment[variable].strip()
            if variable == "OCTAVO_PORT" and "://" in text:
                raise ConfigError(
                    f"the environment variable OCTAVO_PORT is {shown(text)}, which Kubernetes sets beside a service "
                    "called octavo: give the pod enableServiceLinks: false, or the service another name"
                )
            if not text:
                raise ConfigError(f"the environment variable {variable} is set but empty: set a value, or unset it")
            given[name] = self._from_text(name, text, f"the environment variable {variable}")
        return given

    def _of_file(self, path: str) -> dict[str, Any]:
        file = read_toml(path, "the options file", _MAX_FILE_BYTES)
        given: dict[str, Any] = {}
        for key, value in file.parsed.items():
            name = key.replace("-", "_")
            if name in given:
                raise ConfigError(f"{path} gives {name} twice")
            if name not in self._fields:
                hint = removed_option(name) or nearest(name, self._fields)
                if isinstance(value, dict):
                    hint = "; options stand at the top of the file, in no table"
                raise ConfigError(f"{path} has an unknown option {shown(key)}{hint}")
            given[name] = self._from_toml(name, value, f"{path}: {key}")
        if file.exposed and any(_is_secret(self._fields[name]) for name in given):
            logger.warning("other users of this machine can read the keys in %s: chmod 600 it", path)
        return given

    def _from_text(self, name: str, text: str, where: str) -> Any:
        """Parse `text` as the option's flag would."""
        kind = self._kinds[name]
        if kind.get("action") is argparse.BooleanOptionalAction:
            if text.lower() not in _WORDS:
                raise ConfigError(f"{where} must be true or false, got {shown(text)}")
            return _WORDS[text.lower()]
        if kind.get("action") == "append":
            texts = tuple(part for piece in text.split(",") if (part := piece.strip()))
            if not texts:
                raise ConfigError(
                    f"{where} is set but holds no {'key' if name == 'api_key' else 'value'}: set one, or unset it"
                )
            return texts
        if (choices := kind.get("choices")) and text not in choices:
            if says := replacement_of(name, text):
                raise ConfigError(f"{where}: {says}")
            raise ConfigError(f"{where} must be one of {', '.join(choices)}, got {shown(text)}")
        try:
            return kind.get("type", str)(text)
        except (ValueError, argparse.ArgumentTypeError):
            wanted = "a number" if kind.get("type") is float else "an integer"
            if "|" in (metavar := kind.get("metavar", "")):
                wanted = f"an integer or {metavar.removeprefix('N|')}"
            raise ConfigError(f"{where} must be {wanted}, got {shown(text)}") from None

    def _from_toml(self, name: str, value: object, where: str) -> Any:
        kind = self._kinds[name]
        if kind.get("action") is argparse.BooleanOptionalAction:
            if not isinstance(value, bool):
                raise ConfigError(f"{where} must be true or false, got {shown(value)}")
            return value
        if kind.get("action") == "append":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
                raise ConfigError(f"{where} must be a text or a list of texts")
            if not texts:
                raise ConfigError(f"{where} is an empty list: give a value, or leave the option out")
            return tuple(texts)
        numbers = {float: (int, float), integer: (int,)}.get(kind.get("type", str), ())
        if not numbers and kind.get("metavar") != "TEXT" and "choices" not in kind:
            numbers = (int,)  # a size, or an integer or a word
        if isinstance(value, numbers) and not isinstance(value, bool):
            return float(value) if kind.get("type") is float else value
        if not isinstance(value, str):
            wanted = "a text" if not numbers else "a number" if float in numbers else "an integer"
            what = _HIDDEN if _is_secret(self._fields[name]) else shown(value)
            raise ConfigError(f"{where} must be {wanted}, got {what}")
        return self._from_text(name, value, where)


def _is_secret(option: Field[Any]) -> bool:
    return bool(option.metadata.get("secret"))


def _shown(option: Field[Any], value: Any) -> Any:
    if _is_secret(option) and value:
        return [_HIDDEN] * len(value) if isinstance(value, (list, tuple)) else _HIDDEN
    return list(value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_word, value)) or "[]"
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return text if re.fullmatch(r"[^\s\"'=]+", text) else repr(text)

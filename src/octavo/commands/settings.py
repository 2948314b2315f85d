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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from types import MappingProxyType
from typing import Any

from octavo.errors import ConfigError, shown
from octavo.option import HIDDEN, Option, Options, nearest, options_of, unknown_name
from octavo.text_file import read_toml

logger = logging.getLogger("octavo.serve")

PREFIX = "OCTAVO_"
FLAG, ENVIRONMENT, DEFAULT = "flags", "the environment", "defaults"
CONFIG_VARIABLE = "OCTAVO_CONFIG"
# Variables that are not options; they are read elsewhere.
_OTHER_VARIABLES = (CONFIG_VARIABLE, "OCTAVO_MEMORY_LIMIT", "OCTAVO_ISA")
# Variables that Kubernetes sets in every container if there is a service called "octavo".
_SERVICE_LINKS = re.compile(r"OCTAVO_(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_MAX_FILE_BYTES = 2**20


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
        defaults: the command's own defaults, where they differ from those that the dataclasses declare.
        path: the file given by a flag; None for the one that `CONFIG_VARIABLE` names, if any.
        exclusive: groups of options that override each other: if a source gives an option of such a group, all options
            of the group in sources with lower precedence are ignored.
        omit: options of `configs` that the command does not have.

    Raises:
        ConfigError: an option is unknown, or its value is of the wrong type.
    """

    def __init__(
        self,
        configs: Sequence[type[Options]],
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        path: str | None = None,
        exclusive: Sequence[frozenset[str]] = (),
        defaults: Mapping[str, Any] = MappingProxyType({}),
        omit: Collection[str] = (),
    ) -> None:
        self._configs = configs
        self._options = {
            name: each
            for config in configs
            for name, each in options_of(config).items()
            if not each.internal and name not in omit
        }
        self.path = path or environment.get(CONFIG_VARIABLE) or None
        from_file = {} if self.path is None else self._of_file(self.path)
        by_source = {FLAG: dict(flags), ENVIRONMENT: self._of_environment(environment), self.path or "": from_file}
        for group in exclusive:
            holders = [given for given in by_source.values() if group & given.keys()]
            for worse in holders[1:]:
                for name in group:
                    worse.pop(name, None)
        self._by_name = {name: Setting(value, DEFAULT) for name, value in defaults.items()}
        for source, given in reversed(by_source.items()):
            for name, value in given.items():
                if self._options[name].is_table and name in self._by_name:
                    value = {**self._by_name[name].value, **value}
                self._by_name[name] = Setting(value, source)

    def given(self, config: type[Options]) -> dict[str, Any]:
        """Return the options of `config` that were given in any source, by name."""
        return {name: self._by_name[name].value for name in options_of(config) if name in self._by_name}

    def by_source(self) -> dict[str, dict[str, Any]]:
        """Return all options with secrets hidden, grouped by source, the highest precedence first."""
        grouped: dict[str, dict[str, Any]] = {}
        for source in (FLAG, ENVIRONMENT, self.path, DEFAULT):
            options = {}
            for name, option in self._options.items():
                setting = self._by_name.get(name, Setting(option.default, DEFAULT))
                if setting.source == source:
                    options[name] = _shown(option, setting.value)
            if source is not None and options:
                grouped[source] = options
        return grouped

    def log(self) -> None:
        """Log every option with its source, with secrets hidden; flags and defaults only at debug level.

        The operator knows the flags, having just written them, but may not be aware of the environment and the file.
        """
        for source, options in self.by_source().items():
            words = " ".join(f"{name}={_word(value)}" for name, value in options.items())
            message = {"message": f"options from {source}", "options": options}
            level = logging.DEBUG if source in (FLAG, DEFAULT) else logging.INFO
            logger.log(level, "options from %s: %s", source, words, extra={"fields": message})

    def _of_environment(self, environment: Mapping[str, str]) -> dict[str, Any]:
        given = {}
        for variable in sorted(environment):
            if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES or _SERVICE_LINKS.fullmatch(variable):
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name not in self._options or variable != variable.upper():
                known = [*_OTHER_VARIABLES, *(PREFIX + known.upper() for known in self._options)]
                hint = self._instead_of(name, nearest(PREFIX + name.upper(), known))
                raise ConfigError(f"unknown environment variable {shown(variable)}{hint}")
            text = environment[variable].strip()
            if variable == "OCTAVO_PORT" and "://" in text:
                raise ConfigError(
                    f"the environment variable OCTAVO_PORT is {shown(text)}, which Kubernetes sets for a service "
                    "called octavo: give the pod enableServiceLinks: false, or the service another name"
                )
            if not text:
                raise ConfigError(f"the environment variable {variable} is set but empty: set a value, or unset it")
            given[name] = self._options[name].parse(text, f"the environment variable {variable}")
        return given

    def _of_file(self, path: str) -> dict[str, Any]:
        file = read_toml(path, "the options file", _MAX_FILE_BYTES)
        given: dict[str, Any] = {}
        for key, value in file.parsed.items():
            name = key.replace("-", "_")
            if name in given:
                raise ConfigError(f"{path} gives {name} twice")
            if name not in self._options:
                hint = self._instead_of(name, nearest(name, self._options))
                if isinstance(value, dict):
                    hint = "; options stand at the top of the file, in no table"
                raise ConfigError(f"{path} has an unknown option {shown(key)}{hint}")
            given[name] = self._options[name].accept(value, f"{path}: {key}")
        if file.exposed and any(self._options[name].secret for name in given):
            logger.warning("other users of this machine can read the keys in %s: chmod 600 it", path)
        return given

    def _instead_of(self, name: str, nearest_name: str) -> str:
        if any(name in config.REMOVED for config in self._configs):
            return unknown_name(name, self._configs)
        if any(name in options_of(config) for config in self._configs) and name not in self._options:
            return "; it is an option of servers only"
        return nearest_name


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, the file of options."""
    help = f"TOML file of options; default: ${CONFIG_VARIABLE}"
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=help)


def _shown(option: Option, value: Any) -> Any:
    if option.secret and value:
        return [HIDDEN] * len(value) if isinstance(value, (list, tuple)) else HIDDEN
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    return list(value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={each}" for name, each in value.items())
    if isinstance(value, list):
        return ",".join(map(_word, value)) or "[]"
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return text if re.fullmatch(r"[^\s\"'=]+", text) else repr(text)

"""Reads and writes the text files that users name: options, keys, prompts, traces, tables, …"""

from __future__ import annotations

import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError


def read_text(path: str | Path, what: str = "", most: int | None = None) -> str:
    """Return the text in a file.

    Args:
        what: names it in errors, such as "the keys file".
        most: the largest number of characters.

    Raises:
        ConfigError: the file cannot be read, is longer than `most`, or is not UTF-8. Messages do not repeat its text.
    """
    named = f"{what} {path}".lstrip()
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read() if most is None else file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {named}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if most is not None and len(text) > most:
        raise ConfigError(f"{named} has more than {most:,} characters, the most that are read")
    return text


def write_text(path: str | Path, text: str, what: str = "") -> None:
    """Write the output of a command, whose `--output` names the file.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        named = f"{what} {path}".lstrip()
        raise ConfigError(f"cannot write {named}: {error.strerror or error}; give --output FILE") from error


@dataclass(frozen=True, slots=True)
class TomlFile:
    """The contents of a TOML file.

    Attributes:
        parsed: the parsed contents.
        exposed: whether other users than the owner can read the file.
    """

    parsed: dict[str, Any]
    exposed: bool


def read_toml(path: str, what: str, most: int) -> TomlFile:
    """Read a TOML file.

    Raises:
        ConfigError: see `read_text`; or it is not TOML.
    """
    text = read_text(path, what, most)
    mode = Path(path).stat().st_mode
    try:
        parsed = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # A TOMLDecodeError does not repeat the file's text.
        raise ConfigError(f"{what} {path} is not valid TOML: {error}") from None
    return TomlFile(parsed, exposed=stat.S_ISREG(mode) and bool(mode & (stat.S_IRGRP | stat.S_IROTH)))

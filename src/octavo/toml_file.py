"""Reads the TOML files that operators write: options and keys."""

from __future__ import annotations

import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TomlFile:
    """The contents of a TOML file.

    Attributes:
        parsed: the parsed contents.
        exposed: whether other users than the owner can read the file.
    """

    parsed: dict[str, Any]
    exposed: bool


def read_toml(path: str, what: str, max_bytes: int) -> TomlFile:
    """Read a TOML file; `what` names it in error messages, such as "the keys file".

    Raises:
        ConfigError: the file cannot be read, is larger than `max_bytes`, or is not TOML. Messages do not repeat its
            text.
    """
    try:
        mode = Path(path).stat().st_mode
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror or error}") from error
    if len(raw) > max_bytes:
        raise ConfigError(f"{what} {path} has {len(raw)} bytes; at most {max_bytes} are read")
    try:
        parsed = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        # TOMLDecodeError and UnicodeDecodeError are ValueErrors. Neither repeats the file's text.
        raise ConfigError(f"{what} {path} is not valid TOML: {error}") from None
    return TomlFile(parsed, exposed=stat.S_ISREG(mode) and bool(mode & (stat.S_IRGRP | stat.S_IROTH)))

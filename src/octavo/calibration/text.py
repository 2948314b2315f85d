"""The text that a model is calibrated with."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.workloads.forward_text import english

_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Text:
    """A text, and its name in reports."""

    name: str
    content: str


def read_text(path: str | None) -> Text:
    """Read the text in a file or, if `path` is None, Python's own language reference (`pydoc_data.topics`).

    Raises:
        ConfigError: the file cannot be read, is larger than 64 MiB, or is not UTF-8.
    """
    if path is None:
        return Text("pydoc_data.topics", english())
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the text {path}: {error.strerror or error}") from error
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"the text {path} has more than {_MOST_BYTES:,} bytes: pass an excerpt")
    try:
        return Text(path, raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"the text {path} is not UTF-8: {error}") from error

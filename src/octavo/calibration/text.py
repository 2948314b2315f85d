"""The text that a model is calibrated with."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.text_file import read_text
from octavo.workloads.forward_text import english

_MOST_CHARACTERS = 64 << 20


@dataclass(frozen=True, slots=True)
class Text:
    """A text, and its name in reports."""

    name: str
    content: str


def calibration_text(path: str | None) -> Text:
    """Read the text in a file or, if `path` is None, Python's own language reference (`pydoc_data.topics`).

    Raises:
        ConfigError: the file cannot be read, is longer than 64 Mi characters, or is not UTF-8.
    """
    if path is None:
        return Text("pydoc_data.topics", english())
    return Text(path, read_text(path, "the text", _MOST_CHARACTERS))

"""How options are declared: dataclass fields that carry their own help, from which flags and tables are made."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, secret: bool = False) -> Any:
    """A dataclass field that carries its own `--help` text. The value of a `secret` one is never shown."""
    return field(default=default, repr=not secret, metadata={"help": help, "secret": secret})


def flag(name: str) -> str:
    """'max_num_seqs' -> '--max-num-seqs'."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: '; did you mean max_num_seqs?', or all that are known."""
    names = list(known)
    if found := difflib.get_close_matches(name[:80], names, n=1, cutoff=0.6):
        return f"; did you mean {found[0]}?"
    return f"; known: {', '.join(names)}"

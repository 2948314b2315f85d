"""Declares options as dataclass fields that carry their own help, from which flags and tables are made."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, metavar: str | None = None, secret: bool = False) -> Any:
    """Return a dataclass field that carries its own `--help` text.

    Args:
        metavar: name of the value in `--help`; if None, it depends on the type.
        secret: whether the value must never be shown.
    """
    return field(default=default, repr=not secret, metadata={"help": help, "metavar": metavar, "secret": secret})


def flag(name: str) -> str:
    """Return the flag of an option: 'max_num_seqs' -> '--max-num-seqs'."""
    return "--" + name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: '; did you mean max_num_seqs?', or a list of all names."""
    names = list(known)
    if found := difflib.get_close_matches(name[:80], names, n=1, cutoff=0.6):
        return f"; did you mean {found[0]}?"
    return f"; known: {', '.join(names)}"

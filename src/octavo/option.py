"""How options are declared: dataclass fields that carry their own help, from which flags and tables are made."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str) -> Any:
    """A dataclass field that carries its own `--help` text."""
    return field(default=default, metadata={"help": help})


def flag(name: str) -> str:
    """'max_num_seqs' -> '--max-num-seqs'."""
    return "--" + name.replace("_", "-")

"""Prints what the package requires, and what the extras named as arguments add, one requirement a line.

`make` installs these packages while it compiles the C++ library.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(project: dict[str, Any], extras: list[str]) -> Iterator[str]:
    """Yield them; an extra may include others, as `octavo[plot]` does."""
    yield from project["dependencies"]
    for extra in extras:
        yield from _added(project, extra)


def _added(project: dict[str, Any], extra: str) -> Iterator[str]:
    for requirement in project["optional-dependencies"][extra]:
        if others := re.fullmatch(rf"{project['name']}\[(.+)\]", requirement):
            for other in others[1].split(","):
                yield from _added(project, other)
        else:
            yield requirement


if __name__ == "__main__":
    print(*requirements(tomllib.loads(PYPROJECT.read_text())["project"], sys.argv[1:]), sep="\n")

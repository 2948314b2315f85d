"""Shared by all client scripts here: run checks, and print a line of JSON for each. Standard library only."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable

URL = os.environ["OCTAVO_URL"]
MODEL = os.environ["OCTAVO_MODEL"]

_checks: list[tuple[str, Callable[[], object]]] = []


def check(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Declare a check: a function that raises if something is wrong, and may return a note."""

    def declare(function: Callable[[], object]) -> Callable[[], object]:
        _checks.append((name, function))
        return function

    return declare


def run_all() -> None:
    for name, function in _checks:
        try:
            note, ok = function(), True
        except Exception as error:
            traceback.print_exc()
            note, ok = f"{type(error).__name__}: {error}", False
        print(json.dumps({"check": name, "ok": ok, "note": str(note or "")[:200]}), flush=True)

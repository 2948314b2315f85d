from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.cli import main
from tests.commands.fake_llm import FakeLLM

OctavoCommand = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """`octavo.LLM` is `FakeLLM`, without importing the real one for it."""
    monkeypatch.setitem(octavo.__dict__, "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "last", None)
    return FakeLLM


@pytest.fixture
def octavo_command(capsys: pytest.CaptureFixture[str]) -> OctavoCommand:
    """Runs a command line; returns (exit code, stdout, stderr), usage errors included."""

    def run(*argv: Path | float | str) -> tuple[Any, str, str]:
        code: Any
        try:
            code = main([str(part) for part in argv])
        except SystemExit as leaving:
            code = leaving.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run

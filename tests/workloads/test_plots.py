"""Who asks for a plot is told at once if there can be none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands.conftest import OctavoCommand

COMMANDS = {
    "simulate": ["simulate", "smollm2", "--machine", "h100", "--plot"],
    "plan": ["plan", "llama-2-7b", "--memory", "80GiB", "--plot"],
    "memory": ["bench", "memory", "--simulate", "--model", "llama-2-7b", "--output"],
    "codecs": ["quality", "no-model", "--codecs", "int8", "--plot"],
    "budgets": ["quality", "no-model", "--kv-budget", '{"mode": "sinks", "tokens": 64}', "--plot"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_matplotlib_is_told_before_anything_is_measured(
    octavo_command: OctavoCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    code, out, err = octavo_command(*COMMANDS[name], tmp_path / "p.png")
    assert (code, out) == (1, "")
    assert "a plot needs octavo[plot] (" in err
    assert "run `make -C " in err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    octavo_command: OctavoCommand, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    code, out, err = octavo_command(*COMMANDS[name], tmp_path / "file" / "p.png")
    assert (code, out) == (1, "")
    assert "cannot write" in err

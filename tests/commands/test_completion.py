from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.commands.completion import SHELLS
from tests.commands.conftest import OctavoCommand


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_command(octavo_command: OctavoCommand, shell: str) -> None:
    code, out, _ = octavo_command("completion", shell)
    assert code == 0
    assert all(word in out for word in ("serve", "generate", "plan", "max-num-seqs"))


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["octavo", "se"], "serve"),
        (["octavo", "serve", "--max-num-s"], "--max-num-seqs"),
        (["octavo", "serve", "--prefix-cache", "r"], "radix"),
        (["octavo", "bench", "thr"], "throughput"),
    ],
)
def test_bash_completes_commands_options_and_choices(
    octavo_command: OctavoCommand, tmp_path: Path, words: list[str], offered: str
) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("no bash here")
    _, script, _ = octavo_command("completion", "bash")
    (tmp_path / "octavo").write_text(script)
    asking = f"""
        source {tmp_path}/octavo
        COMP_WORDS=({" ".join(words)}) COMP_CWORD={len(words) - 1}
        $(complete -p octavo | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run([bash, "-c", asking], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split() == [offered]

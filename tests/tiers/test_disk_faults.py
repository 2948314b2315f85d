"""The randomised cycles of kill, damage and restart that the benchmark repeats ten thousand times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def test_killed_and_damaged_stores_give_no_wrong_block_and_no_wrong_answer() -> None:
    command = [sys.executable, "-m", "tests.campaigns.disk_faults", "--cycles", "16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| wrong blocks given | 0 |" in done.stdout
    assert "| wrong answers given | 0 |" in done.stdout
    assert "| killed | 16 |" in done.stdout
    assert "| right blocks |" in done.stdout
    assert "| prompt tokens found on disk |" in done.stdout

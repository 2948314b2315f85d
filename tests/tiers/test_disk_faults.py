"""The randomised cycles of kill, damage and restart that the benchmark repeats ten thousand times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "disk_faults.py"


def test_killed_and_damaged_stores_give_no_wrong_byte() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cycles", "25"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| wrong bytes given | 0 |" in done.stdout
    assert "| killed | 25 |" in done.stdout
    assert "| right |" in done.stdout

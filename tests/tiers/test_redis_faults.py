"""The randomised cycles of kill, damage and planting that the benchmark repeats ten thousand times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.redis_server import HOW, PROGRAM

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "redis_faults.py"


@pytest.mark.skipif(PROGRAM is None, reason=f"cycles of faults in Redis are not tested: no redis-server here: {HOW}")
def test_killed_servers_and_damaged_values_give_no_wrong_byte() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cycles", "20"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| wrong bytes given | 0 |" in done.stdout
    assert "| killed | 20 |" in done.stdout
    assert "| right |" in done.stdout

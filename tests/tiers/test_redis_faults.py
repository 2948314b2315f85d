"""The randomised cycles of kill, damage and planting that the benchmark repeats ten thousand times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.redis_server import HOW, PROGRAM

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(PROGRAM is None, reason=f"cycles of faults in Redis are not tested: no redis-server here: {HOW}")
def test_killed_servers_and_damaged_values_give_no_wrong_block_and_no_wrong_answer() -> None:
    found: set[str] = set()
    # Redis has 50 ms for each answer: on a busy machine that may be too little, and all blocks are misses.
    for seed in range(5):
        command = [sys.executable, "-m", "tests.campaigns.redis_faults", "--cycles", "12", "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "| wrong blocks given | 0 |" in done.stdout
        assert "| wrong answers given | 0 |" in done.stdout
        assert "| killed | 12 |" in done.stdout
        found |= {what for what in ("right blocks", "prompt tokens found on remote") if f"| {what} |" in done.stdout}
        if len(found) == 2:
            return
    pytest.fail(f"of what was stored, only this was found: {found}")

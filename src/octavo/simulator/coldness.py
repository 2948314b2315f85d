"""Models the slower first steps after an idle pause.

A decode step of one row reads all weights and computes little. On a virtual machine with two cores it took 3.6 ms in a
series of such steps, 5.9 ms after a pause of 0.25 s and 6.6 ms after a chunk of 600 tokens, and became as fast again
within 12 to 24 steps (benchmarks/results/intel_spr/step_times.md). So a state between 0 and 1 moves towards 1 in a
pause, and in a step towards 1 - fastest / seconds: towards 0 if memory is read all the time.
"""

from __future__ import annotations

import math

_COOLING_S, _WARMING_S = 0.01, 0.03


class Coldness:
    """The state at the beginning of each step, from 0 after a series of the fastest steps to 1 after a pause.

    Args:
        fastest: seconds of the fastest step.
    """

    def __init__(self, fastest: float) -> None:
        self._fastest = fastest
        self._state = 1.0
        self._ended: float | None = None

    def before(self, at: float) -> float:
        """Return the state for a step that begins at time `at`."""
        if self._ended is not None and at > self._ended:
            self._move(1.0, at - self._ended)
        return self._state

    def after(self, at: float, seconds: float) -> None:
        """Take note of a step that ended at time `at` and, by the model, took `seconds`."""
        self._move(max(0.0, 1 - self._fastest / seconds) if seconds > 0 else 1.0, seconds)
        self._ended = at

    def _move(self, target: float, seconds: float) -> None:
        slowness = _COOLING_S if target > self._state else _WARMING_S
        self._state = target + (self._state - target) * math.exp(-seconds / slowness)

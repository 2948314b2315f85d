"""Decides whether a preempted sequence is swapped to host memory or recomputed, by the measured cost of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.kvcache.holdings import RestoreCost

# Steps with fewer prompt tokens say little about the cost of one.
_LEAST_TOKENS = 16
_SMOOTHING = 0.2
# One in this many sequences that seem cheaper to recompute is swapped all the same, to measure the speed again.
_TRY_EVERY = 32


@dataclass(slots=True)
class Preemption:
    """Chooses between swapping and recomputing, by how long moving and computing blocks takes.

    Attributes:
        seconds_per_token: time to compute a prompt token; None until measured.
        seconds_per_block: time to copy a block to or from host memory, one way; None until measured.
        mode: "recompute" what is no longer in the prefix cache; "swap" as long as there is room in host memory; or
            "auto", whichever is cheaper for this sequence. Both costs are upper bounds, because published blocks may
            be found in the prefix cache either way.
    """

    seconds_per_token: float | None = None
    seconds_per_block: float | None = None
    mode: Literal["auto", "recompute", "swap"] = "recompute"
    _num_recomputed: int = 0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step with so many prompt tokens."""
        if num_tokens >= _LEAST_TOKENS:
            self.seconds_per_token = _smoothed(self.seconds_per_token, seconds / num_tokens)

    def moved(self, num_blocks: int, seconds: float) -> None:
        """Learn from a step's stores to host memory and loads from there."""
        if num_blocks and seconds:
            self.seconds_per_block = _smoothed(self.seconds_per_block, seconds / num_blocks)

    def swapping_is_cheaper(self, cost: RestoreCost) -> bool:
        """Whether moving the blocks out and back is faster than recomputing the tokens, as far as is known."""
        if self.seconds_per_token is None or self.seconds_per_block is None:
            return True
        return 2 * cost.blocks * self.seconds_per_block < cost.tokens * self.seconds_per_token

    def swaps(self, cost: RestoreCost) -> bool:
        """Whether to move a sequence's blocks to the host, if there is room, rather than recompute them."""
        if self.mode != "auto" or self.swapping_is_cheaper(cost):
            return self.mode != "recompute"
        self._num_recomputed += 1
        return self._num_recomputed % _TRY_EVERY == 0


def _smoothed(known: float | None, measured: float) -> float:
    return measured if known is None else known + _SMOOTHING * (measured - known)

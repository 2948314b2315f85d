"""The contract of a memory tier, where blocks may live besides the device.

A tier holds bytes and decides nothing: which block goes where is the bookkeeping's (`kvcache/`), when it goes is the
runner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class BlockTier(Protocol):
    """Memory for whole blocks, by number.

    Attributes:
        num_blocks: how many it has room for.
    """

    num_blocks: int

    def write(self, ids: Sequence[int], rows: torch.Tensor) -> None:
        """Store rows uint8 [n, block_bytes], on any device, in the blocks `ids`, all different."""

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The blocks `ids` as rows uint8 [n, block_bytes], in their order; on the CPU, and the caller's to keep."""

"""Host memory for the blocks of swapped sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.errors import ConfigError


class HostTier:
    """Blocks in host memory: reserved at once, allocated by the system on first write.

    Args:
        num_blocks: may be 0; then nothing can be stored.
        block_bytes: of one block, as in the device's arena.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks < 0:
            raise ConfigError(f"a host tier needs 0 or more blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        # Not zeroed: a block is read only after the whole of it was written.
        self._bytes = torch.empty(num_blocks, block_bytes, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def write(self, ids: Sequence[int], rows: torch.Tensor) -> None:
        """Store rows uint8 [n, block_bytes], on any device, in the blocks `ids`, all different."""
        self._bytes[list(ids)] = rows.to("cpu")

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The blocks `ids` as rows uint8 [n, block_bytes], in their order; on the CPU, and the caller's to keep."""
        return self._bytes[list(ids)]

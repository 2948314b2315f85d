"""Host memory for blocks of prefixes and of preempted sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.storage.arena import zero_pages


class HostTier:
    """Blocks in host memory: reserved at once, allocated by the system on first write.

    Args:
        num_blocks: capacity in blocks; may be 0, so that nothing can be stored.
        block_bytes: size of a block, as in the device's arena.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks < 0:
            raise ConfigError(f"a host tier needs 0 or more blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._bytes = zero_pages(num_blocks * block_bytes, "blocks in host memory").view(num_blocks, block_bytes)
        flat: Any = self._bytes.view(-1).numpy()
        self._memory = memoryview(flat)

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    @property
    def memory(self) -> torch.Tensor:
        """All blocks, uint8 [num_blocks, block_bytes]."""
        return self._bytes

    def row(self, block_id: int) -> memoryview:
        """Return the memory of a block, for a store to fill or copy."""
        # A slice, because taking a tensor's row releases the interpreter's lock, which cost 60 us while a store worked.
        return self._memory[block_id * self._block_bytes : (block_id + 1) * self._block_bytes]

    def write(self, ids: Sequence[int], rows: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Store rows uint8 [n, block_bytes] in the blocks `ids`, all different."""
        # Row by row, because indexing with many numbers, `rows[ids] = …`, copies byte by byte and is 16 times slower.
        for block_id, row in zip(ids, rows, strict=True):
            self._bytes[block_id] = row

    def rows(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """Return the memory of the blocks `ids`, uint8 [block_bytes] each, in this order."""
        return [self._bytes[block_id] for block_id in ids]

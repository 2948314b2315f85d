"""Host memory for blocks of prefixes and of preempted sequences; two processes can share it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any, Protocol

import torch

from octavo.errors import ConfigError


class BlockTier(Protocol):
    """Memory for whole blocks, addressed by number. The bookkeeping decides which block goes where.

    Attributes:
        num_blocks: capacity in blocks.
    """

    num_blocks: int

    def write(self, ids: Sequence[int], rows: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Store rows uint8 [n, block_bytes] in the blocks `ids`, all different."""

    def rows(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """Return the memory of the blocks `ids`, uint8 [block_bytes] each, in this order."""


class HostTier:
    """Blocks in host memory: reserved at once, allocated by the system on first write.

    Args:
        num_blocks: capacity in blocks; may be 0, so that nothing can be stored.
        block_bytes: size of a block, as in the device's arena.
        file: memory that is shared with another process, or None for private memory. The file is resized as needed,
            and the caller must close it.
    """

    def __init__(self, num_blocks: int, block_bytes: int, file: SharedFile | None = None) -> None:
        if num_blocks < 0:
            raise ConfigError(f"a host tier needs 0 or more blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self._block_bytes = block_bytes
        num_bytes = num_blocks * block_bytes
        # Not zeroed, because a block is read only after all of it was written.
        if file is None or not num_blocks:
            self._bytes = torch.empty(num_blocks, block_bytes, dtype=torch.uint8)
        else:
            os.ftruncate(file.fd, num_bytes)
            mapped = mmap.mmap(file.fd, num_bytes)
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8).view(num_blocks, block_bytes)
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
        """See `BlockTier.write`."""
        # Row by row, because indexing with many numbers, `rows[ids] = …`, copies byte by byte and is 16 times slower.
        for block_id, row in zip(ids, rows, strict=True):
            self._bytes[block_id] = row

    def rows(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """See `BlockTier.rows`."""
        return [self._bytes[block_id] for block_id in ids]


class SharedFile:
    """An anonymous file in memory, shared with processes that are spawned with it as an argument.

    It is freed when no process has it open or mapped any more, however the processes end.
    """

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "kv_disk and kv_remote with executor 'process' need memory that two processes share, which Linux has "
                "(memfd_create): use executor 'in_process'"
            )
        self.fd = os.memfd_create("octavo-host-memory")

    def close(self) -> None:
        """Close the file in this process; its mappings stay valid. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> tuple[Callable[[Any], SharedFile], tuple[Any]]:
        # A descriptor can only be passed to a process while it is being spawned.
        return _received, (reduction.DupFd(self.fd),)


def _received(descriptor: Any) -> SharedFile:
    file = SharedFile.__new__(SharedFile)
    file.fd = descriptor.detach()
    return file

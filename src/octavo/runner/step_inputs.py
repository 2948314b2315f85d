"""The inputs of decode steps in buffers with fixed addresses, as a CUDA graph requires."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.storage.device_copy import write_to_device

_TOKENS, _ROWS, _LENGTHS, _POSITIONS, _SLOTS = range(5)


def padded_size(num_seqs: int) -> int:
    """Round up to 1, 2, 4, 8, then to multiples of 8 up to 64, of 16 up to 256, and of 32 beyond."""
    if num_seqs <= 8:
        return 1 << (num_seqs - 1).bit_length()
    step = 8 if num_seqs <= 64 else 16 if num_seqs <= 256 else 32
    return -(-num_seqs // step) * step


class StepInputs:
    """The inputs of up to `capacity` sequences with one token each, written on the host and copied in one transfer.

        host           | token ids | rows | lengths | positions | slots of group 0 | slots of group 1 | …
                             └── one transfer ──> the same on the device

    On a CPU both are the same memory. Entries after the sequences of a step are padding: token 0 at position 0 of a
    sequence of one token, whose key and value go to the null block.

    Args:
        device_tables: each group's block tables on the device.
        mirrored: whether the device has its own memory.

    Attributes:
        token_ids, positions, rows: int64 [capacity], on the host.
        lengths: int32 [capacity], on the host.
        slots: int64 [capacity] per group, on the host.
        places: int64 [1 + groups, capacity], the positions and the slots, on the host.
    """

    def __init__(
        self, capacity: int, device_tables: Sequence[torch.Tensor], device: torch.device, *, mirrored: bool
    ) -> None:
        num_groups = len(device_tables)
        self._host = torch.zeros(_SLOTS + num_groups, capacity, dtype=torch.int64)
        self._device = torch.zeros_like(self._host, device=device) if mirrored else self._host
        self._tables = device_tables
        self._query_start = torch.arange(capacity + 1, dtype=torch.int32, device=device)
        self._indices = torch.arange(capacity, device=device)
        fields = self._host.numpy()
        self.token_ids, self.positions, self.rows = fields[_TOKENS], fields[_POSITIONS], fields[_ROWS]
        self.lengths: npt.NDArray[np.int32] = fields[_LENGTHS].view(np.int32)[:capacity]
        self.places = fields[_POSITIONS:]
        self.slots = [fields[_SLOTS + group] for group in range(num_groups)]

    @property
    def capacity(self) -> int:
        return self._host.shape[1]

    def pad(self, count: int) -> None:
        """Fill all entries from `count` on with padding."""
        for field in (self.token_ids, self.positions, self.rows, *self.slots):
            field[count:] = 0
        self.lengths[count:] = 1

    def push(self) -> None:
        """Update the device's copy; the host's may be overwritten at once."""
        if self._device is not self._host:
            write_to_device(self._host.numpy(), self._device)

    def device_token_ids(self, count: int) -> torch.Tensor:
        return self._device[_TOKENS, :count]

    def logits_indices(self, count: int) -> torch.Tensor:
        return self._indices[:count]

    def batch(self, count: int, max_context_len: int, total_len: int) -> AttentionBatch:
        """Return the attention inputs of the first `count` sequences, on the device.

        Args:
            max_context_len, total_len: the largest of their contexts, and the sum, or more.
        """
        return AttentionBatch(
            query_start=self._query_start[: count + 1],
            context_lens=self._device[_LENGTHS].view(torch.int32)[:count],
            table_rows=self._device[_ROWS, :count],
            positions=self._device[_POSITIONS, :count],
            groups=tuple(
                GroupBatch(table, self._device[_SLOTS + group, :count]) for group, table in enumerate(self._tables)
            ),
            num_seqs=count,
            num_tokens=count,
            max_query_len=1,
            max_context_len=max_context_len,
            total_decode_len=total_len,
        )

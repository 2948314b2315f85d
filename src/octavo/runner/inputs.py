"""A step's inputs at fixed addresses, as a CUDA graph requires: written on the host, and read by the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from octavo.attention.base import AttentionBatch, GroupBatch
from octavo.storage.device_copy import write_to_device

_TOKENS, _ROWS, _LENGTHS, _BOUNDS, _INDICES, _POSITIONS, _SLOTS = range(7)


def padded_size(num_seqs: int) -> int:
    """Round up to 1, 2, 4, 8, then to multiples of 8 up to 64, of 16 up to 256, and of 32 beyond."""
    if num_seqs <= 8:
        return 1 << (num_seqs - 1).bit_length()
    step = 8 if num_seqs <= 64 else 16 if num_seqs <= 256 else 32
    return -(-num_seqs // step) * step


class StepInputs:
    """The inputs of a step of up to `capacity` tokens, written on the host and copied in one transfer.

        host    | token ids | rows | lengths | bounds | indices | positions | slots of group 0 | slots of group 1 | …
                    └── one transfer ──> the same on the device

    On a CPU both are the same memory. Entries after those of a step are padding: token 0 at position 0 of a sequence of
    one token, whose key and value go to the null block.

    Args:
        device_tables: each group's block tables on the device.
        mirrored: whether the device has its own memory.

    Attributes:
        token_ids, positions: int64 [tokens], on the host like all others.
        rows: int64 [queries], each one's row in the block tables.
        lengths: int32 [queries], each one's context.
        bounds: int32 [queries + 1], each one's first token.
        indices: int64 [outputs], the tokens whose logits or hidden states are needed.
        places: int64 [1 + groups, tokens], the positions, and each group's slots.
    """

    def __init__(
        self, capacity: int, device_tables: Sequence[torch.Tensor], device: torch.device, *, mirrored: bool
    ) -> None:
        self.capacity = capacity
        self._host = torch.zeros(_SLOTS + len(device_tables), capacity + 1, dtype=torch.int64)
        self._device = torch.zeros_like(self._host, device=device) if mirrored else self._host
        self._tables = device_tables
        fields = self._host.numpy()
        self.token_ids, self.positions, self.rows = fields[_TOKENS], fields[_POSITIONS], fields[_ROWS]
        self.lengths: npt.NDArray[np.int32] = fields[_LENGTHS].view(np.int32)[: capacity + 1]
        self.bounds: npt.NDArray[np.int32] = fields[_BOUNDS].view(np.int32)[: capacity + 1]
        self.indices = fields[_INDICES]
        self.places = fields[_POSITIONS:]
        self.bounds[:] = self.indices[:] = np.arange(capacity + 1)  # as of tokens that are a query each
        self._decodes: dict[int, InputViews] = {}

    def pad(self, count: int) -> None:
        """Fill all entries from `count` on with padding, which graphs read."""
        if self._device is not self._host:
            for entries in (self.token_ids, self.rows, *self.places):
                entries[count:] = 0
            self.lengths[count:] = 1

    def push(self) -> None:
        """Update the device's copy; the host's may be overwritten at once."""
        if self._device is not self._host:
            write_to_device(self._host.numpy(), self._device)

    def decodes(self, count: int) -> InputViews:
        """Return the views of `count` tokens that are queries, and whose logits are needed: always the same object."""
        if (views := self._decodes.get(count)) is None:
            views = self._decodes[count] = self.views(count, count, count)
        return views

    def views(self, num_seqs: int, num_tokens: int, num_outputs: int) -> InputViews:
        """Return the first entries on the device. Numbers of the attention that only the host needs are left at 0."""
        device = self._device
        attention = AttentionBatch(
            query_start=device[_BOUNDS].view(torch.int32)[: num_seqs + 1],
            context_lens=device[_LENGTHS].view(torch.int32)[:num_seqs],
            table_rows=device[_ROWS, :num_seqs],
            positions=device[_POSITIONS, :num_tokens],
            groups=tuple(
                GroupBatch(table, device[_SLOTS + group, :num_tokens]) for group, table in enumerate(self._tables)
            ),
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=1,
            max_context_len=0,
            total_decode_len=0,
        )
        return InputViews(device[_TOKENS, :num_tokens], attention, device[_INDICES, :num_outputs])


class InputViews(NamedTuple):
    """A step's inputs of the model on the device, as views of `StepInputs`."""

    token_ids: torch.Tensor
    attention: AttentionBatch
    logits_indices: torch.Tensor

"""Selects rows of a step's logits for torch operations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

DrawRows = npt.NDArray[np.int64]
"""Indices of draws."""
Flags = npt.NDArray[np.bool_]
"""One flag per draw."""

# Number of logits processed at a time on a CPU. Copies of a few MiB stay in its cache and with the allocator, which
# returns larger ones to the system after each use: draws with logprobs from 57 rows of 49,152 took 41 ms at once, and
# take 9 ms in slices.
_AT_ONCE = 2**20


def slices(rows: DrawRows, logits: torch.Tensor) -> Iterator[DrawRows]:
    """Return slices of the rows, each small enough to be processed at once."""
    at_once = max(1, len(logits) if logits.is_cuda else _AT_ONCE // logits.shape[1])
    return (rows[first : first + at_once] for first in range(0, len(rows), at_once))


def look_at(tensor: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Return some rows, which must be in ascending order; read-only, because adjacent rows are not copied."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[int(rows[0]) : int(rows[-1]) + 1]
    return select(tensor, rows)


def select(tensor: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor[torch.from_numpy(rows).to(tensor.device)]


def place(tensor: torch.Tensor, rows: DrawRows, values: torch.Tensor) -> None:
    if len(rows) == len(tensor):
        tensor.copy_(values)
    else:
        tensor[torch.from_numpy(rows).to(tensor.device)] = values

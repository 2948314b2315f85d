"""The vocabulary of blocks: ids, keys, states."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from enum import Enum
from typing import Any, NamedTuple, NewType, cast

import numpy as np
import numpy.typing as npt

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

HostBlockId = NewType("HostBlockId", int)
"""A slot of host memory."""

NULL_BLOCK = BlockId(0)
"""A block that is never allocated or written; it fills the places in tables that a window has slid past."""


BlockTable = MutableSequence[BlockId]
"""A sequence's block ids in one group, in order, as a compact int32 array; made by `new_table`."""


BlockIds = npt.NDArray[np.signedinteger[Any]]
"""Block ids as an array of `int32` or `intp`; numpy indexes with `intp` directly, and converts others to it first."""


def new_table(block_ids: Iterable[int] = ()) -> BlockTable:
    """Return a table of these blocks, as an `array`, which numpy copies and reads without visiting each entry."""
    return cast(BlockTable, array("i", block_ids))


def table_of(block_ids: BlockIds) -> BlockTable:
    """Return a block table of these ids."""
    table = array("i")
    table.frombytes(np.ascontiguousarray(block_ids, np.int32).tobytes())
    return cast(BlockTable, table)


def as_array(block_ids: Sequence[int]) -> BlockIds:
    """Return the ids as an array; for a table this is a view, and the table cannot grow while it exists."""
    if isinstance(block_ids, array):
        return np.frombuffer(cast(Any, block_ids), np.int32)
    return np.array(block_ids, np.int32)


def as_indices(block_ids: Sequence[int]) -> npt.NDArray[np.intp]:
    """Return the ids without null blocks, as `intp` for repeated indexing."""
    ids = as_array(block_ids)
    return (ids if ids.all() else ids[ids != NULL_BLOCK]).astype(np.intp)


def where(holds: npt.NDArray[np.bool_], block_ids: BlockIds) -> BlockIds:
    """Return the blocks selected by a mask; returns the array itself if it selects all."""
    return block_ids if holds.all() else block_ids[holds]


class BlockState(Enum):
    """Every block is in exactly one of these states; see `BlockPool.state`."""

    NULL = "null"
    FREE = "free"  # unreferenced, holds nothing
    CACHED = "cached"  # unreferenced, but a prefix hit could use it
    PINNED = "pinned"  # cached, and not evicted until its pins expire
    ACTIVE = "active"  # referenced by at least one sequence


class BlockCopy(NamedTuple):
    """A copy-on-write: `source` is copied to `destination` before the step computes."""

    source: BlockId
    destination: BlockId


class BlockTransfer(NamedTuple):
    """One block between device and host; its direction is that of the list that contains it."""

    device: BlockId
    host: HostBlockId

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

NULL_BLOCK = BlockId(0)
"""Never allocated, never written: stands in tables where a window has slid past."""


BlockTable = MutableSequence[BlockId]
"""One group's block ids of a sequence, in order, as int32 side by side: `new_table` makes one."""


BlockIds = npt.NDArray[np.int32]


def new_table(block_ids: Iterable[int] = ()) -> BlockTable:
    """A table of these blocks: an `array`, so that it is copied and read by numpy without a look at each entry."""
    return cast(BlockTable, array("i", block_ids))


def table_of(block_ids: BlockIds) -> BlockTable:
    """A block table of these ids."""
    table = array("i")
    table.frombytes(np.ascontiguousarray(block_ids, np.int32).tobytes())
    return cast(BlockTable, table)


def as_array(block_ids: Sequence[int]) -> BlockIds:
    """The ids as an array; a view of a table, which cannot grow as long as the view lives."""
    if isinstance(block_ids, array):
        return np.frombuffer(cast(Any, block_ids), np.int32)
    return np.array(block_ids, np.int32)


def no_null(block_ids: BlockIds) -> BlockIds:
    """The ids without null blocks: the very array where there is none."""
    return block_ids if block_ids.all() else block_ids[block_ids != NULL_BLOCK]


class BlockState(Enum):
    """Every block is in exactly one of these states; see `BlockPool.state`."""

    NULL = "null"
    FREE = "free"  # nobody references it and it holds nothing
    CACHED = "cached"  # nobody references it but a prefix could
    PINNED = "pinned"  # nobody references it, a prefix could, and until a time it is not evicted
    ACTIVE = "active"  # some sequence references it


class BlockCopy(NamedTuple):
    """A copy-on-write: all of `source` is copied to `destination` before the step computes."""

    source: BlockId
    destination: BlockId

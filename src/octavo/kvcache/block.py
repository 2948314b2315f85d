"""The vocabulary of blocks: ids, keys, states."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, NewType

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)

NULL_BLOCK = BlockId(0)
"""Never allocated, never written: stands in tables where a window has slid past."""


class BlockState(Enum):
    """Every block is in exactly one of these states; see `BlockPool.state`."""

    NULL = "null"
    FREE = "free"  # nobody references it and it holds nothing
    CACHED = "cached"  # nobody references it but a prefix could
    PINNED = "pinned"  # nobody references it, a prefix could, and until a time it is not evicted
    ACTIVE = "active"  # some sequence references it


class BlockCopy(NamedTuple):
    """Copy-on-write: the whole of `source` goes to `destination` before the step computes."""

    source: BlockId
    destination: BlockId

"""The record of every block: what it contains, and who references it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockState
from octavo.kvcache.hashing import DIGEST_BYTES, NO_SOURCE, TOKEN_BYTES, Label
from octavo.kvcache.key_index import Children, KeyIndex

UNPUBLISHED = -1


class BlockRecords:
    """One array per field, by block id, without an object per block. The pool owns it; others read it.

        field        of                  written by
        references   every block         the pool: entries of block tables that contain it
        pins         published blocks    the pool: pins that hold it
        groups       every block         the prefix index: its group of layers, or `UNPUBLISHED`
        keys         published blocks    the prefix index: its key, and which block has a key
        parents      "                   the prefix index: the key of the prefix before it
        children     "                   the prefix index: which blocks continue a prefix
        tokens       "                   the prefix index: its token ids
        sources      "                   the prefix index: tenant, scope and request that computed it

    An eviction policy has its own arrays, because host memory and disk, with other records, use the same policies.

    Args:
        num_blocks: size of the pool, including the null block.
        block_size: tokens of a block; 0 to record none: of slots on disk, whose headers have them, or of a device's
            blocks if none will be published, which then have no keys either.
        in_tree: whether children and sources are recorded too: those of the device's blocks, not of slots in host
            memory or on disk.
    """

    def __init__(self, num_blocks: int, block_size: int = 0, *, in_tree: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = array("i", [0]) * num_blocks
        self.pins = array("i", [0]) * num_blocks
        self.groups = array("h", [UNPUBLISHED]) * num_blocks
        num_contents = num_blocks if block_size else 0
        self.keys = KeyIndex(num_contents if in_tree else num_blocks)
        self.children = Children(num_contents * in_tree)
        self.parents = bytearray(num_contents * DIGEST_BYTES)
        self.tokens = bytearray(num_contents * block_size * TOKEN_BYTES)
        self.sources = [NO_SOURCE] * (num_blocks * in_tree)
        # The same memory as arrays of numpy.
        self.references_array = np.frombuffer(cast(Any, self.references), np.int32)
        self.pins_array = np.frombuffer(cast(Any, self.pins), np.int32)
        self.groups_array = np.frombuffer(cast(Any, self.groups), np.int16)

    def published(self) -> npt.NDArray[np.intp]:
        """Return the ids of all published blocks. O(blocks)."""
        return np.flatnonzero(self.groups_array != UNPUBLISHED)

    def is_published(self, block_id: int) -> bool:
        return self.groups[block_id] != UNPUBLISHED

    def forget(self, block_ids: Sequence[BlockId]) -> int:
        """Forget keys, so that these blocks are not published any more; returns how many of them had one."""
        groups = self.groups
        for block_id in block_ids:
            groups[block_id] = UNPUBLISHED
        return self.keys.discard(block_ids)

    def state(self, block_id: BlockId) -> BlockState:
        if block_id == NULL_BLOCK:
            return BlockState.NULL
        if self.references[block_id]:
            return BlockState.ACTIVE
        if self.groups[block_id] == UNPUBLISHED:
            return BlockState.FREE
        return BlockState.PINNED if self.pins[block_id] else BlockState.CACHED

    def write(self, block_id: int, parent: bytes, tokens: bytes) -> None:
        """Record the contents of a block that has a key."""
        width = self.block_size * TOKEN_BYTES
        self.parents[block_id * DIGEST_BYTES : (block_id + 1) * DIGEST_BYTES] = parent
        self.tokens[block_id * width : (block_id + 1) * width] = tokens

    # Of published blocks

    def key(self, block_id: int) -> bytes:
        """Return a block's key, which covers its group too."""
        return self.keys.key(block_id)

    def parent_prefix(self, block_id: int) -> bytes:
        """Return the key of the prefix before a block, which is the same in all groups."""
        return bytes(self.parents[block_id * DIGEST_BYTES : (block_id + 1) * DIGEST_BYTES])

    def token_bytes(self, block_id: int) -> bytes:
        """Return a block's packed token ids; raises KeyError if it is not published."""
        if not self.is_published(block_id):
            raise KeyError(block_id)
        width = self.block_size * TOKEN_BYTES
        return bytes(self.tokens[block_id * width : (block_id + 1) * width])

    def label(self, block_id: int) -> Label:
        """Return a block's label, its name in other tiers."""
        return Label(self.key(block_id), self.parent_prefix(block_id), self.token_bytes(block_id))

"""The identity against which a block outside the device (in host memory, a file or a shared store) is verified."""

from __future__ import annotations

import struct
from typing import NamedTuple

from octavo.kvcache.hashing import TokenChain, group_key
from octavo.request import SequenceId


class Label(NamedTuple):
    """The identity of a block.

    Attributes:
        key: key of the prefix that it ends, which also covers the model, its weights, dtype, block size and tenant.
        parent: the key of the prefix before it.
        tokens: its own packed token ids; empty if the label is private.
    """

    key: bytes
    parent: bytes
    tokens: bytes

    @property
    def is_private(self) -> bool:
        """Whether the block is for one preempted sequence only, so that no prefix finds it."""
        return not self.tokens


def label_of(group: int, chain: TokenChain, index: int) -> Label:
    """Return the label of full block `index` of a chain, in a group."""
    return Label(group_key(group, chain.key(index + 1)), chain.key(index), chain.tokens(index, index + 1))


def private_label(seq_id: SequenceId, group: int, index: int) -> Label:
    """Return the label of block `index` of one sequence, which is half filled or has no key of a prefix."""
    # The halves of a key that differ most come first, because hash tables place keys by their first half.
    return Label(struct.pack("<QQ", seq_id << 32 | index, group), b"", b"")

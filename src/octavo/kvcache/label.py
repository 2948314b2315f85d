"""The identity against which a block outside the device (in host memory, a file or a shared store) is verified."""

from __future__ import annotations

from typing import NamedTuple

from octavo.kvcache.hashing import TokenChain, group_key


class Label(NamedTuple):
    """The identity of a full block.

    Attributes:
        key: key of the prefix that it ends, which also covers the model, its weights, dtype, block size and tenant.
        parent: the key of the prefix before it.
        tokens: its own packed token ids.
    """

    key: bytes
    parent: bytes
    tokens: bytes


def label_of(group: int, chain: TokenChain, index: int) -> Label:
    """Return the label of full block `index` of a chain, in a group."""
    return Label(group_key(group, chain.key(index + 1)), chain.key(index), chain.tokens(index, index + 1))

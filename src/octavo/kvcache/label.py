"""What a block outside the device must prove to be: in host memory, in a file, in a store that others write to."""

from __future__ import annotations

from typing import NamedTuple

from octavo.kvcache.hashing import TokenChain, group_key


class Label(NamedTuple):
    """The identity of a full block.

    Attributes:
        key: of the prefix that it ends; stands for the model, its weights, dtype, block size and tenant too.
        parent: the key of the prefix before it.
        tokens: its own packed token ids.
    """

    key: bytes
    parent: bytes
    tokens: bytes


def label_of(group: int, chain: TokenChain, index: int) -> Label:
    """What full block `index` of a chain must prove to be, in a group."""
    return Label(group_key(group, chain.key(index + 1)), chain.key(index), chain.tokens(index, index + 1))

"""The hash chain: a full block's key says everything its keys and values depend on.

    root(model, dtype, codec, block size, scope) -> key 0 = H(root, tokens 0..15) -> key 1 = H(key 0, tokens 16..31) …

H is blake2b with a digest of 128 bits. Nothing of a process or machine goes in, so memory, disk, remote store and
router agree on the keys, across restarts.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Self

from octavo.kvcache.block import BlockHash

DIGEST_BYTES = 16


def root_hash(*parts: str) -> BlockHash:
    """Key of the empty prefix; `parts` are length-prefixed, so that no two lists of parts look alike."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return BlockHash(digest.digest())


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as consecutive little-endian int32."""
    packed = array("i", token_ids)
    return packed.tobytes()


def child_hash(parent: BlockHash, block_token_bytes: bytes) -> BlockHash:
    """Key of a full block after `parent`."""
    return BlockHash(blake2b(parent + block_token_bytes, digest_size=DIGEST_BYTES).digest())


class TokenChain:
    """The full blocks of one token sequence, packed once each as the sequence grows.

    Attributes:
        tokens: the token ids of full block i, as `token_bytes`.
    """

    __slots__ = ("block_size", "tokens")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: list[bytes] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the full blocks of `token_ids` that are not in the chain yet."""
        size = self.block_size
        for index in range(len(self.tokens), len(token_ids) // size):
            self._append(token_bytes(token_ids[index * size : (index + 1) * size]))

    def copy(self) -> Self:
        """For a fork: the common past is not packed again."""
        raise NotImplementedError

    def key(self, length: int) -> Hashable:
        """Stands for the first `length` full blocks under this salt: equal where those are, and else unlike."""
        raise NotImplementedError

    def _append(self, packed: bytes) -> None:
        self.tokens.append(packed)


class HashChain(TokenChain):
    """The keys of one token sequence's full blocks, computed once each as the sequence grows.

    Attributes:
        hashes: key of full block i.
        tokens: compared on a hit, so that a collision of keys cannot hand out another prompt's block.
    """

    __slots__ = ("hashes", "root")

    def __init__(self, root: BlockHash, block_size: int) -> None:
        super().__init__(block_size)
        self.root = root
        self.hashes: list[BlockHash] = []

    def copy(self) -> Self:
        twin = type(self)(self.root, self.block_size)
        twin.hashes = self.hashes.copy()
        twin.tokens = self.tokens.copy()
        return twin

    def key(self, length: int) -> BlockHash:
        return self.hashes[length - 1] if length else self.root

    def _append(self, packed: bytes) -> None:
        self.hashes.append(child_hash(self.hashes[-1] if self.hashes else self.root, packed))
        self.tokens.append(packed)


class NullChain(TokenChain):
    """Of a cache without prefix caching: no block ever has a key, and nothing is packed or hashed."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(1)

    def extend(self, token_ids: Sequence[int]) -> None:
        return

    def copy(self) -> Self:
        return self

"""The hash chain: a full block's key covers everything that its keys and values depend on.

    root(model, dtype, codec, block size, scope) -> key 0 = H(root, tokens 0..15) -> key 1 = H(key 0, tokens 16..31) …

H is blake2b with a digest of 128 bits. The keys do not depend on the process or machine, so memory, disk, remote store
and router agree on them, also across restarts.

A prompt is hashed once, in the thread that made the request, and all users share the result:

    FullBlocks of the prompt (never changes) ──┬── TokenChain of sequence 0: + blocks of its own output
                                               ├── TokenChain of sequence 1: + blocks of its own output
                                               └── pins, by number of blocks
"""

from __future__ import annotations

import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

from octavo.kvcache.block import BlockHash
from octavo.request import RequestId, SequenceId

DIGEST_BYTES = 16
TOKEN_BYTES = 4
PREFIX_BYTES = 8
"""A prefix of a key for uses where a collision does no harm: among a million keys, the chance of one is 1 in 37
million."""
# Tokens packed and hashed before other threads get the GIL, which takes about half a millisecond.
_SLICE_TOKENS = 4096

KEY_HALF = np.dtype("<u8")
TOKEN = np.dtype("<i4")

Keys = npt.NDArray[np.uint64]
"""Keys as [blocks, 2] of `KEY_HALF`, 16 bytes per block."""

Tokens = npt.NDArray[np.int32]
"""Token ids as [blocks, block_size] of `TOKEN`."""


def root_hash(*parts: str) -> BlockHash:
    """Return the key of the empty prefix; `parts` are length-prefixed, so that different lists never hash alike."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return BlockHash(digest.digest())


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as consecutive little-endian int32, so that keys are the same on every machine."""
    return _packed(token_ids).tobytes()


def _packed(token_ids: Sequence[int]) -> array[int]:
    """Return token ids as an array whose bytes are little-endian: their own array, if its bytes are."""
    if sys.byteorder == "little":
        is_packed = isinstance(token_ids, array) and token_ids.typecode == "i"
        return cast("array[int]", token_ids) if is_packed else array("i", token_ids)
    packed = array("i", token_ids)
    packed.byteswap()
    return packed


def key_prefix(key: bytes) -> int:
    """Return the first `PREFIX_BYTES` of a key as a number."""
    return int.from_bytes(key[:PREFIX_BYTES], "little")


def group_key(group: int, key: bytes) -> bytes:
    """Return the key of a block in a group, because each group of layers has its own blocks for the same tokens."""
    if not group:
        return key
    return key[:14] + (int.from_bytes(key[14:], "little") ^ group).to_bytes(2, "little")


def group_bits(group: int) -> int:
    """Return the bits that `group_key` flips in a key's second half, read as a little-endian number."""
    return group << 48


def chain_hashes(parent: BlockHash, packed: bytes, block_size: int) -> bytes:
    """Return the concatenated keys of the full blocks in `packed`, which follow `parent`."""
    width = block_size * TOKEN_BYTES
    keys = []
    key: bytes = parent
    for start in range(0, len(packed), width):
        key = blake2b(key + packed[start : start + width], digest_size=DIGEST_BYTES).digest()
        keys.append(key)
    return b"".join(keys)


_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class FullBlocks:
    """The full blocks of a prompt, packed and hashed; shared by all sequences of a request.

    Attributes:
        tokens: packed token ids, `block_size` per block; shares the prompt's memory if that is an `array("i")`.
        keys: keys of 16 bytes per block.
    """

    root: BlockHash
    block_size: int
    tokens: memoryview = _NOTHING
    keys: memoryview = _NOTHING

    def __len__(self) -> int:
        return len(self.keys) // DIGEST_BYTES

    def first(self, count: int) -> FullBlocks:
        """Return the first `count` blocks, or all of them if there are no more."""
        if count >= len(self):
            return self
        width = self.block_size * TOKEN_BYTES
        tokens, keys = self.tokens[: count * width], self.keys[: count * DIGEST_BYTES]
        return FullBlocks(self.root, self.block_size, tokens, keys)

    @classmethod
    def of(cls, root: BlockHash, block_size: int, token_ids: Sequence[int]) -> FullBlocks:
        """Pack and hash a prompt. Thread-safe; for a long prompt, other threads may run between slices."""
        num_blocks = len(token_ids) // block_size
        if not num_blocks:
            return cls(root, block_size)
        width, step = block_size * TOKEN_BYTES, max(1, _SLICE_TOKENS // block_size)
        tokens = memoryview(_packed(token_ids)).cast("B")[: num_blocks * width].toreadonly()
        # `np.empty` lets the memory be first touched slice by slice: touching five megabytes at once delays other
        # threads by a millisecond or two.
        keys = np.empty(num_blocks * DIGEST_BYTES, np.uint8).data
        parent = root
        for start in range(0, num_blocks, step):
            if start:
                time.sleep(0)
            end = min(start + step, num_blocks)
            hashed = chain_hashes(parent, bytes(tokens[start * width : end * width]), block_size)
            keys[start * DIGEST_BYTES : end * DIGEST_BYTES] = hashed
            parent = BlockHash(hashed[-DIGEST_BYTES:])
        return cls(root, block_size, tokens, keys.toreadonly())


class Source(NamedTuple):
    """The request that computed a block; one object is shared by all blocks of a sequence."""

    tenant: str
    scope: str
    request_id: RequestId


NO_SOURCE = Source("", "", RequestId(""))


class TokenChain:
    """The full blocks of one sequence and their keys, each packed and hashed once as the sequence grows.

    Args:
        prompt: the blocks that the sequence starts with, which are shared rather than copied.

    Attributes:
        source: the request whose sequence this is; recorded with each block that it publishes.
        most: number of blocks at which the chain ends: those that are computed after an eviction have no key, because
            they depend on more than the tokens before them.
    """

    __slots__ = (
        "_keys",
        "_last",
        "_length",
        "_num_shared",
        "_shared",
        "_tokens",
        "_width",
        "block_size",
        "most",
        "root",
        "source",
    )

    def __init__(self, prompt: FullBlocks, most: int = sys.maxsize) -> None:
        prompt = prompt.first(most)
        self.most = most
        self.root = prompt.root
        self.source = NO_SOURCE
        self.block_size = prompt.block_size
        self._shared = prompt
        self._num_shared = len(prompt)
        self._width = prompt.block_size * TOKEN_BYTES
        self._tokens = bytearray()
        self._keys = bytearray()
        self._length = self._num_shared
        # The key of all blocks, which is used several times whenever a sequence has filled a block.
        self._last = BlockHash(bytes(prompt.keys[-DIGEST_BYTES:])) or prompt.root

    def __len__(self) -> int:
        return self._length

    def grow(self, num_tokens: int, read: Callable[[int, int], Sequence[int]]) -> None:
        """Add the new full blocks of a sequence of `num_tokens` tokens; `read` returns any slice of them."""
        have, size = self._length, self.block_size
        wanted = min(num_tokens // size, self.most)
        if wanted > have:
            packed = token_bytes(read(have * size, wanted * size))
            keys = chain_hashes(self._last, packed, size)
            self._tokens += packed
            self._keys += keys
            self._length, self._last = wanted, BlockHash(keys[-DIGEST_BYTES:])

    def copy(self) -> Self:
        """Return a copy for a fork: the prompt is shared, the blocks of output are copied."""
        twin = type(self)(self._shared, self.most)
        twin._tokens = self._tokens[:]
        twin._keys = self._keys[:]
        twin._length, twin._last, twin.source = self._length, self._last, self.source
        return twin

    def key(self, length: int) -> BlockHash:
        """Return the key of the first `length` full blocks under this root; equal if and only if the blocks are."""
        if length == self._length:
            return self._last
        if length == 0:
            return self.root
        start = (length - 1) * DIGEST_BYTES
        if length <= self._num_shared:
            return BlockHash(bytes(self._shared.keys[start : start + DIGEST_BYTES]))
        start -= self._num_shared * DIGEST_BYTES
        return BlockHash(bytes(self._keys[start : start + DIGEST_BYTES]))

    def tokens(self, start: int, end: int) -> bytes:
        """Return the packed token ids of full blocks `start .. end`."""
        width, split = self._width, self._num_shared
        if end <= split:
            return bytes(self._shared.tokens[start * width : end * width])
        own = bytes(self._tokens[max(0, start - split) * width : (end - split) * width])
        return own if start >= split else bytes(self._shared.tokens[start * width :]) + own

    def rows(self, start: int, end: int) -> Iterator[tuple[Keys, Tokens]]:
        """Yield keys and token ids of full blocks `start .. end` as arrays, in one or two pieces."""
        split, width = self._num_shared, self._width
        if start < (middle := min(end, split)):
            yield self._rows(self._shared.keys, self._shared.tokens, start, middle)
        if end > (middle := max(start, split)):
            # Copies, because the originals could not grow while an array views them.
            first, last = middle - split, end - split
            keys, tokens = (
                self._keys[first * DIGEST_BYTES : last * DIGEST_BYTES],
                self._tokens[first * width : last * width],
            )
            yield self._rows(memoryview(keys), memoryview(tokens), 0, last - first)

    def _rows(self, keys: memoryview, tokens: memoryview, start: int, end: int) -> tuple[Keys, Tokens]:
        return (
            np.frombuffer(keys[start * DIGEST_BYTES : end * DIGEST_BYTES], KEY_HALF).reshape(-1, 2),
            np.frombuffer(tokens[start * self._width : end * self._width], TOKEN).reshape(-1, self.block_size),
        )


class Label(NamedTuple):
    """The identity against which a block outside the device (in host memory, a file or a shared store) is verified.

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

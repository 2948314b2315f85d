"""The index of prefixes: a table from a block's key to its id, which is also the tree that cached blocks form.

    root ──> b0 ──> b1 ──┬──> b2          each published block has its key, and its parent's:
                         └──> c2 ──> c3   the key of the prefix that its tokens continue

The index owns no blocks: the pool decides what is evicted, and calls `drop`. A block is put in only after its keys and
values are computed. A parent is known by its key, because ids are reused; it need not be published, so a parent that is
published again has its children at once. Events, drafts and the ledger read the same tree.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.kvcache.block import (
    NULL_BLOCK,
    BlockHash,
    BlockId,
    BlockIds,
    BlockTable,
    HostBlockId,
    as_array,
    new_table,
    table_of,
)
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.hashing import (
    NO_SOURCE,
    TOKEN,
    TOKEN_BYTES,
    FullBlocks,
    TokenChain,
    Tokens,
    group_bits,
    group_key,
    key_prefix,
    label_of,
    root_hash,
)
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.spec import Window

# The first blocks of a prompt are looked up one by one, the rest as arrays, whose fixed cost is that of several
# look-ups.
_ONE_BY_ONE = 16
# Number of blocks compared in one call: a quarter of a megabyte of tokens, which stays in the processor's cache.
_COMPARED_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that hold the beginning of a sequence.

    Attributes:
        num_tokens: number of tokens covered, at most all but the last of the sequence; a multiple of the block size,
            unless a preempted sequence finds what it left.
        tables: blocks per group; null if outside the group's window, or in `loads`.
        loads: blocks that are not on the device: group, index in its table, and slot of host memory.
    """

    num_tokens: int
    tables: tuple[BlockTable, ...]
    loads: tuple[tuple[int, int, HostBlockId], ...] = ()


Published = tuple[BlockId, int, int, bytes]
"""A block that has just been published, its index in the chain, its group, and its key."""


class PrefixIndex:
    """Finds the block that holds a given prefix's last full block, per group of layers: a prefix of k full blocks in k
    look-ups. It records in `BlockRecords` what a published block contains.

    Blocks of groups with a sliding window stand outside the tree, because a hit needs only those inside the window. So
    a hit of h blocks needs, in each group, the blocks that the token after it attends to: all h under full attention,
    otherwise those inside the window, and the first blocks that stay.

    Args:
        blocks: the record of the pool's blocks; if it records no contents, nothing is cached.
        identity: inputs of keys and values other than the tokens: model fingerprint, dtype, codec, …
        windows: by group of layers, its sliding window, None for full attention.
    """

    def __init__(
        self, blocks: BlockRecords, identity: tuple[str, ...], windows: Sequence[Window | None] = (None,)
    ) -> None:
        self._blocks = blocks
        # Without prefix caching no block is ever full, so nothing is packed, hashed, looked up or published.
        self._block_size = blocks.block_size or sys.maxsize
        self._identity = (*identity, str(self._block_size))
        self._width = self._block_size * TOKEN_BYTES
        self._windows = windows
        self._unsalted_root = root_hash(*self._identity, "")

    def tokens_after(self, chain: TokenChain, tail: Sequence[int], most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that followed a chain and `tail`, less than a block, in published blocks.

        Of several continuations, that which was published last.
        """
        blocks, found, skipped = self._blocks, array("i"), len(tail)
        key: bytes = chain.key(len(chain))
        while len(found) < skipped + most and (block_id := blocks.children.latest(key)) is not None:
            found.frombytes(blocks.token_bytes(block_id))
            if len(found) == self._block_size and found[:skipped].tolist() != list(tail):
                return ()
            key = group_key(blocks.groups[block_id], blocks.key(block_id))  # the prefix's, without the group
        return tuple(found[skipped : skipped + most])

    def full_blocks(self, token_ids: Sequence[int], salt: str) -> FullBlocks:
        """Return the full blocks of a prompt, packed and hashed for `chain`. O(tokens), thread-safe."""
        return FullBlocks.of(self._root(salt), self._block_size, token_ids)

    def chain(self, salt: str, prompt: FullBlocks | None = None, most: int = sys.maxsize) -> TokenChain:
        """Return a chain for a new sequence; sequences of different salts never share a block.

        Args:
            prompt: its first blocks, from `full_blocks` with this salt; by default none.
            most: the most blocks that the chain may have.
        """
        return TokenChain(FullBlocks(self._root(salt), self._block_size) if prompt is None else prompt, most)

    def leading(self, group: int, chain: TokenChain, limit: int) -> BlockTable:
        """Return the blocks for full blocks 0, 1, … of the chain up to the first that is missing, at most `limit`."""
        found = new_table()
        while len(found) < min(limit, _ONE_BY_ONE):
            block_id = self.get(group, chain, len(found))
            if block_id is None:
                return found
            found.append(block_id)
        for keys, tokens in chain.rows(len(found), limit):
            ids = self._blocks.keys.find_leading(keys, group_bits(group))
            ids = ids[: self._num_equal(ids, tokens)]
            found.extend(table_of(ids))
            if len(ids) < len(keys):
                break
        return found

    def get(self, group: int, chain: TokenChain, index: int) -> BlockId | None:
        """Return the block that holds full block `index` of the chain, with the same tokens before it, or None."""
        block_id = self._blocks.keys.get(group_key(group, chain.key(index + 1)))
        if block_id is None:
            return None
        start = block_id * self._width
        same = self._blocks.tokens[start : start + self._width] == chain.tokens(index, index + 1)
        return BlockId(block_id) if same else None

    def longest(self, chain: TokenChain, most: int, host: HostMemory | None = None) -> PrefixHit:
        """Return the longest prefix of at most `most` full blocks that all groups have cached on the device.

        Args:
            host: host memory, if blocks there are to be found too.
        """
        size, hit = self._block_size, most
        tables = [new_table() for _ in self._windows]
        for group, window in enumerate(self._windows):
            if window is None:
                tables[group] = leading = self.leading(group, chain, hit)
                while host is not None and len(leading) < hit:
                    if (block := self._get_with(group, chain, len(leading), host)) is None:
                        break
                    leading.append(block)
                hit = len(leading)
        # A block missing at index j fails every hit that ends after j and still sees j, so the end moves to j.
        is_whole = False
        while not is_whole:
            is_whole = True
            for group, window in enumerate(self._windows):
                if window is None:
                    continue
                first = window.passed(hit * size, size)
                num_sinks = min(first, window.sink_blocks)
                seen = (*range(num_sinks), *range(first, hit))
                found = [self._get_with(group, chain, index, host) for index in seen]
                missing = max((i for i, block in zip(seen, found, strict=True) if block is None), default=None)
                if missing is not None:
                    hit, is_whole = missing, False
                    break
                blocks = [block for block in found if block is not None]
                tables[group] = new_table(
                    [*blocks[:num_sinks], *[NULL_BLOCK] * (first - num_sinks), *blocks[num_sinks:]]
                )
        loads: list[tuple[int, int, HostBlockId]] = []
        for group, table in enumerate(tables):
            del table[hit:]
            if host is not None:
                for index in np.flatnonzero(as_array(table) < 0).tolist():
                    loads.append((group, index, HostBlockId(-table[index])))
                    table[index] = NULL_BLOCK
        return PrefixHit(hit * size, tuple(tables), tuple(loads))

    def ends_at(self, chain: TokenChain, length: int, most: int) -> bool:
        """Whether the longest prefix most probably still has `length` blocks of at most `most`. O(groups).

        Checks that its last block is cached in every group and the next one is not, because a prefix loses its tail
        before its head.
        """
        groups, get = range(len(self._windows)), self.get
        if length and any(get(group, chain, length - 1) is None for group in groups):
            return False
        return length == most or any(get(group, chain, length) is None for group in groups)

    def publish(self, chain: TokenChain, first: int, tables: Sequence[Sequence[BlockId]]) -> list[Published]:
        """Publish computed blocks, given by group for the full blocks of the chain from `first` on.

        Returns:
            Those that were published, in order; the others are null, or a block like them is published already.
        """
        blocks, published, parents = self._blocks, list[Published](), list[int]()
        before = chain.key(first)
        for index, row in enumerate(zip(*tables, strict=True), first):
            prefix = chain.key(index + 1)
            for group, block_id in enumerate(row):
                key = group_key(group, prefix)
                if block_id == NULL_BLOCK or blocks.is_published(block_id) or not blocks.keys.put(key, block_id):
                    continue
                blocks.write(block_id, before, chain.tokens(index, index + 1))
                blocks.groups[block_id] = group
                blocks.sources[block_id] = chain.source
                published.append((block_id, index, group, key))
                parents.append(key_prefix(before))
            before = prefix
        blocks.children.add([block_id for block_id, *_ in published], parents)
        return published

    def drop(self, block_ids: Sequence[BlockId]) -> None:
        """Forget blocks that the pool evicts; raises KeyError if one is not published."""
        blocks = self._blocks
        if blocks.forget(block_ids) != len(block_ids):
            raise KeyError(f"not all of these blocks are published: {block_ids}")
        blocks.children.remove(block_ids)
        for block_id in block_ids:
            blocks.sources[block_id] = NO_SOURCE

    def parent(self, block_id: BlockId) -> BlockId | None:
        """Return the published block that a published block continues; None if there is none, or under a window."""
        blocks, group = self._blocks, self._blocks.groups[block_id]
        if self._windows[group] is not None:
            return None
        parent = blocks.keys.get(group_key(group, blocks.parent_prefix(block_id)))
        return None if parent is None else BlockId(parent)

    def children(self, block_id: BlockId) -> Iterator[BlockId]:
        """Iterate over the published blocks that continue a published one; there are none under a window."""
        blocks, group = self._blocks, self._blocks.groups[block_id]
        if self._windows[group] is None:
            key = group_key(group, blocks.key(block_id))
            for child in blocks.children.of(key):
                if blocks.groups[child] == group and blocks.parent_prefix(child) == key:
                    yield child

    def check(self) -> Iterator[str]:
        """Yield every violation of the index's own invariants. O(blocks)."""
        yield from self._blocks.keys.check()
        has_key, published = self._blocks.keys.ids(), self._blocks.published()
        for block_id in np.setxor1d(has_key, published, assume_unique=True).tolist():
            yield f"block {block_id} has a key or is published in the prefix cache, but not both"
        yield from self._blocks.children.check(published)

    def _root(self, salt: str) -> BlockHash:
        # Only the unsalted root is kept, because salts come from clients and are unbounded in number.
        return root_hash(*self._identity, salt) if salt else self._unsalted_root

    def _num_equal(self, ids: BlockIds, tokens: Tokens) -> int:
        """Return how many leading blocks hold the tokens in the same row."""
        slab = np.frombuffer(self._blocks.tokens, TOKEN).reshape(-1, self._block_size)
        for start in range(0, len(ids), _COMPARED_AT_ONCE):
            part = ids[start : start + _COMPARED_AT_ONCE]
            # Usually all are equal, so one comparison is enough.
            if (differ := slab.take(part, axis=0) != tokens[start : start + len(part)]).any():
                return start + int(differ.any(axis=1).argmax())
        return len(ids)

    def _get_with(self, group: int, chain: TokenChain, index: int, host: HostMemory | None) -> BlockId | None:
        """Return a block; one in host memory as a negative id, minus its slot."""
        block = self.get(group, chain, index)
        if block is not None or host is None:
            return block
        slot = host.find(label_of(group, chain, index))
        return None if slot is None else BlockId(-slot)

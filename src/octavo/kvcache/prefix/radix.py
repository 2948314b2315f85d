"""Prefix caching by a radix tree over token sequences, at block granularity.

An edge holds a run of blocks, and runs split where sequences diverge:

    root of a salt ──[b0 b1 b2 b3]──┬──[b4 b5]
                                    └──[c4 c5 c6]──┬──[c7]
                                                   └──[d7 d8]

A position is one full block of tokens after all those before it; each group of layers may have a block there. The pool
evicts single blocks, so positions without any block remain as long as a published block follows them: published blocks
are never lost, and a hole is filled when its block is computed again. `LeafFirstEviction` keeps holes rare, by means of
`parent` and `children`.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockTable, new_table
from octavo.kvcache.hashing import TOKEN_BYTES, FullBlocks, TokenChain, root_hash


class _Node:
    """One edge and the node at its end; a root has no tokens.

    Attributes:
        start: index of the run's first block in its sequences.
        tokens: packed token ids of the run's blocks, concatenated.
        blocks: block ids as [group][offset in the run], null for a hole.
        children: child nodes by the packed tokens of their first block.
        sealed: whether the run may no longer grow, because it has had positions after its end.
        alive: whether the node is still part of the tree.

    While it is alive, the tokens of its positions never change: it may split (the lower part is the same node), grow
    until it is sealed, and lose positions at its end. So a cursor need not compare a position again.
    """

    __slots__ = ("alive", "blocks", "children", "parent", "salt", "sealed", "start", "tokens")

    def __init__(
        self, parent: _Node | None, start: int, length: int, tokens: bytes, num_groups: int, salt: str = ""
    ) -> None:
        self.parent = parent
        self.start = start
        self.tokens = bytearray(tokens)
        self.blocks: list[BlockTable] = [_holes(length) for _ in range(num_groups)]
        self.children: dict[bytes, _Node] = {}
        self.salt = salt
        self.sealed = False
        self.alive = True

    @property
    def end(self) -> int:
        return self.start + len(self.blocks[0])


class RadixChain(TokenChain):
    """A sequence's full blocks with a cursor: its current node, and how many blocks it has compared on the way."""

    __slots__ = ("compared", "node", "salt")

    def __init__(self, prompt: FullBlocks, salt: str = "") -> None:
        super().__init__(prompt)
        self.salt = salt
        self.node: _Node | None = None
        self.compared = 0

    def copy(self) -> Self:
        twin = super().copy()
        twin.salt, twin.node, twin.compared = self.salt, self.node, self.compared
        return twin


class RadixPrefixCache:
    """An index with one radix tree per salt. A prefix of k blocks in e edges is found in e look-ups and k comparisons
    of packed tokens. `get` and `put` of the next block are O(1), and a split takes the length of the run's upper part.
    Keys are not used for look-ups here: they only identify prefixes for the ledger and the pins.

    Args:
        block_size: tokens per block.
        windows: sliding window per group, None for full attention.
        identity: what keys and values depend on besides the tokens, which goes into the keys.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None], identity: tuple[str, ...] = ()) -> None:
        self._identity = (*identity, str(block_size))
        self._block_size = block_size
        self._width = block_size * TOKEN_BYTES
        self._windows = tuple(windows)
        # A root is dropped with its last child, because salts come from clients and are unbounded in number.
        self._roots: dict[str, _Node] = {}
        # The position of each block, by its id.
        self._nodes: list[_Node | None] = []
        self._groups = array("H")
        self._indices = array("i")

    def full_blocks(self, token_ids: Sequence[int], salt: str) -> FullBlocks:
        return FullBlocks.of(root_hash(*self._identity, salt), self._block_size, token_ids)

    def chain(self, salt: str, prompt: FullBlocks | None = None) -> RadixChain:
        return RadixChain(
            FullBlocks(root_hash(*self._identity, salt), self._block_size) if prompt is None else prompt, salt
        )

    def reserve(self, num_blocks: int) -> None:
        missing = num_blocks - len(self._nodes)
        if missing > 0:
            self._nodes += [None] * missing
            self._groups.frombytes(bytes(2 * missing))
            self._indices.frombytes(bytes(4 * missing))

    def tokens(self, block_id: BlockId) -> bytes:
        node, _, index = self._place(block_id)
        start = (index - node.start) * self._width
        return bytes(node.tokens[start : start + self._width])

    def leading(self, group: int, chain: RadixChain, limit: int) -> BlockTable:
        found = new_table()
        node, at = self._roots.get(chain.salt), 0
        limit = min(limit, len(chain))
        while node is not None and at < limit:
            child = node.children.get(chain.tokens(at, at + 1))
            if child is None:
                break
            common = self._common_length(child, chain, at, limit)
            at += common
            chain.node, chain.compared = child, at
            run = child.blocks[group][:common]
            if NULL_BLOCK in run:
                found.extend(run[: run.index(NULL_BLOCK)])
                break
            found.extend(run)
            if at < child.end:
                break
            node = child
        return found

    def look_up(self, group: int, chain: RadixChain, limit: int, most: int) -> int:
        return 0  # `leading` compares whole runs, which takes no longer than copying them

    def get(self, group: int, chain: RadixChain, index: int) -> BlockId | None:
        node = self._seek(chain, index)
        return None if node is None else node.blocks[group][index - node.start] or None

    def put(self, group: int, chain: RadixChain, index: int, block_id: BlockId) -> bool:
        if block_id >= len(self._nodes):
            self.reserve(2 * block_id)
        if self._nodes[block_id] is not None:
            return False
        node = self._seek(chain, index) or self._insert(chain, index)
        run, offset = node.blocks[group], index - node.start
        if run[offset] != NULL_BLOCK:
            return False
        run[offset] = block_id
        self._nodes[block_id], self._groups[block_id], self._indices[block_id] = node, group, index
        return True

    def drop(self, *block_ids: BlockId) -> None:
        left: dict[_Node, None] = {}
        for block_id in block_ids:
            node, group, index = self._place(block_id)
            self._nodes[block_id] = None
            node.blocks[group][index - node.start] = NULL_BLOCK
            left[node] = None
        for node in left:
            if node.alive:
                self._prune(node)

    def parent(self, block_id: BlockId) -> BlockId | None:
        """Return the block right before this in its group; None at the start, at a hole or with a sliding window."""
        node, group, index = self._place(block_id)
        if index == 0 or self._windows[group] is not None:
            return None
        if index > node.start:
            return node.blocks[group][index - node.start - 1] or None
        return (node.parent and node.parent.blocks[group][-1]) or None

    def children(self, block_id: BlockId) -> Sequence[BlockId]:
        """Return the blocks right after this one in its group; none with a sliding window."""
        node, group, index = self._place(block_id)
        if self._windows[group] is not None:
            return ()
        if index + 1 < node.end:
            block = node.blocks[group][index - node.start + 1]
            return () if block == NULL_BLOCK else (block,)
        if not node.children:
            return ()
        return [block for child in node.children.values() if (block := child.blocks[group][0]) != NULL_BLOCK]

    def __iter__(self) -> Iterator[BlockId]:
        return (BlockId(i) for i, node in enumerate(self._nodes) if node is not None)

    def check(self) -> Findings:
        for blocks in in_slices(self):
            for block in blocks:
                node, group, index = self._place(block)
                there = node.alive and node.start <= index < node.end
                if not there or node.blocks[group][index - node.start] != block:
                    yield f"block {block} is not where the radix tree has it: group {group}, position {index}"
            yield None

    def _place(self, block_id: BlockId) -> tuple[_Node, int, int]:
        """Return a block's node, group, and index in its sequences."""
        node = self._nodes[block_id]
        if node is None:
            raise KeyError(block_id)
        return node, self._groups[block_id], self._indices[block_id]

    def _seek(self, chain: RadixChain, index: int) -> _Node | None:
        """Return the node that holds position `index` of the chain, or None; leaves the cursor where they diverge."""
        node = chain.node
        while node is not None and (not node.alive or index < node.start or chain.compared <= node.start):
            node = node.parent
        if node is None:
            node = self._roots.get(chain.salt)
        compared = 0
        if node is not None:
            limit = index + 1
            compared = min(chain.compared, node.end)
            while compared < limit:
                if compared < node.end:
                    compared += self._common_length(node, chain, compared, limit)
                    if compared < node.end:
                        break
                    continue
                child = node.children.get(chain.tokens(compared, compared + 1))
                if child is None:
                    break
                node = child
        chain.node, chain.compared = node, compared
        return node if compared > index else None

    def _insert(self, chain: RadixChain, index: int) -> _Node:
        """Insert the chain's positions from the cursor up to `index`; returns the node of the last."""
        node, at = chain.node, chain.compared
        groups = len(self._windows)
        if node is None:
            node = self._roots[chain.salt] = _Node(None, 0, 0, b"", groups, chain.salt)
            node.sealed = True
        elif at < node.end:
            node = self._split(node, at)
        length, tokens = index + 1 - at, chain.tokens(at, index + 1)
        if node.sealed:
            child = _Node(node, at, length, tokens, groups)
            node.children[tokens[: self._width]] = child
            node = child
        else:
            # Only a leaf is unsealed, so that a sequence that grows by single blocks remains one run.
            node.tokens += tokens
            for run in node.blocks:
                run.extend(_holes(length))
        chain.node, chain.compared = node, index + 1
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Split the run before position `at`; returns the upper part, a new node."""
        parent, length = node.parent, at - node.start
        assert parent is not None
        width = self._width
        upper = _Node(parent, node.start, 0, bytes(node.tokens[: length * width]), len(self._windows))
        upper.sealed = True
        parent.children[bytes(upper.tokens[:width])] = upper
        for group, run in enumerate(node.blocks):
            upper.blocks[group] = run[:length]
            for block in upper.blocks[group]:
                if block != NULL_BLOCK:
                    self._nodes[block] = upper
            del run[:length]
        del node.tokens[: length * width]
        node.start, node.parent = at, upper
        upper.children[bytes(node.tokens[:width])] = node
        return upper

    def _prune(self, node: _Node) -> None:
        """Remove empty positions from the node's end, then from its ancestors if it vanishes. Amortised O(1)."""
        while not node.children:
            length = before = len(node.blocks[0])
            while length and not any(run[length - 1] for run in node.blocks):
                length -= 1
            if length:
                if length < before:
                    node.sealed = True
                    del node.tokens[length * self._width :]
                    for run in node.blocks:
                        del run[length:]
                return
            node.alive = False
            if node.parent is None:
                del self._roots[node.salt]
                return
            del node.parent.children[bytes(node.tokens[: self._width])]
            node = node.parent

    def _common_length(self, node: _Node, chain: RadixChain, start: int, limit: int) -> int:
        """Return how many blocks of node and chain are equal from position `start` on, up to position `limit`."""
        width, end = self._width, min(limit, node.end)
        ours = chain.tokens(start, end)
        theirs = node.tokens[(start - node.start) * width : (end - node.start) * width]
        # Usually all are equal, so one comparison of memory is enough.
        if ours == theirs:
            return end - start
        differ = np.frombuffer(ours, np.int32) != np.frombuffer(theirs, np.int32)
        return int(differ.argmax()) // self._block_size


def _holes(length: int) -> BlockTable:
    return new_table(itertools.repeat(NULL_BLOCK, length))

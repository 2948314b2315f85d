"""Prefix caching by a radix tree over token sequences, at block granularity.

An edge holds a run of blocks, and runs split where sequences diverge:

    root of a salt ──[b0 b1 b2 b3]──┬──[b4 b5]
                                    └──[c4 c5 c6]──┬──[c7]
                                                   └──[d7 d8]

A position is one full block of tokens after all those before it; each group of layers may have a block there. The pool
gives up single blocks, so positions without any remain as long as something published stands behind them: nothing that
is published is ever lost, and a hole is filled when the block is computed again. `LeafFirstEviction` sees to it that
holes are rare, by way of `parent` and `children`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from octavo.kvcache.block import NULL_BLOCK, BlockId
from octavo.kvcache.hashing import TokenChain


class _Node:
    """One edge and what hangs on its end; a root has no tokens.

    Attributes:
        start: index of the run's first block in its sequences.
        tokens: packed token ids of the run's blocks.
        blocks: [group][offset in the run], null for a hole.
        children: by the packed tokens of their first block.
        sealed: the run has had an end beyond which something stood; it grows no more.
        alive: still part of the tree.

    While it is alive the tokens of its positions never change: it may split (the lower part is the same node), grow
    before it is sealed, and lose positions from its end. So a cursor that has compared a position need not do so again.
    """

    __slots__ = ("alive", "blocks", "children", "parent", "salt", "sealed", "start", "tokens")

    def __init__(self, parent: _Node | None, start: int, tokens: list[bytes], num_groups: int, salt: str = "") -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.blocks: list[list[BlockId]] = [[NULL_BLOCK] * len(tokens) for _ in range(num_groups)]
        self.children: dict[bytes, _Node] = {}
        self.salt = salt
        self.sealed = False
        self.alive = True

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class RadixChain(TokenChain):
    """A sequence's full blocks and a cursor: the node it stands in, and how many blocks it has compared on the way."""

    __slots__ = ("_keys", "compared", "node", "salt")

    def __init__(self, salt: str, block_size: int) -> None:
        super().__init__(block_size)
        self._keys = [hash(salt)]
        self.salt = salt
        self.node: _Node | None = None
        self.compared = 0

    def copy(self) -> Self:
        twin = type(self)(self.salt, self.block_size)
        twin.tokens = self.tokens.copy()
        twin.node, twin.compared = self.node, self.compared
        twin._keys = self._keys.copy()
        return twin

    def key(self, length: int) -> int:
        # Python's own 64 bits suffice: these keys only say why something was not found, never what is.
        keys = self._keys
        for tokens in self.tokens[len(keys) - 1 : length]:
            keys.append(hash((keys[-1], tokens)))
        return keys[length]


class RadixPrefixCache:
    """A radix tree per salt. A prefix of k blocks in e edges is found in e look-ups and k comparisons of packed tokens;
    `get` and `put` one block further cost O(1), a split the length of the run's upper part. Nothing is hashed.

    Args:
        block_size: tokens per block.
        windows: per group its sliding window, None for full attention.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None]) -> None:
        self._block_size = block_size
        self._windows = tuple(windows)
        # A root lives as long as it has children: salts come from clients and would grow without bound.
        self._roots: dict[str, _Node] = {}
        self._places: dict[BlockId, tuple[_Node, int, int]] = {}  # node, group, index

    def chain(self, salt: str) -> RadixChain:
        return RadixChain(salt, self._block_size)

    def leading(self, group: int, chain: RadixChain, limit: int) -> list[BlockId]:
        found: list[BlockId] = []
        node = self._roots.get(chain.salt)
        tokens, at = chain.tokens, 0
        limit = min(limit, len(tokens))
        while node is not None and at < limit:
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common_length(child.tokens, tokens, at, limit)
            at += common
            chain.node, chain.compared = child, at
            run = child.blocks[group][:common]
            if NULL_BLOCK in run:
                found += run[: run.index(NULL_BLOCK)]
                break
            found += run
            if common < len(child.tokens):
                break
            node = child
        return found

    def get(self, group: int, chain: RadixChain, index: int) -> BlockId | None:
        node = self._seek(chain, index)
        return None if node is None else node.blocks[group][index - node.start] or None

    def put(self, group: int, chain: RadixChain, index: int, block_id: BlockId) -> bool:
        if block_id in self._places:
            return False
        node = self._seek(chain, index) or self._insert(chain, index)
        run, offset = node.blocks[group], index - node.start
        if run[offset] != NULL_BLOCK:
            return False
        run[offset] = block_id
        self._places[block_id] = (node, group, index)
        return True

    def drop(self, block_id: BlockId) -> None:
        node, group, index = self._places.pop(block_id)
        node.blocks[group][index - node.start] = NULL_BLOCK
        if not node.children and index == node.end - 1:
            self._prune(node)

    def parent(self, block_id: BlockId) -> BlockId | None:
        """The block right before this one in its group; None at the start, at a hole, and under a sliding window."""
        node, group, index = self._places[block_id]
        if index == 0 or self._windows[group] is not None:
            return None
        if index > node.start:
            return node.blocks[group][index - node.start - 1] or None
        return (node.parent and node.parent.blocks[group][-1]) or None

    def children(self, block_id: BlockId) -> Sequence[BlockId]:
        """The blocks right after this one in its group; none under a sliding window."""
        node, group, index = self._places[block_id]
        if self._windows[group] is not None:
            return ()
        if index + 1 < node.end:
            block = node.blocks[group][index - node.start + 1]
            return () if block == NULL_BLOCK else (block,)
        if not node.children:
            return ()
        return [block for child in node.children.values() if (block := child.blocks[group][0]) != NULL_BLOCK]

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._places)

    def _seek(self, chain: RadixChain, index: int) -> _Node | None:
        """The node that holds position `index` of the chain, or None; leaves the cursor where the two part."""
        node = chain.node
        while node is not None and (not node.alive or index < node.start or chain.compared <= node.start):
            node = node.parent
        if node is None:
            node = self._roots.get(chain.salt)
        compared = 0
        if node is not None:
            tokens, limit = chain.tokens, index + 1
            compared = min(chain.compared, node.end)
            while compared < limit:
                if compared < node.end:
                    run = node.tokens[compared - node.start : limit - node.start]
                    compared += _common_length(run, tokens, compared, limit)
                    if compared < node.end:
                        break
                    continue
                child = node.children.get(tokens[compared])
                if child is None:
                    break
                node = child
        chain.node, chain.compared = node, compared
        return node if compared > index else None

    def _insert(self, chain: RadixChain, index: int) -> _Node:
        """Positions up to `index` of the chain, from the cursor on."""
        node, at = chain.node, chain.compared
        groups = len(self._windows)
        if node is None:
            node = self._roots[chain.salt] = _Node(None, 0, [], groups, chain.salt)
            node.sealed = True
        elif at < node.end:
            node = self._split(node, at)
        tokens = chain.tokens[at : index + 1]
        if node.sealed:
            child = _Node(node, at, tokens, groups)
            node.children[tokens[0]] = child
            node = child
        else:
            # Only a leaf is unsealed: a sequence that grows by single blocks remains one run.
            node.tokens += tokens
            for run in node.blocks:
                run += [NULL_BLOCK] * len(tokens)
        chain.node, chain.compared = node, index + 1
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut the run before position `at`; returns the upper part, a new node."""
        parent, length = node.parent, at - node.start
        assert parent is not None
        upper = _Node(parent, node.start, node.tokens[:length], len(self._windows))
        upper.sealed = True
        parent.children[upper.tokens[0]] = upper
        for group, run in enumerate(node.blocks):
            upper.blocks[group] = run[:length]
            for index, block in enumerate(run[:length], node.start):
                if block != NULL_BLOCK:
                    self._places[block] = (upper, group, index)
            del run[:length]
        del node.tokens[:length]
        node.start, node.parent = at, upper
        upper.children[node.tokens[0]] = node
        return upper

    def _prune(self, node: _Node) -> None:
        """Cut positions off the node's end that hold nothing, and then those they stood on. Amortised O(1)."""
        while not node.children:
            length = len(node.tokens)
            while length and not any(run[length - 1] for run in node.blocks):
                length -= 1
            if length:
                if length < len(node.tokens):
                    node.sealed = True
                    del node.tokens[length:]
                    for run in node.blocks:
                        del run[length:]
                return
            node.alive = False
            if node.parent is None:
                del self._roots[node.salt]
                return
            del node.parent.children[node.tokens[0]]
            node = node.parent


def _common_length(run: list[bytes], tokens: list[bytes], start: int, limit: int) -> int:
    """How many blocks of the run equal `tokens[start:limit]` from its beginning."""
    most = min(len(run), limit - start)
    if most == 1:
        return int(run[0] == tokens[start])
    # Comparing whole lists is a hundred times faster than comparing block by block, and mostly all are equal.
    if run[:most] == tokens[start : start + most]:
        return most
    return next(i for i in range(most) if run[i] != tokens[start + i])

"""Chooses the blocks that a `bounded` budget keeps of a sequence, by the attention that they received.

    table of a group   | first block | first tenth | by mass ........ | last tenth | answer ....... | most recent |
                         of the prompt              of the prompt                    by mass

A sequence lets go of blocks after its prompt, and then whenever it fills one: of those that nothing protects, the ones
with the least mass since they were written, as the model's layers measure it (`attention/base.py`). The ends of the
prompt have at most an eighth of the budget each, and the most recent blocks half of it (as in H2O), so some block is
always left to choose. What the prompt's first rows attended to is not known when they come from the prefix cache, so
nothing but its last rows counts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from octavo.kv_budget import KVBudget

Mass = npt.NDArray[np.int64]
"""The mass of the blocks that a group keeps: [blocks]."""

Masses = tuple[Mass, ...]
"""Those of each group; empty with a window, which is not measured."""

_SHARE_OF_ENDS = 8
_SHARE_OF_RECENT = 2
_PROMPT_END = 10


class AttendedBlocks:
    """The blocks of one group that a sequence keeps, and their mass (`holdings.Retention`).

    Args:
        num_blocks: the most that it keeps once the sequence exceeds the budget.

    Attributes:
        mass_let_go: mass of the evicted blocks when they were evicted.
    """

    leaves_out = True

    def __init__(self, budget: KVBudget, num_blocks: int, block_size: int, num_prompt_tokens: int) -> None:
        self._size, self._most = block_size, num_blocks
        # Among them the block of the next token, which is empty at first.
        self._recent = max(min(2, self._most - 1), self._most // _SHARE_OF_RECENT)
        self._budget, self._num_prompt_tokens = budget, num_prompt_tokens
        self._first_eviction = budget.first_eviction(num_prompt_tokens)
        num_prompt_tokens = budget.num_dense(num_prompt_tokens)
        end = min(-(-num_prompt_tokens // (_PROMPT_END * block_size)), self._most // _SHARE_OF_ENDS)
        num_prompt_blocks = -(-num_prompt_tokens // block_size)
        self._first, self._last = max(1, end), (num_prompt_blocks - end, num_prompt_blocks)
        self._indices = np.empty(0, np.int64)  # in the table, of the blocks that are kept
        self._mass = np.empty(0, np.int64)
        self._length = 0  # entries of the table, kept or not
        self.mass_let_go = 0

    def copy(self) -> AttendedBlocks:
        """Return a copy for a fork."""
        twin = object.__new__(AttendedBlocks)
        twin.__dict__.update(self.__dict__)
        twin._mass = self._mass.copy()  # the only array that is changed in place
        return twin

    @property
    def tokens_let_go(self) -> int:
        return (self._length - len(self._indices)) * self._size

    @property
    def mass_kept(self) -> int:
        return int(self._mass.sum())

    def add(self, mass: Mass) -> None:
        """Add the attention of some rows to all blocks that the group keeps: [blocks]."""
        self._grow(len(mass) - len(self._indices))
        self._mass[: len(mass)] += mass

    def due_at(self, num_computed: int, block_size: int) -> int:
        return num_computed + self._budget.tokens_until_eviction(num_computed, self._num_prompt_tokens, block_size)

    def let_go(self, table: Seq[int], num_computed: int, block_size: int) -> Seq[int]:
        """Choose blocks to evict, so that the rest, with the next token's block, is within the budget."""
        if num_computed < self._first_eviction:
            return ()
        self._grow(-(-num_computed // self._size) - self._length)
        indices, mass = self._indices, self._mass
        # Some go when the next token begins a block.
        excess = len(indices) + (num_computed % self._size == 0) - self._most
        if excess <= 0:
            return ()
        first, end = self._last
        recent = num_computed // self._size + 1 - self._recent
        may_go = (indices >= self._first) & (indices < recent) & ((indices < first) | (indices >= end))
        candidates = np.flatnonzero(may_go)
        chosen = candidates[np.argsort(mass[candidates], kind="stable")[:excess]]
        self.mass_let_go += int(mass[chosen].sum())
        self._indices, self._mass = np.delete(indices, chosen), np.delete(mass, chosen)
        gone: list[int] = np.sort(indices[chosen]).tolist()
        return gone

    def _grow(self, count: int) -> None:
        """Note `count` more blocks, all of which it keeps."""
        if count > 0:
            first, self._length = self._length, self._length + count
            self._indices = np.concatenate((self._indices, np.arange(first, first + count)))
            self._mass = np.concatenate((self._mass, np.zeros(count, np.int64)))

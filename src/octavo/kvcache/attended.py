"""Which blocks a `bounded` budget keeps of a sequence, by how much of the attention they have had.

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
from octavo.kvcache.spec import Window

Mass = npt.NDArray[np.int64]
"""The mass of blocks: [groups, blocks], as many as groups without a window keep; others are not measured."""

Places = tuple[tuple[int, ...], ...]
"""For each group, places of blocks among those that it keeps, ascending."""

_SHARE_OF_ENDS = 8
_SHARE_OF_RECENT = 2
_PROMPT_END = 10


class AttendedBlocks:
    """The blocks that a sequence keeps, and their mass.

    Args:
        windows: the window of each group, None without one; groups with a window are left alone.
    """

    def __init__(
        self,
        budget: KVBudget,
        windows: Seq[Window | None],
        block_size: int,
        num_prompt_tokens: int,
    ) -> None:
        self._size, self._most = block_size, budget.tokens // block_size
        # Among them the block of the next token, which is empty at first.
        self._recent = max(min(2, self._most - 1), self._most // _SHARE_OF_RECENT)
        self._first_eviction = budget.first_eviction(num_prompt_tokens)
        num_prompt_tokens = budget.num_dense(num_prompt_tokens)
        end = min(-(-num_prompt_tokens // (_PROMPT_END * block_size)), self._most // _SHARE_OF_ENDS)
        num_prompt_blocks = -(-num_prompt_tokens // block_size)
        self._first, self._last = max(1, end), (num_prompt_blocks - end, num_prompt_blocks)
        none = np.empty(0, np.int64)
        self._decides = [window is None for window in windows]
        self._indices = [none] * len(self._decides)  # in the table, of the blocks that each group keeps
        self._mass = [none] * len(self._decides)
        self._lengths = [0] * len(self._decides)  # entries of the tables, kept or not
        self._mass_let_go = 0

    def copy(self) -> AttendedBlocks:
        """Return a copy for a fork."""
        twin = object.__new__(AttendedBlocks)
        twin.__dict__.update(self.__dict__)
        twin._indices, twin._mass = self._indices.copy(), [mass.copy() for mass in self._mass]
        twin._lengths = self._lengths.copy()
        return twin

    @property
    def tokens_let_go(self) -> int:
        """The number of tokens that no group keeps any more."""
        most = max(map(len, self._indices))
        return (max(self._lengths) - most) * self._size

    @property
    def share_let_go(self) -> float:
        """The share of all mass that blocks had when they were let go, from 0 to 1."""
        total = self._mass_let_go + sum(int(mass.sum()) for mass in self._mass)
        return self._mass_let_go / total if total else 0.0

    def places_let_go(self) -> Places:
        """Return for each group the indices of the blocks that it has let go; () if there are none."""
        gone = tuple(
            tuple(np.setdiff1d(np.arange(length), indices).tolist())
            for indices, length in zip(self._indices, self._lengths, strict=True)
        )
        return gone if any(gone) else ()

    def add(self, mass: Mass) -> None:
        """Add what some rows attended to, whose blocks are all that the groups keep."""
        for group, of_group in enumerate(mass):
            if self._decides[group]:
                self._grow(group, len(of_group) - len(self._indices[group]))
                self._mass[group][: len(of_group)] += of_group

    def let_go(self, num_computed: int) -> list[tuple[tuple[int, ...], list[int]]]:
        """Choose which blocks go, so that those kept and that of the next token are within the budget, and forget them.

        Returns:
            For each group, the places of these blocks among those kept, and their indices in its table; empty if there
            are none.
        """
        if num_computed < self._first_eviction:
            return []
        # All groups keep as many blocks, and let go of some when the next token begins one.
        kept = max(len(indices) for indices in self._indices)
        if kept and kept + (num_computed % self._size == 0) <= self._most:
            return []
        return [self._choose(group, num_computed) for group in range(len(self._decides))]

    def _choose(self, group: int, num_computed: int) -> tuple[tuple[int, ...], list[int]]:
        if not self._decides[group]:
            return (), []
        self._grow(group, -(-num_computed // self._size) - self._lengths[group])
        indices, mass = self._indices[group], self._mass[group]
        excess = len(indices) + (num_computed % self._size == 0) - self._most
        first, end = self._last
        recent = num_computed // self._size + 1 - self._recent
        may_go = (indices >= self._first) & (indices < recent) & ((indices < first) | (indices >= end))
        candidates = np.flatnonzero(may_go)
        chosen = np.sort(candidates[np.argsort(mass[candidates], kind="stable")[: max(0, excess)]])
        gone = indices[chosen].tolist()
        self._mass_let_go += int(mass[chosen].sum())
        self._indices[group], self._mass[group] = np.delete(indices, chosen), np.delete(mass, chosen)
        return tuple(chosen.tolist()), gone

    def _grow(self, group: int, count: int) -> None:
        """Note `count` more blocks of a group, all of which it keeps."""
        if count > 0:
            first, self._lengths[group] = self._lengths[group], self._lengths[group] + count
            self._indices[group] = np.concatenate((self._indices[group], np.arange(first, first + count)))
            self._mass[group] = np.concatenate((self._mass[group], np.zeros(count, np.int64)))

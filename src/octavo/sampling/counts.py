"""Token counts of a sequence for the penalties, updated token by token."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from octavo.limits import MOST_BAD_WORD_TOKENS

IntArray = npt.NDArray[np.int64]
"""Token ids, their counts or their rows."""

# Number of last output tokens kept: as many as the longest bad word has before its last token.
MAX_TAIL = MOST_BAD_WORD_TOKENS - 1


class TokenCounts:
    """The distinct tokens of a prompt, and those of an output with their counts; O(1) per new token.

        prompt_ids        [ 3 17 90 ]        sorted; the same array for all forks
        output_ids        [ 4 90 … |   ]     new ones in order of first occurrence, with room to grow
        output_counts     [ 1  2 … |   ]
        tail              [ 4  7  4 ]        the last output tokens, in order

    Args:
        token_ids: all tokens so far.
        num_prompt_tokens: how many of them belong to the prompt.
    """

    __slots__ = ("_counts", "_ids", "_places", "num_tokens", "prompt_ids", "tail")

    def __init__(self, token_ids: npt.NDArray[np.integer], num_prompt_tokens: int) -> None:
        # Counting by id takes a tenth of the time of sorting.
        self.prompt_ids: IntArray = np.flatnonzero(np.bincount(token_ids[:num_prompt_tokens]))
        self.num_tokens = len(token_ids)
        counts = np.bincount(token_ids[num_prompt_tokens:])
        self._ids: IntArray = np.flatnonzero(counts)
        self._counts: IntArray = counts[self._ids].astype(np.int64)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}
        self.tail: deque[int] = deque(token_ids[num_prompt_tokens:][-MAX_TAIL:].tolist(), MAX_TAIL)

    @property
    def output_ids(self) -> IntArray:
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> IntArray:
        return self._counts[: len(self._places)]

    def append(self, token_id: int) -> None:
        """Count one more output token."""
        self.num_tokens += 1
        self.tail.append(token_id)
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = _grown(self._ids)
            self._counts = _grown(self._counts)
        self._ids[place] = token_id
        self._counts[place] += 1

    def fork(self) -> TokenCounts:
        """Return a copy of the counts for a forked sequence. O(distinct tokens of the output)."""
        child = TokenCounts.__new__(TokenCounts)
        child.prompt_ids, child.num_tokens = self.prompt_ids, self.num_tokens
        child.tail = self.tail.copy()
        child._ids, child._counts, child._places = self._ids.copy(), self._counts.copy(), self._places.copy()
        return child


def _grown(array: IntArray) -> IntArray:
    grown = np.zeros(max(16, 2 * len(array)), dtype=np.int64)
    grown[: len(array)] = array
    return grown

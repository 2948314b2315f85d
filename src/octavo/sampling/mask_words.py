"""Masks of allowed tokens as bits, and their use with torch operations.

A row has one bit per token, 32 per word. How it is applied depends on how many tokens it allows:

    few         their logits are gathered, and the token is drawn only among these      [rows, FEW]
    nearly all  the few forbidden ones become -inf                                      [rows, vocab]
    otherwise   all forbidden ones become -inf
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.sampling.counts import IntArray

# A row that allows at most this many tokens is drawn from among those.
FEW = 256
# A row that forbids at most this many tokens has them masked one by one.
_FEW_FORBIDDEN = 4096

Words = npt.NDArray[np.uint32]
"""Masks: [rows, ceil(vocab / 32)]."""


def split(words: Words) -> tuple[IntArray, IntArray]:
    """Return the rows that allow at most `FEW` tokens, and the others."""
    is_few = np.bitwise_count(words).sum(-1) <= FEW
    return np.flatnonzero(is_few), np.flatnonzero(~is_few)


def allowed_ids(words: Words) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return the allowed tokens of rows with few, int64 [rows, FEW] in ascending order, and which entries are used."""
    rows, token_ids = positions_of(words)
    counts = np.bincount(rows, minlength=len(words))
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.zeros((len(words), FEW), dtype=np.int64)
    table[rows, place] = token_ids
    return table, np.arange(FEW) < counts[:, None]


def mask(logits: torch.Tensor, rows: IntArray, words: Words) -> None:
    """Set the logits of all tokens that `words[i]` forbids to -inf in row `rows[i]`, in place: float32 [*, vocab]."""
    vocab = logits.shape[1]
    forbidden = ~words
    if rest := vocab % 32:
        forbidden[:, -1] &= np.uint32((1 << rest) - 1)
    is_dense = np.bitwise_count(forbidden).sum(-1) > _FEW_FORBIDDEN
    sparse = np.flatnonzero(~is_dense)
    if len(sparse):
        which, token_ids = positions_of(forbidden[sparse])
        index = torch.from_numpy(rows[sparse][which] * vocab + token_ids).to(logits.device)
        logits.view(-1).index_fill_(0, index, -torch.inf)
    dense = np.flatnonzero(is_dense)
    if len(dense):
        bits = np.unpackbits(forbidden[dense].view(np.uint8), axis=1, bitorder="little", count=vocab)
        is_forbidden = torch.from_numpy(bits).view(torch.bool).to(logits.device)
        for row, each in zip(rows[dense].tolist(), is_forbidden, strict=True):
            logits[row].masked_fill_(each, -torch.inf)


def positions_of(words: Words) -> tuple[IntArray, IntArray]:
    """Return (row, token id) of every set bit, in ascending order."""
    rows, columns = np.nonzero(words)
    bits = np.unpackbits(words[rows, columns].astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    which, bit = np.nonzero(bits)
    return rows[which], columns[which] * 32 + bit


def rows_allowing(words: Words, rows: Sequence[int], token_ids: Iterable[int]) -> list[int]:
    """Return those of the rows that allow any of the tokens, which may lie beyond the vocabulary."""
    index = np.asarray(rows)
    allows = np.zeros(len(index), dtype=np.bool_)
    for token_id in token_ids:
        if token_id // 32 < words.shape[1]:
            allows |= (words[index, token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1)).astype(np.bool_)
    return [int(row) for row in index[allows]]

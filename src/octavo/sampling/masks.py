"""Masks of allowed tokens as bits: one per token, 32 per word; and what a request forbids beyond its grammar.

JSON sets no limit to a number's digits, and a small model may write them without end. So after many digits in a row, a
number goes on only if its grammar leaves nothing else. No number that a schema demands is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from octavo.grammar.state import GrammarState
from octavo.sampling.batch import IntArray, SamplingState

Words = npt.NDArray[np.uint32]
"""Masks: [rows, ceil(vocab / 32)]."""


def mask(logits: torch.Tensor, rows: IntArray, words: Words) -> None:
    """Set the logits of all tokens that `words[i]` forbids to -inf in row `rows[i]`, in place: float32 [*, vocab]."""
    bits = np.unpackbits(~words.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
    is_forbidden = torch.from_numpy(bits).view(torch.bool).to(logits.device)
    for row, each in zip(rows.tolist(), is_forbidden, strict=True):
        logits[row].masked_fill_(each, -torch.inf)


def positions_of(words: Words) -> tuple[IntArray, IntArray]:
    """Return (row, token id) of every set bit, in ascending order."""
    rows, columns = np.nonzero(words)
    bits = np.unpackbits(words[rows, columns].astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    which, bit = np.nonzero(bits)
    return rows[which], columns[which] * 32 + bit


def finish_masks(words: Words, states: Seq[SamplingState]) -> None:
    """Take out of masks what a grammar allows but its request, or the length of a JSON number, does not."""
    for word, state in zip(words, states, strict=True):
        # `min_tokens` and `ignore_eos` keep an output from ending while the grammar allows anything else.
        forbid(word, forbidden_ends(state, len(state.followed.token_ids)))
        end_long_number(word, state.followed)


def forbid(word: Words, token_ids: Iterable[int]) -> None:
    """Take tokens, which may lie beyond the vocabulary, out of a mask [ceil(vocab / 32)] unless it allows no others."""
    allowed = [i for i in token_ids if i // 32 < len(word) and int(word[i // 32]) >> i % 32 & 1]
    if not allowed:
        return
    left = word.copy()
    for token_id in allowed:
        left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if left.any():
        word[:] = left


def forbidden_ends(state: SamplingState, position: int) -> frozenset[int]:
    """Return the tokens that must not end the output yet."""
    params, eos_token_ids = state.snapshot.params, state.snapshot.eos_token_ids
    if position < params.min_tokens:
        return eos_token_ids.union(params.stop_token_ids)
    return eos_token_ids if params.ignore_eos else frozenset()


MAX_DIGITS = 40
"""Digits in a row, before or after a number's point: enough for 128-bit integers and for SQL's NUMERIC(38)."""

_DIGITS = frozenset(b"0123456789")
_QUOTE = ord('"')


def end_long_number(word: Words, grammar: GrammarState) -> None:
    """Forbid digits, in place, where a JSON number that is long enough may end.

    Args:
        word: the mask of the tokens that may come next, uint32 [ceil(vocab / 32)].
    """
    if not grammar.compiled.has_json or not _follows_many_digits(grammar):
        return
    vocabulary = grammar.compiled.vocabulary
    _, token_ids = positions_of(word[None])
    first = {token_id: vocabulary.spelling(token_id)[:1] for token_id in token_ids.tolist()}
    digits = [token_id for token_id, byte in first.items() if byte and byte[0] in _DIGITS]
    # A quotation mark cannot follow a number, but may follow the digits of a string.
    if not any(byte and byte[0] == _QUOTE for byte in first.values()):
        forbid(word, digits)


def _follows_many_digits(grammar: GrammarState) -> bool:
    spelling, count = grammar.compiled.vocabulary.spelling, 0
    for token_id in reversed(grammar.token_ids):
        text = spelling(token_id)
        if not text.isdigit():
            return False
        count += len(text)
        if count >= MAX_DIGITS:
            return True
    return False

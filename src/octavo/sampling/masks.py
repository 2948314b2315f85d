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


def rows_allowing(words: Words, rows: Seq[int], token_ids: Iterable[int]) -> list[int]:
    """Return those of the rows that allow any of the tokens, which may lie beyond the vocabulary."""
    index = np.asarray(rows)
    allows = np.zeros(len(index), dtype=np.bool_)
    for token_id in token_ids:
        if token_id // 32 < words.shape[1]:
            allows |= (words[index, token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1)).astype(np.bool_)
    return [int(row) for row in index[allows]]


def finish_masks(words: Words, states: Seq[SamplingState]) -> None:
    """Take out of masks what a grammar allows but its request, or the length of a JSON number, does not."""
    _forbid_ends(words, states)
    for word, grammar in zip(words, grammars_of(states), strict=True):
        end_long_number(word, grammar)


def _forbid_ends(words: Words, states: Seq[SamplingState]) -> None:
    """Apply `min_tokens` and `ignore_eos`, which keep an output from ending while the grammar allows anything else."""
    rows_of: dict[frozenset[int], list[int]] = {}
    for row, (state, grammar) in enumerate(zip(states, grammars_of(states), strict=True)):
        if ends := forbidden_ends(state, len(grammar.token_ids)):
            rows_of.setdefault(ends, []).append(row)
    for ends, rows in rows_of.items():
        for row in rows_allowing(words, rows, ends):  # a few
            going_on = words[row].copy()
            for token_id in ends:
                if token_id // 32 < words.shape[1]:
                    going_on[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            if going_on.any():
                words[row] = going_on


def forbidden_ends(state: SamplingState, position: int) -> frozenset[int]:
    """Return the tokens that must not end the output yet."""
    params, eos_token_ids = state.snapshot.params, state.snapshot.eos_token_ids
    if position < params.min_tokens:
        return eos_token_ids.union(params.stop_token_ids)
    return eos_token_ids if params.ignore_eos else frozenset()


def may_go_on(state: SamplingState) -> bool:
    """Whether another token may follow the output."""
    return state.grammar is not None and len(state.grammar.token_ids) < (state.snapshot.params.max_tokens or 1)


def grammars_of(states: Seq[SamplingState]) -> list[GrammarState]:
    return [state.grammar for state in states if state.grammar is not None]


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
    is_string = any(byte and byte[0] == _QUOTE for byte in first.values())
    if is_string or len(digits) == len(first):
        return
    for token_id in digits:
        word[token_id // 32] &= ~np.uint32(1 << token_id % 32)


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

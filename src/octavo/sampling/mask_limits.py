"""What a request demands of an output beyond its grammar."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from octavo.grammar.state import GrammarState
from octavo.sampling.batch import SamplingState
from octavo.sampling.mask_words import Words, rows_allowing
from octavo.sampling.numbers import end_long_number


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

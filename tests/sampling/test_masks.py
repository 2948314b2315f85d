"""Masks of grammars against plain sets of allowed tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.masks import mask, rows_allowing

VOCAB = 5001


def words_of(allowed: list[list[int]]) -> np.ndarray:
    bits = np.zeros((len(allowed), -(-VOCAB // 32) * 32), dtype=np.uint8)
    for row, token_ids in enumerate(allowed):
        bits[row, token_ids] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


rows = st.lists(
    st.lists(st.integers(0, VOCAB - 1), max_size=20, unique=True).flatmap(
        lambda some: st.sampled_from(
            [some, sorted(set(range(VOCAB)) - set(some)), some + [t for t in range(600) if t not in some]]
        )
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(allowed=rows)
def test_only_what_is_allowed_keeps_its_logit(allowed: list[list[int]]) -> None:
    words = words_of(allowed)
    places = np.arange(len(allowed))[::-1].copy()
    logits = torch.randn(len(allowed), VOCAB)
    expected = torch.full_like(logits, -torch.inf)
    for row, token_ids in zip(places.tolist(), allowed, strict=True):
        expected[row, token_ids] = logits[row, token_ids]
    mask(logits, places, words)
    assert torch.equal(logits, expected)


def test_rows_that_allow_some_of_the_tokens_are_found() -> None:
    words = np.zeros((4, 2), dtype=np.uint32)
    words[0, 0], words[1, 1], words[3, 1] = 1 << 31, 1, 1 << 31
    assert rows_allowing(words, [0, 1, 2, 3], [31, 63]) == [0, 3]
    assert rows_allowing(words, [1, 3], [32, 63]) == [1, 3]
    assert rows_allowing(words, [0, 1], [5, 64, 1000]) == []

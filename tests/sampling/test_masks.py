"""Masks of grammars against plain sets of allowed tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.masks import forbid, mask

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


@pytest.mark.parametrize(
    ("allowed", "forbidden", "left"),
    [
        ([31, 40], [31, 63], [40]),
        ([32, 63], [63], [32]),
        ([31, 63], [31, 63], [31, 63]),  # nothing else is allowed
        ([5], [64, 1000, VOCAB + 64], [5]),  # they are not allowed, or beyond the vocabulary
    ],
)
def test_tokens_are_forbidden_unless_nothing_else_is_allowed(
    allowed: list[int], forbidden: list[int], left: list[int]
) -> None:
    words = words_of([allowed])
    forbid(words[0], forbidden)
    assert (words == words_of([left])).all()

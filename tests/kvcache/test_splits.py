"""Bounds of the splits of decodes, against a count of them."""

from __future__ import annotations

import random

import pytest

from octavo.kvcache.splits import SPLIT, max_splits, most_splits, partial_bytes


def count(context: int, window: int | None, kv_heads: int) -> int:
    """As the kernels count the splits of a sequence."""
    begin = 0 if window is None else max(0, context - window)
    tokens = -(-(context - begin) // (SPLIT * most_splits(kv_heads))) * SPLIT
    return -(-context // tokens) - begin // tokens


@pytest.mark.parametrize("window", [None, 1, 255, 257, 4096])
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 64])
def test_the_bound_covers_the_splits_of_any_batch(window: int | None, kv_heads: int) -> None:
    draw = random.Random(kv_heads)
    for _ in range(200):
        longest = draw.choice([1, 256, 300, 5000, 140_000])
        contexts = [draw.randint(1, longest) for _ in range(draw.randint(1, 9))]
        found = sum(count(context, window, kv_heads) for context in contexts)
        assert found <= max_splits(len(contexts), max(contexts), sum(contexts), window, kv_heads), contexts


def test_one_long_context_among_short_ones_adds_its_own_splits_only() -> None:
    contexts = [100_000] + [300] * 255
    assert max_splits(256, max(contexts), sum(contexts), None, 8) <= 256 + sum(contexts) // SPLIT
    assert sum(count(context, None, 8) for context in contexts) == 56 + 2 * 255


def test_partial_results_of_the_longest_contexts_are_bounded() -> None:
    # Llama 3.1 8B: 256 sequences of 131,072 tokens would leave 2.2 GB with splits of 256 tokens each.
    assert partial_bytes(max_splits(256, 131_072, 256 * 131_072, None, 8), 32, 128) == 256 * 64 * 32 * 130 * 4

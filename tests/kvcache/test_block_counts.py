from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kvcache.block import BlockIds
from octavo.kvcache.pins import BlockCounts


def ids(blocks: list[int]) -> BlockIds:
    return np.array(blocks, np.int32)


@given(st.lists(st.lists(st.integers(1, 12), unique=True), max_size=6), st.data())
def test_counts_are_those_of_a_counter_whatever_comes_and_goes(held: list[list[int]], data: st.DataObject) -> None:
    counts, expected = BlockCounts(), Counter[int]()
    for blocks in held:
        assert counts.num_missing(ids(blocks)) == sum(block not in expected for block in blocks)
        counts.add(ids(blocks))
        expected.update(blocks)
        assert dict(counts.items()) == expected
    gone = [blocks for blocks in held if data.draw(st.booleans())]
    counts.remove(ids([block for blocks in gone for block in blocks]))
    expected.subtract(block for blocks in gone for block in blocks)
    assert dict(counts.items()) == +expected
    assert len(counts) == len(+expected)


def test_removing_what_is_not_held_raises_and_changes_nothing() -> None:
    counts = BlockCounts()
    counts.add(ids([3, 1]))
    for blocks in ([1, 2], [1, 1]):
        with pytest.raises(KeyError):
            counts.remove(ids(blocks))
    assert dict(counts.items()) == {1: 1, 3: 1}

"""What is special to the prefix cache of hash chains."""

from __future__ import annotations

from array import array

import pytest

from octavo.kvcache.block import BlockId
from octavo.kvcache.prefix import hashed


def test_a_long_prefix_is_looked_up_in_pieces_that_begin_short_and_stay_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hashed, "MOST_AT_ONCE", 256)
    num_blocks = 1000
    cache = hashed.HashedPrefixCache(("m",), 1)
    cache.reserve(num_blocks + 1)
    chain = cache.chain("", cache.full_blocks(array("i", range(num_blocks)), ""))
    for index in range(num_blocks):
        cache.put(0, chain, index, BlockId(index + 1))
    pieces: list[int] = []
    find = cache._index.find
    monkeypatch.setattr(cache._index, "find", lambda keys: pieces.append(len(keys)) or find(keys))  # type: ignore[func-returns-value]
    assert list(cache.leading(0, chain, num_blocks)) == list(range(1, num_blocks + 1))
    assert (pieces[0], max(pieces)) == (128, 256)
    cache.drop(BlockId(20))
    pieces.clear()
    assert len(cache.leading(0, chain, num_blocks)) == 19
    assert pieces == [128], "who misses early is not looked up to its end"

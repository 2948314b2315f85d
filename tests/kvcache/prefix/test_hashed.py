"""What is special to the prefix cache of hash chains."""

from __future__ import annotations

from array import array

import pytest

from octavo.kvcache import key_index
from octavo.kvcache.block import BlockId
from octavo.kvcache.prefix import hashed


def test_a_long_prefix_is_looked_up_in_pieces_that_begin_short_and_stay_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_index, "_LARGEST_PIECE", 256)
    num_blocks = 1000
    cache = hashed.HashedPrefixCache(("m",), 1)
    cache.reserve(num_blocks + 1)
    chain = cache.chain("", cache.full_blocks(array("i", range(num_blocks)), ""))
    for index in range(num_blocks):
        cache.put(0, chain, index, BlockId(index + 1))
    sizes: list[int] = []
    homes = cache._index._homes
    monkeypatch.setattr(cache._index, "_homes", lambda keys: sizes.append(len(keys)) or homes(keys))  # type: ignore[func-returns-value]
    assert list(cache.leading(0, chain, num_blocks)) == list(range(1, num_blocks + 1))
    assert (sizes[0], max(sizes), sum(sizes)) == (128, 256, num_blocks - 16)
    for block in range(20, num_blocks + 1):
        cache.drop(BlockId(block))
    sizes.clear()
    assert len(cache.leading(0, chain, num_blocks)) == 19
    assert sizes == [128], "who misses early is not looked up to its end"

"""What the index of prefixes promises, and that it agrees with a plain dictionary."""

from __future__ import annotations

from array import array
from itertools import count, takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kvcache import key_index
from octavo.kvcache.block import BlockId
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.hashing import TokenChain
from octavo.kvcache.prefix import PrefixIndex
from octavo.kvcache.spec import KVCacheSpec
from tests.kvcache.caches import FULL, extend, put, sliding

NUM_BLOCKS = 2000
GROUPS = [(FULL,), (sliding(5),), (FULL, sliding(3)), (FULL, sliding(6), sliding(9))]


def make_index(layers: tuple = (FULL,), block_size: int = 2) -> PrefixIndex:
    windows = [group.window for group in KVCacheSpec.build(layers, block_size, "float32").groups]
    return PrefixIndex(BlockRecords(NUM_BLOCKS, block_size), (), windows)


def chain_of(index: PrefixIndex, tokens: list[int], salt: str = "") -> TokenChain:
    chain = index.chain(salt)
    extend(chain, tokens)
    return chain


def publish(cache: PrefixIndex, tokens: list[int], first_block: int, salt: str = "", group: int = 0) -> None:
    chain = chain_of(cache, tokens, salt)
    for index in range(len(chain)):
        put(cache, group, chain, index, BlockId(first_block + index))


@pytest.fixture
def cache() -> PrefixIndex:
    return make_index((FULL, sliding(5)))


def test_a_published_block_is_found_by_its_tokens_and_all_before_them(cache: PrefixIndex) -> None:
    publish(cache, [1, 2, 3, 4, 5, 6], first_block=7)
    assert list(cache.leading(0, chain_of(cache, [1, 2, 3, 4, 9, 9]), 3)) == [7, 8]
    assert cache.get(0, chain_of(cache, [1, 2, 3, 4, 5, 6]), 2) == 9
    assert cache.get(0, chain_of(cache, [9, 2, 3, 4, 5, 6]), 2) is None
    assert list(cache.leading(0, chain_of(cache, [3, 4]), 1)) == []


def test_a_prefix_is_cut_at_the_limit(cache: PrefixIndex) -> None:
    publish(cache, [1, 2, 3, 4, 5, 6], first_block=7)
    chain = chain_of(cache, [1, 2, 3, 4, 5, 6])
    assert [list(cache.leading(0, chain, limit)) for limit in range(4)] == [[], [7], [7, 8], [7, 8, 9]]


def test_the_first_of_two_equal_blocks_stays(cache: PrefixIndex) -> None:
    chain = chain_of(cache, [1, 2])
    assert put(cache, 0, chain, 0, BlockId(1))
    assert not put(cache, 0, chain, 0, BlockId(2))
    assert cache.get(0, chain, 0) == 1
    assert cache._blocks.published().tolist() == [1]


def test_a_block_is_published_once_only(cache: PrefixIndex) -> None:
    assert put(cache, 0, chain_of(cache, [1, 2]), 0, BlockId(1))
    assert not put(cache, 0, chain_of(cache, [3, 4]), 0, BlockId(1))
    assert cache.get(0, chain_of(cache, [3, 4]), 0) is None


def test_groups_and_salts_do_not_see_each_other(cache: PrefixIndex) -> None:
    publish(cache, [1, 2, 3, 4], first_block=1, salt="a")
    assert list(cache.leading(1, chain_of(cache, [1, 2, 3, 4], "a"), 2)) == []
    assert list(cache.leading(0, chain_of(cache, [1, 2, 3, 4], "b"), 2)) == []
    publish(cache, [1, 2, 3, 4], first_block=3, salt="a", group=1)
    assert list(cache.leading(1, chain_of(cache, [1, 2, 3, 4], "a"), 2)) == [3, 4]


def test_a_dropped_block_leaves_a_hole_that_can_be_filled(cache: PrefixIndex) -> None:
    publish(cache, [1, 2, 3, 4, 5, 6], first_block=1)
    cache.drop([BlockId(2)])
    chain = chain_of(cache, [1, 2, 3, 4, 5, 6])
    assert list(cache.leading(0, chain, 3)) == [1]
    assert cache.get(0, chain, 1) is None
    assert cache.get(0, chain, 2) == 3
    assert put(cache, 0, chain, 1, BlockId(9))
    assert list(cache.leading(0, chain, 3)) == [1, 9, 3]


def test_a_block_may_be_published_before_those_it_stands_on(cache: PrefixIndex) -> None:
    chain = chain_of(cache, [1, 2, 3, 4, 5, 6])
    assert put(cache, 1, chain, 2, BlockId(5))
    assert list(cache.leading(1, chain, 3)) == []
    assert cache.get(1, chain, 2) == 5


def test_a_copied_chain_grows_on_its_own(cache: PrefixIndex) -> None:
    publish(cache, [1, 2, 3, 4], first_block=1)
    parent = chain_of(cache, [1, 2])
    assert list(cache.leading(0, parent, 1)) == [1]
    child = parent.copy()
    extend(child, [1, 2, 7, 8])
    extend(parent, [1, 2, 3, 4])
    assert list(cache.leading(0, parent, 2)) == [1, 2]
    assert list(cache.leading(0, child, 2)) == [1]
    assert put(cache, 0, child, 1, BlockId(5))
    assert (cache.get(0, parent, 1), cache.get(0, child, 1)) == (2, 5)


def test_what_is_all_dropped_is_all_forgotten(cache: PrefixIndex) -> None:
    chain = chain_of(cache, [1, 2, 3, 4])
    publish(cache, [1, 2, 3, 4], first_block=1)
    publish(cache, [1, 2, 5, 6], first_block=3)
    for block in cache._blocks.published().tolist():
        cache.drop([BlockId(block)])
    assert cache._blocks.published().tolist() == []
    assert list(cache.leading(0, chain, 2)) == []
    publish(cache, [1, 2, 3, 4], first_block=1)
    assert list(cache.leading(0, chain, 2)) == [1, 2]


def test_a_block_knows_its_parent_and_children_in_its_group_and_not_under_a_window(cache: PrefixIndex) -> None:
    publish(cache, [1, 1, 2, 2, 3, 3], first_block=1)
    publish(cache, [1, 1, 2, 2, 4, 4], first_block=11)
    publish(cache, [1, 1, 2, 2], first_block=21, group=1)
    assert [cache.parent(BlockId(block)) for block in (1, 2, 3, 13, 21, 22)] == [None, 1, 2, 2, None, None]
    assert [list(cache.children(BlockId(block))) for block in (1, 2, 3, 21)] == [[2], [13, 3], [], []]
    cache.drop([BlockId(13), BlockId(1)])
    assert (cache.parent(BlockId(2)), list(cache.children(BlockId(2)))) == (None, [3])
    assert put(cache, 0, chain_of(cache, [1, 1]), 0, BlockId(31))
    assert (cache.parent(BlockId(2)), list(cache.children(BlockId(31)))) == (31, [2])


def test_a_long_prefix_is_looked_up_in_pieces_that_begin_short_and_stay_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_index, "_LARGEST_PIECE", 256)
    num_blocks = 1000
    cache = make_index(block_size=1)
    chain = cache.chain("", cache.full_blocks(array("i", range(num_blocks)), ""))
    for index in range(num_blocks):
        put(cache, 0, chain, index, BlockId(index + 1))
    sizes: list[int] = []
    homes = cache._blocks.keys._homes
    monkeypatch.setattr(cache._blocks.keys, "_homes", lambda keys: sizes.append(len(keys)) or homes(keys))  # type: ignore[func-returns-value]
    assert list(cache.leading(0, chain, num_blocks)) == list(range(1, num_blocks + 1))
    assert (sizes[0], max(sizes), sum(sizes)) == (128, 256, num_blocks - 16)
    cache.drop([BlockId(block) for block in range(20, num_blocks + 1)])
    sizes.clear()
    assert len(cache.leading(0, chain, num_blocks)) == 19
    assert sizes == [128], "a prompt that misses early is not looked up to its end"


tokens_lists = st.lists(st.integers(0, 2), min_size=1, max_size=24)
operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "drop", "get", "leading"]),
        st.integers(0, 3),  # which of four sequences, with chains that live through all of it
        st.integers(0, 1),  # group
        st.integers(0, 11),  # index, or which block to drop
    ),
    max_size=120,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    sequences=st.lists(tokens_lists, min_size=4, max_size=4),
    salts=st.text("ab", min_size=4, max_size=4),
    ops=operations,
)
def test_any_history_of_puts_and_drops_gives_the_answers_of_a_dictionary(
    sequences: list[list[int]], salts: str, ops: list[tuple[str, int, int, int]]
) -> None:
    cache = make_index((FULL, sliding(4)))
    chains = [chain_of(cache, tokens, salt) for tokens, salt in zip(sequences, salts, strict=True)]
    blocks: dict[tuple[Any, ...], BlockId] = {}
    ids = count(1)
    for name, which, group, number in ops:
        chain, tokens, salt = chains[which], sequences[which], salts[which]

        def place(index: int, group: int = group, tokens: list[int] = tokens, salt: str = salt) -> tuple[Any, ...]:
            return group, salt, *tokens[: 2 * (index + 1)]

        if name == "drop":
            if blocks:
                gone = sorted(blocks)[number % len(blocks)]
                cache.drop([blocks.pop(gone)])
        elif name == "leading":
            limit = min(number, len(chain))
            expected = list(takewhile(lambda block: block is not None, (blocks.get(place(i)) for i in range(limit))))
            assert list(cache.leading(group, chain, limit)) == expected
        elif number < len(chain):
            if name == "put":
                block = BlockId(next(ids))
                assert put(cache, group, chain, number, block) == (place(number) not in blocks)
                blocks.setdefault(place(number), block)
            assert cache.get(group, chain, number) == blocks.get(place(number))
            if (found := cache.get(group, chain, number)) is not None:
                parent = blocks.get(place(number - 1)) if number and not group else None
                assert cache.parent(found) == parent
                assert parent is None or found in cache.children(parent)
    assert cache._blocks.published().tolist() == sorted(blocks.values())
    assert list(cache.check()) == []

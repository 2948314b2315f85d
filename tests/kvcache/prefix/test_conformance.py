"""What every prefix cache promises, and that all of them find the same."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.kvcache.block import BlockId
from octavo.kvcache.prefix import PrefixCache, make_prefix_cache
from octavo.kvcache.spec import KVCacheSpec
from tests.kvcache.caches import FULL, admit_and_compute, make_manager, make_sequence, sliding

NAMES = ["hashed", "radix"]
GROUPS = [(FULL,), (sliding(5),), (FULL, sliding(3)), (FULL, sliding(6), sliding(9))]


def make_cache(name: str, layers: tuple = (FULL,), block_size: int = 2) -> PrefixCache[Any]:
    return make_prefix_cache(name, "lru", spec=KVCacheSpec.build(layers, block_size, "float32"))[0]


def chain_of(cache: PrefixCache[Any], tokens: list[int], salt: str = "") -> Any:
    chain = cache.chain(salt)
    chain.extend(tokens)
    return chain


def publish(cache: PrefixCache[Any], tokens: list[int], first_block: int, salt: str = "", group: int = 0) -> None:
    chain = chain_of(cache, tokens, salt)
    for index in range(len(chain)):
        cache.put(group, chain, index, BlockId(first_block + index))


@pytest.fixture(params=NAMES)
def cache(request: pytest.FixtureRequest) -> PrefixCache[Any]:
    return make_cache(request.param, (FULL, sliding(5)))


def test_a_published_block_is_found_by_its_tokens_and_all_before_them(cache: PrefixCache[Any]) -> None:
    publish(cache, [1, 2, 3, 4, 5, 6], first_block=7)
    assert list(cache.leading(0, chain_of(cache, [1, 2, 3, 4, 9, 9]), 3)) == [7, 8]
    assert cache.get(0, chain_of(cache, [1, 2, 3, 4, 5, 6]), 2) == 9
    assert cache.get(0, chain_of(cache, [9, 2, 3, 4, 5, 6]), 2) is None
    assert list(cache.leading(0, chain_of(cache, [3, 4]), 1)) == []


def test_a_prefix_is_cut_at_the_limit(cache: PrefixCache[Any]) -> None:
    publish(cache, [1, 2, 3, 4, 5, 6], first_block=7)
    chain = chain_of(cache, [1, 2, 3, 4, 5, 6])
    assert [list(cache.leading(0, chain, limit)) for limit in range(4)] == [[], [7], [7, 8], [7, 8, 9]]


def test_the_first_of_two_equal_blocks_stays(cache: PrefixCache[Any]) -> None:
    chain = chain_of(cache, [1, 2])
    assert cache.put(0, chain, 0, BlockId(1))
    assert not cache.put(0, chain, 0, BlockId(2))
    assert cache.get(0, chain, 0) == 1
    assert list(cache) == [1]


def test_a_block_is_published_once_only(cache: PrefixCache[Any]) -> None:
    assert cache.put(0, chain_of(cache, [1, 2]), 0, BlockId(1))
    assert not cache.put(0, chain_of(cache, [3, 4]), 0, BlockId(1))
    assert cache.get(0, chain_of(cache, [3, 4]), 0) is None


def test_groups_and_salts_do_not_see_each_other(cache: PrefixCache[Any]) -> None:
    publish(cache, [1, 2, 3, 4], first_block=1, salt="a")
    assert list(cache.leading(1, chain_of(cache, [1, 2, 3, 4], "a"), 2)) == []
    assert list(cache.leading(0, chain_of(cache, [1, 2, 3, 4], "b"), 2)) == []
    publish(cache, [1, 2, 3, 4], first_block=3, salt="a", group=1)
    assert list(cache.leading(1, chain_of(cache, [1, 2, 3, 4], "a"), 2)) == [3, 4]


def test_a_dropped_block_leaves_a_hole_that_can_be_filled(cache: PrefixCache[Any]) -> None:
    publish(cache, [1, 2, 3, 4, 5, 6], first_block=1)
    cache.drop(BlockId(2))
    chain = chain_of(cache, [1, 2, 3, 4, 5, 6])
    assert list(cache.leading(0, chain, 3)) == [1]
    assert cache.get(0, chain, 1) is None
    assert cache.get(0, chain, 2) == 3
    assert cache.put(0, chain, 1, BlockId(9))
    assert list(cache.leading(0, chain, 3)) == [1, 9, 3]


def test_a_block_may_be_published_before_those_it_stands_on(cache: PrefixCache[Any]) -> None:
    chain = chain_of(cache, [1, 2, 3, 4, 5, 6])
    assert cache.put(1, chain, 2, BlockId(5))
    assert list(cache.leading(1, chain, 3)) == []
    assert cache.get(1, chain, 2) == 5


def test_a_copied_chain_grows_on_its_own(cache: PrefixCache[Any]) -> None:
    publish(cache, [1, 2, 3, 4], first_block=1)
    parent = chain_of(cache, [1, 2])
    assert list(cache.leading(0, parent, 1)) == [1]
    child = parent.copy()
    child.extend([1, 2, 7, 8])
    parent.extend([1, 2, 3, 4])
    assert list(cache.leading(0, parent, 2)) == [1, 2]
    assert list(cache.leading(0, child, 2)) == [1]
    assert cache.put(0, child, 1, BlockId(5))
    assert (cache.get(0, parent, 1), cache.get(0, child, 1)) == (2, 5)


def test_what_is_all_dropped_is_all_forgotten(cache: PrefixCache[Any]) -> None:
    chain = chain_of(cache, [1, 2, 3, 4])
    publish(cache, [1, 2, 3, 4], first_block=1)
    publish(cache, [1, 2, 5, 6], first_block=3)
    for block in list(cache):
        cache.drop(block)
    assert list(cache) == []
    assert list(cache.leading(0, chain, 2)) == []
    publish(cache, [1, 2, 3, 4], first_block=1)
    assert list(cache.leading(0, chain, 2)) == [1, 2]


def test_a_prefix_looked_up_in_parts_is_the_one_looked_up_at_once() -> None:
    cache = make_cache("hashed")
    publish(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9], first_block=1)
    chain = chain_of(cache, [1, 2, 3, 4, 5, 6, 7, 8, 0, 0])
    assert [cache.look_up(0, chain, 5, 3) for _ in range(3)] == [3, 1, 0]
    assert list(cache.leading(0, chain, 5)) == [1, 2, 3, 4]
    assert list(cache.leading(0, chain, 2)) == [1, 2]
    # A block that is dropped and given to another prefix meanwhile is not taken for the one that was found.
    cache.drop(BlockId(2))
    publish(cache, [6, 6], first_block=2)
    assert list(cache.leading(0, chain, 5)) == [1]
    publish(cache, [1, 2, 3, 4], first_block=8)
    assert list(cache.leading(0, chain, 5)) == [1, 9, 3, 4]


def test_an_unknown_cache_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="hashed, radix, got 'trie'"):
        make_cache("trie")


tokens_lists = st.lists(st.integers(0, 2), min_size=1, max_size=24)
operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "drop", "get", "leading", "look_up"]),
        st.integers(0, 3),  # which of four sequences, with chains that live through all of it
        st.integers(0, 1),  # group
        st.integers(0, 11),  # index, or which block to drop
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(
    sequences=st.lists(tokens_lists, min_size=4, max_size=4),
    salts=st.text("ab", min_size=4, max_size=4),
    ops=operations,
)
def test_any_history_of_puts_and_drops_leaves_all_caches_with_the_same_answers(
    sequences: list[list[int]], salts: str, ops: list[tuple[str, int, int, int]]
) -> None:
    caches = [make_cache(name, (FULL, sliding(4))) for name in NAMES]
    chains = [[chain_of(cache, t, s) for t, s in zip(sequences, salts, strict=True)] for cache in caches]
    ids = count(1)
    for name, which, group, number in ops:
        pairs = [(cache, of_cache[which]) for cache, of_cache in zip(caches, chains, strict=True)]
        length = len(pairs[0][1])
        if name == "drop":
            if published := sorted(caches[0]):
                for cache in caches:
                    cache.drop(published[number % len(published)])
        elif name == "look_up":
            for cache, chain in pairs:
                # Whatever is looked up in advance, the answers of `leading` stay the same.
                assert cache.look_up(group, chain, length, number) <= number
        elif name == "leading":
            hashed, radix = (cache.leading(group, chain, min(number, length)) for cache, chain in pairs)
            assert hashed == radix
        elif number < length:
            block = BlockId(next(ids))
            hashed, radix = (  # type: ignore[assignment]
                cache.put(group, chain, number, block) if name == "put" else cache.get(group, chain, number)
                for cache, chain in pairs
            )
            assert hashed == radix
    assert sorted(caches[0]) == sorted(caches[1])


@settings(max_examples=150, deadline=None)
@given(
    layers=st.sampled_from(GROUPS),
    block_size=st.sampled_from([1, 2, 4]),
    history=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.sampled_from("aab"), st.booleans()),
        max_size=14,
    ),
)
def test_every_cache_gives_the_same_hits_for_the_same_history_while_nothing_is_evicted(
    layers: tuple, block_size: int, history: list[tuple[list[int], str, bool]]
) -> None:
    def play(name: str) -> list[int]:
        manager = make_manager(3000, block_size, layers, prefix_cache=name)
        hits = []
        for tokens, salt, stays in history:
            seq = make_sequence(tokens, salt)
            hits.append(admit_and_compute(manager, seq))
            if not stays:
                manager.forget(seq)
        manager.audit()
        return hits

    assert play("hashed") == play("radix")

"""The shape of the tree, and what is evicted from it first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction import EVICTION_POLICIES, LeafFirstEviction, LruEviction, make_eviction_policy
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.prefix.radix import RadixPrefixCache, _Node
from octavo.request import Sequence
from tests.kvcache.caches import FULL, admit_and_compute, make_manager, make_sequence, sliding


def publish(cache: RadixPrefixCache, tokens: list[int], first_block: int, salt: str = "") -> None:
    chain = cache.chain(salt)
    chain.extend(tokens)
    for index in range(len(chain)):
        cache.put(0, chain, index, BlockId(first_block + index))


def runs(cache: RadixPrefixCache, salt: str = "") -> list[tuple[int, list[int]]]:
    """(start, blocks) of every edge, from the root on."""

    def below(node: _Node) -> list[tuple[int, list[int]]]:
        edges = []
        for child in node.children.values():
            edges += [(child.start, list(child.blocks[0])), *below(child)]
        return edges  # type: ignore[return-value]

    return below(cache._roots[salt]) if salt in cache._roots else []


def make_tree() -> RadixPrefixCache:
    return RadixPrefixCache(block_size=1, windows=[None])


def test_a_sequence_that_grows_block_by_block_is_one_edge() -> None:
    cache = make_tree()
    chain = cache.chain("")
    for index in range(5):
        chain.extend(list(range(index + 1)))
        cache.put(0, chain, index, BlockId(index + 1))
    assert runs(cache) == [(0, [1, 2, 3, 4, 5])]


def test_an_edge_splits_where_sequences_diverge() -> None:
    cache = make_tree()
    publish(cache, [1, 2, 3, 4, 5], first_block=1)
    publish(cache, [1, 2, 3, 7, 8, 9], first_block=11)
    assert runs(cache) == [(0, [1, 2, 3]), (3, [4, 5]), (3, [14, 15, 16])]
    publish(cache, [1, 6], first_block=21)
    assert runs(cache) == [(0, [1]), (1, [2, 3]), (3, [4, 5]), (3, [14, 15, 16]), (1, [22])]


def test_each_salt_has_a_root_of_its_own_that_goes_with_its_last_block() -> None:
    cache = make_tree()
    publish(cache, [1], first_block=1, salt="a")
    publish(cache, [1], first_block=2, salt="b")
    assert (runs(cache, "a"), runs(cache, "b")) == ([(0, [1])], [(0, [2])])
    cache.drop(BlockId(1))
    assert set(cache._roots) == {"b"}


def test_dropping_a_leaf_shortens_its_edge_and_an_empty_edge_goes() -> None:
    cache = make_tree()
    publish(cache, [1, 2, 3], first_block=1)
    publish(cache, [1, 4, 5], first_block=11)
    cache.drop(BlockId(13))
    assert runs(cache) == [(0, [1]), (1, [2, 3]), (1, [12])]
    cache.drop(BlockId(12))
    assert runs(cache) == [(0, [1]), (1, [2, 3])]


def test_holes_at_the_end_of_an_edge_go_with_the_leaf_that_stood_on_them() -> None:
    cache = make_tree()
    publish(cache, [1, 2, 3, 4], first_block=1)
    cache.drop(BlockId(2))
    cache.drop(BlockId(3))
    assert runs(cache) == [(0, [1, 0, 0, 4])]
    cache.drop(BlockId(4))
    assert runs(cache) == [(0, [1])]


def test_a_cursor_in_a_part_of_the_tree_that_was_replaced_is_not_believed() -> None:
    cache = make_tree()
    old = cache.chain("")
    old.extend([1, 2, 3])
    publish(cache, [1, 2, 3], first_block=1)
    assert cache.get(0, old, 2) == 3
    cache.drop(BlockId(3))
    publish(cache, [1, 2, 9], first_block=11)
    assert cache.get(0, old, 2) is None
    assert cache.get(0, old, 1) == 2


def test_parents_and_children_are_known_across_edges_and_not_under_a_window() -> None:
    cache = RadixPrefixCache(block_size=1, windows=[None, 4])
    publish(cache, [1, 2, 3], first_block=1)
    publish(cache, [1, 2, 4], first_block=11)
    assert [cache.parent(BlockId(block)) for block in (1, 2, 3, 13)] == [None, 1, 2, 2]
    assert sorted(cache.children(BlockId(2))) == [3, 13]
    assert list(cache.children(BlockId(1))) == [2]
    chain = cache.chain("")
    chain.extend([1, 2])
    cache.put(1, chain, 0, BlockId(21))
    cache.put(1, chain, 1, BlockId(22))
    assert cache.parent(BlockId(22)) is None
    assert list(cache.children(BlockId(21))) == []


def test_a_block_that_others_stand_on_waits_for_them_and_then_has_its_old_place() -> None:
    cache = make_tree()
    policy = LeafFirstEviction(LruEviction(), cache)
    publish(cache, [1, 2, 3], first_block=1)
    publish(cache, [8], first_block=8)
    for block in (1, 8, 2, 3):  # the head first: the wrong way round
        policy.add(BlockId(block))
    evicted = []
    while policy:
        evicted.append(policy.evict())
        cache.drop(evicted[-1])
    assert evicted == [8, 3, 2, 1]


def test_an_active_block_does_not_hold_back_the_one_it_stands_on() -> None:
    cache = make_tree()
    policy = LeafFirstEviction(LruEviction(), cache)
    publish(cache, [1, 2], first_block=1)
    policy.add(BlockId(1))
    assert policy.evict() == 1


def test_a_block_computed_again_under_cached_descendants_waits_for_them() -> None:
    cache = make_tree()
    policy = LeafFirstEviction(LruEviction(), cache)
    publish(cache, [1, 2], first_block=1)
    policy.add(BlockId(1))
    cache.drop(policy.evict())
    policy.add(BlockId(2))
    publish(cache, [1], first_block=9)
    policy.publish(BlockId(9), 0, 0)
    policy.add(BlockId(9))
    policy.remove(BlockId(2))
    policy.add(BlockId(2))
    assert [policy.evict(), policy.evict()] == [2, 9]


# Where blocks are released head first, some return from aside. Evicting and restoring others changes what `adaptive`
# has learned.
@pytest.mark.parametrize(
    ("name", "head_first"),
    [*((name, False) for name in EVICTION_POLICIES), *((name, True) for name in ("lru", "fifo", "priority"))],
)
def test_evicting_many_at_once_is_as_evicting_them_one_by_one(name: str, head_first: bool) -> None:
    rng = random.Random(0)
    trees = together, alone = make_tree(), make_tree()
    policies = many, single = [LeafFirstEviction(make_eviction_policy(name), tree) for tree in trees]
    for policy in policies:
        policy.reserve(200)
    free = [*range(199, 0, -1)]
    for _ in range(200):
        tokens = [rng.randrange(2) if i < 4 else rng.randrange(50) for i in range(rng.choice([3, 12, 40]))]
        while len(free) < len(tokens):
            victims = many.evict_many(min(len(many), rng.choice([1, 3, 30])))
            assert victims == [single.evict() for _ in victims]
            together.drop(*victims)
            for block in victims:
                alone.drop(block)
            free += victims
        found: list[list[BlockId]] = []
        blocks = [BlockId(free.pop()) for _ in tokens]
        for tree, policy in zip(trees, policies, strict=True):
            chain = tree.chain("")
            chain.extend(tokens)
            held = [BlockId(block) for block in tree.leading(0, chain, len(tokens))]
            policy.remove_all(np.array(held, np.int32))
            policy.hit(held, 0)
            new = [index for index in range(len(tokens)) if tree.put(0, chain, index, blocks[index])]
            for index in new if head_first else reversed(new):
                policy.publish(blocks[index], index, 0, chain.key(index + 1))
            held += [blocks[index] for index in new]
            policy.add_all(np.array(held if head_first else held[::-1], np.int32))
            found.append(held)
        assert found[0] == found[1]
        free += [block for block in blocks if block not in found[0]]
        assert sorted(many) == sorted(single)
        assert runs(together) == runs(alone)
    assert many.evict_many(len(many)) == [single.evict() for _ in range(len(single))]


def unreachable(manager: KVCacheManager) -> list[BlockId]:
    """Cached blocks of full attention whose predecessor is not published: no hit can get to them."""
    tree: Any = manager.prefix_cache
    return [
        block
        for block in tree
        if tree._windows[tree._place(block)[1]] is None
        and manager.pool.ref_counts[block] == 0
        and tree._place(block)[2] > 0
        and tree.parent(block) is None
    ]


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
@settings(max_examples=30, deadline=None)
@given(
    layers=st.sampled_from([(FULL,), (FULL, sliding(3))]),
    history=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(-1, 1)), min_size=5, max_size=40
    ),
)
def test_no_policy_leaves_a_cached_block_out_of_reach_when_sequences_come_one_by_one(
    eviction: str, layers: tuple, history: list[tuple[list[int], int]]
) -> None:
    manager = make_manager(30, 1, layers, prefix_cache="radix", eviction=eviction)
    for tokens, priority in history:
        seq: Sequence = make_sequence(tokens, priority=priority)
        admit_and_compute(manager, seq)
        manager.forget(seq)
        manager.audit()
        assert unreachable(manager) == []

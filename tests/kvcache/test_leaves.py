"""What is evicted first from the tree of cached blocks."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kvcache.block import BlockId
from octavo.kvcache.blocks import BlockRecords
from octavo.kvcache.eviction import EVICTION_POLICIES, EvictionPolicy, make_eviction_policy
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.prefix import PrefixIndex
from octavo.request import Sequence
from tests.kvcache.caches import FULL, admit_and_compute, extend, make_manager, make_sequence, put, sliding


def publish(index: PrefixIndex, tokens: list[int], first_block: int, salt: str = "") -> None:
    chain = index.chain(salt)
    extend(chain, tokens)
    for position in range(len(chain)):
        put(index, 0, chain, position, BlockId(first_block + position))


def make_tree() -> PrefixIndex:
    return PrefixIndex(BlockRecords(200, block_size=1), ())


def leaves_first(name: str, tree: PrefixIndex) -> EvictionPolicy:
    policy = make_eviction_policy(name)
    policy.tree = tree
    policy.reserve(200)
    return policy


def one_by_one(policy: EvictionPolicy, count: int) -> list[BlockId]:
    return [victim for _ in range(count) for victim in policy.evict(1)]


def test_a_block_that_others_stand_on_waits_for_them_and_then_has_its_old_place() -> None:
    tree = make_tree()
    policy = leaves_first("lru", tree)
    publish(tree, [1, 2, 3], first_block=1)
    publish(tree, [8], first_block=8)
    for block in (1, 8, 2, 3):  # the head first: the wrong way round
        policy.add([BlockId(block)])
    evicted = []
    while policy:
        evicted += policy.evict(1)
        tree.drop(evicted[-1:])
    assert evicted == [8, 3, 2, 1]


def test_an_active_block_does_not_hold_back_the_one_it_stands_on() -> None:
    tree = make_tree()
    policy = leaves_first("lru", tree)
    publish(tree, [1, 2], first_block=1)
    policy.add([BlockId(1)])
    assert policy.evict(1) == [1]


def test_a_block_computed_again_under_cached_descendants_waits_for_them() -> None:
    tree = make_tree()
    policy = leaves_first("lru", tree)
    publish(tree, [1, 2], first_block=1)
    policy.add([BlockId(1)])
    tree.drop(policy.evict(1))
    policy.add([BlockId(2)])
    publish(tree, [1], first_block=9)
    policy.publish(BlockId(9), 0, tree._blocks.key(BlockId(9)))
    policy.add([BlockId(9)])
    policy.remove([BlockId(2)])
    policy.add([BlockId(2)])
    assert policy.evict(2) == [2, 9]


# Where blocks are released head first, some return from aside. Evicting and restoring others changes what `adaptive`
# has learned.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head_first"),
    [*((name, False) for name in EVICTION_POLICIES), *((name, True) for name in ("lru", "fifo", "priority"))],
)
def test_evicting_many_at_once_is_as_evicting_them_one_by_one(name: str, head_first: bool) -> None:
    rng = random.Random(0)
    trees = together, alone = make_tree(), make_tree()
    policies = many, single = [leaves_first(name, tree) for tree in trees]
    free = [*range(199, 0, -1)]
    for _ in range(200):
        tokens = [rng.randrange(2) if i < 4 else rng.randrange(50) for i in range(rng.choice([3, 12, 40]))]
        while len(free) < len(tokens):
            victims = many.evict(min(len(many), rng.choice([1, 3, 30])))
            assert victims == one_by_one(single, len(victims))
            together.drop(victims)
            alone.drop(victims)
            free += victims
        found: list[list[BlockId]] = []
        blocks = [BlockId(free.pop()) for _ in tokens]
        for tree, policy in zip(trees, policies, strict=True):
            chain = tree.chain("")
            extend(chain, tokens)
            held = [BlockId(block) for block in tree.leading(0, chain, len(tokens))]
            policy.remove(np.array(held, np.int32))
            policy.hit(held, 0)
            new = [index for index in range(len(tokens)) if put(tree, 0, chain, index, blocks[index])]
            for index in new if head_first else reversed(new):
                policy.publish(blocks[index], 0, chain.key(index + 1))
            held += [blocks[index] for index in new]
            policy.add(np.array(held if head_first else held[::-1], np.int32))
            found.append(held)
        assert found[0] == found[1]
        free += [block for block in blocks if block not in found[0]]
        assert sorted(many) == sorted(single)
    assert many.evict(len(many)) == one_by_one(single, len(single))


def unreachable(manager: KVCacheManager) -> list[BlockId]:
    """Cached blocks of full attention whose parent is not published: no hit can get to them."""
    blocks, tree = manager.blocks, manager.prefix_cache
    return [
        block
        for block in map(BlockId, blocks.published().tolist())
        if blocks.references[block] == 0
        and manager.spec.groups[blocks.groups[block]].window is None
        and blocks.parent_prefix(block) != tree.chain("").root
        and tree.parent(block) is None
    ]


@pytest.mark.slow
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

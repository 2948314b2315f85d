"""Which tenant each block in use counts for."""

from __future__ import annotations

import numpy as np

from octavo.kvcache.block import BlockId, new_table
from octavo.kvcache.pool import BlockOwners
from tests.kvcache.test_pool import make_pool, publish


def test_a_block_counts_for_the_tenant_that_took_it_until_it_is_unused() -> None:
    pool, _ = make_pool(200)
    pool.count_owners(())
    assert pool.owners is not None
    many = pool.allocate(100, "a")
    pool.acquire(new_table(many), "b")
    assert (pool.owners.held("a"), pool.owners.held("b")) == (100, 0)
    pool.release(new_table(many))
    assert pool.owners.held("a") == 100
    pool.release(new_table(many))
    assert pool.owners.held("a") == 0
    assert list(pool.check()) == []


def test_a_cached_block_counts_for_who_takes_it_again() -> None:
    pool, _ = make_pool(200)
    pool.count_owners(())
    assert pool.owners is not None
    blocks = pool.allocate(100, "a")
    publish(pool, *blocks)
    pool.release(blocks)
    pool.acquire(new_table(blocks), "b")
    assert (pool.owners.held("a"), pool.owners.held("b")) == (0, 100)
    assert list(pool.check()) == []


def test_counting_may_begin_while_blocks_are_held() -> None:
    pool, _ = make_pool()
    first, second = pool.allocate(2), pool.allocate(3)
    pool.acquire(second)
    pool.count_owners([("a", new_table(first)), ("b", new_table([0, *second])), ("c", new_table(second))])
    assert pool.owners is not None
    assert [pool.owners.held(tenant) for tenant in "abcd"] == [2, 3, 0, 0]
    assert list(pool.check()) == []


def test_a_wrong_count_is_found() -> None:
    owners = BlockOwners(4)
    owners.took([BlockId(1), BlockId(2)], "a")
    assert list(owners.check(np.array([False, True, False, False]))) == [
        "1 blocks count for tenant 'a', but 2 are counted"
    ]

from collections.abc import Sequence

import pytest

from octavo.errors import CacheError
from octavo.kvcache.block import NULL_BLOCK, BlockId, BlockState
from octavo.kvcache.blocks import UNPUBLISHED, BlockRecords
from octavo.kvcache.eviction import LruEviction
from octavo.kvcache.pool import BlockPool


def make_pool(num_blocks: int = 8) -> tuple[BlockPool, list[BlockId]]:
    evicted: list[BlockId] = []

    def on_evict(blocks: Sequence[BlockId]) -> None:
        evicted.extend(blocks)
        for block in blocks:
            pool.blocks.groups[block] = UNPUBLISHED

    pool = BlockPool(BlockRecords(num_blocks), LruEviction(), [on_evict])
    return pool, evicted


def publish(pool: BlockPool, *blocks: BlockId) -> None:
    for block in blocks:
        pool.note_published(block, 0, b"")
        pool.blocks.groups[block] = 0


def test_a_new_pool_has_every_block_but_the_null_block_free() -> None:
    pool, _ = make_pool(8)
    assert pool.num_free == pool.num_available == 7
    assert pool.blocks.state(NULL_BLOCK) is BlockState.NULL
    assert NULL_BLOCK not in pool.allocate(7)


def test_allocation_is_all_or_nothing() -> None:
    pool, _ = make_pool(4)
    pool.allocate(2)
    with pytest.raises(CacheError, match="2 blocks requested, 1 available of 3"):
        pool.allocate(2)
    assert pool.num_available == 1
    assert list(pool.check()) == []


def test_freeing_twice_raises() -> None:
    pool, _ = make_pool()
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(CacheError, match=f"block {block} is freed twice"):
        pool.release([block])
    assert list(pool.check()) == []


def test_a_shared_block_is_freed_with_its_last_reference() -> None:
    pool, _ = make_pool()
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.release([block])
    assert pool.blocks.state(block) is BlockState.ACTIVE
    pool.release([block])
    assert pool.blocks.state(block) is BlockState.FREE


def test_a_free_block_cannot_be_shared_or_published() -> None:
    pool, _ = make_pool()
    with pytest.raises(CacheError, match="is free and cannot be shared"):
        pool.acquire([BlockId(3)])
    with pytest.raises(CacheError, match="block 3 has no references and cannot be published"):
        publish(pool, BlockId(3))


def test_published_blocks_are_evicted_only_when_no_free_block_is_left_and_tails_first() -> None:
    pool, evicted = make_pool(5)
    blocks = pool.allocate(3)
    publish(pool, *blocks)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 3, 4)
    pool.allocate(1)
    assert evicted == []
    assert pool.allocate(2) == blocks[:0:-1] == evicted


def test_a_cached_block_that_is_used_again_is_no_longer_evictable() -> None:
    pool, evicted = make_pool(4)
    blocks = pool.allocate(2)
    publish(pool, *blocks)
    pool.release(blocks)
    pool.acquire(blocks[:1])
    assert pool.blocks.state(blocks[0]) is BlockState.ACTIVE
    pool.allocate(2)
    assert evicted == [blocks[1]]
    assert list(pool.check()) == []


def test_problems_name_a_block_whose_count_was_tampered_with() -> None:
    pool, _ = make_pool()
    pool.blocks.references[3] = 1
    assert any("block 3" in problem for problem in list(pool.check()))

import dataclasses

import pytest

from octavo.errors import CacheError
from octavo.kvcache.block import NULL_BLOCK, BlockState
from octavo.kvcache.hashing import FullBlocks
from octavo.kvcache.prefix import PrefixIndex
from tests.kvcache.caches import FULL, admit_and_compute, compute, make_manager, make_sequence, sliding


def test_blocks_are_allocated_on_demand_one_at_a_time() -> None:
    manager = make_manager(block_size=4)
    seq = make_sequence([1, 2, 3, 4])
    admit_and_compute(manager, seq)
    assert len(manager.tables(seq)[0]) == 1
    for expected in (2, 2, 2, 2, 3):
        seq.output_token_ids.append(9)
        assert list(manager.extend(seq, 1) or ()) == []
        compute(manager, seq)
        assert len(manager.tables(seq)[0]) == expected
    manager.audit()


def test_a_sequence_that_does_not_fit_changes_nothing() -> None:
    manager = make_manager(num_blocks=4, block_size=4)
    admit_and_compute(manager, make_sequence(list(range(8))))
    before = manager.audit()
    late = make_sequence(list(range(100, 108)))
    assert not manager.admit(late, manager.match(late), 8)
    assert manager.audit() == before


def test_a_running_sequence_that_cannot_grow_changes_nothing() -> None:
    manager = make_manager(num_blocks=2, block_size=4)
    seq = make_sequence([1, 2, 3, 4])
    admit_and_compute(manager, seq)
    seq.output_token_ids.append(5)
    assert manager.extend(seq, 1) is None
    assert len(manager.tables(seq)[0]) == 1
    manager.audit()


def test_full_sequences_get_a_block_each_at_once_or_none_does() -> None:
    manager = make_manager(num_blocks=7, block_size=4, layers=(FULL, sliding(5)))
    seqs = [make_sequence([1, 2, 3, 4], salt) for salt in "ab"]
    for seq in seqs:
        admit_and_compute(manager, seq)
        seq.output_token_ids.append(9)
    assert manager.extend_all([])
    assert not manager.extend_all(seqs), "four blocks are needed, two are left"
    assert manager.extend_all(seqs[:1])
    assert [list(map(len, manager.tables(seq))) for seq in seqs] == [[2, 2], [1, 1]]
    assert manager.extend(seqs[0], 4) == ()
    assert not manager.extend_all(seqs[:1]), "its last block is not full"
    manager.forget(seqs[1])
    manager.audit()


def test_blocks_counted_by_tenant_are_not_given_out_at_once() -> None:
    manager = make_manager(block_size=4)
    seq = make_sequence([1, 2, 3, 4], tenant="x")
    admit_and_compute(manager, seq)
    manager.count_owners([seq.request])
    assert not manager.extend_all([seq])
    assert manager.extend(seq, 1) == []
    assert manager.pool.owners is not None
    assert manager.pool.owners.held("x") == 2


def test_a_common_prefix_is_found_in_full_blocks_and_never_covers_the_last_token() -> None:
    manager = make_manager(block_size=4)
    admit_and_compute(manager, make_sequence(list(range(10))))
    assert manager.match(make_sequence([*range(10), 77])).num_tokens == 8
    assert manager.match(make_sequence(list(range(8)))).num_tokens == 4
    assert manager.match(make_sequence([*range(4), 50, 51, 52, 53, 54])).num_tokens == 4
    assert manager.match(make_sequence([1, *range(9)])).num_tokens == 0


def test_a_hit_holds_the_very_same_blocks() -> None:
    manager = make_manager(block_size=4)
    first, second = make_sequence(list(range(9))), make_sequence([*range(8), 77])
    admit_and_compute(manager, first)
    assert admit_and_compute(manager, second) == 8
    assert manager.tables(first)[0][:2] == manager.tables(second)[0][:2]
    assert manager.tables(first)[0][2] != manager.tables(second)[0][2]
    manager.audit()


def test_blocks_are_published_only_after_they_are_computed() -> None:
    manager = make_manager(block_size=4)
    first, second = make_sequence(list(range(12))), make_sequence(list(range(12)))
    manager.admit(first, manager.match(first), 12)
    assert manager.match(second).num_tokens == 0
    compute(manager, first, 7)
    assert manager.match(second).num_tokens == 4


def test_a_finished_sequence_leaves_its_full_blocks_to_the_cache() -> None:
    manager = make_manager(num_blocks=8, block_size=4)
    seq = make_sequence(list(range(10)))
    admit_and_compute(manager, seq)
    manager.forget(seq)
    counts = manager.audit()
    assert (counts[BlockState.CACHED], counts[BlockState.FREE]) == (2, 5)
    assert manager.match(make_sequence(list(range(10)))).num_tokens == 8


def test_a_sequences_tail_is_evicted_before_its_head() -> None:
    manager = make_manager(num_blocks=6, block_size=4)
    seq = make_sequence(list(range(17)))
    admit_and_compute(manager, seq)
    manager.forget(seq)
    admit_and_compute(manager, make_sequence(list(range(100, 111))))
    assert manager.match(make_sequence(list(range(17)))).num_tokens == 8
    manager.audit()


def test_salts_do_not_share_blocks() -> None:
    manager = make_manager()
    admit_and_compute(manager, make_sequence(list(range(9)), salt="a"))
    assert manager.match(make_sequence(list(range(9)), salt="b")).num_tokens == 0
    assert manager.match(make_sequence(list(range(9)), salt="a")).num_tokens == 8


@pytest.mark.parametrize("place", [0, 3, 15, 16, 17, 39])
def test_a_colliding_key_does_not_hand_out_another_prompts_block(place: int) -> None:
    manager = make_manager(num_blocks=50, block_size=4)
    seq = make_sequence(list(range(161)))
    admit_and_compute(manager, seq)
    cache, mine = manager.prefix_cache, seq.request.full_blocks
    assert isinstance(cache, PrefixIndex)
    assert isinstance(mine, FullBlocks)
    assert len(cache.leading(0, cache.chain("", mine), 40)) == 40
    tokens = bytearray(mine.tokens)
    tokens[16 * place : 16 * place + 16] = b"another prompt's"
    chain = cache.chain("", dataclasses.replace(mine, tokens=memoryview(tokens)))
    assert cache.get(0, chain, place) is None
    assert len(cache.leading(0, chain, 40)) == place


def test_without_prefix_caching_nothing_is_hashed_found_or_kept() -> None:
    manager = make_manager(prefix_caching=False)
    seq = make_sequence(list(range(9)))
    admit_and_compute(manager, seq)
    manager.forget(seq)
    assert manager.match(make_sequence(list(range(9)))).num_tokens == 0
    assert not manager.audit()[BlockState.CACHED]


def test_a_forked_sequence_copies_a_shared_block_on_its_first_write() -> None:
    manager = make_manager(block_size=4)
    parent, child = make_sequence(list(range(6)), n=2).request.sequences
    admit_and_compute(manager, parent)
    manager.fork(parent, child)
    child.num_computed = parent.num_computed
    assert manager.tables(parent) == manager.tables(child)
    shared = manager.tables(parent)[0][1]

    copies = manager.extend(child, 1)
    assert [copy.source for copy in copies or ()] == [shared]
    assert manager.tables(child)[0][0] == manager.tables(parent)[0][0]
    assert manager.tables(child)[0][1] != shared
    # The last holder writes in place.
    assert list(manager.extend(parent, 1) or ()) == []
    assert manager.tables(parent)[0][1] == shared
    manager.audit()


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = make_manager(block_size=4)
    parent, child = make_sequence(list(range(8)), n=2).request.sequences
    admit_and_compute(manager, parent)
    manager.fork(parent, child)
    child.num_computed = 8
    assert list(manager.extend(child, 1) or ()) == []
    assert manager.tables(child)[0][:2] == manager.tables(parent)[0]
    manager.audit()


def test_blocks_are_given_up_as_they_slide_out_of_the_window() -> None:
    manager = make_manager(block_size=4, layers=(sliding(5),))
    seq = make_sequence(list(range(10)))
    admit_and_compute(manager, seq)
    # The next query, at 10, sees 6..10: block 0 (0..3) is out, block 1 (4..7) is still seen.
    table = manager.tables(seq)[0]
    assert table[0] == NULL_BLOCK
    assert NULL_BLOCK not in table[1:]
    for _ in range(20):
        seq.output_token_ids.append(1)
        manager.extend(seq, 1)
        compute(manager, seq)
        assert sum(block != NULL_BLOCK for block in table) <= 3
        manager.audit()


def test_a_window_needs_only_its_own_blocks_for_a_hit() -> None:
    manager = make_manager(num_blocks=32, block_size=4, layers=(FULL, sliding(5)))
    seq = make_sequence(list(range(21)))
    admit_and_compute(manager, seq)
    hit = manager.match(make_sequence([*range(20), 99]))
    assert hit.num_tokens == 20
    full, window = hit.tables
    assert NULL_BLOCK not in full
    assert list(window[:4]) == [NULL_BLOCK] * 4
    assert window[4] != NULL_BLOCK


def test_a_hit_ends_where_a_windows_block_is_missing() -> None:
    manager = make_manager(num_blocks=32, block_size=4, layers=(FULL, sliding(5)))
    seq = make_sequence(list(range(21)))
    admit_and_compute(manager, seq)
    # Evict the window group's block 4 (tokens 16..19); its blocks 0..3 slid out and are cached.
    block = manager.tables(seq)[1][4]
    manager.forget(seq)
    manager.pool._eviction.remove([block])
    manager.pool.num_cached -= 1
    for note in manager.pool._on_evict:
        note([block])
    manager.pool._free.append(block)
    assert manager.match(make_sequence([*range(20), 99])).num_tokens == 16
    manager.audit()


def test_admitting_a_sequence_that_holds_blocks_is_refused() -> None:
    manager = make_manager()
    seq = make_sequence([1, 2, 3])
    admit_and_compute(manager, seq)
    with pytest.raises(CacheError, match="while it holds blocks"):
        manager.admit(seq, manager.no_hit, 1)


def test_audit_names_a_leaked_block() -> None:
    manager = make_manager()
    (block,) = manager.pool.allocate(1)
    with pytest.raises(CacheError, match=f"block {block} counts 1 references, tables hold 0"):
        manager.audit()


def test_reset_gives_up_cached_blocks_and_keeps_those_in_use() -> None:
    manager = make_manager(block_size=4)
    done, live = make_sequence(list(range(9))), make_sequence(list(range(50, 59)))
    admit_and_compute(manager, done)
    admit_and_compute(manager, live)
    manager.forget(done)
    assert manager.reset_prefix_cache() == 2
    assert manager.match(make_sequence(list(range(9)))).num_tokens == 0
    assert manager.match(make_sequence(list(range(50, 59)))).num_tokens == 8
    manager.audit()


def test_what_followed_a_sequence_before_is_read_from_the_cache_the_latest_first() -> None:
    manager = make_manager(32, 4, (FULL, sliding(5)))
    for tokens in ([*range(8), 20, 21, 22, 23], [*range(8), 30, 31, 32, 33, 34, 35, 36, 37]):
        seq = make_sequence([*tokens, 0])
        admit_and_compute(manager, seq)
        manager.forget(seq)
    seq = make_sequence(list(range(8)))
    admit_and_compute(manager, seq)
    assert manager.tokens_after(seq, 6) == (30, 31, 32, 33, 34, 35)
    seq.output_token_ids.extend([30, 31])
    assert manager.tokens_after(seq, 3) == (32, 33, 34)
    seq.output_token_ids[-1] = 99
    assert manager.tokens_after(seq, 3) == (), "it went on otherwise"
    manager.forget(seq)
    manager.audit()

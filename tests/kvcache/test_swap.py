"""Which blocks move when a sequence is swapped out and back, and which never leave the device."""

from __future__ import annotations

import pytest

from octavo.errors import CacheError
from octavo.kvcache.audit import problems
from octavo.kvcache.block import NULL_BLOCK, BlockState
from octavo.kvcache.host_pool import HostPool
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.swap import RestoreCost
from octavo.request import Sequence, SequenceId
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence, sliding


def running(manager: KVCacheManager, num_tokens: int, first: int = 0) -> Sequence:
    """A sequence of that many tokens, all computed, and one more to go."""
    seq = make_sequence([*range(first, first + num_tokens)])
    admit_and_compute(manager, seq)
    seq.append_token(99)
    return seq


def out(manager: KVCacheManager) -> list[int]:
    """The device blocks that the next step moves to the host; that step is over on return."""
    moved, _ = manager.swap.take_transfers()
    manager.swap.complete_transfers()
    return [swap.device for swap in moved]


def test_without_a_prefix_cache_all_blocks_leave_and_come_back() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=5, prefix_caching=False)
    seq = running(manager, 10)
    held = list(manager.tables(seq)[0])
    assert manager.swap_out(seq)
    audit = manager.audit()
    assert (audit.num_host, audit.num_swapped, BlockState.ACTIVE in audit.counts) == (3, 1, False)
    assert sorted(out(manager)) == sorted(held)
    assert not manager.swap_in(seq, 1)
    _, back = manager.swap.take_transfers()
    assert sorted(swap.device for swap in back) == sorted(manager.tables(seq)[0])
    assert manager.swap.host.num_free == 2, "what the step still reads is nobody's to take"
    manager.swap.complete_transfers()
    assert manager.swap.host.num_free == 5
    manager.audit()


def test_published_blocks_stay_cached_and_only_the_rest_moves() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=5)
    seq = running(manager, 10)
    head, tail = manager.tables(seq)[0][:2], manager.tables(seq)[0][2]
    manager.swap_out(seq)
    assert out(manager) == [tail]
    assert manager.audit().counts[BlockState.CACHED] == 2
    manager.swap_in(seq, 1)
    assert manager.tables(seq)[0][:2] == head, "found again where they were"
    assert len(manager.swap.take_transfers()[1]) == 1
    manager.audit()


def test_a_cached_block_of_a_swapped_sequence_moves_when_it_is_evicted() -> None:
    manager = make_manager(num_blocks=5, num_host_blocks=5)
    seq = running(manager, 10)
    head = manager.tables(seq)[0][:2]
    manager.swap_out(seq)
    out(manager)
    other = running(manager, 11, first=50)
    assert out(manager) == [head[1]], "the tail of what is cached is evicted first"
    manager.forget(other)
    assert manager.swap_in(seq, 1) is not None
    assert manager.tables(seq)[0][0] == head[0]
    assert len(manager.swap.take_transfers()[1]) == 2
    manager.swap.complete_transfers()
    manager.commit(seq)
    assert manager.match(make_sequence([*range(9)])).num_tokens == 8, "what came back is published again"
    manager.audit()


def test_where_the_host_has_no_room_nothing_is_swapped() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=2, prefix_caching=False)
    seq = running(manager, 10)
    before = manager.audit()
    assert not manager.swap_out(seq)
    assert manager.audit() == before


def test_a_sequence_is_given_up_when_an_evicted_block_of_it_finds_no_room() -> None:
    manager = make_manager(num_blocks=5, num_host_blocks=1)
    seq = running(manager, 10)
    manager.swap_out(seq)
    other = running(manager, 11, first=50)
    assert not manager.is_swapped(seq)
    assert manager.audit().num_host == 0
    assert manager.swap.counters.sequences_lost == 1
    manager.forget(other)
    assert manager.match(seq).num_tokens == 4, "what is still cached of it is found"
    assert manager.admit(seq, manager.match(seq), 7)
    manager.audit()


def test_a_block_shared_with_a_sibling_is_kept_not_moved() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=5, prefix_caching=False)
    parent, child = make_sequence(list(range(6)), n=2).request.sequences
    admit_and_compute(manager, parent)
    manager.fork(parent, child)
    child.num_computed = 6
    shared = list(manager.tables(parent)[0])
    child.append_token(99)
    manager.swap_out(child)
    assert out(manager) == []
    assert manager.swap.keeps_blocks(child.seq_id)
    assert list(manager.tables(child)[0]) == shared
    copies = manager.swap_in(child, 1)
    assert [copy.source for copy in copies or ()] == [shared[1]], "the first write still copies what is shared"
    assert manager.tables(child)[0][0] == shared[0]
    manager.audit()


def test_blocks_outside_a_window_stay_null() -> None:
    manager = make_manager(num_blocks=12, num_host_blocks=8, layers=(sliding(5),), prefix_caching=False)
    seq = running(manager, 18)
    nulls = [block == NULL_BLOCK for block in manager.tables(seq)[0]]
    assert any(nulls)
    manager.swap_out(seq)
    assert len(out(manager)) == nulls.count(False)
    manager.swap_in(seq, 1)
    assert [block == NULL_BLOCK for block in manager.tables(seq)[0]] == nulls
    manager.audit()


def test_a_swapped_sequence_that_ends_frees_its_host_blocks_and_cancels_their_transfers() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=3, prefix_caching=False)
    seq = running(manager, 10)
    manager.swap_out(seq)
    manager.forget(seq)
    assert manager.swap.host.num_free == 3
    assert not manager.swap.has_transfers
    manager.audit()


def test_coming_back_needs_room_for_all_and_changes_nothing_without() -> None:
    manager = make_manager(num_blocks=6, num_host_blocks=3, prefix_caching=False)
    seq = running(manager, 10)
    manager.swap_out(seq)
    out(manager)
    running(manager, 11, first=50)
    before = manager.audit()
    assert manager.swap_in(seq, 1) is None
    assert manager.audit() == before


def test_shared_blocks_at_the_beginning_cost_nothing_to_restore() -> None:
    manager = make_manager(num_blocks=12, prefix_caching=False)
    parent, child = make_sequence(list(range(8)), n=2).request.sequences
    admit_and_compute(manager, parent)
    assert manager.restore_cost(parent) == RestoreCost(tokens=8, blocks=2)
    manager.fork(parent, child)
    child.num_computed = 8
    child.output_token_ids += [1, 2, 3]
    manager.extend(child, 3)
    child.num_computed = 11
    assert manager.restore_cost(parent) == RestoreCost(tokens=0, blocks=0)
    assert manager.restore_cost(child) == RestoreCost(tokens=3, blocks=1)


def test_a_host_block_in_flight_is_nobodys_until_its_step_is_over() -> None:
    pool = HostPool(1)
    host = pool.swap_out(make_manager().pool.allocate(1)[0], SequenceId(1))
    pool.take_transfers()
    pool.release([host])
    assert (pool.num_free, problems(pool.check())) == (0, [])
    pool.complete()
    assert (pool.num_free, problems(pool.check())) == (1, [])
    with pytest.raises(CacheError, match="freed twice"):
        pool.release([host])

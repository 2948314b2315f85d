"""What a sequence leaves when it is preempted by swapping, and how it finds it again."""

from __future__ import annotations

from octavo.kvcache.block import NULL_BLOCK, BlockState
from octavo.kvcache.holdings import RestoreCost
from octavo.kvcache.host_memory import HostMemory
from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence, resume, sliding


def running(manager: KVCacheManager, num_tokens: int, first: int = 0) -> Sequence:
    """A sequence of that many tokens, all computed, and one more to go."""
    seq = make_sequence([*range(first, first + num_tokens)])
    admit_and_compute(manager, seq)
    seq.output_token_ids.append(99)
    return seq


def host_of(manager: KVCacheManager) -> HostMemory:
    return manager.hierarchy.host


def step(manager: KVCacheManager) -> tuple[list[int], list[int]]:
    """The device blocks that the next step stores and loads; that step is over on return."""
    stores, loads = manager.hierarchy.take()
    manager.hierarchy.complete()
    manager.audit()
    return [block for block, _ in stores], [block for block, _ in loads]


def test_without_a_prefix_cache_all_blocks_leave_and_come_back() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=5, prefix_caching=False)
    seq = running(manager, 10)
    held = list(manager.tables(seq)[0])
    assert manager.demote(seq)
    assert not manager.audit()[BlockState.ACTIVE]
    assert (manager.hierarchy.num_kept, manager.hierarchy.num_preempted) == (3, 1)
    assert step(manager) == (held, [])
    hit = manager.match(seq)
    assert (hit.num_tokens, len(hit.loads)) == (10, 3)
    assert resume(manager, seq)
    assert host_of(manager).pool.num_free == 2, "what the step still reads is nobody's to take"
    assert sorted(step(manager)[1]) == sorted(manager.tables(seq)[0])
    assert host_of(manager).pool.num_free == 5
    assert not manager.can_resume(seq)


def test_published_blocks_stay_cached_and_only_the_rest_moves() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=5)
    seq = running(manager, 10)
    head, tail = list(manager.tables(seq)[0][:2]), manager.tables(seq)[0][2]
    manager.demote(seq)
    assert step(manager) == ([tail], [])
    assert manager.audit()[BlockState.CACHED] == 2
    resume(manager, seq)
    assert list(manager.tables(seq)[0][:2]) == head, "found again where they were"
    assert len(step(manager)[1]) == 1


def test_a_full_block_that_another_sequence_has_published_is_not_copied() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=5)
    first, second = make_sequence([*range(8)]), make_sequence([*range(8)])
    for seq in (first, second):
        assert manager.admit(seq, manager.no_hit, 8)
    for seq in (first, second):
        seq.num_computed = 8
        manager.commit(seq)
        seq.output_token_ids.append(99)
    assert manager.tables(first)[0] != manager.tables(second)[0]
    manager.demote(second)
    assert step(manager) == ([], [])
    resume(manager, second)
    assert list(manager.tables(second)[0][:2]) == list(manager.tables(first)[0])
    manager.audit()


def test_a_cached_block_of_a_preempted_sequence_moves_when_it_is_evicted() -> None:
    manager = make_manager(num_blocks=5, num_host_blocks=5)
    seq = running(manager, 10)
    head = list(manager.tables(seq)[0][:2])
    manager.demote(seq)
    step(manager)
    other = running(manager, 11, first=50)
    assert step(manager)[0] == [head[1]], "the tail of what is cached is evicted first"
    manager.forget(other)
    assert resume(manager, seq)
    assert manager.tables(seq)[0][0] == head[0]
    assert len(step(manager)[1]) == 2
    manager.commit(seq)
    assert manager.match(make_sequence([*range(9)])).num_tokens == 8, "what came back is published again"


def test_where_the_host_has_no_room_nothing_changes() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=2, prefix_caching=False)
    seq = running(manager, 10)
    before = manager.audit(), manager.hierarchy.num_kept
    assert not manager.demote(seq)
    assert (manager.audit(), manager.hierarchy.num_kept) == before


def test_a_sequence_restarts_from_its_cached_blocks_when_an_evicted_one_finds_no_room() -> None:
    manager = make_manager(num_blocks=5, num_host_blocks=1)
    seq = running(manager, 10)
    manager.demote(seq)
    other = running(manager, 11, first=50)
    assert not manager.can_resume(seq)
    manager.audit()
    assert manager.hierarchy.num_kept == 0
    assert manager.hierarchy.swapped.sequences_lost == 1
    manager.forget(other)
    assert manager.match(seq).num_tokens == 4
    assert resume(manager, seq, 7)
    manager.audit()


def test_an_evicted_block_that_two_preempted_sequences_want_is_stored_once_for_both() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=8)
    both = [running(manager, 10), running(manager, 10)]
    for seq in both:
        manager.demote(seq)
    step(manager)
    manager.reset_prefix_cache()
    assert len(step(manager)[0]) == 2
    assert manager.hierarchy.num_kept == 4, "two of its own, and two that both need"
    for seq in both:
        assert resume(manager, seq)
        assert len(step(manager)[1]) == 3
    counters = manager.hierarchy.swapped
    assert (counters.blocks_out, counters.blocks_in, counters.blocks_dropped) == (4, 4, 0)
    assert host_of(manager).pool.num_free == 8


def test_a_sequence_that_shares_a_half_filled_block_leaves_a_copy_and_keeps_nothing() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=5)
    parent, child = make_sequence(list(range(6)), n=2).request.sequences
    admit_and_compute(manager, parent)
    manager.fork(parent, child)
    child.num_computed = 6
    shared = list(manager.tables(parent)[0])
    child.output_token_ids.append(99)
    manager.demote(child)
    assert not any(manager.tables(child))
    assert step(manager)[0] == [shared[1]]
    parent.output_token_ids.append(98)
    assert not manager.extend(parent, 1), "it has the block for itself now, and copies nothing"
    assert resume(manager, child)
    assert manager.tables(child)[0][0] == shared[0], "what is published is shared again"
    assert manager.tables(child)[0][1] not in shared
    manager.audit()


def test_what_was_to_come_back_with_the_same_step_is_kept_without_being_read() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=3, prefix_caching=False)
    seq = running(manager, 10)
    manager.demote(seq)
    step(manager)
    assert resume(manager, seq)
    assert manager.demote(seq)
    assert step(manager) == ([], [])
    assert manager.match(seq).num_tokens == 10
    assert manager.hierarchy.swapped.blocks_out == 3


def test_blocks_outside_a_window_stay_null() -> None:
    manager = make_manager(num_blocks=12, num_host_blocks=8, layers=(sliding(5),), prefix_caching=False)
    seq = running(manager, 18)
    nulls = [block == NULL_BLOCK for block in manager.tables(seq)[0]]
    assert any(nulls)
    manager.demote(seq)
    assert len(step(manager)[0]) == nulls.count(False)
    assert resume(manager, seq)
    assert [block == NULL_BLOCK for block in manager.tables(seq)[0]] == nulls
    manager.audit()


def test_a_preempted_sequence_that_ends_frees_its_host_blocks_and_cancels_their_transfers() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=3, prefix_caching=False)
    seq = running(manager, 10)
    manager.demote(seq)
    manager.forget(seq)
    assert host_of(manager).pool.num_free == 3
    assert not manager.hierarchy.host.has_transfers
    manager.audit()


def test_coming_back_needs_room_for_all_and_changes_nothing_without() -> None:
    manager = make_manager(num_blocks=6, num_host_blocks=3, prefix_caching=False)
    seq = running(manager, 10)
    manager.demote(seq)
    step(manager)
    running(manager, 11, first=50)
    before = manager.audit(), manager.hierarchy.num_kept
    assert not resume(manager, seq)
    assert (manager.audit(), manager.hierarchy.num_kept) == before


def test_shared_blocks_at_the_beginning_cost_nothing_to_restore() -> None:
    manager = make_manager(num_blocks=12, prefix_caching=False)
    parent, child = make_sequence(list(range(8)), n=2).request.sequences
    admit_and_compute(manager, parent)
    assert manager.holdings.restore_cost(parent) == RestoreCost(tokens=8, blocks=2)
    manager.fork(parent, child)
    child.num_computed = 8
    child.output_token_ids += [1, 2, 3]
    manager.extend(child, 3)
    child.num_computed = 11
    assert manager.holdings.restore_cost(parent) == RestoreCost(tokens=0, blocks=0)
    assert manager.holdings.restore_cost(child) == RestoreCost(tokens=3, blocks=1)


def test_what_a_preempted_sequence_had_published_counts_as_used_twice() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=1, num_prefix_blocks=4, demotion="on_second_use")
    seq = running(manager, 8)
    manager.demote(seq)
    manager.forget(seq)
    manager.pool.evict_all_cached()
    step(manager)
    assert manager.match(make_sequence([*range(9)])).num_tokens == 8


def test_a_reset_of_the_prefix_cache_leaves_what_a_preempted_sequence_needs() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=4, num_prefix_blocks=4, demotion="on_evict")
    away, gone = running(manager, 10), running(manager, 8, first=50)
    manager.demote(away)
    manager.forget(gone)
    manager.reset_prefix_cache()
    step(manager)
    assert manager.match(make_sequence([*range(50, 59)])).num_tokens == 0
    assert manager.match(away).num_tokens == 10
    assert resume(manager, away)
    assert len(step(manager)[1]) == 3


def test_a_sequence_whose_blocks_a_failed_step_was_to_store_cannot_resume() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=5)
    lost, kept = running(manager, 10), running(manager, 8, first=50)
    for seq in (lost, kept):
        manager.demote(seq)
    manager.hierarchy.take()
    manager.hierarchy.fail()
    manager.audit()
    assert (manager.can_resume(lost), manager.can_resume(kept)) == (False, True)
    assert manager.hierarchy.swapped.sequences_lost == 1
    assert manager.match(lost).num_tokens == 8, "what the prefix cache has is found as by any other"


def test_a_sequence_that_is_preempted_again_before_a_step_takes_its_loads_leaves_everything_where_it_was() -> None:
    manager = make_manager(num_blocks=8, num_host_blocks=3)
    seq = running(manager, 10)
    manager.demote(seq)
    manager.reset_prefix_cache()
    step(manager)
    for _ in range(3):
        assert resume(manager, seq)
        assert manager.demote(seq)
        manager.audit()
    assert (manager.match(seq).num_tokens, manager.hierarchy.swapped.sequences_out) == (10, 1)
    manager.forget(seq)
    assert host_of(manager).pool.num_free == 3
    assert not manager.hierarchy.host.has_transfers


def test_preempted_sequences_of_one_tenant_do_not_displace_those_of_another() -> None:
    manager = make_manager(num_blocks=9, num_host_blocks=3, num_prefix_blocks=2, prefix_caching=False)
    first, second = (make_sequence([*range(10)], tenant=name) for name in ("ada", "bob"))
    for seq in (first, second):
        admit_and_compute(manager, seq)
        seq.output_token_ids.append(99)
    assert manager.demote(first)
    assert not manager.demote(second)
    assert (manager.can_resume(first), host_of(manager).pool.by_tenant()) == (True, {"ada": 3})


def test_a_sequence_that_has_nothing_to_load_resumes_alone() -> None:
    """Others that resume with the same step still wait for it."""
    manager = make_manager(num_blocks=12, num_host_blocks=5)
    moved, cached = running(manager, 10), running(manager, 8, first=50)
    for seq in (moved, cached):
        assert manager.demote(seq)
    step(manager)
    assert resume(manager, moved)
    assert resume(manager, cached)
    assert (manager.can_resume(moved), manager.can_resume(cached)) == (True, False)
    manager.audit()
    assert len(step(manager)[1]) == 1
    assert manager.hierarchy.num_kept == 0
    swapped = manager.hierarchy.swapped
    assert (swapped.sequences_in, swapped.blocks_out, swapped.blocks_in) == (2, 1, 1)

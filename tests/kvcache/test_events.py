"""Events of the cache: an index that applies them knows exactly the blocks that a prefix can find.

`test_manager_machine.py` compares both after every step of its random workloads.
"""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kvcache.events import BlocksRemoved, BlocksStored, CacheSnapshot
from octavo.kvcache.hashing import key_prefix
from octavo.kvcache.manager import KVCacheManager
from tests.kvcache.caches import FULL, admit_and_compute, compute, make_manager, make_sequence, sliding
from tests.kvcache.event_index import EventIndex, findable


def logged(**options: object) -> tuple[KVCacheManager, EventIndex]:
    manager = make_manager(logs_events=True, **options)  # type: ignore[arg-type]
    return manager, EventIndex(manager.spec.block_size)


def ended(manager: KVCacheManager, tokens: list[int], salt: str = "", tenant: str = "") -> None:
    """Compute a sequence and end it."""
    seq = make_sequence(tokens, salt, tenant=tenant)
    admit_and_compute(manager, seq)
    manager.forget(seq)


def test_the_full_blocks_of_a_sequence_are_stored_in_one_event_with_their_tokens_and_parent() -> None:
    manager, index = logged()
    seq = make_sequence(list(range(10)))
    admit_and_compute(manager, seq)
    (stored,) = manager.events.take()
    assert isinstance(stored, BlocksStored)
    chain = manager.holdings[seq].chain
    hashes = [key_prefix(chain.key(length)) for length in (1, 2)]
    assert stored == BlocksStored(hashes, None, list(range(8)), "")
    longer = make_sequence(list(range(14)))
    admit_and_compute(manager, longer)
    (more,) = manager.events.take()
    third = key_prefix(manager.holdings[longer].chain.key(3))
    assert more == BlocksStored([third], hashes[-1], [8, 9, 10, 11], "")
    index.apply([stored, more])
    assert index.blocks == findable(manager)
    assert manager.events.take() == []


def test_two_tenants_with_equal_prompts_have_no_hash_in_common_and_each_event_names_its_scope() -> None:
    manager, _ = logged()
    for tenant in "ab":
        ended(manager, list(range(9)), tenant=tenant)
    first, second = manager.events.take()
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert first.token_ids == second.token_ids
    assert not set(first.block_hashes) & set(second.block_hashes)
    assert first.scope != second.scope != ""


def test_blocks_behind_one_that_is_evicted_are_removed_with_it_and_stored_again_with_it() -> None:
    manager, index = logged(num_blocks=7, eviction="fifo")
    seq = make_sequence(list(range(21)))
    assert manager.admit(seq, manager.match(seq), 21)
    for _ in range(5):
        compute(manager, seq, 4)  # its first block is published first
    manager.forget(seq)
    index.apply(manager.events.take())
    assert len(index.blocks) == 5
    ended(manager, [100, 101, 102, 103, 104])  # takes the free block, and that of the first four tokens
    events = manager.events.take()
    assert [len(event.block_hashes) for event in events if isinstance(event, BlocksRemoved)] == [5]
    index.apply(events)
    assert len(manager.blocks.published()) == 5, "four stay cached, and nobody can find them"
    assert index.blocks == findable(manager)
    assert len(index.blocks) == 1
    ended(manager, [0, 1, 2, 3])  # takes the last free block
    index.apply(manager.events.take())
    assert index.blocks == findable(manager)
    assert len(index.blocks) == 6, "those behind it are found again"


def test_blocks_under_a_sliding_window_are_not_announced() -> None:
    manager, index = logged(layers=(FULL, sliding(5)))
    ended(manager, list(range(17)))
    events = manager.events.take()
    index.apply(events)
    assert len(index.blocks) == 4
    assert index.blocks == findable(manager)
    manager.reset_prefix_cache()
    index.apply(manager.events.take())
    assert index.blocks == {}


def test_a_model_without_full_attention_announces_nothing() -> None:
    manager, _ = logged(layers=(sliding(5),))
    ended(manager, list(range(17)))
    assert manager.events is None


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_snapshot_describes_all_blocks_parents_first_and_forgets_the_events_before_it(at_once: int) -> None:
    manager, index = logged(num_blocks=32)
    for tokens in ([*range(13)], [*range(8), *range(50, 58)], [*range(90, 99)]):
        ended(manager, tokens, salt="s" if tokens[0] else "")
    snapshot = manager.events.snapshot()
    assert isinstance(snapshot, CacheSnapshot)
    assert manager.events.take() == []
    for events in snapshot.events(at_once):
        assert len(events) <= at_once
        index.apply(events)
    assert index.blocks == findable(manager)
    assert np.count_nonzero(snapshot.is_first) == 2

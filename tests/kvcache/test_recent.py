"""Whoever looks now and then is told what was evicted and copied since, as far as it is remembered."""

from octavo.kvcache.block import BlockCopy, BlockId
from octavo.kvcache.ledger import MOST_COPIED, MOST_EVICTED, RecentChanges
from octavo.request import RequestId


def test_two_that_look_at_different_times_are_each_told_what_is_new() -> None:
    recent = RecentChanges()
    recent.evicted([BlockId(3), BlockId(1)])
    early = recent.num_evicted
    recent.evicted([BlockId(2)])
    assert recent.evicted_since(early) == [2]
    assert recent.evicted_since(0) == [3, 1, 2]
    assert recent.evicted_since(recent.num_evicted) == []
    recent.copied(RequestId("r"), BlockCopy(BlockId(4), BlockId(5)))
    assert recent.copied_since(0) == [("r", 4, 5)]
    assert recent.copied_since(1) == []


def test_only_the_latest_are_remembered_but_all_are_counted() -> None:
    recent = RecentChanges()
    recent.evicted([BlockId(i) for i in range(10 * MOST_EVICTED)])
    assert recent.num_evicted == 10 * MOST_EVICTED
    assert recent.evicted_since(0) == list(range(9 * MOST_EVICTED, 10 * MOST_EVICTED))
    for i in range(2 * MOST_COPIED):
        recent.copied(RequestId("r"), BlockCopy(BlockId(1), BlockId(i)))
    assert recent.num_copied == 2 * MOST_COPIED
    assert [copy.destination for copy in recent.copied_since(0)] == list(range(MOST_COPIED, 2 * MOST_COPIED))

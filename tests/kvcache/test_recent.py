"""Whoever looks now and then is told what happened since, as far as it is remembered."""

from octavo.kvcache.ledger import Latest


def test_two_that_look_at_different_times_are_each_told_what_is_new() -> None:
    latest = Latest[int](4)
    latest.add([3, 1])
    early = latest.count
    latest.add([2])
    assert (latest.since(early), latest.since(0), latest.since(latest.count)) == ([2], [3, 1, 2], [])


def test_only_the_latest_are_remembered_but_all_are_counted() -> None:
    latest = Latest[int](4)
    latest.add([*range(10)])
    assert (latest.count, latest.since(0), latest.since(9)) == (10, [6, 7, 8, 9], [9])

"""Requests that wait for blocks from a store: who gets host memory for them, and what becomes of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from octavo.kvcache.eviction import make_eviction_policy
from octavo.kvcache.hashing import Label
from octavo.kvcache.host_memory import HostMemory
from octavo.tiers.base import Medium, Reason
from octavo.tiers.lower import Fetch, LowerTiers
from octavo.tiers.store import Store
from tests.kvcache.host_tier import num_held
from tests.tiers.stores import SECONDS, label

LOAD_SECONDS = 5.0


class Shelf(Medium):
    """A medium that has every block it is asked for but those named, and reads only while it may."""

    name = "shelf"

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()
        self.lacks: set[bytes] = set()
        self.num_read = 0

    def contains(self, key: bytes) -> bool | None:
        return key not in self.lacks

    def read(self, labels: Sequence[Label], buffers: Sequence[memoryview]) -> list[Reason | None]:
        assert self.may_read.wait(SECONDS)
        self.num_read += len(labels)
        return [Reason.ABSENT if label.key in self.lacks else None for label in labels]

    def write(self, label: Label, payload: memoryview, tenant: str) -> Reason | None:
        return None

    def close(self) -> None:
        self.may_read.set()


class AskedShelf(Shelf):
    """The same where only asking tells."""

    must_ask = True

    def contains(self, key: bytes) -> bool | None:
        return None

    def ask(self, labels: Sequence[Label]) -> list[Reason | None]:
        return [Reason.ABSENT if label.key in self.lacks else None for label in labels]


class Setup:
    """Host memory of `num_slots`, of which requests may hold half, over one store."""

    def __init__(self, medium: Shelf, num_slots: int) -> None:
        self.now = 0.0
        self.medium = medium
        self.host = HostMemory(num_slots, 0, 4, make_eviction_policy("lru"))
        self.store = Store(medium, clock=self.clock)
        row = memoryview(bytearray(8))
        self.tiers = LowerTiers(self.host, [self.store], lambda slot: row, 8, self.clock, load_seconds=LOAD_SECONDS)
        self.fetches: list[Fetch] = []

    def clock(self) -> float:
        return self.now

    def fetch(self, numbers: range, tenant: str = "", seconds_to_compute: float | None = None) -> Fetch:
        fetch = self.tiers.prefetch(map(label, numbers), tenant, seconds_to_compute)
        assert fetch is not None
        self.fetches.append(fetch)
        self.until(lambda: not fetch.asking)
        return fetch

    def until(self, condition: Callable[[], bool]) -> None:
        """Polls as the engine does."""
        ends = time.monotonic() + SECONDS
        while True:
            self.tiers.poll()
            self.audit()
            if condition():
                return
            assert time.monotonic() < ends, "it does not come"
            self.tiers.wait(0.002)

    def audit(self) -> None:
        """Prove that somebody answers for every hold and every slot that is being filled."""
        assert list(self.host.check([])) == []
        fetches = [*self.tiers._unreleased, *(f for f in self.tiers._fetches if f.released)]
        held = sum(len(f.held) + sum(len(slots) for _, _, slots in f.transfers) for f in fetches)
        assert self.tiers._queue.num_held == held

    def arrive(self, fetch: Fetch) -> None:
        self.until(lambda: not fetch.pending)

    def has(self, numbers: range) -> list[bool]:
        return [self.host.find(label(n)) is not None for n in numbers]

    def close(self) -> None:
        for fetch in self.fetches:
            self.tiers.release(fetch)
        self.tiers.close(SECONDS)
        assert list(self.host.check([])) == []
        assert (num_held(self.host), self.tiers._queue.num_held, len(self.tiers._queue)) == (0, 0, 0)


@pytest.fixture(params=[Shelf, AskedShelf])
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    setup = Setup(request.param(), num_slots=20)
    yield setup
    setup.close()


def test_a_burst_that_finds_no_room_is_loaded_as_those_before_it_give_up_theirs(setup: Setup) -> None:
    fetches = [setup.fetch(range(first, first + 5)) for first in range(0, 40, 5)]
    for fetch in fetches:
        setup.arrive(fetch)
        assert len(fetch.held) == 5
        assert not setup.tiers.is_late(fetch)
        setup.tiers.release(fetch)  # it is admitted
    assert setup.medium.num_read == 40


def test_never_more_than_half_of_host_memory_is_held(setup: Setup) -> None:
    fetches = [setup.fetch(range(first, first + 4)) for first in range(0, 16, 4)]
    for fetch in fetches[:2]:  # two threads load them
        setup.arrive(fetch)
    assert num_held(setup.host) == 8
    assert [fetch.pending for fetch in fetches] == [False, False, True, True]


def test_a_prefix_larger_than_may_be_held_is_loaded_as_far_as_that_goes(setup: Setup) -> None:
    fetch = setup.fetch(range(30))
    setup.arrive(fetch)
    assert setup.has(range(12)) == [True] * 10 + [False] * 2


def test_nobody_waits_for_room_longer_than_for_a_load_and_loads_what_fits_later(setup: Setup) -> None:
    first, second = setup.fetch(range(8)), setup.fetch(range(20, 26))
    setup.arrive(first)
    setup.now = LOAD_SECONDS - 0.1
    assert not setup.tiers.is_late(second)
    setup.now = LOAD_SECONDS + 0.1
    assert setup.tiers.is_late(second), "it goes to the queue"
    setup.arrive(second)
    assert setup.has(range(20, 26)) == [True, True, False, False, False, False]


def test_nobody_waits_for_room_longer_than_computing_would_take(setup: Setup) -> None:
    setup.fetch(range(10))
    fetches = [setup.fetch(range(first, first + 10), seconds_to_compute=0.05) for first in (20, 40)]
    setup.now = 0.7
    assert [setup.tiers.is_late(fetch) for fetch in fetches] == [True, False], "alone, and behind the first"
    setup.now = 1.1
    assert setup.tiers.is_late(fetches[1])


def test_a_tenant_waits_behind_its_own_crowd_and_not_behind_anothers(setup: Setup) -> None:
    crowd = [setup.fetch(range(first, first + 5), tenant="crowd") for first in range(0, 40, 5)]
    single = setup.fetch(range(100, 105), tenant="single")
    setup.arrive(crowd[1])
    setup.tiers.release(crowd[0])
    setup.arrive(single)
    assert all(fetch.pending for fetch in crowd[2:])


def test_blocks_that_another_request_is_loading_are_waited_for_and_read_once(setup: Setup) -> None:
    setup.medium.may_read.clear()
    first = setup.fetch(range(5))
    second = setup.fetch(range(7))
    setup.medium.may_read.set()
    setup.until(lambda: not first.pending and not second.pending)
    assert setup.medium.num_read == 7
    setup.tiers.release(first)
    assert (len(second.held), num_held(setup.host)) == (7, 7), "what one gives up the other still keeps"


def test_blocks_that_come_while_their_request_is_in_line_are_not_read_again(setup: Setup) -> None:
    first, second = setup.fetch(range(8)), setup.fetch(range(8, 13))
    third = setup.fetch(range(8, 13))
    setup.arrive(first)
    setup.tiers.release(first)
    setup.until(lambda: not second.pending and not third.pending)
    assert (setup.medium.num_read, len(third.held)) == (13, 5)


def test_a_load_that_another_request_waits_for_may_fail(setup: Setup) -> None:
    setup.medium.may_read.clear()
    first = setup.fetch(range(5))
    second = setup.fetch(range(5))
    setup.medium.lacks = {label(n).key for n in range(3, 5)}
    setup.medium.may_read.set()
    setup.until(lambda: not first.pending and not second.pending)
    assert setup.has(range(5)) == [True] * 3 + [False] * 2


def test_a_request_that_ends_in_line_takes_nothing_and_holds_nobody_up(setup: Setup) -> None:
    first, second, third = (setup.fetch(range(first, first + 8)) for first in (0, 10, 20))
    setup.arrive(first)
    setup.tiers.release(second)
    setup.tiers.release(first)
    setup.arrive(third)
    assert setup.medium.num_read == 16


def test_beyond_a_number_in_line_requests_are_computed_at_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.tiers.lower._MOST_QUEUED", 1)
    setup.medium.may_read.clear()  # so that the second stays in line
    first, second = setup.fetch(range(10)), setup.fetch(range(20, 30))
    setup.until(lambda: not (first.asking or second.asking))
    third = setup.tiers.prefetch(map(label, range(40, 50)), "", None)
    if setup.store.must_ask:
        assert third is not None
        setup.fetches.append(third)
        setup.until(lambda: not third.asking)
    assert third is None or not (third.pending or third.held)
    assert second.wanted
    setup.medium.may_read.set()

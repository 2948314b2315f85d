"""Requests whose prefix a store is bringing: they wait outside the line and hold up nobody."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.kvcache.hashing import Label
from octavo.request import FinishReason
from tests.scheduler.kit import Harness, running


class Store:
    """A store that has the prefix of every prompt of 40 tokens, and brings it when a test says so."""

    def __init__(self) -> None:
        self.num_not_worth = 0
        self.fetches: list[SimpleNamespace] = []
        self.released: list[SimpleNamespace] = []

    def prefetch(
        self, labels: Iterable[Label], tenant: str, seconds_to_compute: float | None, kv_hint: str | None
    ) -> Any | None:
        if len(list(labels)) < 9:
            return None
        self.fetches.append(SimpleNamespace(pending=True, late=False))
        return self.fetches[-1]

    def poll(self) -> None:
        pass

    def is_late(self, fetch: Any) -> bool:
        return bool(fetch.late)

    def wait(self, seconds: float) -> None:
        pass

    def release(self, fetch: Any) -> None:
        self.released.append(fetch)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def harness(store: Store) -> Harness:
    return Harness(num_prefix_blocks=20, store=store)


def test_a_request_that_waits_for_a_store_delays_no_other_and_counts_as_waiting(harness: Harness, store: Store) -> None:
    fetched, other = harness.add(40), harness.add(8)
    assert harness.scheduler.num_waiting == 2
    harness.step()
    assert (running(fetched), running(other), harness.scheduler.num_waiting) == (False, True, 1)
    store.fetches[0].pending = False
    harness.step()
    assert (running(fetched), harness.scheduler.num_waiting) == (True, 0)
    assert store.released == store.fetches
    harness.run()


def test_a_request_does_not_wait_for_a_store_that_is_late(harness: Harness, store: Store) -> None:
    request = harness.add(40)
    assert not harness.scheduler.schedule()
    store.fetches[0].late = True
    harness.step()
    assert running(request)
    harness.run()


def test_a_request_that_ends_while_it_waits_for_a_store_lets_go_of_its_fetch(harness: Harness, store: Store) -> None:
    request = harness.add(40)
    harness.scheduler.end_request(request.request_id)
    assert request.sequences[0].finish_reason is FinishReason.ABORT
    assert store.released == store.fetches
    assert harness.scheduler.num_waiting == 0
    assert not harness.scheduler.has_work


def test_a_request_that_waits_for_a_store_is_held_back_after_a_failure_too(harness: Harness, store: Store) -> None:
    fetched, other = harness.add(40), harness.add(8)
    harness.step()
    harness.scheduler.restart(lambda request_id: request_id == other.request_id)
    store.fetches[0].pending = False
    harness.step()
    assert (running(other), running(fetched)) == (True, False)
    harness.scheduler.restart()
    harness.step()
    assert running(fetched)
    assert store.released == store.fetches
    harness.run()


def test_a_request_is_reported_as_admitted_once_however_often_it_is_preempted() -> None:
    harness, admitted = Harness(num_blocks=1 + 6, prefix_caching=False), []
    harness.scheduler.on_admitted = lambda request: admitted.append(request.request_id)
    requests = [harness.add(11), harness.add(11)]
    harness.run()
    assert requests[1].sequences[0].num_preemptions > 0
    assert admitted == [request.request_id for request in requests]

"""Requests whose prefix is being fetched from a store: they wait outside the queue and delay no other request.

add ──> fetching ──arrived, or too late──> waiting ──admit──> running
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from octavo.kvcache.hashing import Label
from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence, SequenceStatus
from octavo.scheduler.preemption import RestoreSpeed


class Fetcher(Protocol):
    """Brings blocks from stores to host memory. A fetch is an opaque handle, except for its `pending`.

    Attributes:
        num_not_worth: loads that were expected to take longer than computing.
    """

    num_not_worth: int

    def prefetch(self, labels: Iterable[Label], tenant: str, seconds_to_compute: float | None) -> Any | None:
        """Start fetching the blocks of a prefix that the stores hold; None if there is nothing to wait for."""

    def poll(self) -> None:
        """Process the blocks that have arrived."""

    def is_late(self, fetch: Any) -> bool:
        """Whether a request should stop waiting for this fetch."""

    def wait(self, seconds: float) -> None:
        """Wait until something arrives, at most this long."""

    def release(self, fetch: Any) -> None:
        """Release a fetch whose request has its blocks, or has ended."""


class Fetching:
    """Tracks the requests that wait for a fetch; each keeps it until it is admitted or ends.

    Attributes:
        speed: how long computing takes, against which loads are weighed.
    """

    def __init__(self, kv: KVCacheManager, fetcher: Fetcher, speed: RestoreSpeed) -> None:
        self.speed = speed
        self._kv = kv
        self._fetcher = fetcher
        self._waiting: dict[Sequence, None] = {}  # in order of arrival; each has its fetch in its state

    def __len__(self) -> int:
        """The number of requests that wait for a fetch."""
        return len(self._waiting)

    def begin(self, seq: Sequence) -> bool:
        """Start a fetch for a new sequence; if True, it must wait until `arrived` returns it."""
        labels = self._kv.hierarchy.missing(seq, *self._kv.holdings.matchable(seq))
        per_token = self.speed.seconds_per_token
        cost = None if per_token is None else per_token * self._kv.spec.block_size
        fetch = self._fetcher.prefetch(labels, seq.request.tenant, cost)
        if fetch is None:
            return False
        seq.status = SequenceStatus.PARKED
        seq.state.fetch = fetch
        self._waiting[seq] = None
        return True

    @property
    def num_not_worth(self) -> int:
        """The number of loads that were expected to take longer than computing."""
        return self._fetcher.num_not_worth

    def is_waiting(self, seq: Sequence) -> bool:
        """Whether a sequence waits for a fetch."""
        return seq in self._waiting

    def arrived(self) -> list[Sequence]:
        """Return the sequences that need not wait any longer."""
        self._fetcher.poll()
        is_late = self._fetcher.is_late
        ready = [seq for seq in self._waiting if not seq.state.fetch.pending or is_late(seq.state.fetch)]
        for seq in ready:
            del self._waiting[seq]
        return ready

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that was admitted, or has ended."""
        self._waiting.pop(seq, None)
        if (fetch := seq.state.fetch) is not None:
            seq.state.fetch = None
            self._fetcher.release(fetch)

    def wait(self, seconds: float) -> None:
        """Wait for something to arrive while there is nothing to compute."""
        self._fetcher.wait(seconds)

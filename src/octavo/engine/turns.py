"""A semaphore and a thread pool that are fair to tenants, so that the work of one does not hold up another's.

    waiting   ada: ■ ■ ■ ■ ■     places   [ada] [ada]     and one more, for a tenant that has none: [ben]
              ben: ■

A place that becomes free goes to the waiting tenant that holds the fewest; tenants with equally many take turns. Each
tenant's requests are served in order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.least_served import LeastServed

_T = TypeVar("_T")


class Turns:
    """A semaphore that is fair to tenants. Used only from the event loop.

    Args:
        places: number of places for any tenant; one more is reserved for tenants that hold none.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._num_held = 0
        self._held = LeastServed()  # places
        # Tenants in the order of their last turns.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, tenant: str) -> None:
        """Wait for a place and take it; `give_back` frees it."""
        if self._has_place(tenant):
            self._hold(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:
                self.give_back(tenant)  # the place was given just before the cancellation
            raise

    def give_back(self, tenant: str) -> None:
        """Free a place that was taken with `take`."""
        self._num_held -= 1
        self._held.charge(tenant, -1)
        if not self._held[tenant]:
            self._held.forget(tenant)
        while (following := self._next()) is not None:
            line = self._waiting.pop(following)
            turn = line.popleft()
            if line:
                self._waiting[following] = line
            if not turn.done():  # the waiting task may have been cancelled just now
                self._hold(following)
                turn.set_result(None)

    def _has_place(self, tenant: str) -> bool:
        return self._num_held < self._places + (not self._held[tenant])

    def _hold(self, tenant: str) -> None:
        self._num_held += 1
        self._held.charge(tenant, 1)

    def _next(self) -> str | None:
        """Return the tenant whose turn it is, or None if nobody waits or there is no place for it."""
        following = self._held.next(self._waiting)
        return following if following is not None and self._has_place(following) else None

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant, deque())
        if turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[tenant]


class TenantThreads:
    """Threads in which the work of tenants is done in turn. Used only from the event loop.

    Args:
        places: number of threads for any tenant; one more is reserved for tenants that have none.
        name: prefix of the threads' names.
    """

    def __init__(self, places: int, name: str) -> None:
        self._turns = Turns(places)
        self._threads = ThreadPoolExecutor(places + 1, name)

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Call `work` in a thread once it is the tenant's turn, and return its result."""
        await self._turns.take(tenant)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # The work keeps its place until it ends, even if nobody waits for it any more.
        running.add_done_callback(lambda _: self._turns.give_back(tenant))
        return await asyncio.shield(running)

    def start(self, work: Callable[[], object]) -> None:
        """Call `work` in a thread out of turn, without waiting for it."""
        self._threads.submit(work)

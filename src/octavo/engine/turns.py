"""Work outside the engine's thread, fair to tenants: a semaphore, a pool of threads, and the compiling of grammars.

    waiting   ada: ■ ■ ■ ■ ■     places   [ada] [ada]     and one more, for a tenant that has none: [ben]
              ben: ■

A place that becomes free goes to the waiting tenant that holds the fewest; tenants with equally many take turns. Each
tenant's requests are served in order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.errors import EngineDeadError, OverloadedError
from octavo.grammar.compiler import NUM_SHARED_THREADS, PATIENCE, CompiledGrammar, GrammarCompiler
from octavo.least_served import LeastServed
from octavo.structured_outputs import StructuredOutputsParams

_T = TypeVar("_T")
_Key = tuple[str, StructuredOutputsParams]


class Turns:
    """A semaphore that is fair to tenants. Used only from the event loop.

    Args:
        places: number of places for any tenant; one more is reserved for tenants that hold none.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._held = LeastServed()  # places
        # Tenants in the order of their last turns; no line is empty.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, tenant: str, begin: Callable[[], asyncio.Future[_T]], patience: float | None = None) -> _T:
        """Wait for a place, hold it until `begin`'s future is done, even if the caller has left; return its result.

        Raises:
            TimeoutError: there was no place within `patience` seconds.
        """
        await asyncio.wait_for(self.take(tenant), patience)
        running = begin()
        running.add_done_callback(lambda _: self.give_back(tenant))
        return await asyncio.shield(running)

    async def take(self, tenant: str) -> None:
        """Wait for a place and take it; `give_back` frees it."""
        turn = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(tenant, deque())
        line.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(tenant)  # the place was given just before the cancellation
            elif turn in line:
                line.remove(turn)
                if not line:
                    del self._waiting[tenant]
            raise

    def give_back(self, tenant: str) -> None:
        """Free a place that was taken with `take`."""
        self._held.charge(tenant, -1)
        if not self._held[tenant]:
            self._held.forget(tenant)
        self._let_in()

    def close(self) -> None:
        """Refuse those that wait with `EngineDeadError`."""
        for line in self._waiting.values():
            for turn in line:
                if not turn.done():
                    turn.set_exception(EngineDeadError("the server is shutting down"))
        self._waiting.clear()

    def _let_in(self) -> None:
        """Give free places to the tenants whose turn it is."""
        num_held = sum(map(self._held.__getitem__, self._held))
        while (tenant := self._held.next(self._waiting)) is not None:
            if num_held >= self._places + (not self._held[tenant]):
                return
            line = self._waiting.pop(tenant)
            turn = line.popleft()
            if line:
                self._waiting[tenant] = line
            if not turn.done():  # the waiting task may have been cancelled just now
                self._held.charge(tenant, 1)
                num_held += 1
                turn.set_result(None)


class TenantThreads:
    """Threads that do the tenants' work in turn. Used only from the event loop.

    Args:
        places: number of threads for any tenant; one more is reserved for tenants that have none.
        name: prefix of the threads' names.
    """

    def __init__(self, places: int, name: str) -> None:
        self._turns = Turns(places)
        self._threads = ThreadPoolExecutor(places + 1, name)

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """Call `work` in a thread once it is the tenant's turn, and return its result."""
        loop = asyncio.get_running_loop()
        return await self._turns.run(tenant, lambda: loop.run_in_executor(self._threads, work))

    def close(self) -> None:
        """Refuse what waits, and let each thread end once its work is done."""
        self._turns.close()
        self._threads.shutdown(wait=False)

    def start(self, work: Callable[[], object]) -> None:
        """Call `work` in a thread out of turn, without waiting for it."""
        self._threads.submit(work)


class GrammarQueue:
    """Compiles the grammars of tenants in turn; requests of one tenant with the same grammar wait together.

    Used only from the event loop.

    Args:
        patience: seconds that a grammar may wait for its turn.
    """

    def __init__(self, compiler: GrammarCompiler, patience: float = PATIENCE) -> None:
        self._compiler = compiler
        self._patience = patience
        self._turns = Turns(NUM_SHARED_THREADS)
        self._tasks: dict[_Key, asyncio.Task[CompiledGrammar]] = {}
        self._num_waiting: Counter[_Key] = Counter()

    async def compile(self, wanted: StructuredOutputsParams, tenant: str) -> CompiledGrammar:
        """Return a compiled grammar, once it is the tenant's turn.

        Raises:
            RequestError: the grammar cannot be compiled; see `GrammarCompiler.compile`.
            OverloadedError: it was not its turn within the patience.
        """
        if (known := self._compiler.known(wanted, tenant)) is not None:
            return known
        key = (tenant, wanted)
        if (task := self._tasks.get(key)) is None:
            task = self._tasks[key] = asyncio.ensure_future(self._compile(wanted, tenant))
            task.add_done_callback(lambda done: self._forget(key, done))
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._num_waiting[key]
                self._forget(key, task)  # at once, so that no request joins what is being cancelled
                task.cancel()  # does nothing if it is done; otherwise all clients have left

    def close(self) -> None:
        """Refuse the grammars that wait for their turn."""
        self._turns.close()

    def _forget(self, key: _Key, task: asyncio.Task[CompiledGrammar]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _compile(self, wanted: StructuredOutputsParams, tenant: str) -> CompiledGrammar:
        try:
            return await self._turns.run(
                tenant, lambda: asyncio.wrap_future(self._compiler.begin(wanted, tenant)), self._patience
            )
        except TimeoutError:
            raise OverloadedError(
                f"structured_outputs.{wanted.kind} was not compiled within {self._patience:g} s: the machine is busy, "
                "or other grammars came first; try again later"
            ) from None

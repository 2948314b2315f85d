"""Places are taken by tenants in turn, and none is ever lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.turns import Turns


async def soon() -> None:
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Tenants:
    """Tasks that take places, and who got theirs in what order."""

    def __init__(self, places: int) -> None:
        self.turns = Turns(places)
        self.served: list[str] = []

    async def ask(self, *names: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.ensure_future(self._take(name)) for name in names]
        await soon()
        return tasks

    async def _take(self, name: str) -> None:
        await self.turns.take(name)
        self.served.append(name)

    async def end(self, name: str) -> None:
        self.turns.give_back(name)
        await soon()


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await work()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(run())


def test_a_tenant_takes_all_places_but_the_one_kept_for_others() -> None:
    async def work() -> None:
        tenants = Tenants(2)
        await tenants.ask("ada", "ada", "ada", "ada")
        assert tenants.served == ["ada"] * 2
        await tenants.ask("ben", "ben")
        assert tenants.served == ["ada"] * 2 + ["ben"]

    in_loop(work)


def test_a_free_place_goes_to_the_tenant_that_has_the_fewest_then_in_turn() -> None:
    async def work() -> None:
        tenants = Tenants(1)
        await tenants.ask("yan", "zoe", *["ada"] * 4, *["ben"] * 3, *["cleo"] * 2)
        for ended in ("yan", "zoe", "ada", "ben", "cleo", "ada", "ben", "cleo", "ada"):
            await tenants.end(ended)
        assert tenants.served[2:] == ["ada", "ben", "cleo", "ada", "ben", "cleo", "ada", "ben", "ada"]

    in_loop(work)


def test_who_is_cancelled_while_waiting_takes_no_turn() -> None:
    async def work() -> None:
        tenants = Tenants(1)
        _, second, _ = await tenants.ask("ada", "ada", "ada")
        second.cancel()
        # In the same go of the loop: the task has not heard of it yet.
        await tenants.end("ada")
        assert tenants.served == ["ada", "ada"]
        assert second.cancelled()
        assert not tenants.turns._waiting

    in_loop(work)


def test_who_is_cancelled_as_its_turn_comes_passes_it_on() -> None:
    async def work() -> None:
        tenants = Tenants(1)
        _, second, _ = await tenants.ask("ada", "ada", "ada")
        tenants.turns.give_back("ada")
        second.cancel()
        await soon()
        assert second.cancelled()
        assert tenants.served == ["ada", "ada"]

    in_loop(work)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ask", "end", "cancel"]), st.integers(0, 9)), max_size=40))
def test_whatever_happens_no_place_is_lost(events: list[tuple[str, int]]) -> None:
    async def work() -> None:
        tenants, tasks, held = Tenants(2), [], Counter[str]()
        for what, number in events:
            name = f"tenant-{number % 3}"
            if what == "ask":
                tasks += await tenants.ask(name)
            elif what == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif what == "end" and held[name]:
                held[name] -= 1
                tenants.turns.give_back(name)
            # Not `soon`: events meet in one go of the loop.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            held.update(tenants.served)
            tenants.served.clear()
        await soon()
        held.update(tenants.served)
        assert {tenant: count for tenant, count in held.items() if count} == tenants.turns._held._received
        waits = any(tenants.turns._waiting.values())
        assert not waits or held.total() >= 2

    in_loop(work)

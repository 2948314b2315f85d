"""Tenants' grammars are compiled in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.engine.turns import GrammarQueue
from octavo.errors import OverloadedError, RequestError
from octavo.grammar.compiler import CompiledGrammar
from octavo.structured_outputs import StructuredOutputsParams


def choice(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=[text])


class Compiling:
    """Stands in for a compiler whose grammars are ready when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.futures: dict[tuple[str, str], Future[Any]] = {}

    def known(self, wanted: StructuredOutputsParams, tenant: str) -> CompiledGrammar | None:
        return None

    def begin(self, wanted: StructuredOutputsParams, tenant: str) -> Future[Any]:
        assert wanted.choice is not None
        key = (tenant, wanted.choice[0])
        self.begun.append(key)
        self.futures[key] = Future()
        return self.futures[key]


def queue_of(compiler: Any, patience: float = 600.0) -> GrammarQueue:
    return GrammarQueue(compiler, patience)


async def soon() -> None:
    """Let every task go on as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def ask(queue: GrammarQueue, tenant: str, names: Iterable[str]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(queue.compile(choice(name), tenant)) for name in names]


def test_a_tenants_slow_grammars_hold_up_no_other_tenants() -> None:
    async def run() -> None:
        compiler = Compiling()
        queue = queue_of(compiler)
        slow = ask(queue, "ada", "abcdefgh")
        await soon()
        quick = ask(queue, "ben", "x")
        await soon()
        assert compiler.begun == [("ada", "a"), ("ada", "b"), ("ben", "x")]
        compiler.futures["ben", "x"].set_result("compiled")
        assert await asyncio.gather(*quick) == ["compiled"]
        for task in slow:
            task.cancel()
        await soon()
        # Whoever left the queue is not compiled; what is being compiled keeps its place.
        assert len(compiler.begun) == 3
        late = ask(queue, "ada", "z")
        await soon()
        assert len(compiler.begun) == 3
        compiler.futures["ada", "a"].set_result("compiled")
        while len(compiler.begun) < 4:
            await asyncio.sleep(0.001)
        assert compiler.begun[-1] == ("ada", "z")
        late[0].cancel()

    asyncio.run(run())


def test_the_same_grammar_of_one_tenant_is_compiled_once_for_all_who_wait() -> None:
    async def run() -> None:
        compiler = Compiling()
        tasks = ask(queue_of(compiler), "ada", "aaaa")
        await soon()
        tasks[0].cancel()
        await soon()
        compiler.futures["ada", "a"].set_exception(RequestError("too slow"))
        assert [str(result) for result in await asyncio.gather(*tasks[1:], return_exceptions=True)] == ["too slow"] * 3
        assert compiler.begun == [("ada", "a")]

    asyncio.run(run())


def test_a_grammar_that_never_has_its_turn_is_refused_and_may_be_sent_again() -> None:
    async def run() -> None:
        compiler = Compiling()
        queue = queue_of(compiler, patience=0.01)
        slow = ask(queue, "ada", "ab")
        await soon()
        with pytest.raises(OverloadedError, match=r"structured_outputs.choice was not compiled within 0.01 s"):
            await queue.compile(choice("c"), "ada")
        for name in "ab":
            compiler.futures["ada", name].set_result("compiled")
        assert await asyncio.gather(*slow) == ["compiled"] * 2
        again = ask(queue, "ada", "c")
        await soon()
        assert compiler.begun[-1] == ("ada", "c")
        again[0].cancel()

    asyncio.run(run())


def test_who_asks_as_the_last_one_leaves_gets_the_grammar() -> None:
    async def run() -> None:
        compiler = Compiling()
        queue = queue_of(compiler)
        slow = ask(queue, "ada", "ab")
        await soon()
        (leaving,) = ask(queue, "ada", "c")
        await soon()
        leaving.cancel()
        await asyncio.sleep(0)  # the task has noticed; what it waited for is only being cancelled
        (late,) = ask(queue, "ada", "c")
        for name in "ab":
            compiler.futures["ada", name].set_result("compiled")
        assert await asyncio.gather(*slow) == ["compiled"] * 2
        while ("ada", "c") not in compiler.futures and not late.done():
            await asyncio.sleep(0.001)
        compiler.futures["ada", "c"].set_result("compiled")
        assert await late == "compiled"

    asyncio.run(run())

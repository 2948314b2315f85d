"""Compiles the grammars of tenants in turn, so that one tenant's slow ones do not hold up another's.

generate() ──> compile ──> same tenant, same grammar: one wait for all
                              └──> Turns ──> GrammarCompiler, in a thread per place
"""

from __future__ import annotations

import asyncio
from collections import Counter

from octavo.engine.turns import Turns
from octavo.errors import OverloadedError
from octavo.grammar.compiler import NUM_SHARED_THREADS, PATIENCE, CompiledGrammar, GrammarCompiler
from octavo.structured_outputs import StructuredOutputsParams

_Key = tuple[str, StructuredOutputsParams]


class GrammarQueue:
    """Used only from the event loop.

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
                self._forget(key, task)  # at once, so that nobody joins what is being cancelled
                task.cancel()  # does nothing if it is done; otherwise all clients have left

    def _forget(self, key: _Key, task: asyncio.Task[CompiledGrammar]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _compile(self, wanted: StructuredOutputsParams, tenant: str) -> CompiledGrammar:
        try:
            await asyncio.wait_for(self._turns.take(tenant), self._patience)
        except TimeoutError:
            raise OverloadedError(
                f"structured_outputs.{wanted.kind} has waited {self._patience:g} s for other grammars to be compiled; "
                "try again later"
            ) from None
        compiling = asyncio.wrap_future(self._compiler.begin(wanted, tenant))
        # A grammar keeps its place until it is compiled, even if all clients have left.
        compiling.add_done_callback(lambda _: self._turns.give_back(tenant))
        return await asyncio.shield(compiling)

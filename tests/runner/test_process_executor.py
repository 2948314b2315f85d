"""Grammars compiled in a runner's process before a request that uses them is queued."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import Pipe
from typing import Any

import pytest

from octavo.errors import ExecutorError, RequestError
from octavo.runner.process_executor import GrammarLink, serve_grammars
from octavo.structured_outputs import StructuredOutputsParams

pytestmark = pytest.mark.integration

PATIENCE = 60.0


class ScriptedCompiler:
    """Compiles a grammar when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[StructuredOutputsParams, Future[Any]]] = []
        self.has_begun = threading.Semaphore(0)

    def begin(self, wanted: StructuredOutputsParams) -> Future[Any]:
        self.begun.append((wanted, Future()))
        self.has_begun.release()
        return self.begun[-1][1]


@pytest.fixture
def ends() -> Iterator[tuple[GrammarLink, ScriptedCompiler]]:
    ours, theirs = Pipe()
    link, compiler = GrammarLink(ours), ScriptedCompiler()
    serving = threading.Thread(target=serve_grammars, args=(theirs, compiler))
    serving.start()
    yield link, compiler
    link.close()
    serving.join(PATIENCE)
    assert not serving.is_alive()


def wanted(choice: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=[choice])


def test_a_grammar_is_compiled_once_it_is_there_whichever_was_first(ends: tuple[GrammarLink, ScriptedCompiler]) -> None:
    link, compiler = ends
    slow, quick = link.compile(wanted("slow")), link.compile(wanted("quick"))
    for _ in range(2):
        assert compiler.has_begun.acquire(timeout=PATIENCE)
    assert [each for each, _ in compiler.begun] == [wanted("slow"), wanted("quick")]
    compiler.begun[1][1].set_result(None)
    quick.result(PATIENCE)
    assert not slow.done()
    compiler.begun[0][1].set_exception(RequestError("nothing satisfies it"))  # the engine's process says so too
    slow.result(PATIENCE)


def test_whoever_waits_is_told_that_the_process_has_ended(ends: tuple[GrammarLink, ScriptedCompiler]) -> None:
    link, compiler = ends
    waiting = link.compile(wanted("a"))
    assert compiler.has_begun.acquire(timeout=PATIENCE)
    link.close()
    for future in (waiting, link.compile(wanted("b"))):
        with pytest.raises(ExecutorError, match="has ended"):
            future.result(PATIENCE)

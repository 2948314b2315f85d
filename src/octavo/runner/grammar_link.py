"""Lets a runner in another process compile grammars before a request that uses them is queued.

    engine's process                          runner's process
      GrammarCompiler ── number, grammar ──>    GrammarCompiler.begin, in its own threads
                      <── number ───────────

The grammars of a request could be compiled there when its first plan arrives. But then the step waits for it, and with
it all that run; here only the request waits.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection

from octavo.errors import ExecutorError
from octavo.grammar.compiler import CompiledGrammar, GrammarCompiler
from octavo.structured_outputs import StructuredOutputsParams


class GrammarLink:
    """The engine's end. Thread-safe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._numbers = count()
        self._begun: dict[int, Future[None]] = {}
        self._receiver: threading.Thread | None = None
        self._is_closed = False

    def compile(self, wanted: StructuredOutputsParams) -> Future[None]:
        """Start to compile a grammar there; the result is an `ExecutorError` if the process has ended."""
        future: Future[None] = Future()
        with self._lock:
            if self._receiver is None and not self._is_closed:
                self._receiver = threading.Thread(target=self._receive, name="octavo-grammar-link", daemon=True)
                self._receiver.start()
            number = next(self._numbers)
            self._begun[number] = future
            try:
                self._pipe.send((number, wanted))
            except (OSError, ValueError):
                self._fail()
        return future

    def close(self) -> None:
        """Ask the other end to close the pipe; grammars that are being compiled fail."""
        with self._lock, suppress(OSError, ValueError):
            self._is_closed = True
            self._fail()
            # Closing this end would not wake the thread that reads it.
            self._pipe.send(None)
            if self._receiver is None:
                self._pipe.close()

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number = self._pipe.recv()
                with self._lock:
                    future = self._begun.pop(number, None)
                if future is not None:
                    future.set_result(None)
        with self._lock:
            self._is_closed = True
            self._fail()
            self._pipe.close()

    def _fail(self) -> None:
        begun, self._begun = self._begun, {}
        for future in begun.values():
            future.set_exception(ExecutorError("the process that computes steps has ended"))


def serve_grammars(pipe: Connection, compiler: GrammarCompiler | None) -> None:
    """The runner's end, in a thread of its own: compile what is sent until the pipe is closed.

    Everything is answered, because a request waits for it. What cannot be compiled: the engine's process compiles the
    same, and says why. What a runner without a compiler of its own is sent: it is compiled with the first plan.
    """
    answering = threading.Lock()

    def answer(number: int, _: Future[CompiledGrammar]) -> None:
        with answering, suppress(OSError):
            pipe.send(number)

    with pipe, suppress(EOFError, OSError):
        while (sent := pipe.recv()) is not None:
            number, wanted = sent
            if compiler is None:
                pipe.send(number)
            else:
                compiler.begin(wanted).add_done_callback(partial(answer, number))

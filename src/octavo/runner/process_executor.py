"""An executor with its runner in a separate process, over pipes: plans and results on one, grammars on another.

    engine's process                          runner's process
      ProcessExecutor ── plan ──────────────>   ModelRunner
                      <── step, result|error ─
      GrammarLink ── number, grammar ────────>  GrammarCompiler.begin, in its own threads
                  <── number ─────────────────

The grammars of a request could be compiled there when its first plan arrives. But then the step waits for it, and with
it all that run; here only the request waits, before it is queued.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from octavo.errors import ExecutorError, OctavoError
from octavo.grammar.compiler import CompiledGrammar, GrammarCompiler
from octavo.runner.executor import Collect, Executor
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.structured_outputs import StructuredOutputsParams

_CLOSING_S = 10.0

T = TypeVar("T")


class ProcessExecutor(Executor, Generic[T]):
    """A runner in a separate process, over a pipe.

        engine's process                      runner's process (spawned)
          start ────────────────────────────>  build() ─> (runner, facts)
          facts() <── facts ─────────────────
          execute ──── plan ─────────────────> runner.execute(plan)
                  <─── (step, result|error) ──
          close ─────  end of the pipe ──────> runner.close(), exit

    The process ends when the pipe is closed, so an engine that dies leaves no process behind.

    Args:
        build: called in the new process; returns the runner, and picklable facts about it for the engine.

    Attributes:
        grammar_link: lets the runner compile grammars.
    """

    def __init__(self, build: Callable[[], tuple[Executor, T]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        ours, of_grammars = context.Pipe()
        self.grammar_link = GrammarLink(ours)
        self._process = context.Process(
            target=_serve,
            args=(theirs, of_grammars, build, logging.getLogger().getEffectiveLevel()),
            name="octavo-runner",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        of_grammars.close()

    @property
    def pid(self) -> int | None:
        """The id of the runner's process."""
        return self._process.pid

    def facts(self) -> T:
        """Return the facts from `build`; waits until it has finished, and raises what it raised."""
        try:
            facts: T = self._receive(None)
        except BaseException as error:
            self.close()
            if isinstance(error.__cause__, EOFError):
                raise ExecutorError(
                    f"{error} before its model was loaded: see what it logged; a script that starts it must do so "
                    "under `if __name__ == '__main__':`, because the new process imports that script"
                ) from error
            raise
        return facts

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`.

        Raises:
            ExecutorError: the process has died.
        """
        return self.launch(plan)()

    def launch(self, plan: StepPlan) -> Collect:
        """See `Executor.launch`: a plan made ahead waits in the pipe.

        Raises:
            ExecutorError: the process has died.
        """
        try:
            self._pipe.send(plan)
        except (OSError, ValueError) as error:
            raise self._died() from error

        def collect() -> StepResult:
            self.is_computing = True
            try:
                result: StepResult = self._receive(plan.step)
            finally:
                self.is_computing = False
            return result

        return collect

    def close(self) -> None:
        """End the process, by force if it does not exit by itself."""
        self.grammar_link.close()
        self._pipe.close()
        self._process.join(_CLOSING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self, step: int | None) -> Any:
        while True:
            try:
                answered, value, error = self._pipe.recv()
            except (EOFError, OSError) as lost:
                raise self._died() from lost
            # Skip answers to earlier steps, which the engine has abandoned.
            if answered == step:
                break
        if error is not None:
            raise error
        return value

    def _died(self) -> ExecutorError:
        self._process.join(1.0)
        return ExecutorError(f"the process that computes steps has ended, exit code {self._process.exitcode}")


def _serve(
    pipe: Connection, of_grammars: Connection, build: Callable[[], tuple[Executor, Any]], log_level: int
) -> None:
    """The main function of the runner's process."""
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Ctrl-C reaches every process of the terminal; ignore it here, because the engine's process closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runner, facts = build()
    except Exception as error:
        _answer(pipe, None, None, error)
        return
    threading.Thread(target=serve_grammars, args=(of_grammars, runner.grammars), daemon=True).start()
    _answer(pipe, None, facts, None)
    try:
        while True:
            plan: StepPlan = pipe.recv()
            try:
                result = runner.execute(plan)
            except Exception as error:
                _answer(pipe, plan.step, None, error)
            else:
                _answer(pipe, plan.step, result, None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        runner.close()


def _answer(pipe: Connection, step: int | None, value: Any, error: Exception | None) -> None:
    if error is not None and not isinstance(error, OctavoError):
        # Other exceptions may not be picklable, and would lose their traceback.
        told = "".join(traceback.format_exception(error)).rstrip()
        error = ExecutorError(f"{type(error).__name__} in the process that computes steps: {error}\n{told}")
    pipe.send((step, value, error))


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

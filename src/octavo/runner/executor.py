"""Executors of plans: the interface, and an implementation with its runner in a separate process.

engine ── StepPlan ──> executor ── StepResult ──> engine

    launch(t)   launch(t+1)   result of t   launch(t+2)   result of t+1 …     if plans are made ahead

ModelRunner          in the engine's process; the default
ProcessExecutor      a ModelRunner at the other end of a pipe
RecordingExecutor    either of them, with each plan and its duration written to a file (`runner/recording.py`)
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from octavo.errors import ExecutorError, OctavoError
from octavo.grammar.compiler import GrammarCompiler
from octavo.runner.grammar_link import GrammarLink, serve_grammars
from octavo.scheduler.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

_CLOSING_S = 10.0

T = TypeVar("T")

Collect = Callable[[], StepResult]
"""Waits for the result of a launched plan; raises like `Executor.execute`. Called at most once."""


class Executor(ABC):
    """Executes plans in order; keeps the state of sequences by id.

    Attributes:
        is_computing: whether the model is computing, which hardly needs the GIL. Other threads may read it.
    """

    is_computing = False

    @property
    def grammars(self) -> GrammarCompiler | None:
        """The compiler of grammars for structured outputs; None if no plan may use one."""
        return None

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Execute a plan.

        Raises:
            LogitsError: some logits are not a distribution; names the requests.
            Exception: anything else went wrong. After either, the next plan must have `reset` set.
        """

    def launch(self, plan: StepPlan) -> Collect:
        """Start executing a plan. Both this and the returned function may raise what `execute` raises.

        A plan made ahead may be launched before the result of the previous one is collected. Results are collected in
        the order of their plans, or not at all: if a plan has failed, a plan made ahead of its result is discarded.
        """
        result = self.execute(plan)
        return lambda: result

    def close(self) -> None:  # noqa: B027  most hold nothing that must be released
        """Release all resources; no plan may follow. May be called again."""


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

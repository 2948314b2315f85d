"""Who executes plans: the contract, and the implementation that keeps its runner in a process of its own.

engine ── StepPlan ──> executor ── StepResult ──> engine

    launch(t)   launch(t+1)   result of t   launch(t+2)   result of t+1 …     where plans are made ahead

ModelRunner          in the engine's process: the default
ProcessExecutor      a ModelRunner at the other end of a pipe
RecordingExecutor    either of them, each plan written to a file with its seconds (`runner/recording.py`)
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from octavo.errors import ExecutorError, OctavoError
from octavo.scheduler.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

_CLOSING_S = 10.0

T = TypeVar("T")

Collect = Callable[[], StepResult]
"""Waits for the result of a plan that was launched; raises as `Executor.execute` does. Called once at most."""


class Executor(ABC):
    """Carries out one plan after the other; keeps by id what they say of sequences.

    Attributes:
        is_computing: the model is at work, and hardly needs this process's interpreter. Other threads may read it.
    """

    is_computing = False

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a plan.

        Raises:
            LogitsError: names the requests whose logits make no distribution.
            Exception: anything else that went wrong. After either, only a plan that says `reset` may follow.
        """

    def launch(self, plan: StepPlan) -> Collect:
        """Begin to carry out a plan. It may raise what `execute` raises, or leave that to what it returns.

        A plan made ahead may be launched before the result of the one before it is collected. Results are collected in
        the order of their plans, or not at all: where a plan has failed, one that was made ahead of it is of no use.
        """
        result = self.execute(plan)
        return lambda: result

    def close(self) -> None:  # noqa: B027  most hold nothing that must be given up
        """Give up what it holds; no plan may follow. May be called again."""


class ProcessExecutor(Executor, Generic[T]):
    """A runner in a process of its own, over a pipe.

        engine's process                      runner's process (spawned)
          start ────────────────────────────>  build() ─> (runner, facts)
          facts() <── facts ─────────────────
          execute ──── plan ─────────────────> runner.execute(plan)
                  <─── (step, result|error) ──
          close ─────  end of the pipe ──────> runner.close(), exit

    The process ends when the pipe does, so none is left behind by an engine that dies.

    Args:
        build: called in the new process; makes the runner, and picklable facts about it that the engine needs.
    """

    def __init__(self, build: Callable[[], tuple[Executor, T]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, build, logging.getLogger().getEffectiveLevel()),
            name="octavo-runner",
            daemon=True,
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """Of the runner's process."""
        return self._process.pid

    def facts(self) -> T:
        """What `build` says of its runner; waits until it is there, and raises what it raised."""
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
        """End the process, by force where it does not end by itself."""
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
            # An answer to an earlier step is of one that was given up here while it was computed there.
            if answered == step:
                break
        if error is not None:
            raise error
        return value

    def _died(self) -> ExecutorError:
        self._process.join(1.0)
        return ExecutorError(f"the process that computes steps has ended, exit code {self._process.exitcode}")


def _serve(pipe: Connection, build: Callable[[], tuple[Executor, Any]], log_level: int) -> None:
    """The runner's process."""
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Ctrl-C reaches every process of the terminal: the engine's decides, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runner, facts = build()
    except Exception as error:
        _answer(pipe, None, None, error)
        return
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
        # Anything else may not survive pickling, and loses its traceback.
        told = "".join(traceback.format_exception(error)).rstrip()
        error = ExecutorError(f"{type(error).__name__} in the process that computes steps: {error}\n{told}")
    pipe.send((step, value, error))

"""An executor with its runner in a separate process, over a pipe."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from octavo.errors import ExecutorError, OctavoError
from octavo.runner.executor import Collect, Executor
from octavo.scheduler.plan import StepPlan, StepResult

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


def _serve(pipe: Connection, build: Callable[[], tuple[Executor, Any]], log_level: int) -> None:
    """The main function of the runner's process."""
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Ctrl-C reaches every process of the terminal; ignore it here, because the engine's process closes the pipe.
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
        # Other exceptions may not be picklable, and would lose their traceback.
        trace = "".join(traceback.format_exception(error)).rstrip()
        error = ExecutorError(f"{type(error).__name__} in the process that computes steps: {error}\n{trace}")
    pipe.send((step, value, error))

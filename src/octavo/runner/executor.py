"""Executors of plans: the interface, and one that records what another executes.

engine ── StepPlan ──> executor ── StepResult ──> engine

    launch(t)   launch(t+1)   result of t   launch(t+2)   result of t+1 …     if plans are made ahead

ModelRunner          in the engine's process; of several ranks, rank 0 (`runner/runner.py`)
RecordingExecutor    another executor, with each plan and its duration written to a file
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from octavo.errors import ExecutorError
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.plan_log import PlanLog

Collect = Callable[[], StepResult]
"""Waits for the result of a launched plan; raises like `Executor.execute`. Called at most once."""


class Executor(ABC):
    """Executes plans in order; keeps the state of sequences by id.

    Attributes:
        is_computing: whether the model is computing, which hardly needs the GIL. Other threads may read it.
    """

    is_computing = False

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

    def failure(self) -> str:
        """Return why no plan can be executed before a `restart`; empty if any can."""
        return ""

    def watch(self, on_failure: Callable[[], None]) -> None:  # noqa: B027  most never fail between two steps
        """Call `on_failure`, from another thread, when a `failure` arises while no plan is executed."""

    def restart(self) -> None:
        """Start again after a `failure`; all blocks have lost their keys and values. The next plan must have `reset`
        set.

        Raises:
            ExecutorError: it does not start.
        """
        raise ExecutorError("this executor cannot be restarted")

    def close(self) -> None:  # noqa: B027  most hold nothing that must be released
        """Release all resources; no plan may follow. May be called again."""


class RecordingExecutor(Executor):
    """Passes plans to another executor, and appends each that succeeds to a log with its duration.

    The duration of a plan launched while the previous one was being computed starts at the end of that one.
    """

    def __init__(self, executor: Executor, log: PlanLog) -> None:
        self.executor = executor
        self._log = log
        self._ended = 0.0  # when the last result arrived

    @property
    def is_computing(self) -> bool:  # type: ignore[override]  # it is only read
        """See `Executor`."""
        return self.executor.is_computing

    def failure(self) -> str:
        """See `Executor.failure`."""
        return self.executor.failure()

    def watch(self, on_failure: Callable[[], None]) -> None:
        """See `Executor.watch`."""
        self.executor.watch(on_failure)

    def restart(self) -> None:
        """See `Executor.restart`."""
        self.executor.restart()

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`."""
        began = time.perf_counter()
        result = self.executor.execute(plan)
        self._record(plan, began)
        return result

    def launch(self, plan: StepPlan) -> Collect:
        """See `Executor.launch`."""
        launched = time.perf_counter()
        collect = self.executor.launch(plan)

        def collect_and_record() -> StepResult:
            before = self._ended
            result = collect()
            self._record(plan, max(launched, before))
            return result

        return collect_and_record

    def _record(self, plan: StepPlan, began: float) -> None:
        self._ended = time.perf_counter()
        if plan:
            self._log.record(plan, began, self._ended - began)

    def close(self) -> None:
        """Close the executor and the log."""
        try:
            self.executor.close()
        finally:
            self._log.close()

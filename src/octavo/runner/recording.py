"""An executor that writes down what it executes."""

from __future__ import annotations

import time

from octavo.runner.executor import Executor
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.plan_log import PlanLog


class RecordingExecutor(Executor):
    """Lets another executor carry out plans, and appends each that succeeds to a log with the seconds it took."""

    def __init__(self, executor: Executor, log: PlanLog) -> None:
        self.executor = executor
        self._log = log

    @property
    def is_computing(self) -> bool:  # type: ignore[override]  # it is only read
        """See `Executor`."""
        return self.executor.is_computing

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`."""
        began = time.perf_counter()
        result = self.executor.execute(plan)
        if plan:
            self._log.record(plan, began, time.perf_counter() - began)
        return result

    def close(self) -> None:
        """Close the executor and the log."""
        try:
            self.executor.close()
        finally:
            self._log.close()

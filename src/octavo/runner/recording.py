"""An executor that records what it executes."""

from __future__ import annotations

import time

from octavo.runner.executor import Collect, Executor
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.plan_log import PlanLog


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

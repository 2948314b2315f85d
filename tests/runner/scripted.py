"""Executors that do as a plan's first token says; importable by a process that has no torch."""

from __future__ import annotations

import os
import signal
import time

from octavo.errors import LogitsError, ModelNotFoundError
from octavo.request import SequenceId
from octavo.runner.executor import Executor
from octavo.scheduler.plan import StepPlan, StepResult

FAIL, UNUSABLE, DIE, SLOW, UNPICKLABLE = 1, 2, 3, 4, 5


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.lock = open(os.devnull)  # noqa: SIM115


class ScriptedExecutor(Executor):
    """Gives each step's number as its token."""

    def execute(self, plan: StepPlan) -> StepResult:
        match plan.token_ids[0]:
            case 1:
                raise ValueError("secret insides")
            case 2:
                raise LogitsError(["a", "b"])
            case 3:
                os._exit(7)
            case 4:
                os.kill(os.getppid(), signal.SIGALRM)  # it waits for this step
                time.sleep(0.5)
            case 5:
                raise UnpicklableError(1, 2)
        return StepResult((plan.step,))


def build() -> tuple[Executor, dict[str, int]]:
    return ScriptedExecutor(), {"pid": os.getpid()}


def build_nothing() -> tuple[Executor, None]:
    raise ModelNotFoundError("there is no such model")


def plan(step: int, token: int = 0) -> StepPlan:
    return StepPlan(step, (SequenceId(1),), (0,), (1,), (1,), (token,))


def build_and_die() -> tuple[Executor, None]:
    os._exit(9)

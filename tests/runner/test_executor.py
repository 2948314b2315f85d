"""A runner in a process of its own: what fails there is known here, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from octavo.errors import ExecutorError, LogitsError, ModelNotFoundError
from octavo.runner.process_executor import ProcessExecutor
from octavo.scheduler.plan import StepResult
from tests.runner import scripted

pytestmark = pytest.mark.integration


@pytest.fixture
def executor() -> Iterator[ProcessExecutor[dict[str, int]]]:
    executor = ProcessExecutor(scripted.build)
    yield executor
    executor.close()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is left behind"
        time.sleep(0.02)


def test_plans_go_there_and_results_come_back(executor: ProcessExecutor[dict[str, int]]) -> None:
    facts = executor.facts()
    assert facts == {"pid": executor.pid}
    assert facts["pid"] != os.getpid()
    assert [executor.execute(scripted.plan(step)) for step in (1, 2)] == [StepResult((1,)), StepResult((2,))]


def test_a_failure_there_is_a_failure_here_and_the_next_step_is_computed(
    executor: ProcessExecutor[dict[str, int]],
) -> None:
    executor.facts()
    ahead = [executor.launch(scripted.plan(step, token)) for step, token in ((-2, 0), (-1, scripted.FAIL), (0, 0))]
    assert ahead[0]().token_ids == (-2,)
    with pytest.raises(ExecutorError, match="secret insides"):
        ahead[1]()
    # The answer to the third plan is passed over: whoever was told of the failure gives it up.
    with pytest.raises(LogitsError, match="a, b are NaN") as unusable:
        executor.execute(scripted.plan(1, scripted.UNUSABLE))
    assert unusable.value.request_ids == ["a", "b"]
    with pytest.raises(ExecutorError, match=r"ValueError in the process .*: secret insides\nTraceback"):
        executor.execute(scripted.plan(2, scripted.FAIL))
    with pytest.raises(ExecutorError, match="UnpicklableError in the process that computes steps: 1 and 2"):
        executor.execute(scripted.plan(3, scripted.UNPICKLABLE))
    assert executor.execute(scripted.plan(4)).token_ids == (4,)


def test_its_death_is_an_error_at_once_and_for_every_step_after(executor: ProcessExecutor[dict[str, int]]) -> None:
    executor.facts()
    for step in (1, 2):
        with pytest.raises(ExecutorError, match="has ended, exit code 7"):
            executor.execute(scripted.plan(step, scripted.DIE))


def test_the_answer_to_an_interrupted_step_is_not_taken_for_the_next(
    executor: ProcessExecutor[dict[str, int]],
) -> None:
    executor.facts()
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        with pytest.raises(KeyboardInterrupt):
            executor.execute(scripted.plan(1, scripted.SLOW))
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert executor.execute(scripted.plan(2)).token_ids == (2,)


def test_what_cannot_be_built_there_is_raised_here() -> None:
    executor = ProcessExecutor(scripted.build_nothing)
    with pytest.raises(ModelNotFoundError, match="no such model"):
        executor.facts()
    assert executor.pid is not None
    assert_ends(executor.pid)


def test_a_process_that_dies_while_it_loads_says_so_and_what_scripts_must_do() -> None:
    executor = ProcessExecutor(scripted.build_and_die)
    with pytest.raises(ExecutorError, match=r"exit code 9 before its model was loaded: .*if __name__ == '__main__'"):
        executor.facts()


def test_closing_ends_the_process_and_may_be_done_again(executor: ProcessExecutor[dict[str, int]]) -> None:
    pid = executor.facts()["pid"]
    executor.close()
    assert not is_alive(pid)
    executor.close()
    with pytest.raises(ExecutorError, match="has ended"):
        executor.execute(scripted.plan(1))


def test_an_engine_that_is_killed_leaves_no_process_behind() -> None:
    """Not even time to say goodbye: the end of the pipe ends the runner."""
    engine = (
        "from tests.runner import scripted; from octavo.runner.process_executor import ProcessExecutor; import os\n"
    )
    engine += "if __name__ == '__main__':\n"
    engine += "    print(ProcessExecutor(scripted.build).facts()['pid'], flush=True); os.kill(os.getpid(), 9)"
    told = subprocess.run([sys.executable, "-c", engine], capture_output=True, text=True, timeout=600, check=False)
    assert told.returncode == -signal.SIGKILL
    assert_ends(int(told.stdout))

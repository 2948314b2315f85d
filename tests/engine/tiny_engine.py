"""Engines over a tiny random model, small enough that a step takes less than a millisecond."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.builder import build_engine
from octavo.engine.core import EngineCore
from octavo.request import SequenceId
from tests.conftest import assert_idle, swapping_is_cheaper, without_deadlines
from tests.models.tiny import write_hf_model

VOCAB_SIZE = 320
MAX_MODEL_LEN = 1024
NUM_BLOCKS = 1024
# An embedding that `poison` makes NaN, so that whatever has read this token has no logits to sample from.
POISON = VOCAB_SIZE - 1


@cache
def tiny_model() -> Path:
    """A float32 Llama with a tokenizer and a chat template."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_hf_model(folder, "Llama", tokenizer=True, max_position_embeddings=MAX_MODEL_LEN)
    return folder


@contextmanager
def tiny_core(**options: Any) -> Iterator[EngineCore]:
    """An engine that computes in one thread: a second one would only wait."""
    threads = torch.get_num_threads()
    defaults = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "max_num_seqs": 64, "num_threads": 1}
    defaults["limits"] = {"max_grammar_ms": 60_000}  # a busy machine may take long over any
    config = EngineConfig.from_options({"model": str(tiny_model()), **defaults, **options})
    try:
        with swapping_is_cheaper():
            core = without_deadlines(build_engine(config))
        yield core
    finally:
        torch.set_num_threads(threads)


def poison(core: EngineCore) -> None:
    core.runner.model._embedding[POISON] = float("nan")  # type: ignore[attr-defined]


def slow_down(core: EngineCore, seconds: float) -> Callable[[], None]:
    """Let every step take that much longer, until what is returned is called."""
    execute = core.runner.execute

    def slowly(plan: Any) -> Any:
        time.sleep(seconds)
        return execute(plan)

    def hurry() -> None:
        core.runner.execute = execute

    core.runner.execute = slowly
    return hurry


class step_for_news:  # noqa: N801
    """Let a step wait until its engine is sent a message or stopped, unless it is the first of a sequence.

    What runs so goes on running for as long as a test takes, however slow the machine is, until this is called.

    Attributes:
        is_waiting: whether a step waits.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.is_waiting = False
        self._engine = engine
        self._seen: set[SequenceId] = set()
        self._is_free = threading.Event()
        self._execute = engine.core.runner.execute
        engine.core.runner.execute = self._wait_and_execute

    def __call__(self) -> None:
        self._is_free.set()
        self._engine.core.runner.execute = self._execute

    def _wait_and_execute(self, plan: Any) -> Any:
        is_first = not self._seen.issuperset(plan.seq_ids)
        self._seen.update(plan.seq_ids)
        while not (is_first or self._engine._inbox or self._engine._stopping):
            self.is_waiting = True
            if self._is_free.wait(0.001):
                break
        self.is_waiting = False
        return self._execute(plan)


def break_after(core: EngineCore, steps: int) -> None:
    """Let the step after `steps` more steps raise."""
    execute, last = core.runner.execute, core.stats.num_steps + steps

    def breaking(plan: Any) -> Any:
        if core.stats.num_steps >= last:
            raise RuntimeError("secret insides")
        return execute(plan)

    core.runner.execute = breaking


def is_drained(core: EngineCore) -> bool:
    """Nothing runs or waits, as far as the engine and its statistics say."""
    return not core.has_work and core.scheduler.num_running == core.scheduler.num_waiting == 0


def assert_drained(core: EngineCore) -> None:
    """No request is left, no block is held, and the accounting is proven. Only while the engine is idle."""
    assert_idle(core)
    assert is_drained(core)
    assert core.stats.gauges().kv_usage == 0

"""Engines for tests: small, quick to make, and held to account when their test is over."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from octavo.kvcache.block import BlockState
from octavo.kvcache.holdings import RestoreCost
from octavo.scheduler.preemption import Preemption
from tests.redis_server import HOW, PROGRAM, RedisServer

if TYPE_CHECKING:  # it imports torch, which half of the tests do without
    from octavo.engine.core import EngineCore
    from octavo.runner.runner import ModelRunner

# A third of the time to import and collect the tests would be spent on looking for garbage, of which there is none.
gc.disable()
# The tests run in several processes, each with a core of its own: further threads would take turns on those of others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU, Triton's kernels run in its interpreter, if this is set before anything imports triton.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Tests start hundreds of processes, which take half as long to import modules that are compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# By itself hypothesis fails a test whose examples, or whose data, take it longer than it expects of a quick machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The inner loop tries a fifth of the examples, of tests with a number of their own too.
settings.register_profile("quick", settings.get_profile("any machine"), max_examples=20)
settings.load_profile(os.environ.get("TEST_EXAMPLES", "any machine"))

# Servers that the tests start inherit what is ignored, and a shell ignores both in what it starts in the background.
for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)

MakeLLM = Callable[..., Any]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TEST_EXAMPLES") != "quick":
        return
    for item in items:
        function = getattr(item, "obj", None)
        if (own := getattr(function, "_hypothesis_internal_use_settings", None)) is not None and own.max_examples > 20:
            function._hypothesis_internal_use_settings = settings(own, max_examples=max(20, own.max_examples // 5))


def pytest_collection_finish() -> None:
    """A million objects of imported modules and collected tests stay: no garbage collection looks at them again."""
    gc.freeze()
    gc.enable()
    # Torch has some 40 loggers that do not propagate, and pytest adds a handler to each such logger six times a test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test draws the same numbers, fixtures included, whichever tests ran before it in its process."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        # `torch.manual_seed` formats a stack trace for each other device, and keeps it until that device is used.
        torch.default_generator.manual_seed(0)


def runner_of(core: EngineCore) -> ModelRunner:
    """The runner of an engine that has it in its own process."""
    from octavo.runner.runner import ModelRunner

    assert isinstance(core.runner, ModelRunner)
    return core.runner


def assert_idle(core: EngineCore) -> None:
    """Nothing waits, nothing runs, nobody holds a block, and every count is right."""
    scheduler = core.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, list(scheduler.live)) == (0, 0, [])
    assert not scheduler.kv.audit()[BlockState.ACTIVE]
    assert not len(scheduler.kv.holdings), "a finished sequence is remembered"
    assert not core.outputs._tracked, "a finished request is remembered"


class SwappingIsCheaper(Preemption):
    """Swaps everybody, whatever is measured."""

    def swapping_is_cheaper(self, cost: RestoreCost) -> bool:
        return True


def swapping_is_cheaper() -> AbstractContextManager[Any]:
    """Engines made meanwhile swap every preempted sequence, however long computing and moving blocks takes."""
    return patch("octavo.scheduler.assembly.Preemption", SwappingIsCheaper)


def without_deadlines(core: EngineCore) -> EngineCore:
    """No load from a store is late, and closing waits for every write, however slow the machine is."""
    if core.tiers is not None:
        core.tiers._clock = lambda: 0.0
        core.tiers.close = partial(core.tiers.close, 120.0)
        for store in core.tiers.stores:
            store._clock = lambda: 0.0
    return core


@pytest.fixture
def restore_kernels() -> Iterator[None]:
    """The instruction-set level and the threads that a test leaves are those it found."""
    from octavo import kernels

    level, threads = kernels.isa(), kernels.num_threads()
    yield
    kernels.force_isa(level)
    kernels.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A Redis server for all tests of a session; those that want it empty take `redis_server`."""
    if PROGRAM is None:
        pytest.skip(f"prefixes in Redis (--kv-remote) are not tested: {HOW}")
    server = RedisServer(timeout_s=60)  # a busy machine may be slower than the default allows
    yield server
    server.close()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A running, empty Redis server."""
    import redis

    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Makes `LLM`s in float32 on one thread; at the end of the test each must be idle."""
    import torch

    from octavo.llm import LLM

    made: list[LLM] = []

    def make(model: Path | str, **options: Any) -> LLM:
        # A second thread would only wait: these models are tiny, or the machine is busy with other tests.
        small = {"dtype": "float32", "device": "cpu", "num_threads": 1, "kv_cache_memory": "64MiB"}
        small["limits"] = {"max_grammar_ms": 60_000}  # a busy machine may take long over any
        with swapping_is_cheaper():
            made.append(LLM(str(model), **{**small, **options}))
        without_deadlines(made[-1].core)
        return made[-1]

    threads = torch.get_num_threads()
    yield make
    torch.set_num_threads(threads)
    for llm in made:
        assert_idle(llm.core)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, 320 tokens, 256 positions, with a tokenizer and a chat template."""
    from tests.models.tiny import write_hf_model

    folder = tmp_path_factory.mktemp("tiny_llama")
    write_hf_model(folder, "Llama", tokenizer=True)
    return folder


@pytest.fixture(scope="session")
def tiny_mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a Mistral with a sliding window of nine tokens."""
    from tests.models.tiny import write_hf_model

    folder = tmp_path_factory.mktemp("tiny_mistral")
    write_hf_model(folder, "Mistral", tokenizer=True, sliding_window=9)
    return folder

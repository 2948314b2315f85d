"""The ranks of a model that are processes of this machine: this one is rank 0, and starts the others.

    rank 0                                     rank 1 … (`engine/rank.py`)
      start     ──── RankJob ────────────────>   load its share of the weights
      loaded    <─── bytes of its weights ────
      begin     ──── numbers of blocks ──────>   allocate its share of the cache, and of host memory
                <─── ready ──────────────────
      a step    ──── shared memory ──────────>   compute, in C++ (`csrc/rank_steps.h`)

With several machines (`machines.py`), the first rank of each starts those of its machine.

The other ranks run no Python once they have begun. They end with the thread that has started them, hence with this
process, however it ends; the memory that ranks share has no name, and ends with them.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.errors import ConfigError, ExecutorError
from octavo.helper_process import HelperEndedError, HelperProcess, HelperTooSlowError
from octavo.kernels import rank_memory, ranks
from octavo.kvcache.spec import KVCacheSpec
from octavo.runner.machines import Machines
from octavo.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from octavo import _native

logger = logging.getLogger(__name__)

ANSWER_S = 60.0
"""How long a rank waits for another within a step. A product, which is what another may be busy with, takes seconds."""

RESTARTED_AFTER_S = 60.0
"""How long a rank must have lived to be restarted while nothing runs. Else the next request does that, so that ranks
which cannot live are not loaded again and again."""

_LOADING_S = 3600.0
_BEGINNING_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """Everything a rank needs to load its share of a model.

    Attributes:
        rank: its number among those of all machines.
        spec: its share of the KV cache.
        dtype: torch's name of the dtype of weights and activations.
        file: descriptor of the memory that ranks share.
        cpus: the CPUs of its NUMA nodes, on which its threads run.
        memory: bytes of that memory for messages, for each register, and for logits.
    """

    config: EngineConfig
    rank: int
    spec: KVCacheSpec
    dtype: str
    num_threads: int
    file: int
    memory: tuple[int, int, int]
    log_level: int
    cpus: frozenset[int]

    def join(self) -> _native.Ranks:
        return ranks(self.file, *self.memory, self.rank, self.config.num_ranks, self.config.nnodes, ANSWER_S)


class RankGroup:
    """The other ranks of this machine, the memory that all share, and the other machines.

    Args:
        jobs: the job of each rank of this machine, without `file`.
        description: must be equal on all machines.

    Attributes:
        native: the first rank's side of the shared memory.
        on_failure: called in another thread when a rank has ended or a machine is lost.
    """

    def __init__(self, jobs: Sequence[RankJob], description: str) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("tensor_parallel_size needs anonymous shared memory, which only Linux has")
        self._file = os.memfd_create("octavo-ranks")
        os.ftruncate(self._file, rank_memory(*jobs[0].memory))
        self._jobs = [replace(job, file=self._file) for job in jobs]
        self.native = self._jobs[0].join()
        self.on_failure: Callable[[], None] = lambda: None
        self._processes: list[HelperProcess] = []
        self._waiting: list[threading.Thread] = []
        self._began_at = math.inf
        self._blocks = (0, 0)
        self._description = description
        config = jobs[0].config
        self._machines = Machines(config, ANSWER_S) if config.nnodes > 1 else None
        if self._machines is not None:
            self.native.set_link(*self._machines.link)
        self._start()

    def _start(self) -> None:
        started: list[Future[HelperProcess]] = []
        for job in self._jobs[1:]:
            started.append(Future())
            name = f"octavo-rank-{job.rank}"
            self._waiting.append(threading.Thread(target=self._run, args=(job, started[-1]), name=name, daemon=True))
            self._waiting[-1].start()
        self._processes = [process.result() for process in started if process.exception() is None]
        for process in started:
            process.result()  # raises what starting it raised
        if self._machines is not None:
            self._machines.join()

    def _run(self, job: RankJob, started: Future[HelperProcess]) -> None:
        """Start a rank and wait for its end; it is killed when the thread that started it ends."""
        try:
            process = HelperProcess(
                "octavo.engine.rank", first=[pickle.dumps(job)], files=[job.file], start_seconds=_LOADING_S
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        code = process.wait()
        self._fail(f"rank {job.rank} (process {process.pid}) has ended, exit code {code}")

    def _fail(self, reason: str) -> None:
        self.native.fail(reason)
        if self._jobs[0].rank > 0 and self._began_at < math.inf:
            logger.error("%s", reason)
            os._exit(1)  # the first rank waits for machine 0, however long that takes
        if time.monotonic() - self._began_at > RESTARTED_AFTER_S:
            self.on_failure()

    def use_threads(self, count: int) -> int:
        """Set the number of threads with which each rank of this machine computes the next step; returns it."""
        self.native.num_threads = count
        return count

    @property
    def failure(self) -> str:
        """Why no more steps can be computed; empty if they can."""
        return self.native.failure

    def loaded(self) -> int:
        """Wait until the other ranks of this machine have loaded their weights, and return the bytes of these.

        Raises:
            ExecutorError: one of them has failed.
        """
        total = 0
        for rank, process in self._numbered():
            try:
                process.wait_until_ready()
            except ChildProcessError as error:
                raise ExecutorError(f"rank {rank} could not load its share of the model: see what it logged") from error
            assert process.ready is not None
            total += int.from_bytes(process.ready, "little")
        return total

    def agree(self, num_blocks: int, num_host_blocks: int) -> tuple[int, int]:
        """Return the numbers of blocks that every machine has room for; raises `ExecutorError` or `ConfigError`."""
        if self._machines is not None:
            num_blocks, num_host_blocks = self._machines.agree(self._description, (num_blocks, num_host_blocks))
        return num_blocks, num_host_blocks

    def begin(self, num_blocks: int, num_host_blocks: int) -> None:
        """Let the other ranks allocate their share of these blocks, and wait for steps; raises `ExecutorError`."""
        self._blocks = num_blocks, num_host_blocks
        for rank, process in self._numbered():
            try:
                process.ask(_BEGINNING_S, [pickle.dumps(self._blocks)])
            except (HelperEndedError, HelperTooSlowError, ChildProcessError) as error:
                raise ExecutorError(f"rank {rank} could not allocate its share of the cache: see its log") from error
        self._began_at = time.monotonic()
        if self._machines is not None:
            self._machines.watch(self._fail)

    def _numbered(self) -> Iterator[tuple[int, HelperProcess]]:
        return enumerate(self._processes, start=self._jobs[0].rank + 1)

    def copy_blocks(self, plan: StepPlan) -> None:
        """Do a plan's transfers in the other ranks, in order."""
        if plan.stores:
            self.native.copy(False, True, [(swap.device, swap.host) for swap in plan.stores])
        if plan.copies:
            self.native.copy(False, False, list(plan.copies))
        if plan.loads:
            self.native.copy(True, False, [(swap.host, swap.device) for swap in plan.loads])

    def restart(self) -> None:
        """Start the other ranks again, with nothing in their caches; raises `ExecutorError`."""
        self._end()
        self.native.reset()
        self._start()
        self.loaded()
        if (room := self.agree(*self._blocks)) != self._blocks:
            raise ExecutorError(f"a machine that has started again has room for {room} blocks, not {self._blocks}")
        self.begin(*self._blocks)

    def close(self) -> None:
        """End the other ranks; may be called again."""
        self._end()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _end(self) -> None:
        self._began_at = math.inf
        if self._machines is not None:
            self._machines.leave()
        for process in self._processes:
            process.close()
        for thread in self._waiting:
            thread.join()  # it reports the end of its process, which must not reach the next group
        self._processes, self._waiting = [], []

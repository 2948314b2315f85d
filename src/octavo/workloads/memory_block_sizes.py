"""Compare block sizes at one memory budget: concurrent sequences, wasted memory and throughput.

All requests are queued at once, so that memory is the limit until the queue is empty. The contiguous baseline is the
block size "max": one block of `max_model_len` tokens for each sequence, as engines reserved before paging (the
PagedAttention paper's "Orca (Max)"). Every block size gets the same number of bytes for blocks of sequences, and the
null block in addition.

The scheduler, the manager and the prefix cache are those used for serving. Steps are computed by the engine's runner
(`real_engine`), or only take an assumed time (`simulated_engine`); in the latter case memory figures are exact, and
times follow from `StepTimes`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.planner.calculator import PoolSize, counted_dtype
from octavo.planner.model_shape import ModelShape
from octavo.planner.roofline import StepTimes, without_overlap
from octavo.planner.sizing import UNLIMITED, Sizing
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepResult
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepLoad
from octavo.workloads.memory_usage import MemoryObserver
from octavo.workloads.workload import FIRST_TOKEN_ID, BenchRequest

BlockSize = int | Literal["max"]

CONTIGUOUS: Literal["max"] = "max"


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """The KV memory that every block size of one comparison gets.

    Attributes:
        sizing: the sizes of an engine with these options, whatever its block size.
        num_bytes: bytes for blocks of sequences.
    """

    sizing: Sizing
    num_bytes: int

    @classmethod
    def build(cls, shape: ModelShape, config: EngineConfig, contiguous_seqs: int) -> CacheBudget:
        """Return the budget of an engine's options; without kv_cache_memory, what `contiguous_seqs` sequences reserve.

        Raises:
            ConfigError: max_model_len exceeds the model's, or the memory does not hold one contiguous sequence.
        """
        max_model_len = config.max_model_len or min(shape.config.max_position_embeddings, 2048)
        sizing = Sizing(
            config=config.replace(max_model_len=max_model_len),
            shape=shape,
            dtype=counted_dtype(config.dtype),
            available=UNLIMITED,
            cache_share=1.0,
        )
        one = cls(sizing, 0).contiguous_bytes
        given = config.kv_cache_memory
        num_bytes = given if isinstance(given, int) else contiguous_seqs * one
        if num_bytes < one:
            raise ConfigError(
                f"{num_bytes} bytes are too few for one contiguous sequence of {max_model_len} tokens, which takes "
                f"{one}: raise --kv-cache-memory or lower --max-model-len"
            )
        return cls(sizing, num_bytes)

    @property
    def max_model_len(self) -> int:
        """The maximum length of prompt and output, which the contiguous baseline reserves."""
        return self.sizing.max_model_len

    @property
    def contiguous_bytes(self) -> int:
        """The bytes of a sequence of the contiguous baseline."""
        spec = self.sized(CONTIGUOUS).spec
        return len(spec.groups) * spec.block_bytes

    @property
    def contiguous_seqs(self) -> int:
        """The number of sequences that the contiguous baseline holds at once."""
        return self.num_bytes // self.contiguous_bytes

    def sized(self, block_size: BlockSize) -> Sizing:
        """Return the sizes of an engine with this block size."""
        return replace(self.sizing, config=self.sizing.config.replace(block_size=block_size))

    def pool(self, block_size: BlockSize) -> PoolSize:
        sizing = self.sized(block_size)
        return sizing.pool_within(self.num_bytes + sizing.spec.block_bytes)


class SimulatedEngine:
    """The real scheduler and cache over a runner that computes nothing."""

    def __init__(self, scheduler: Scheduler, times: StepTimes) -> None:
        self.scheduler = scheduler
        self._times = times
        self._ids = itertools.count()

    def add(self, request: BenchRequest) -> Request:
        """Queue a request, which ignores end-of-sequence tokens."""
        params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
        number = next(self._ids)
        queued = Request(RequestId(f"bench-{number}"), request.prompt_token_ids, params, arrival_time=float(number))
        self.scheduler.add(queued)
        return queued

    def step(self) -> float:
        """Compute one step, and return its duration in seconds."""
        plan = self.scheduler.schedule()
        moved = len(plan.stores) + len(plan.loads)
        seconds = self._times.predict(StepLoad.of(plan.starts, plan.lengths), moved)
        self.scheduler.update(plan, StepResult((FIRST_TOKEN_ID,) * len(self.scheduler.drawing)))
        return seconds


class RealEngine:
    """A loaded model; only its steps are timed."""

    def __init__(self, llm: Any) -> None:
        self._core = llm.core
        self.scheduler: Scheduler = llm.core.scheduler

    def add(self, request: BenchRequest) -> Request:
        """See `SimulatedEngine.add`."""
        from octavo.engine.outputs import OutputKind

        params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        queued: Request = self._core.inputs.make(request.prompt_token_ids, params)
        self._core.add(queued, kind=OutputKind.FINAL)
        return queued

    def step(self) -> float:
        """See `SimulatedEngine.step`."""
        began = time.perf_counter()
        self._core.step()
        return time.perf_counter() - began


BenchEngine = SimulatedEngine | RealEngine


def simulated_engine(
    budget: CacheBudget, block_size: BlockSize, config: EngineConfig, gb_s: float, gflop_s: float
) -> SimulatedEngine:
    """Return an engine on a simulated device that reads `gb_s` GB and does `gflop_s` GFLOP per second."""
    sizing, pool = budget.sized(block_size), budget.pool(block_size)
    kv = assemble_cache(config, sizing.spec, pool.num_blocks, num_host_blocks=sizing.num_host_blocks(pool))
    times = without_overlap(sizing.shape, sizing.spec, sizing.dtype, gb_s, gflop_s)
    speed = Preemption(times.product_seconds(1), times.per_moved_block)
    return SimulatedEngine(assemble_scheduler(config, kv, budget.max_model_len, preemption=speed), times)


@contextmanager
def real_engine(budget: CacheBudget, block_size: BlockSize, options: Mapping[str, Any]) -> Iterator[RealEngine]:
    """Load a model with the budget's cache, warmed up by two short requests.

    Raises:
        ConfigError: the model's keys and values are not of the budget's dtype.
    """
    from octavo import LLM

    num_blocks = budget.pool(block_size).num_blocks
    sized = {"max_model_len": budget.max_model_len, "block_size": block_size, "num_blocks": num_blocks}
    with LLM(**{**options, **sized}) as llm:
        spec = llm.core.scheduler.kv.spec
        if spec != budget.sized(block_size).spec:
            kv_dtype = budget.sizing.kv_dtype
            raise ConfigError(f"this model's cache is in {spec.dtype}, not {kv_dtype}: give --dtype {spec.dtype}")
        engine = RealEngine(llm)
        play(engine, [BenchRequest([1, 2, 3, 4], 4)] * 2, budget)
        llm.reset_prefix_cache()
        yield engine


@dataclass(frozen=True, slots=True)
class Played:
    """The result of one workload on one engine.

    Attributes:
        usage: see `MemoryObserver.usage`.
        seconds: total time of all steps.
        cached_tokens: prompt tokens found in the prefix cache.
        recomputed_tokens: tokens that were computed again because of a preemption.
    """

    usage: dict[str, Any]
    seconds: float
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    recomputed_tokens: int

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.seconds


def play(engine: BenchEngine, requests: Sequence[BenchRequest], budget: CacheBudget) -> Played:
    """Run every request to completion, all queued at once, and observe the cache after every step."""
    scheduler = engine.scheduler
    observer = MemoryObserver(scheduler, budget.num_bytes)
    preemptions, recomputed = scheduler.counters.num_preemptions, scheduler.counters.recomputed_tokens
    queued = [engine.add(request) for request in requests]
    for request in queued:
        observer.watch(request)
    seconds, steps = 0.0, 0
    while scheduler.has_work:
        took = engine.step()
        observer.observe(took)
        seconds, steps = seconds + took, steps + 1
    return Played(
        usage=observer.usage(),
        seconds=seconds,
        steps=steps,
        prompt_tokens=sum(len(request.prompt_token_ids) for request in queued),
        cached_tokens=sum(request.num_cached_tokens or 0 for request in queued),
        output_tokens=sum(seq.num_output_tokens for request in queued for seq in request.sequences),
        preemptions=scheduler.counters.num_preemptions - preemptions,
        recomputed_tokens=scheduler.counters.recomputed_tokens - recomputed,
    )

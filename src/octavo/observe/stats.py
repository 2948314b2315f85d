"""The engine's statistics: plain numbers, so that counting costs the step loop next to nothing.

`EngineStats` counts what happens to requests; what the scheduler and the cache count themselves is read from them, as
`Gauges`. Only the step loop's thread writes; any thread may read. A reader can see one field a step ahead of another,
which does not matter for a scrape. `observe/metrics.py` turns these numbers into Prometheus' format.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.kvcache.block import BlockState
from octavo.kvcache.host_memory import HostCounters
from octavo.observe.tenant_queues import TenantQueues
from octavo.observe.tracing import RequestTracer
from octavo.request import CacheOutcome, FinishReason, Request, RequestId
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.speculation import SpeculationCounters
from octavo.scheduler.waiting import Fetching
from octavo.tiers.base import LATENCY_BOUNDS
from octavo.tiers.store import Store

# Upper bounds in seconds, the same as vLLM's, so that its dashboards fit.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
# vLLM's begin at 0.01; the first three are added because small models on a GPU stay below that.
INTER_TOKEN_LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)

STEP_TOKENS_BUCKETS = (1.0, *(8.0 * 2**power for power in range(12)))
COMPLETIONS_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def one_two_five_buckets(maximum: int) -> tuple[float, ...]:
    """Return vLLM's buckets of token counts: 1, 2, 5, 10, 20, 50, … up to `maximum`."""
    bounds: list[float] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > maximum:
                return tuple(bounds)
            bounds.append(float(mantissa * power))
        power *= 10


class Histogram:
    """Counts observations by fixed upper bounds.

    bounds:      0.1      0.5      1.0
    counts:  [0]  |   [1]  |   [2]  |  [3]       value <= bounds[i] falls into counts[i] or an earlier one
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Figures of the scheduler and the cache at one moment.

    Attributes:
        num_fetching: number of the waiting requests whose prefix is being loaded from a store.
        num_swapped: number of the waiting sequences whose blocks are in host memory.
        kv_usage: share of blocks in use, 0 to 1.
        kv_bytes: bytes of the pool by state, which add up to the whole.
        swapped_bytes: bytes of preempted sequences in host memory.
        num_preemptions, deferred_tokens, evicted_blocks, swapped_out_bytes, swapped_in_bytes: totals since the start.
        speculation: counts of drafts; None without speculative decoding.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_fetching: int = 0
    num_swapped: int = 0
    kv_usage: float = 0.0
    kv_bytes: dict[BlockState, int] = field(default_factory=dict)
    swapped_bytes: int = 0
    num_preemptions: int = 0
    deferred_tokens: int = 0
    evicted_blocks: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    speculation: SpeculationCounters | None = None

    @classmethod
    def of(cls, scheduler: Scheduler) -> Gauges:
        """Read the present values, from any thread. O(1)."""
        kv, counters, size = scheduler.kv, scheduler.counters, scheduler.kv.spec.block_bytes
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_fetching=0 if scheduler.fetching is None else len(scheduler.fetching),
            num_swapped=scheduler.num_swapped,
            kv_usage=kv.usage,
            kv_bytes=kv.bytes_by_state(),
            swapped_bytes=kv.hierarchy.num_kept * size,
            num_preemptions=counters.num_preemptions,
            deferred_tokens=counters.num_deferred_tokens,
            evicted_blocks=kv.evicted.count,
            swapped_out_bytes=kv.hierarchy.swapped.blocks_out * size,
            swapped_in_bytes=kv.hierarchy.swapped.blocks_in * size,
            speculation=None if scheduler.speculator is None else scheduler.speculator.counters,
        )


class EngineStats:
    """The counters and histograms of one engine, since its start. Times are in seconds.

    Attributes:
        gauges: reads what the scheduler and the cache count themselves.
        tracer: makes the requests' traces; None if tracing is off.
        hung_step_seconds: how long the current step has hung, as last seen by the watchdog; None if it has not.
        waiting: requests waiting for their first step, by tenant.
        host: counters of blocks moved to and from the host memory for prefixes, in blocks of `block_bytes`; None if
            there is no such memory.
        stores: the stores below host memory, which have their own counters.
        host_loads, host_stores: how long the transfers of a step from and to host memory took.
        fetching: decides what is loaded from the stores; None if there are none.
        cache_config: the cache's configuration, as labels of vLLM's `cache_config_info`.
        audit_problem: what the latest audit found wrong with the block accounting; None if it found nothing.
        kv_limits: "floor_bytes" and "cap_bytes" by tenant.
    """

    def __init__(self, *, max_model_len: int, gauges: Callable[[], Gauges] = Gauges) -> None:
        self.gauges = gauges
        self.waiting = TenantQueues()
        self.tracer: RequestTracer | None = None
        self.host: HostCounters | None = None
        self.block_bytes = 0
        self.stores: tuple[Store, ...] = ()
        self.host_loads = Histogram(LATENCY_BOUNDS)
        self.host_stores = Histogram(LATENCY_BOUNDS)
        self.fetching: Fetching | None = None
        self.num_hung_steps = 0
        self.hung_step_seconds: float | None = None
        self.num_steps = 0
        self.num_failed_steps = 0
        self.num_audits = 0
        self.num_failed_audits = 0
        self.audit_problem: str | None = None
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.kv_limits: dict[str, dict[str, int | None]] = {}
        self.cache_outcomes: dict[CacheOutcome, int] = dict.fromkeys(CacheOutcome, 0)
        self.uncached_tokens: dict[CacheOutcome, int] = dict.fromkeys(CacheOutcome, 0)
        self.cache_config: dict[str, str] = {}
        self.finished: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self.queue_time = Histogram(REQUEST_LATENCY_BUCKETS)
        self.time_to_first_token = Histogram(TIME_TO_FIRST_TOKEN_BUCKETS)
        self.inter_token_latency = Histogram(INTER_TOKEN_LATENCY_BUCKETS)
        self.e2e_latency = Histogram(REQUEST_LATENCY_BUCKETS)
        self.prefill_time = Histogram(REQUEST_LATENCY_BUCKETS)
        self.decode_time = Histogram(REQUEST_LATENCY_BUCKETS)
        self.inference_time = Histogram(REQUEST_LATENCY_BUCKETS)
        self.step_tokens = Histogram(STEP_TOKENS_BUCKETS)
        self.request_n = Histogram(COMPLETIONS_BUCKETS)
        self.request_max_tokens = Histogram(one_two_five_buckets(max_model_len))
        self.request_prompt_tokens = Histogram(one_two_five_buckets(max_model_len))
        self.request_generation_tokens = Histogram(one_two_five_buckets(max_model_len))
        self.longest_generation = Histogram(one_two_five_buckets(max_model_len))

    def on_audit(self, problem: str | None) -> None:
        """Record an audit of the block accounting; `problem` describes a mismatch, or is None."""
        self.num_audits += 1
        self.num_failed_audits += problem is not None
        self.audit_problem = problem

    def on_moved(self, plan: StepPlan, result: StepResult) -> None:
        """Record how long a step's transfers took."""
        if plan.loads:
            self.host_loads.observe(result.load_seconds)
        if plan.stores:
            self.host_stores.observe(result.store_seconds)

    def on_admitted(self, request: Request, now: float) -> None:
        """Record a request's first admission, before it is computed."""
        request.admitted_time = now
        self.waiting.leave(request.request_id)
        self.queue_time.observe(now - request.arrival_time)
        self.prefix_cache_queries += len(request.prompt_token_ids)
        self.prefix_cache_hits += request.num_cached_tokens or 0
        if request.cache_report is not None:
            # Only what its tenant may know, because the metrics are open to everyone.
            report = request.cache_report.visible_to(request.tenant)
            self.cache_outcomes[report.outcome] += 1
            self.uncached_tokens[report.outcome] += report.num_uncached_tokens

    def on_step(self, updates: Iterable[SequenceUpdate], now: float) -> None:
        """Record a step, after stop strings have been applied."""
        prompt_tokens = generation_tokens = 0
        # Most sequences got their previous token in the same step, so they share one observation.
        last_tokens: dict[float, int] = {}
        finished: dict[RequestId, tuple[Request, FinishReason]] = {}
        for update in updates:
            seq = update.seq
            generation_tokens += len(update.token_ids)
            if (last := seq.last_token_time) is not None:
                last_tokens[last] = last_tokens.get(last, 0) + 1
            elif seq.index == 0:
                prompt_tokens += len(seq.request.prompt_token_ids)
                seq.request.first_token_time = now
                self.time_to_first_token.observe(now - seq.request.arrival_time)
            seq.last_token_time = now
            if update.finish_reason is not None and seq.request.finished:
                finished[seq.request.request_id] = (seq.request, update.finish_reason)
        for last, times in last_tokens.items():
            self.inter_token_latency.observe(now - last, times)
        self.num_steps += 1
        self.step_tokens.observe(prompt_tokens + generation_tokens)
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += generation_tokens
        for request, reason in finished.values():
            self.on_finished(request, reason, now)

    def on_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """Record the end of a request, in a step or between two."""
        self.waiting.leave(request.request_id)
        if self.tracer is not None:
            self.tracer.on_finished(request, reason, now)
        lengths = [seq.num_output_tokens for seq in request.sequences]
        self.finished[reason] += 1
        self.e2e_latency.observe(now - request.arrival_time)
        self.request_prompt_tokens.observe(len(request.prompt_token_ids))
        self.request_generation_tokens.observe(sum(lengths))
        admitted, first_token = request.admitted_time, request.first_token_time
        if admitted is not None and first_token is not None:
            self.request_n.observe(request.params.n)
            self.request_max_tokens.observe(request.most_output_tokens)
            self.longest_generation.observe(max(lengths, default=0))
            self.prefill_time.observe(first_token - admitted)
            self.decode_time.observe(now - first_token)
            self.inference_time.observe(now - admitted)

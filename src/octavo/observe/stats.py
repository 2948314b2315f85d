"""The engine's statistics: plain numbers, so that counting costs the step loop next to nothing.

Only the step loop's thread writes; any thread may read. A reader can see one field a step ahead of another, which does
not matter for a scrape. `observe/metrics.py` turns these numbers into Prometheus' format.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from octavo.kvcache.block import BlockState
from octavo.kvcache.host_memory import HostCounters
from octavo.observe.tenant_queues import TenantQueues
from octavo.observe.tracing import RequestTracer
from octavo.request import CacheOutcome, CacheReport, FinishReason
from octavo.scheduler.fetching import Fetching
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.tiers.counters import LATENCY_BOUNDS
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


class EngineStats:
    """The counters, gauges and histograms of one engine. Times are in seconds.

    The gauges, at most 50 ms behind the latest step or change, are `num_running`, `num_waiting`, `num_swapped` (of
    those waiting), `kv_usage` (share of blocks in use, 0 to 1), `kv_bytes` (of the pool, by state) and `swapped_bytes`
    (in host memory). All other numbers are counters since the start.

    Attributes:
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
    """

    def __init__(self, *, max_model_len: int) -> None:
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
        self.num_running = 0
        self.num_waiting = 0
        self.num_swapped = 0
        self.kv_usage = 0.0
        self.num_steps = 0
        self.num_preemptions = 0
        self.deferred_tokens = 0
        self.num_failed_steps = 0
        self.num_audits = 0
        self.num_failed_audits = 0
        self.audit_problem: str | None = None
        self.swapped_out_bytes = 0
        self.swapped_in_bytes = 0
        self.swapped_bytes = 0
        self.evicted_blocks = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.kv_bytes: dict[BlockState, int] = {}
        self.kv_limits: dict[str, dict[str, int | None]] = {}  # by tenant: "floor_bytes", "cap_bytes"
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

    def on_step(self, prompt_tokens: int = 0, generation_tokens: int = 0) -> None:
        """Record a step.

        Args:
            prompt_tokens: prompt tokens, including cached ones, of requests whose prompt was completed in this step.
            generation_tokens: tokens sampled in this step.
        """
        self.num_steps += 1
        self.step_tokens.observe(prompt_tokens + generation_tokens)
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += generation_tokens

    def on_queues(
        self,
        *,
        num_running: int,
        num_waiting: int,
        kv_usage: float,
        num_swapped: int = 0,
        preemptions: int = 0,
        deferred_tokens: int = 0,
    ) -> None:
        """Record the lengths of the queues, and how often sequences were preempted or put off since the last call."""
        self.num_running = num_running
        self.num_waiting = num_waiting
        self.num_swapped = num_swapped
        self.kv_usage = kv_usage
        self.num_preemptions += preemptions
        self.deferred_tokens += deferred_tokens

    def on_moved(self, plan: StepPlan, result: StepResult) -> None:
        """Record how long a step's transfers took."""
        if plan.loads:
            self.host_loads.observe(result.load_seconds)
        if plan.stores:
            self.host_stores.observe(result.store_seconds)

    def on_swapped(self, *, bytes_out: int, bytes_in: int, bytes_held: int) -> None:
        """Record, with `on_queues`, bytes moved to host memory and back since the start, and bytes held there."""
        self.swapped_out_bytes = bytes_out
        self.swapped_in_bytes = bytes_in
        self.swapped_bytes = bytes_held

    def on_admitted(self, *, queue_time: float, queried_tokens: int, hit_tokens: int) -> None:
        """Record, once per request when it is first scheduled, its wait and how much of its prompt was cached."""
        self.queue_time.observe(queue_time)
        self.prefix_cache_queries += queried_tokens
        self.prefix_cache_hits += hit_tokens

    def on_cache_report(self, report: CacheReport) -> None:
        """Record, with `on_admitted`, why no more was cached. Hits and uncached tokens add up to the queries."""
        self.cache_outcomes[report.outcome] += 1
        self.uncached_tokens[report.outcome] += report.num_uncached_tokens

    def on_blocks(self, kv_bytes: dict[BlockState, int], num_evicted: int) -> None:
        """Record, with `on_queues`, the pool's bytes by state, and the number of blocks evicted since the start.

        The dictionary must not change afterwards.
        """
        self.kv_bytes = kv_bytes
        self.evicted_blocks = num_evicted

    def on_first_token(self, ttft: float) -> None:
        """Record a request's first token, `ttft` seconds after the request arrived; once per request."""
        self.time_to_first_token.observe(ttft)

    def on_tokens(self, itl: float, times: int = 1) -> None:
        """Record tokens of `times` sequences that came `itl` seconds after the sequence's previous token."""
        self.inter_token_latency.observe(itl, times)

    def on_finished(
        self, reason: FinishReason, *, e2e_latency: float, prompt_tokens: int, generation_tokens: int
    ) -> None:
        """Record the end of a request's last sequence; `generation_tokens` counts all its sequences."""
        self.finished[reason] += 1
        self.e2e_latency.observe(e2e_latency)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.request_generation_tokens.observe(generation_tokens)

    def on_served(self, *, n: int, max_tokens: int, longest: int, prefill_time: float, decode_time: float) -> None:
        """Record, with `on_finished`, a request that had its first token: what it asked for, and how long it took.

        Args:
            longest: tokens of its longest completion.
        """
        self.request_n.observe(n)
        self.request_max_tokens.observe(max_tokens)
        self.longest_generation.observe(longest)
        self.prefill_time.observe(prefill_time)
        self.decode_time.observe(decode_time)
        self.inference_time.observe(prefill_time + decode_time)

"""`EngineStats` in Prometheus' exposition format, under vLLM's metric names if the meaning is the same.

A collector makes everything at scrape time, so the step loop never touches prometheus_client.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from octavo.observe.collector import ModelCollector
from octavo.observe.stats import EngineStats, Histogram
from octavo.observe.tier_metrics import TierCollector
from octavo.scheduler.speculation import SpeculationCounters

_GAUGES = (
    ("num_requests_running", "num_running", "Requests that hold blocks and are computed."),
    ("num_requests_waiting", "num_waiting", "Requests waiting to be scheduled."),
    ("num_requests_swapped", "num_swapped", "Of the waiting sequences, those whose blocks are in host memory."),
    ("kv_cache_usage_perc", "kv_usage", "Share of KV cache blocks in use; 1 means all."),
)
_COUNTERS = (
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("num_preemptions", "num_preemptions", "Sequences that had to give up their blocks."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens processed, cached ones included."),
    ("prompt_tokens_cached", "prefix_cache_hits", "Prompt tokens that were cached, in any tier."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
)
_SPECULATION = (
    ("spec_decode_num_drafts", "num_drafts", "Drafts that were verified."),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Drafted tokens that were verified."),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Drafted tokens that were accepted."),
)
# In the outcomes, what a tenant may not learn about others is counted as cold, as in its own responses.
_OWN_COUNTERS = (
    ("steps", "num_steps", "Steps that the engine has computed."),
    ("evicted_blocks", "evicted_blocks", "Cached blocks that gave way to others."),
    ("swapped_out_bytes", "swapped_out_bytes", "Keys and values moved to host memory."),
    ("swapped_in_bytes", "swapped_in_bytes", "Keys and values moved back from host memory."),
    (
        "deferred_tokens",
        "deferred_tokens",
        "Tokens of running streams left to a later step, so that it takes no longer than the target.",
    ),
    ("failed_steps", "num_failed_steps", "Steps in which something raised, each try counted."),
    ("hung_steps", "num_hung_steps", "Steps that took longer than the watchdog allows."),
    ("audits", "num_audits", "Times that the block accounting was proven while the engine was idle."),
    ("failed_audits", "num_failed_audits", "Audits that found the block accounting wrong: a bug, never user input."),
)
_BY_OUTCOME = (
    ("prefix_cache_requests", "cache_outcomes", "Requests by why no more of their prompt was cached."),
    ("prefix_cache_uncached_tokens", "uncached_tokens", "Prompt tokens not found in the prefix cache, by reason."),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token", "From arrival to the first token."),
    ("inter_token_latency_seconds", "inter_token_latency", "Between two tokens of one sequence."),
    # Its older name, which vLLM's own dashboard asks for.
    ("time_per_output_token_seconds", "inter_token_latency", "Between two tokens of one sequence."),
    ("e2e_request_latency_seconds", "e2e_latency", "From arrival to the end of the request."),
    ("request_queue_time_seconds", "queue_time", "From arrival to the first time it was scheduled."),
    ("request_prefill_time_seconds", "prefill_time", "From the first time it was scheduled to the first token."),
    ("request_decode_time_seconds", "decode_time", "From the first token to the end of the request."),
    ("request_inference_time_seconds", "inference_time", "From the first time it was scheduled to its end."),
    ("iteration_tokens_total", "step_tokens", "Prompt and output tokens of each step."),
    ("request_params_n", "request_n", "Completions that each finished request asked for."),
    ("request_params_max_tokens", "request_max_tokens", "Output tokens that each finished request allowed."),
    ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of each finished request."),
    ("request_generation_tokens", "request_generation_tokens", "Generated tokens of each finished request."),
    (
        "request_max_num_generation_tokens",
        "longest_generation",
        "Tokens of each finished request's longest completion.",
    ),
)


class EngineCollector(ModelCollector):
    """A Prometheus collector over the requests, steps and cache of one engine."""

    def collect(self) -> Iterator[Metric]:
        stats, gauges = self._stats, self._stats.gauges()

        def read(attribute: str) -> float:
            return float(getattr(gauges if hasattr(gauges, attribute) else stats, attribute))

        for name, attribute, help in _GAUGES:
            yield self._gauge(f"vllm:{name}", help, read(attribute))
        yield self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting to be scheduled: for capacity, or deferred until a store has loaded their prefix.",
            {"capacity": gauges.num_waiting - gauges.num_fetching, "deferred": gauges.num_fetching},
            "reason",
        )
        state = "1 for the engine's state; always awake."
        yield self._gauge("vllm:engine_sleep_state", state, {"awake": 1.0}, "sleep_state")
        for prefix, counters in (("vllm", _COUNTERS), ("octavo", _OWN_COUNTERS)):
            for name, attribute, help in counters:
                yield self._counter(f"{prefix}:{name}", help, read(attribute))
        if gauges.speculation is not None:
            yield from self._of_drafts(gauges.speculation)
        config = stats.cache_config
        about = "The KV cache's configuration, as labels."
        yield self._gauge("vllm:cache_config_info", about, {tuple(config.values()): 1.0}, *config)
        yield self._gauge(
            "octavo:hung_step_seconds",
            "How long the present step has hung; 0 if it does not.",
            stats.hung_step_seconds or 0.0,
        )
        yield self._gauge(
            "octavo:oldest_waiting_seconds",
            "How long the oldest of the requests that wait for their first step has waited; 0 if none waits.",
            stats.waiting.oldest_age(time.monotonic()),
        )
        finished = {reason.value: count for reason, count in stats.finished.items()}
        yield self._counter("vllm:request_success", "Requests that ended, by reason.", finished, "finished_reason")
        yield self._gauge(
            "octavo:kv_cache_bytes",
            "The KV cache by state; what is swapped is in host memory, all others add up to the cache.",
            {**{state.value: size for state, size in gauges.kv_bytes.items()}, "swapped": gauges.swapped_bytes},
            "state",
        )
        for name, attribute, help in _BY_OUTCOME:
            counts = {outcome.value: count for outcome, count in getattr(stats, attribute).items()}
            yield self._counter(f"octavo:{name}", help, counts, "reason")
        for name, attribute, help in _HISTOGRAMS:
            of: Histogram = getattr(stats, attribute)
            yield self._histogram(f"vllm:{name}", help, of.bounds, {(): (of.counts, of.total)})

    def _of_drafts(self, counters: SpeculationCounters) -> Iterator[Metric]:
        for name, attribute, help in _SPECULATION:
            yield self._counter(f"vllm:{name}", help, getattr(counters, attribute))
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their position in the draft.",
            {str(position): count for position, count in enumerate(counters.accepted_per_position)},
            "position",
        )
        yield self._gauge(  # it may fall
            "octavo:speculation_saved_seconds",
            "The time that drafts have saved, as estimated from the times of steps with and without them.",
            counters.saved_seconds,
        )


class MetricsPage:
    """The page at `GET /metrics`: the engine's statistics and this process's memory, CPU time and open files.

    Args:
        others: collectors whose metrics follow the engine's.
    """

    def __init__(self, stats: EngineStats, model_name: str, others: Iterable[Collector] = ()) -> None:
        # A registry of its own: the global one would be shared by every engine of the process.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(EngineCollector(stats, model_name))
        self._registry.register(TierCollector(stats, model_name))
        for collector in others:
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its content type, in the newest of Prometheus' formats that `accept` names."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # Raised for an invalid version in `accept`, or one that is too long to be a number.
            encode, content_type = choose_encoder("")
        if content_type.startswith("application/openmetrics-text"):
            # Every format allows the colon in our names, but prometheus_client 0.26 replaces it in samples if the
            # client does not ask for UTF-8 names, as Prometheus before version 3.
            encode, _ = choose_encoder("application/openmetrics-text; version=1.0.0; escaping=allow-utf-8")
        return encode(self._registry), content_type

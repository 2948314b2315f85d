"""What the engine counts, and how Prometheus reads it."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from octavo.observe.metrics import MetricsPage
from octavo.observe.stats import EngineStats, Histogram, one_two_five_buckets
from octavo.request import FinishReason, Request, RequestId
from octavo.sampling_params import SamplingParams


def exposed(stats: EngineStats) -> dict[str, Metric]:
    text = MetricsPage(stats, "a model").render()[0].decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], family: str, sample: str = "", **labels: str) -> float:
    """The value of `family`'s sample of that name whose labels hold `labels`."""
    wanted = {"model_name": "a model", **labels}
    (found,) = [
        s.value for s in families[family].samples if s.name == (sample or family) and wanted.items() <= s.labels.items()
    ]
    return found


@pytest.mark.parametrize("version", ["x.y", "1" * 5000])
def test_a_format_of_no_version_is_answered_in_the_oldest(version: str) -> None:
    _, content_type = MetricsPage(EngineStats(max_model_len=8), "m").render(
        f"application/openmetrics-text; version={version}"
    )
    assert content_type.startswith("text/plain; version=0.0.4")


def test_gauges_and_counters_follow_the_steps() -> None:
    stats = EngineStats(max_model_len=1024)
    stats.on_admitted(queue_time=0.1, queried_tokens=100, hit_tokens=64)
    stats.on_step(prompt_tokens=100)
    stats.on_step(generation_tokens=3)
    stats.on_step(generation_tokens=3)
    stats.on_queues(num_running=9, num_waiting=9, kv_usage=0.9, preemptions=1, deferred_tokens=7)
    stats.on_queues(num_running=3, num_waiting=2, kv_usage=0.5)
    families = exposed(stats)
    for name, expected in {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.5,
    }.items():
        assert families[name].type == "gauge"
        assert value(families, name) == expected
    for name, expected in {
        "vllm:prefix_cache_queries": 100,
        "vllm:prefix_cache_hits": 64,
        "vllm:num_preemptions": 1,
        "vllm:prompt_tokens": 100,
        "vllm:generation_tokens": 6,
        "octavo:deferred_tokens": 7,
    }.items():
        assert families[name].type == "counter"
        assert value(families, name, f"{name}_total") == expected


def test_finished_requests_are_counted_by_reason() -> None:
    stats = EngineStats(max_model_len=1024)
    for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH):
        stats.on_finished(reason, e2e_latency=1.2, prompt_tokens=7, generation_tokens=30)
    families = exposed(stats)
    counts = {
        reason: value(families, "vllm:request_success", "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort")
    }
    assert counts == {"stop": 2, "length": 1, "abort": 0}
    for name, total in {
        "vllm:request_prompt_tokens": 21,
        "vllm:request_generation_tokens": 90,
        "vllm:e2e_request_latency_seconds": pytest.approx(3.6),
    }.items():
        assert value(families, name, f"{name}_sum") == total
        assert value(families, name, f"{name}_count") == 3


def test_what_vllms_dashboard_asks_for_is_there() -> None:
    stats = EngineStats(max_model_len=1024)
    stats.cache_config = {"block_size": "16", "cache_dtype": "auto"}
    stats.on_step(prompt_tokens=100, generation_tokens=3)
    stats.on_tokens(0.3)
    stats.on_served(n=2, max_tokens=64, longest=30, prefill_time=0.5, decode_time=1.5)
    families = exposed(stats)
    for name, total in {
        "vllm:request_prefill_time_seconds": 0.5,
        "vllm:request_decode_time_seconds": 1.5,
        "vllm:request_inference_time_seconds": 2.0,
        "vllm:iteration_tokens_total": 103,
        "vllm:request_params_n": 2,
        "vllm:request_params_max_tokens": 64,
        "vllm:request_max_num_generation_tokens": 30,
        "vllm:time_per_output_token_seconds": 0.3,
    }.items():
        assert families[name].type == "histogram"
        assert (value(families, name, f"{name}_sum"), value(families, name, f"{name}_count")) == (total, 1)
    assert value(families, "vllm:cache_config_info", block_size="16", cache_dtype="auto") == 1
    assert "vllm:swapped_out_bytes" not in families


def test_latencies_are_histograms_under_vllms_names() -> None:
    stats = EngineStats(max_model_len=1024)
    stats.on_first_token(0.03)
    stats.on_tokens(0.012, times=5)
    stats.on_tokens(0.3)
    stats.on_admitted(queue_time=0.0, queried_tokens=1, hit_tokens=0)
    families = exposed(stats)
    for name, count in {
        "vllm:time_to_first_token_seconds": 1,
        "vllm:inter_token_latency_seconds": 6,
        "vllm:request_queue_time_seconds": 1,
    }.items():
        assert families[name].type == "histogram"
        assert value(families, name, f"{name}_count") == count
    itl = "vllm:inter_token_latency_seconds"
    assert value(families, itl, f"{itl}_sum") == pytest.approx(0.36)
    assert value(families, itl, f"{itl}_bucket", le="0.01") == 0
    assert value(families, itl, f"{itl}_bucket", le="0.025") == 5
    assert value(families, itl, f"{itl}_bucket", le="+Inf") == 6


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0.001, 50), min_size=1, unique=True))
def test_a_bucket_covers_exactly_the_values_up_to_its_bound(values: list[float], bounds: list[float]) -> None:
    bounds.sort()
    histogram = Histogram(bounds)
    for observed in values:
        histogram.observe(observed)
    assert histogram.count == len(values)
    for i, bound in enumerate(bounds):
        assert sum(histogram.counts[: i + 1]) == sum(observed <= bound for observed in values)
    assert histogram.counts[-1] == sum(bisect_left(bounds, observed) == len(bounds) for observed in values)


def test_token_buckets_go_one_two_five_up_to_the_context() -> None:
    assert one_two_five_buckets(130) == (1, 2, 5, 10, 20, 50, 100)
    assert one_two_five_buckets(1) == (1,)


def test_two_engines_in_one_process_do_not_mix_their_metrics() -> None:
    first, second = EngineStats(max_model_len=8), EngineStats(max_model_len=8)
    first.on_queues(num_running=1, num_waiting=0, kv_usage=0.0)
    assert value(exposed(first), "vllm:num_requests_running") == 1
    assert value(exposed(second), "vllm:num_requests_running") == 0


def test_the_process_itself_is_measured() -> None:
    assert "process_resident_memory_bytes" in exposed(EngineStats(max_model_len=8))


def test_evictions_and_steps_are_counted() -> None:
    stats = EngineStats(max_model_len=1024)
    stats.on_step()
    stats.on_blocks({}, 7)
    families = exposed(stats)
    assert value(families, "octavo:steps", "octavo:steps_total") == 1
    assert value(families, "octavo:evicted_blocks", "octavo:evicted_blocks_total") == 7


def test_the_age_of_the_queue_is_that_of_its_oldest_request() -> None:
    stats = EngineStats(max_model_len=1024)
    assert value(exposed(stats), "octavo:oldest_waiting_seconds") == 0
    for name, arrival in (("a", 10.0), ("b", 12.0)):
        stats.waiting.enter(Request(RequestId(name), [1], SamplingParams(), arrival_time=arrival))
    assert stats.waiting.oldest_age(15.0) == 5
    stats.waiting.leave(RequestId("a"))
    assert stats.waiting.oldest_age(15.0) == 3
    stats.waiting.leave(RequestId("b"))
    assert stats.waiting.oldest_age(15.0) == 0

"""What the engine counts, and how Prometheus reads it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from octavo.observe.metrics import MetricsPage
from octavo.observe.stats import EngineStats, Gauges, Histogram, one_two_five_buckets
from octavo.request import FinishReason, Request, RequestId, SequenceStatus
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import SequenceUpdate


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


def served(
    stats: EngineStats, arrival: float, admitted: float, tokens: Iterable[float], reason: FinishReason, **params: Any
) -> Request:
    """Record a request of seven prompt tokens, four of them cached, that got tokens at these times, and ended."""
    request = Request(RequestId("r"), [1] * 7, SamplingParams(**params), arrival_time=arrival, num_cached_tokens=4)
    seq, times = request.sequences[0], list(tokens)
    stats.on_admitted(request, admitted)
    for now in times:
        seq.output_token_ids.append(5)
        if now == times[-1]:
            for each in request.sequences:
                each.status, each.finish_reason = SequenceStatus.FINISHED, reason
        stats.on_step([SequenceUpdate(seq, (5,), finish_reason=seq.finish_reason)], now)
    return request


def test_the_present_state_is_read_when_it_is_asked_for() -> None:
    now = Gauges(num_running=9)
    stats = EngineStats(max_model_len=1024, gauges=lambda: now)
    now = Gauges(
        num_running=3,
        num_waiting=5,
        num_fetching=2,
        kv_usage=0.5,
        num_preemptions=1,
        deferred_tokens=7,
        evicted_blocks=8,
    )
    families = exposed(stats)
    for name, expected in {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.5,
    }.items():
        assert families[name].type == "gauge"
        assert value(families, name) == expected
    for reason, expected in {"capacity": 3, "deferred": 2}.items():
        name = "vllm:num_requests_waiting_by_reason"
        assert value(families, name, reason=reason) == expected
    for name, expected in {
        "vllm:num_preemptions": 1,
        "octavo:deferred_tokens": 7,
        "octavo:evicted_blocks": 8,
    }.items():
        assert families[name].type == "counter"
        assert value(families, name, f"{name}_total") == expected


def test_tokens_are_counted_with_the_step_that_drew_them() -> None:
    stats = EngineStats(max_model_len=1024)
    served(stats, 1.0, 1.5, [2.0, 2.25, 3.0], FinishReason.STOP)
    families = exposed(stats)
    for name, expected in {
        "vllm:prefix_cache_queries": 7,
        "vllm:prefix_cache_hits": 4,
        "vllm:prompt_tokens": 7,
        "vllm:generation_tokens": 3,
        "octavo:steps": 3,
    }.items():
        assert families[name].type == "counter"
        assert value(families, name, f"{name}_total") == expected


def test_finished_requests_are_counted_by_reason() -> None:
    stats = EngineStats(max_model_len=1024)
    for reason in (FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH):
        served(stats, 1.0, 1.0, [1.5, 2.25], reason)
    families = exposed(stats)
    counts = {
        reason: value(families, "vllm:request_success", "vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort")
    }
    assert counts == {"stop": 2, "length": 1, "abort": 0}
    for name, total in {
        "vllm:request_prompt_tokens": 21,
        "vllm:request_generation_tokens": 6,
        "vllm:e2e_request_latency_seconds": 3.75,
    }.items():
        assert value(families, name, f"{name}_sum") == total
        assert value(families, name, f"{name}_count") == 3


def test_what_vllms_dashboard_asks_for_is_there() -> None:
    stats = EngineStats(max_model_len=1024)
    stats.cache_config = {"block_size": "16", "cache_dtype": "auto"}
    served(stats, 1.0, 1.25, [1.75, 3.25], FinishReason.LENGTH, n=2, max_tokens=64)
    families = exposed(stats)
    for name, total, count in (
        ("vllm:request_queue_time_seconds", 0.25, 1),
        ("vllm:time_to_first_token_seconds", 0.75, 1),
        ("vllm:request_prefill_time_seconds", 0.5, 1),
        ("vllm:request_decode_time_seconds", 1.5, 1),
        ("vllm:request_inference_time_seconds", 2.0, 1),
        ("vllm:iteration_tokens_total", 9, 2),
        ("vllm:request_params_n", 2, 1),
        ("vllm:request_params_max_tokens", 64, 1),
        ("vllm:request_max_num_generation_tokens", 2, 1),
        ("vllm:time_per_output_token_seconds", 1.5, 1),
    ):
        assert families[name].type == "histogram"
        assert (value(families, name, f"{name}_sum"), value(families, name, f"{name}_count")) == (total, count)
    assert value(families, "vllm:cache_config_info", block_size="16", cache_dtype="auto") == 1
    assert "vllm:swapped_out_bytes" not in families


def test_a_request_that_never_ran_counts_as_finished_but_not_as_served() -> None:
    stats = EngineStats(max_model_len=1024)
    request = Request(RequestId("r"), [1], SamplingParams(), arrival_time=1.0)
    stats.on_finished(request, FinishReason.ABORT, 2.0)
    assert (stats.e2e_latency.count, stats.decode_time.count) == (1, 0)


def test_streams_that_got_their_last_token_together_share_an_observation() -> None:
    stats = EngineStats(max_model_len=1024)
    requests = [Request(RequestId(str(i)), [1], SamplingParams(), arrival_time=0.0) for i in range(5)]
    for now in (1.0, 1.0125):
        stats.on_step([SequenceUpdate(request.sequences[0], (5,)) for request in requests], now)
    stats.on_step([SequenceUpdate(requests[0].sequences[0], (5,))], 1.3125)
    families, itl = exposed(stats), "vllm:inter_token_latency_seconds"
    assert value(families, itl, f"{itl}_count") == 6
    assert value(families, itl, f"{itl}_sum") == pytest.approx(0.3625)
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
    first, second = EngineStats(max_model_len=8, gauges=lambda: Gauges(num_running=1)), EngineStats(max_model_len=8)
    assert value(exposed(first), "vllm:num_requests_running") == 1
    assert value(exposed(second), "vllm:num_requests_running") == 0


def test_the_process_itself_is_measured() -> None:
    assert "process_resident_memory_bytes" in exposed(EngineStats(max_model_len=8))


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

"""Simulations of small servers whose steps take a known time."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.planner.roofline import StepTimes, find_machine
from octavo.planner.sources import find_shape
from octavo.request import Request
from octavo.simulator.fitting import Spread
from octavo.simulator.options import Demand
from octavo.simulator.questions import (
    Targets,
    find_rate,
    find_replicas,
    num_refused,
    simulate,
    too_short,
)
from octavo.simulator.results import Results
from octavo.simulator.setup import Plan
from octavo.simulator.simulation import Simulation
from octavo.simulator.sketch import Sketch
from octavo.simulator.speed import MEASURED, Speed
from octavo.simulator.study import checked_variants
from octavo.simulator.traffic import Tenants
from octavo.workloads.traces import TraceRequest

SHAPE = find_shape("llama-2-7b")
STEP = 0.01
TOKEN = 0.001


def plan(**options: Any) -> Plan:
    """A server whose steps take 10 ms, and 1 ms for each token beyond the first."""
    options = {"num_blocks": 513, "max_model_len": 2048, "swap_space": 0, **options}
    times = StepTimes(STEP, ((1.0, 0.0), (2.0, TOKEN)))
    return Plan(SHAPE, EngineConfig(**options), Speed("made up", MEASURED, times))


def arrivals_of(demand: Demand) -> Iterator[float]:
    traffic = demand.traffic()
    while traffic.due() is not None:
        yield traffic.take().arrival_s


def test_a_request_alone_waits_for_its_prompt_and_then_a_step_a_token() -> None:
    results = simulate(plan(), Demand(num_requests=1, input_len="11", output_len="5"))
    assert results.ttft.greatest == pytest.approx(STEP + 10 * TOKEN)
    assert results.itl.greatest == pytest.approx(STEP)
    assert results.itl.count == 4
    assert results.e2e.greatest == pytest.approx(results.duration_s) == pytest.approx(5 * STEP + 10 * TOKEN)
    assert (results.steps, results.output_tokens, results.prompt_tokens) == (5, 5, 11)


def test_a_requests_time_outside_its_steps_is_added() -> None:
    demand = Demand(num_requests=1, input_len="1", output_len="1")
    slow = plan().replace(speed=Speed("", MEASURED, StepTimes(STEP, ()), intake_s=0.5, reply_s=0.2))
    results = simulate(slow, demand)
    assert results.ttft.greatest == results.e2e.greatest == pytest.approx(STEP + 0.7)
    assert (
        simulate(slow, Demand(num_requests=2, concurrency=1, input_len="1", output_len="1")).e2e.greatest
        == results.e2e.greatest
    )


def test_a_step_during_which_a_request_comes_takes_longer() -> None:
    times = StepTimes(STEP, (), per_arrival=0.004)
    trace = (TraceRequest(0.0, 1, 20), TraceRequest(0.055, 1, 1))
    results = simulate(plan().replace(speed=Speed("", MEASURED, times)), Demand(trace=trace))
    assert results.ttft.greatest == pytest.approx(0.05 + STEP + 0.004 + STEP - 0.055), "it came in the sixth step"
    assert results.duration_s == pytest.approx(20 * STEP + 0.004)


def test_a_prompt_that_finds_the_engine_idle_has_a_slower_first_step() -> None:
    spread = Spread(decodes=(1.0,), chunks=(1.0,), resumed=(1.5,))
    trace = (TraceRequest(0.0, 11, 2), TraceRequest(0.001, 11, 1), TraceRequest(1.0, 11, 3))
    timed = plan().replace(speed=Speed("", MEASURED, StepTimes(STEP, ((1.0, 0.0), (2.0, TOKEN))), spread=spread))
    results = simulate(timed, Demand(trace=trace))
    assert results.duration_s == pytest.approx(1.0 + 1.5 * (STEP + 10 * TOKEN) + 2 * STEP)
    busy = 1.5 * (STEP + 10 * TOKEN) + STEP + 11 * TOKEN
    assert results.busy_s == pytest.approx(busy + results.duration_s - 1.0), "the second prompt came to a busy engine"


def test_a_request_that_comes_to_an_idle_server_holds_up_no_step() -> None:
    times = StepTimes(STEP, (), per_arrival=0.004)
    trace = (TraceRequest(0.0, 1, 2), TraceRequest(1.0, 1, 2))
    assert simulate(plan().replace(speed=Speed("", MEASURED, times)), Demand(trace=trace)).busy_s == pytest.approx(0.04)


@pytest.mark.parametrize("num_blocks", [40, 513])
def test_steps_simulated_at_once_are_those_simulated_one_by_one(num_blocks: int) -> None:
    spread = Spread(decodes=(0.9, 1.0, 1.3), chunks=(1.0, 1.1), resumed=(1.5,))
    times = StepTimes(STEP, ((1.0, 0.0), (2.0, TOKEN)), per_context_token=1e-6, per_arrival=0.002)
    speed = Speed("", MEASURED, times, intake_s=0.003, reply_s=0.001, spread=spread)
    demand = Demand(
        num_requests=80, request_rate=8.0, input_len="uniform:1-200", output_len="uniform:1-90", prefix_len="64"
    )
    several, single = (plan(num_blocks=num_blocks).replace(speed=speed).server() for _ in range(2))
    single.leaps = None
    at_once, one_by_one = (Simulation(server, demand.traffic()).run().report() for server in (several, single))
    assert several.scheduler.builder._step < single.scheduler.builder._step == one_by_one["steps"]
    for name in one_by_one.keys() - {"simulated_in_s"}:
        assert at_once[name] == pytest.approx(one_by_one[name], rel=0.02 if name == "mean_kv_usage" else 1e-4), name


@pytest.mark.parametrize("count", [1, 2, 7, 100, 101])
def test_a_percentile_is_a_value_that_as_many_as_it_says_do_not_exceed(count: int) -> None:
    sketch, values = Sketch(), [1.1**i for i in range(count)]
    for value in values:
        sketch.add(value)
    for q in (0, 1, 50, 90, 95, 99, 99.9, 100):
        exact = next(value for i, value in enumerate(values, start=1) if 100 * i >= q * count)
        assert sketch.percentile(q) == pytest.approx(exact, rel=0.005)


def test_percentiles_hold_what_single_steps_differ_by_and_are_the_same_in_every_run() -> None:
    spread = Spread(decodes=(0.9, 1.0, 1.0, 1.5), chunks=(2.0,))
    uneven = plan().replace(speed=Speed("", MEASURED, StepTimes(STEP, ()), spread=spread))
    demand = Demand(num_requests=1, input_len="11", output_len="2000")
    results = simulate(uneven, demand)
    assert results.ttft.greatest == pytest.approx(2 * STEP)
    assert [results.itl.percentile(p) for p in (10, 50, 90)] == pytest.approx([0.9 * STEP, STEP, 1.5 * STEP], rel=0.01)
    assert simulate(uneven, demand).duration_s == results.duration_s


def test_every_token_is_accounted_for_and_no_block_is_lost() -> None:
    demand = Demand(
        num_requests=60, request_rate=20.0, input_len="lognormal:150,0.9", output_len="uniform:20-150", workload_seed=3
    )
    server = plan(num_blocks=81).server()
    results = Simulation(server, demand.traffic()).run()
    server.kv.audit()
    assert not len(server.kv.holdings)
    shapes = list(itertools.islice(demand.shapes(), 60))
    assert results.completed == results.ttft.count == 60
    assert results.output_tokens == sum(shape.output_tokens for shape in shapes)
    assert results.prompt_tokens == sum(shape.prompt_tokens for shape in shapes)
    assert results.itl.count == results.output_tokens - 60
    assert results.preemptions > 0


def test_prompts_share_what_the_trace_says_they_share() -> None:
    trace = tuple(TraceRequest(float(i), 1024 + 100, 4, hash_ids=(7, 8, 100 + i)) for i in range(5))
    results = simulate(plan(), Demand(trace=trace))
    assert results.cached_tokens == 4 * 1024
    again = simulate(plan(), Demand(trace=trace, num_requests=10))
    assert again.cached_tokens == 2 * 4 * 1024, "a repetition stands for other people"


def test_a_machine_whose_memory_is_the_hosts_gives_swap_space_from_it() -> None:
    on_cpu = Plan(SHAPE, EngineConfig(max_model_len=2048), machine=find_machine("desktop-ddr5"))
    assert on_cpu.num_blocks == on_cpu.replace(swap_space="8GiB").num_blocks, "the cache takes no more than its share"
    with pytest.raises(ConfigError, match=r"swap space 60\.00 GiB"):
        _ = on_cpu.replace(swap_space="60GiB").num_blocks


def test_requests_with_a_shared_prefix_find_it() -> None:
    demand = Demand(num_requests=20, request_rate=5.0, input_len="20", output_len="2", prefix_len="160", num_prefixes=2)
    results = simulate(plan(), demand)
    assert results.cached_tokens == 18 * 160


def test_a_closed_loop_has_no_more_in_flight_than_users() -> None:
    results = simulate(plan(), Demand(num_requests=50, concurrency=4, think_time=0.05, output_len="8"))
    assert results.completed == 50
    assert results.peak_running <= 4
    assert results.mean_running < 4


def test_a_trace_comes_faster_when_its_rate_is_scaled() -> None:
    trace = tuple(TraceRequest(2.0 * i, 10, 2) for i in range(5))
    assert simulate(plan(), Demand(trace=trace)).duration_s == pytest.approx(8.0, abs=0.1)
    assert simulate(plan(), Demand(trace=trace, rate_scale=4.0)).duration_s == pytest.approx(2.0, abs=0.1)


def test_tenants_with_twice_the_weight_are_served_sooner() -> None:
    tenants = Tenants.parse("gold:4,basic:1")
    demand = Demand(num_requests=120, request_rate=200.0, output_len="40", tenants=tenants)
    results = simulate(plan(scheduling_policy="vtc", max_num_seqs=4), demand)
    gold, basic = results.tenants["gold"], results.tenants["basic"]
    assert gold.requests + basic.requests == 120
    assert gold.ttft.mean < 0.7 * basic.ttft.mean


def test_a_request_that_can_never_be_served_is_counted_and_the_rest_goes_on() -> None:
    trace = tuple(TraceRequest(0.0, length, 4) for length in (100, 1500, 100))
    results = simulate(plan(num_blocks=33), Demand(trace=trace))
    assert (results.refused, results.completed) == (1, 2)
    assert num_refused(plan(num_blocks=33), Demand(trace=trace)) == 1
    assert num_refused(plan(num_blocks=33), Demand(trace=trace, num_requests=9)) == 3
    assert num_refused(plan(), Demand(trace=trace)) == 0


def test_a_request_that_can_never_be_served_misses_the_targets_at_any_rate_and_on_any_number_of_replicas() -> None:
    trace = tuple(TraceRequest(float(i), 1500 if i == 99 else 100, 4) for i in range(100))
    small, targets, demand = plan(num_blocks=33), Targets(ttft_ms=1000.0), Demand(trace=trace)
    assert not targets.met(simulate(small, demand))
    assert find_rate(small, demand, targets) is None
    assert find_replicas(small, demand, targets) is None
    assert targets.met(simulate(plan(), demand))


def test_a_request_over_the_models_length_is_cut_and_counted() -> None:
    trace = (TraceRequest(0.0, 5000, 100),)
    results = simulate(plan(), Demand(trace=trace))
    assert (results.clipped, results.prompt_tokens, results.output_tokens) == (1, 1948, 100)


def test_the_largest_rate_keeps_the_targets_and_a_little_more_does_not() -> None:
    demand = Demand(num_requests=60, request_rate=20.0, input_len="20", output_len="20")
    targets = Targets(ttft_ms=200.0)
    found = find_rate(plan(max_num_seqs=8), demand, targets)
    assert found is not None
    assert found.missed_at is not None
    assert found.value < found.missed_at <= 1.031 * found.value
    assert targets.met(found.results)


@pytest.mark.slow
def test_the_largest_rate_of_a_trace_is_that_of_the_requests_which_are_simulated() -> None:
    trace = tuple(TraceRequest(at, 20, 20) for at in (*map(float, range(40)), *(39 + i / 100 for i in range(1, 41))))
    assert Demand(trace=trace).mean_rate == pytest.approx(79 / 39.4)
    assert Demand(trace=trace, num_requests=40, rate_scale=3.0).mean_rate == pytest.approx(3.0)
    assert Demand(trace=trace, num_requests=120).mean_rate == pytest.approx(119 / (39.4 * 80 / 79 + 39))
    demand, server = Demand(trace=trace, num_requests=40), plan(max_num_seqs=2)
    found = find_rate(server, demand, Targets(ttft_ms=200.0))
    assert found is not None
    *_, last = arrivals_of(demand.at_rate(found.value))
    assert found.value == pytest.approx(39 / last)
    assert found.results.duration_s == pytest.approx(last, abs=1.0)


@pytest.mark.slow
def test_requests_of_a_trace_that_all_come_at_once_are_spread_to_find_a_rate() -> None:
    demand = Demand(trace=tuple(TraceRequest(0.0, 20, 20) for _ in range(40)))
    assert demand.mean_rate == math.inf
    found = find_rate(plan(max_num_seqs=2), demand, Targets(ttft_ms=200.0))
    assert found is not None
    assert 0 < found.value < math.inf


def test_too_few_requests_to_find_a_largest_rate_are_said_to_be() -> None:
    found = find_rate(plan(), Demand(num_requests=4, request_rate=20.0, output_len="4"), Targets(ttft_ms=60_000.0))
    assert found is not None
    assert (found.value, found.missed_at, found.results.completed) == (math.inf, None, 4)


def test_a_target_that_even_one_request_misses_is_said_to_be_out_of_reach() -> None:
    assert find_rate(plan(), Demand(num_requests=2, request_rate=1.0, output_len="2"), Targets(ttft_ms=0.001)) is None
    assert find_replicas(plan(), Demand(num_requests=3, request_rate=1.0), Targets(ttft_ms=0.001)) is None


def test_replicas_are_the_fewest_that_keep_the_targets() -> None:
    demand = Demand(num_requests=120, request_rate=80.0, input_len="20", output_len="20")
    server, targets = plan(max_num_seqs=4), Targets(ttft_ms=200.0)
    answer = find_replicas(server, demand, targets)
    assert answer is not None
    count, results = answer
    assert count > 1
    assert targets.met(results)
    assert results.requests == -(-120 // count)


def test_arrivals_are_too_short_if_they_last_less_than_ten_requests() -> None:
    def run(count: int, **options: Any) -> Results:
        return simulate(plan(**options), Demand(trace=tuple(TraceRequest(i / 20, 1, 20) for i in range(count))))

    assert too_short(run(101)) is None
    warning = too_short(run(21))
    assert warning is not None
    assert warning.startswith("arrivals last 1 s, a request 0.")
    overloaded = run(101, max_num_seqs=2)
    assert too_short(overloaded) is None, "a queue forms"
    assert too_short(overloaded, met=True) is not None, "and would grow out of any target"


def test_a_replica_for_each_request_is_tried_before_no_number_is_said_to_suffice() -> None:
    trace = tuple(TraceRequest(0.001 * i, 50, 2) for i in range(5))
    answer = find_replicas(plan(), Demand(trace=trace), Targets(ttft_ms=65.0))
    assert answer is not None
    assert answer[0] == 5, "of two on one replica, the second waits for the first"
    assert find_replicas(plan(), Demand(trace=trace), Targets(ttft_ms=65.0), most=4) is None


def test_a_run_of_one_of_several_replicas_is_not_stopped_while_it_can_meet_the_targets() -> None:
    trace = tuple(TraceRequest(0.0, 10, 1500) for _ in range(3))
    targets = Targets(ttft_ms=1000.0, percentile=50.0)
    results = simulate(plan(max_num_seqs=1), Demand(trace=trace, turns=2), targets)
    assert (results.completed, targets.met(results)) == (2, True), "one of two is in time"


def test_a_larger_cache_preempts_less_and_smaller_elements_hold_more() -> None:
    demand = Demand(num_requests=40, input_len="200", output_len="60")
    by_size = {
        changes["num_blocks"]: simulate(each, demand).preemptions
        for changes, each in checked_variants(plan(), ["num_blocks=65,1025"])
    }
    assert by_size[65] > by_size[1025] == 0
    sized = plan(num_blocks=None, kv_cache_memory="1GiB")
    half = sized.replace(kv_cache_dtype="fp8")
    assert half.num_blocks == pytest.approx(2 * sized.num_blocks, rel=0.01)


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"rate_scale": 0.0}, "rate_scale must be above 0"),
        ({"concurrency": 3, "request_rate": 2.0}, "a closed loop"),
        ({"think_time": -1.0}, "think_time must be at least 0"),
    ],
)
def test_traffic_that_makes_no_sense_is_refused(demand: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Demand(**demand)


@pytest.mark.parametrize("text", ["a:0", "a:1:2:3", ":2", "a:x", "a,a"])
def test_tenants_that_cannot_be_read_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="tenant"):
        Tenants.parse(text)


def test_swapping_is_simulated_where_there_is_a_host_to_swap_to() -> None:
    demand = Demand(num_requests=40, input_len="200", output_len="60")
    results = simulate(plan(num_blocks=65, swap_space="4GiB", preemption_mode="swap"), demand)
    assert results.preemptions > 0
    assert results.moved_blocks > 0
    assert results.completed == 40


def test_host_memory_for_prefixes_gives_back_what_a_small_pool_evicts() -> None:
    trace = tuple(TraceRequest(float(i), 512, 2, hash_ids=(i % 4,)) for i in range(24))
    without, beside = (simulate(plan(num_blocks=65, kv_host_memory=size), Demand(trace=trace)) for size in (0, "4GiB"))
    assert without.cached_tokens == 0
    assert beside.cached_tokens > 5000
    assert beside.moved_blocks > without.moved_blocks


def test_a_store_on_disk_is_said_not_to_be_simulated() -> None:
    with pytest.raises(ConfigError, match="not simulated yet"):
        plan(kv_disk="/tmp/x", kv_host_memory="1GiB")


@pytest.mark.slow
def test_a_simulation_leaves_no_request_to_the_garbage_collector() -> None:
    def num_requests() -> int:
        return sum(type(one) is Request for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        simulate(plan(), Demand(num_requests=20, request_rate=20.0, output_len="8"))
        left = num_requests()  # where the scheduler's tests are loaded, they remember every request
        gc.collect()
        assert num_requests() == left
    finally:
        gc.enable()


def estimated(model: str, max_model_len: int = 32768) -> Plan:
    return Plan(find_shape(model), EngineConfig(max_model_len=max_model_len), machine=find_machine("h200"))


@pytest.mark.slow
def test_long_contexts_take_less_time_with_windows_and_short_ones_do_not() -> None:
    # The same architecture; v0.1 has windows of 4,096 tokens.
    for prompt, is_less in (("3000", False), ("20000", True)):
        demand = Demand(num_requests=2, concurrency=1, input_len=prompt, output_len="50")
        windowed, full = (simulate(estimated(f"mistral-7b-v0.{n}"), demand) for n in (1, 2))
        assert (windowed.itl.percentile(50) < full.itl.percentile(50)) == is_less
        assert (windowed.ttft.percentile(50) < full.ttft.percentile(50)) == is_less
        assert (windowed.duration_s == pytest.approx(full.duration_s)) != is_less


def test_only_some_of_a_models_layers_have_windows() -> None:
    plan = estimated("gemma-3-4b")
    (layers,) = plan.server().windowed
    times, num_windowed = (
        plan.effective_speed.times,
        sum(layer.sliding_window is not None for layer in plan.spec.layers),
    )
    assert 0 < num_windowed < len(plan.spec.layers)
    assert layers.size == 1024
    share = num_windowed / len(plan.spec.layers)
    assert layers.per_context_token == pytest.approx(share * times.per_context_token)
    assert layers.per_chunk_work == pytest.approx(share * times.per_chunk_work)


def test_nothing_is_taken_off_measured_times_or_where_no_context_exceeds_the_window() -> None:
    plan = estimated("mistral-7b-v0.1")
    assert plan.server().windowed
    assert not estimated("mistral-7b-v0.1", 4096).server().windowed
    assert not estimated("llama-3.1-8b").server().windowed
    measured = plan.replace(machine=None, speed=Speed("made up", MEASURED, plan.effective_speed.times), num_blocks=99)
    assert not measured.server().windowed


@pytest.mark.parametrize("mode", ["sinks", "bounded", "sparse_read"])
def test_a_budget_bounds_what_requests_keep_and_read(mode: str) -> None:
    demand = Demand(num_requests=4, concurrency=4, input_len="500", output_len="1500")
    times = StepTimes(STEP, (), per_context_token=1e-6)
    dense = plan(max_model_len=4096).replace(speed=Speed("made up", MEASURED, times))
    budget = {"mode": mode, "tokens": 256}
    everything, kept = (simulate(each, demand) for each in (dense, dense.replace(kv_budget=budget)))
    assert everything.output_tokens == kept.output_tokens
    share = len([layer for layer in dense.replace(kv_budget=budget).spec.layers if layer.bounded]) / 32 or 1.0
    context = 4 * (share * 256 + (1 - share) * 2000)
    assert kept.itl.percentile(100) == pytest.approx(STEP + 1e-6 * context, rel=0.01)
    assert everything.itl.percentile(100) == pytest.approx(STEP + 1e-6 * 4 * 2000, rel=0.01)
    assert (kept.mean_usage < 0.5 * everything.mean_usage) == (mode != "sparse_read")

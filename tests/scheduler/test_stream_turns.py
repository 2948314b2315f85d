"""Streams of several tenants share the time of a step, where all of their tokens would take too long."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import SERVER_DEFAULTS
from octavo.planner.roofline import StepTimes
from octavo.request import Request, Sequence
from octavo.scheduler.lifecycle import DEFAULT_HEADROOM_TOKENS
from octavo.scheduler.plan import StepResult
from octavo.scheduler.policy import VirtualTokenCounter
from octavo.scheduler.step_budget import LatencyTarget
from octavo.scheduler.step_time import StepLoad
from octavo.scheduler.stream_turns import StreamTurns
from tests.kvcache.caches import make_sequence
from tests.scheduler.kit import Harness, outputs

# Near to SmolLM2-135M on two cores: 64 streams of 6,000 tokens take 280 ms, and of 5 tokens 50.
SMALL = StepTimes(0.003, ((1, 0.001), (64, 0.047), (2048, 0.8)), 0.6e-6, 1e-9)
# Reading the weights of this one takes 400 ms, whatever a step computes.
LARGE = StepTimes(0.4, ((1, 0.001), (64, 0.02), (2048, 8.0)), 4e-6, 1e-8)
TARGET = 0.05


def server_of(
    device: StepTimes = SMALL, *, seqs: int = 128, fair: bool = False, target: float | None = TARGET
) -> Harness:
    return Harness(
        6001,
        16,
        max_num_seqs=seqs,
        max_num_batched_tokens=2048,
        max_model_len=1 << 16,
        headroom_tokens=DEFAULT_HEADROOM_TOKENS,
        itl_slo_ms=target and target * 1e3,
        policy=VirtualTokenCounter() if fair else None,
        device=device,
        audits=False,
        max_tokens=5000,
    )


def run_until_streaming(server: Harness, *requests: Request) -> None:
    server.steps_until(lambda: all(outputs(request)[-1] > 0 for request in requests), most=5000)


@pytest.mark.parametrize("fair", [False, True])
def test_long_contexts_of_a_tenant_do_not_slow_down_anothers_stream(fair: bool) -> None:
    server = server_of(fair=fair)
    other = server.add(5, tenant="other")
    server.steps(200)
    attacker = server.add(6000, tenant="attacker", n=63)
    before, steps = outputs(other)[0], len(server.seconds)
    run_until_streaming(server, attacker)
    seconds = server.steps(300)
    assert max(seconds) < 1.2 * TARGET
    assert outputs(other)[0] - before == len(server.seconds) - steps, "a token in each step"
    # The attacker has the rest of the time, and each of its streams the same part of it.
    assert sum(seconds) > 0.8 * TARGET * 300
    assert max(outputs(attacker)) - min(outputs(attacker)) <= 1
    assert server.scheduler.counters.num_deferred_tokens > 0


def test_streams_of_one_tenant_have_a_token_in_every_step() -> None:
    server = server_of()
    request = server.add(6000, n=64)
    run_until_streaming(server, request)
    assert min(server.steps(20)) > 0.25
    assert min(outputs(request)) >= 20
    assert server.scheduler.counters.num_deferred_tokens == 0


def test_without_a_latency_target_nobody_takes_turns() -> None:
    server = server_of(target=None)
    other, request = (
        server.add(5, tenant="other"),
        server.add(6000, tenant="attacker", n=63),
    )
    run_until_streaming(server, other, request)
    assert min(server.steps(10)) > 0.25


@pytest.mark.parametrize(("target_ms", "least", "most"), [(SERVER_DEFAULTS["itl_slo_ms"], 0.3, 0.6), (None, 1.5, 2.0)])
def test_an_urgent_long_prompt_holds_no_stream_for_longer_than_a_servers_default_target(
    target_ms: float | None, least: float, most: float
) -> None:
    """A step of 2,048 tokens takes this device 1.6 s."""
    slow = StepTimes(0.006, ((1, 0.002), (64, 0.05), (2048, 1.6)), 1.2e-6, 2e-9)
    server = server_of(slow, target=target_ms and target_ms / 1e3)
    streams = [server.add(50, tenant="other") for _ in range(8)]
    run_until_streaming(server, *streams)
    server.steps(20)
    before, steps = [outputs(stream)[0] for stream in streams], len(server.seconds)
    run_until_streaming(server, server.add(7000, tenant="urgent", priority=-1))
    beside = server.seconds[steps:]
    assert least < max(beside) < most
    assert [outputs(stream)[0] for stream in streams] == [count + len(beside) for count in before]


def test_time_is_shared_by_weight() -> None:
    server = server_of()
    requests = {weight: server.add(6000, tenant=f"of {weight}", n=40, weight=weight) for weight in (1.0, 3.0)}
    run_until_streaming(server, *requests.values())
    before = {weight: sum(outputs(request)) for weight, request in requests.items()}
    server.steps(200)
    light, heavy = (sum(outputs(request)) - before[weight] for weight, request in requests.items())
    assert heavy / light == pytest.approx(3, rel=0.1)


@pytest.mark.slow
def test_tenants_of_which_each_takes_more_than_its_share_all_have_their_turn() -> None:
    server = server_of(StepTimes(0.003, SMALL.products, 0.1e-6))
    requests = [server.add(1000 + 500 * i, tenant=f"tenant {i}") for i in range(12)]
    run_until_streaming(server, *requests)
    server.device = StepTimes(0.003, SMALL.products, 1e-5)
    before = [outputs(request)[0] for request in requests]
    server.steps(400)
    counts = [outputs(request)[0] - had for request, had in zip(requests, before, strict=True)]
    assert min(counts) > 20
    # Those with less to read have more tokens for the same time.
    assert counts[0] > counts[-1]


def test_prompts_go_on_where_streams_take_turns() -> None:
    server = server_of()
    other = server.add(5, tenant="other")
    run_until_streaming(server, other, server.add(6000, tenant="attacker", n=63))
    server.steps(100)
    prompt = server.add(1000, tenant="third")
    steps = len(server.seconds)
    run_until_streaming(server, prompt)
    # With 16 tokens a step, as beside streams that exceed the target, it would be 63.
    assert len(server.seconds) - steps < 40
    assert max(server.seconds[steps:]) < 1.3 * TARGET


def test_a_large_model_spends_half_of_its_time_on_streams_that_take_turns() -> None:
    server = server_of(LARGE)
    other = server.add(5, tenant="other")
    run_until_streaming(server, other, server.add(6000, tenant="attacker", n=63))
    seconds = server.steps(100)
    assert 1.6 * LARGE.base < sorted(seconds)[50] < 2.2 * LARGE.base


def test_no_step_is_planned_ahead_of_one_whose_streams_will_take_turns() -> None:
    server = server_of()
    run_until_streaming(server, server.add(1000, tenant="a", n=10), server.add(1000, tenant="b", n=10))
    server.steps(50)
    plan = server.scheduler.schedule()
    assert plan.num_streams == 20
    server.device = StepTimes(0.003, SMALL.products, 1e-5)
    for _ in range(60):
        server.scheduler.update(plan, StepResult((7,) * plan.num_draws))
        seconds = server.device.predict(StepLoad.of(plan.starts, plan.lengths, num_streams=plan.num_streams))
        server.scheduler.observe(plan, seconds)
        plan = server.scheduler.schedule()
    assert plan.num_streams < 20
    assert not server.scheduler.schedule()


def streams_of(tenants: list[tuple[str, float, list[int]]]) -> list[Sequence]:
    streams = []
    for tenant, weight, lengths in tenants:
        for length in lengths:
            seq = make_sequence([1] * length)
            seq.request.tenant, seq.request.weight = tenant, weight
            streams.append(seq)
    return streams


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    tenants=st.lists(
        st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.lists(st.integers(1, 400), min_size=1, max_size=6)),
        min_size=2,
        max_size=4,
    ),
    per_token=st.sampled_from([1e-6, 1e-4, 1e-3]),
)
def test_whoever_asks_for_its_share_has_it_and_all_others_have_turns(
    tenants: list[tuple[float, list[int]]], per_token: float
) -> None:
    latency, device = LatencyTarget(TARGET), StepTimes(0.003, ((0, 0.0), (64, 0.02)), per_token)
    for rows in [*range(1, 30), *range(1, 30)]:
        load = StepLoad(rows, rows * rows * 3 % 1000, 0.0, rows)
        latency.observe(load, device.predict(load))
    turns = StreamTurns(latency)
    streams = streams_of([(str(i), weight, lengths) for i, (weight, lengths) in enumerate(tenants)])
    time = latency.stream_time(len(streams), sum(seq.num_tokens for seq in streams))
    costs = [time.of(seq.num_tokens) for seq in streams]
    asked: Counter[str] = Counter()
    for seq, cost in zip(streams, costs, strict=True):
        asked[seq.request.tenant] += cost  # type: ignore[assignment]
    share = time.available / sum(weight for weight, _ in tenants)
    waited = [0] * len(streams)
    for _ in range(100):
        chosen = turns.within_time(streams, have_prompts=False)
        served = [seq in chosen for seq in streams]
        assert chosen
        assert chosen == [seq for seq, now in zip(streams, served, strict=True) if now], "in their order"
        assert sum(cost for cost, now in zip(costs, served, strict=True) if now) <= time.available + max(costs)
        for seq, now in zip(streams, served, strict=True):
            assert now or asked[seq.request.tenant] > share * seq.request.weight * 0.999
        waited = [0 if now else steps + 1 for steps, now in zip(waited, served, strict=True)]
        # A turn of the largest stream of the least weight may cost the others six of theirs for each of its own.
        assert max(waited) <= 6 * len(streams) * max(costs) / min(costs)
        if time.wanted <= time.available:
            assert chosen == streams
            break

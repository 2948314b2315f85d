"""Streams of several tenants share the time of a step, where all of their tokens would take too long."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.commands.serve import DEFAULTS
from octavo.planner.roofline import StepTimes
from octavo.request import Request, Sequence
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.scheduler.policy import VirtualTokenCounter
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig
from octavo.scheduler.step_budget import LatencyTarget
from octavo.scheduler.step_time import StepLoad
from octavo.scheduler.stream_turns import StreamTurns
from tests.kvcache.caches import make_manager, make_request, make_sequence

# Near to SmolLM2-135M on two cores: 64 streams of 6,000 tokens take 280 ms, and of 5 tokens 50.
SMALL = StepTimes(0.003, ((1, 0.001), (64, 0.047), (2048, 0.8)), 0.6e-6, 1e-9)
# Reading the weights of this one takes 400 ms, whatever a step computes.
LARGE = StepTimes(0.4, ((1, 0.001), (64, 0.02), (2048, 8.0)), 4e-6, 1e-8)
TARGET = 0.05


class Server:
    """A scheduler whose steps take as long as a device would, and which draws token 7 for everyone."""

    def __init__(
        self, device: StepTimes = SMALL, *, seqs: int = 128, fair: bool = False, target: float | None = TARGET
    ) -> None:
        self.kv = make_manager(6001, 16)
        config = SchedulerConfig(seqs, 2048, max_model_len=1 << 16, itl_slo_ms=target and target * 1e3)
        self.scheduler = Scheduler(config, self.kv, policy=VirtualTokenCounter() if fair else None)
        self.device = device
        self.seconds: list[float] = []
        self._arrivals = 0

    def add(
        self, tenant: str, tokens: int, n: int = 1, max_tokens: int = 5000, weight: float = 1.0, priority: int = 0
    ) -> Request:
        self._arrivals += 1
        prompt = [self._arrivals * 10_000 + i for i in range(tokens)]
        request = make_request(prompt, n=n, max_tokens=max_tokens, ignore_eos=True, tenant=tenant)
        request.arrival_time, request.weight = float(self._arrivals), weight
        request.priority = priority
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, StepResult((7,) * plan.num_draws))
        seconds = self.device.predict(StepLoad.of(plan.starts, plan.lengths, num_streams=plan.num_streams))
        self.scheduler.observe(plan, seconds)
        self.seconds.append(seconds)
        return plan

    def run(self, steps: int) -> list[float]:
        """Compute so many steps, and return how long each took."""
        for _ in range(steps):
            self.step()
        return self.seconds[-steps:]

    def run_until_streaming(self, *requests: Request) -> None:
        for _ in range(5000):
            if all(drawn(request)[-1] > 0 for request in requests):
                return
            self.step()
        raise AssertionError("the prompts were not computed in 5,000 steps")


def drawn(request: Request) -> list[int]:
    return [seq.num_output_tokens for seq in request.sequences]


@pytest.mark.parametrize("fair", [False, True])
def test_long_contexts_of_a_tenant_do_not_slow_down_anothers_stream(fair: bool) -> None:
    server = Server(fair=fair)
    other = server.add("other", 5)
    server.run(200)
    attacker = server.add("attacker", 6000, n=63)
    before, steps = drawn(other)[0], len(server.seconds)
    server.run_until_streaming(attacker)
    seconds = server.run(300)
    assert max(seconds) < 1.2 * TARGET
    assert drawn(other)[0] - before == len(server.seconds) - steps, "a token in each step"
    # The attacker has the rest of the time, and each of its streams the same part of it.
    assert sum(seconds) > 0.8 * TARGET * 300
    assert max(drawn(attacker)) - min(drawn(attacker)) <= 1
    assert server.scheduler.counters.num_deferred_tokens > 0


def test_streams_of_one_tenant_have_a_token_in_every_step() -> None:
    server = Server()
    request = server.add("", 6000, n=64)
    server.run_until_streaming(request)
    assert min(server.run(20)) > 0.25
    assert min(drawn(request)) >= 20
    assert server.scheduler.counters.num_deferred_tokens == 0


def test_without_a_latency_target_nobody_takes_turns() -> None:
    server = Server(target=None)
    other, request = server.add("other", 5), server.add("attacker", 6000, n=63)
    server.run_until_streaming(other, request)
    assert min(server.run(10)) > 0.25


@pytest.mark.parametrize(("target_ms", "least", "most"), [(DEFAULTS["itl_slo_ms"], 0.3, 0.6), (None, 1.5, 2.0)])
def test_an_urgent_long_prompt_holds_no_stream_for_longer_than_a_servers_default_target(
    target_ms: float | None, least: float, most: float
) -> None:
    """A step of 2,048 tokens takes this device 1.6 s."""
    slow = StepTimes(0.006, ((1, 0.002), (64, 0.05), (2048, 1.6)), 1.2e-6, 2e-9)
    server = Server(slow, target=target_ms and target_ms / 1e3)
    streams = [server.add("other", 50) for _ in range(8)]
    server.run_until_streaming(*streams)
    server.run(20)
    before, steps = [drawn(stream)[0] for stream in streams], len(server.seconds)
    server.run_until_streaming(server.add("urgent", 7000, priority=-1))
    beside = server.seconds[steps:]
    assert least < max(beside) < most
    assert [drawn(stream)[0] for stream in streams] == [count + len(beside) for count in before]


def test_time_is_shared_by_weight() -> None:
    server = Server()
    requests = {weight: server.add(f"of {weight}", 6000, n=40, weight=weight) for weight in (1.0, 3.0)}
    server.run_until_streaming(*requests.values())
    before = {weight: sum(drawn(request)) for weight, request in requests.items()}
    server.run(200)
    light, heavy = (sum(drawn(request)) - before[weight] for weight, request in requests.items())
    assert heavy / light == pytest.approx(3, rel=0.1)


@pytest.mark.slow
def test_tenants_of_which_each_takes_more_than_its_share_all_have_their_turn() -> None:
    server = Server(StepTimes(0.003, SMALL.products, 0.1e-6))
    requests = [server.add(f"tenant {i}", 1000 + 500 * i) for i in range(12)]
    server.run_until_streaming(*requests)
    server.device = StepTimes(0.003, SMALL.products, 1e-5)
    before = [drawn(request)[0] for request in requests]
    server.run(400)
    counts = [drawn(request)[0] - had for request, had in zip(requests, before, strict=True)]
    assert min(counts) > 20
    # Those with less to read have more tokens for the same time.
    assert counts[0] > counts[-1]


def test_prompts_go_on_where_streams_take_turns() -> None:
    server = Server()
    other = server.add("other", 5)
    server.run_until_streaming(other, server.add("attacker", 6000, n=63))
    server.run(100)
    prompt = server.add("third", 1000)
    steps = len(server.seconds)
    server.run_until_streaming(prompt)
    # With 16 tokens a step, as beside streams that exceed the target, it would be 63.
    assert len(server.seconds) - steps < 40
    assert max(server.seconds[steps:]) < 1.3 * TARGET


def test_a_large_model_spends_half_of_its_time_on_streams_that_take_turns() -> None:
    server = Server(LARGE)
    other = server.add("other", 5)
    server.run_until_streaming(other, server.add("attacker", 6000, n=63))
    seconds = server.run(100)
    assert 1.6 * LARGE.base < sorted(seconds)[50] < 2.2 * LARGE.base


def test_no_step_is_planned_ahead_of_one_whose_streams_will_take_turns() -> None:
    server = Server()
    server.run_until_streaming(server.add("a", 1000, n=10), server.add("b", 1000, n=10))
    server.run(50)
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


def test_a_stream_served_often_while_time_was_short_has_its_turn_when_tokens_are() -> None:
    latency, device = LatencyTarget(TARGET), StepTimes(0.003, ((0, 0.0), (64, 0.02)), 5e-6)
    for rows in [*range(1, 30), *range(1, 30)]:
        load = StepLoad(rows, rows * rows * 3 % 1000, 0.0, rows)
        latency.observe(load, device.predict(load))
    turns = StreamTurns(latency)
    early = streams_of([("a", 1.0, [6000] * 4), ("b", 1.0, [6000] * 4)])
    for _ in range(200):
        assert len(turns.within_time(early, have_prompts=False)) < len(early)
    streams = [*early, *streams_of([("c", 1.0, [10] * 4)])]
    served = Counter[int]()
    for _ in range(12):
        chosen, _ = turns.within_tokens(streams, 2, have_prompts=False)
        served.update(seq.seq_id for seq in chosen)
    assert set(served.values()) == {2}
    assert len(served) == len(streams)

"""Several simulated servers behind a router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.cluster.config import RouterConfig
from octavo.errors import ConfigError
from octavo.kvcache.hashing import Label
from octavo.planner.roofline import StepTimes
from octavo.simulator.fleet import PREFILL_TOKENS, ROUTERS, Fleet
from octavo.simulator.links import ROUND_TRIP_S
from octavo.simulator.options import Demand
from octavo.simulator.questions import simulate
from octavo.simulator.results import Results
from octavo.simulator.speed import MEASURED, Speed
from octavo.tiers.base import Reason
from octavo.workloads.traces import TOKENS_PER_HASH, TraceRequest
from tests.simulator.test_simulation import STEP, plan

# Conversations of four turns, each prompt the last one and 512 tokens more.
CONVERSATIONS = tuple(
    TraceRequest(
        turn * 4.0 + number / 10, TOKENS_PER_HASH * (turn + 1), 20, tuple(range(9 * number, 9 * number + turn + 1))
    )
    for turn in range(4)
    for number in range(7)
)


def figures(results: Results) -> dict[str, Any]:
    own = ("simulated_in_s", "router", "servers", "requests_of_a_server")
    return {name: value for name, value in results.report().items() if name not in own}


@pytest.mark.parametrize(
    "demand",
    [
        Demand(
            num_requests=60, request_rate=40.0, input_len="uniform:1-300", output_len="uniform:1-60", burstiness=0.5
        ),
        Demand(
            num_requests=60,
            concurrency=12,
            think_time=0.2,
            input_len="uniform:1-3000",
            output_len="30",
            prefix_len="100",
        ),
    ],
    ids=["open", "closed"],
)
@pytest.mark.parametrize("router", ROUTERS)
def test_one_server_of_a_fleet_is_a_server(demand: Demand, router: str) -> None:
    servers = [plan().server()]
    assert figures(Fleet(servers, demand.traffic(), router, demand.sent_by).run()) == figures(simulate(plan(), demand))


def test_servers_that_take_turns_have_the_results_of_each_alone() -> None:
    demand = Demand(
        num_requests=200, request_rate=60.0, input_len="uniform:1-300", output_len="uniform:1-60", prefix_len="64"
    )
    fleet = simulate(plan().replace(replicas=3, router="round_robin"), demand)
    alone = [simulate(plan(), replace(demand, turn=number, turns=3)) for number in range(3)]
    for name in ("requests", "completed", "steps", "output_tokens", "cached_tokens", "evictions", "busy_s"):
        assert getattr(fleet, name) == pytest.approx(sum(getattr(each, name) for each in alone)), name
    assert fleet.duration_s == max(each.duration_s for each in alone)
    assert fleet.ttft.greatest == max(each.ttft.greatest for each in alone)
    assert fleet.report()["requests_of_a_server"] == {"min": 66, "max": 67}


def test_conversations_stay_with_their_blocks_if_prompts_are_looked_at() -> None:
    found = {
        router: simulate(plan(max_model_len=4096).replace(replicas=3, router=router), Demand(trace=CONVERSATIONS))
        for router in ROUTERS
    }
    # All but the first turn's 512 tokens, and the last block, which a hit leaves.
    assert found["prefix"].hit_rate > 0.55 > found["round_robin"].hit_rate
    assert found["prefix"].ttft.mean < found["round_robin"].ttft.mean
    assert min(found["prefix"].per_replica) >= 4, "they are not all sent to one"


def test_the_least_loaded_server_is_one_without_requests() -> None:
    trace = (TraceRequest(0.0, 1, 100), *(TraceRequest(0.1 + 0.05 * i, 1, 2) for i in range(5)))
    results = simulate(plan().replace(replicas=2, router="least_loaded"), Demand(trace=trace))
    assert results.per_replica == [1, 5]
    assert results.busy_s == pytest.approx(110 * STEP)


@pytest.mark.parametrize("router", ["least_loaded", "prefix"])
def test_a_request_is_unfinished_for_the_router_until_its_step_ends(router: str) -> None:
    slow = Speed("", MEASURED, StepTimes(1.0, ()))
    trace = tuple(TraceRequest(number / 10, 100, 1) for number in range(2))
    results = simulate(plan().replace(speed=slow, replicas=2, router=router), Demand(trace=trace))
    assert results.per_replica == [1, 1]


def test_a_request_that_comes_during_a_step_delays_the_next() -> None:
    times = StepTimes(STEP, (), per_arrival=0.004)
    servers = plan().replace(speed=Speed("", MEASURED, times), replicas=2, router="round_robin")
    trace = tuple(TraceRequest(0.055 if i else 0.0, 1, 20) for i in range(3))
    assert simulate(servers, Demand(trace=trace)).busy_s == pytest.approx(26 * STEP + 0.004 + 20 * STEP)


NEAR = {"kv_host_memory": "4GiB", "kv_demotion": "all", "max_model_len": 4096}


def hot(router: str, **fleet: Any) -> Results:
    """Two servers, of which the one that has a long prompt is busy when it comes again."""
    long = tuple(range(6))
    trace = (
        TraceRequest(0.0, TOKENS_PER_HASH * 6, 2, long),
        *(TraceRequest(8.0, TOKENS_PER_HASH * 2, 300, (100 + n, 200 + n)) for n in range(2)),
        *(TraceRequest(8.1 + n / 10, TOKENS_PER_HASH * 6, 2, long) for n in range(2)),
    )
    return simulate(plan(**NEAR).replace(replicas=2, router=router, **fleet), Demand(trace=trace))


def test_a_server_fetches_what_a_neighbour_has_if_that_is_faster_than_computing() -> None:
    alone = hot("round_robin", link_gbit=None)
    assert hot("round_robin", link_gbit=100.0).cached_tokens == alone.cached_tokens, "a router that does not look knows"
    fetched, slowly, never = (hot("prefix", link_gbit=rate) for rate in (100.0, 0.001, None))
    assert fetched.completed == slowly.completed == never.completed == 5
    assert fetched.cached_tokens >= slowly.cached_tokens >= never.cached_tokens > 0


def test_blocks_arrive_when_the_links_have_carried_them() -> None:
    servers = plan(**NEAR).replace(replicas=3, link_gbit=10.0).servers()
    stores = [server.neighbours for server in servers]
    clock, memory, key = servers[0].clock, servers[1].kv.hierarchy.host, b"k" * 16
    label = Label(key, b"p" * 16, b"t" * 8)
    slot = memory.reserve(label, "")
    assert slot is not None
    for store in stores:
        assert store is not None
        store.medium.expect([label], "1")
    first, _, third = stores
    assert first is not None
    assert third is not None
    assert first.ask([label], 1.0).outcomes == [Reason.ABSENT], "it is being filled"
    memory.filled(slot, "neighbour", hold=False)
    asked, got = first.ask([label], 1.0), first.get([label], [memoryview(b"")], 1.0)
    carried = first.block_bytes / (10e9 / 8)
    assert (asked.outcomes, got.outcomes, asked.done, got.done) == ([None], [None], False, False)
    assert first.next_end() == ROUND_TRIP_S
    clock.now = ROUND_TRIP_S
    assert (asked.done, got.done) == (True, False)
    assert first.next_end() == pytest.approx(ROUND_TRIP_S + carried)
    # The neighbour's own link carries one after the other.
    third.get([label], [memoryview(b"")], 1.0)
    assert third.next_end() == pytest.approx(ROUND_TRIP_S + 2 * carried)
    clock.now = 1.0
    assert got.done
    assert first.next_end() is None


def test_long_prompts_are_computed_apart_and_fetched() -> None:
    trace = tuple(
        TraceRequest(number * 2.0, TOKENS_PER_HASH * 4 if number % 2 else 64, 30, (10 * number,) * 4)
        for number in range(8)
    )
    found = simulate(plan(**NEAR).replace(replicas=3, link_gbit=100.0, prefill_replicas=1), Demand(trace=trace))
    assert (found.requests, found.completed, found.output_tokens) == (8, 8, 8 * 30)
    assert found.per_replica[0] == 4, "the long ones"
    assert sum(found.per_replica) == 12
    assert found.prompt_tokens == 4 * 64 + 4 * TOKENS_PER_HASH * 4, "each prompt counts once"
    assert found.ttft.count == 8
    together = simulate(plan(**NEAR).replace(replicas=3), Demand(trace=trace))
    assert found.ttft.greatest > together.ttft.greatest
    assert RouterConfig(worker=["http://a:1"]).prefill_tokens == PREFILL_TOKENS


def test_what_cannot_be_is_refused() -> None:
    near = plan(**NEAR).replace(replicas=2)
    for changes, reason in (
        ({"link_gbit": 0.0}, "link_gbit must be above 0"),
        ({"link_gbit": 10.0, "kv_demotion": "on_evict"}, "--kv-demotion all"),
        ({"prefill_replicas": 2}, "must leave some of the 2 replicas, got 2"),
        ({"prefill_replicas": 1}, "needs a link"),
    ):
        with pytest.raises(ConfigError, match=reason):
            near.replace(**changes)
    with pytest.raises(ConfigError, match="router must be one of prefix, least_loaded, round_robin, got 'best'"):
        plan().replace(replicas=2, router="best")
    with pytest.raises(ConfigError, match="replicas must be at least 1"):
        plan().replace(replicas=0)

"""Tenants take turns by the service that they have received, on whole schedulers without a model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.request import Sequence
from octavo.scheduler.policy import OUTPUT_TOKEN, RECENT_HALF_LIFE, VirtualTokenCounter, make_policy
from octavo.scheduler.waiting import WaitingQueue
from tests.kvcache.caches import make_request
from tests.scheduler.kit import Harness

MAX_LEN = 64


def tenants_server(
    policy: str = "vtc",
    num_blocks: int = 400,
    seqs: int = 4,
    budget: int = 32,
    headroom: int = 32,
    **cache: Any,
) -> Harness:
    return Harness(
        num_blocks,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_LEN,
        headroom_tokens=headroom,
        policy=make_policy(policy),  # type: ignore[arg-type]
        audits=False,
        **cache,
    )


def received_by(server: Harness, tenant: str) -> float:
    assert isinstance(server.scheduler.policy, VirtualTokenCounter)
    return server.scheduler.policy.received(tenant)


def waiting_tenants(server: Harness) -> set[str]:
    return {seq.request.tenant for seq in server.scheduler.waiting.heads()}


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=5)
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 3.0])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    tenants=st.lists(st.tuples(WEIGHTS, SHAPES), min_size=2, max_size=4),
    seqs=st.integers(1, 6),
    num_blocks=st.sampled_from([18, 24, 40, 400]),  # one request nearly fills the first, all fit into the last
)
def test_tenants_that_always_wait_differ_by_a_bound_that_does_not_grow(
    tenants: list[tuple[float, list[tuple[int, int]]]], seqs: int, num_blocks: int
) -> None:
    server = tenants_server("vtc", num_blocks, seqs)
    shapes = {f"t{i}": (weight, itertools.cycle(work)) for i, (weight, work) in enumerate(tenants)}
    # Of one admission, and of all that runs for one tenant while another has its turn (OSDI 2024, theorem 4.4).
    bound = (MAX_LEN + 2 * seqs * OUTPUT_TOKEN * 20) / min(weight for weight, _ in tenants)
    # Where requests wait for blocks, others pass them by a bound too (`VirtualTokenCounter.may_pass`).
    bound = 2 * bound + 2 * MAX_LEN / min(weight for weight, _ in tenants)
    for _ in range(300):
        for tenant, (weight, work) in shapes.items():
            while sum(request.tenant == tenant for request in server.scheduler.requests) <= seqs:
                server.add(*next(work), tenant=tenant, weight=weight)
        server.step()
        received = [received_by(server, tenant) for tenant in shapes]
        assert max(received) - min(received) <= bound
    for request in server.scheduler.requests:
        server.scheduler.end_request(request.request_id)
    server.kv.audit()


@pytest.mark.slow
def test_large_requests_get_their_share_of_a_pool_that_one_of_them_nearly_fills() -> None:
    server = tenants_server("vtc", num_blocks=20, seqs=6)
    small, large = (1, 1), (40, 11)
    works = {"a": (0.5, [small, large]), "b": (1.0, [small, (10, 5), large, small])}
    works |= {"c": (0.5, [small]), "d": (0.5, [small])}
    shapes = {tenant: (weight, itertools.cycle(work)) for tenant, (weight, work) in works.items()}
    for _ in range(600):
        for tenant, (weight, work) in shapes.items():
            while sum(request.tenant == tenant for request in server.scheduler.requests) <= 6:
                server.add(*next(work), tenant=tenant, weight=weight)
        server.step()
    received = [received_by(server, tenant) for tenant in shapes]
    assert max(received) < 1.5 * min(received)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=25),
    seqs=st.integers(1, 6),
)
def test_nothing_idles_while_a_request_waits_and_every_request_ends(
    work: list[tuple[str, int, int]], seqs: int
) -> None:
    server = tenants_server(seqs=seqs)
    requests = [server.add(prompt, output, tenant=tenant) for tenant, prompt, output in work]
    for _ in range(2000):
        if not server.scheduler.has_work:
            break
        server.step()
        # More than enough blocks: whoever waits does so for a place or for tokens of a step.
        if server.scheduler.num_waiting:
            assert (
                len(server.plan.lengths) == seqs
                or server.plan.num_tokens == server.scheduler.config.max_num_batched_tokens
            )
    assert all(request.finished for request in requests)
    server.kv.audit()


def test_a_pause_gives_no_credit() -> None:
    server = tenants_server(seqs=2)

    def keep_busy(*tenants: str) -> None:
        for tenant in tenants:
            while sum(request.tenant == tenant for request in server.scheduler.requests) < 4:
                server.add(10, 10, tenant=tenant)
        server.step()

    server.add(10, 10, tenant="ada")
    for _ in range(300):
        keep_busy("ben")
    before = received_by(server, "ben")
    for _ in range(200):
        keep_busy("ada", "ben")
    # Since it came back ada has had as much as ben, and not what it had asked nothing for.
    assert received_by(server, "ben") - before > 200
    assert abs(received_by(server, "ada") - received_by(server, "ben")) < 150


def test_a_flood_does_not_keep_another_tenant_waiting_longer_than_a_place_takes_to_become_free() -> None:
    server = tenants_server(seqs=2)
    for _ in range(50):
        server.add(10, 5, tenant="flood")
    for _ in range(20):
        server.step()
    quiet = server.add(10, 5, tenant="quiet")
    for _ in range(8):
        server.step()
    assert quiet.sequences[0].num_output_tokens


def test_prompts_of_a_tenant_that_sends_little_are_computed_first_however_many_places_it_has() -> None:
    server = tenants_server(seqs=8, budget=16)
    for _ in range(4):
        server.add(30, 2, tenant="busy")
        while server.scheduler.has_work:
            server.step()
    for _ in range(2):
        server.add(2, 30, tenant="quiet")
    server.step()
    busy, quiet = server.add(25, 10, tenant="busy"), server.add(25, 10, tenant="quiet")
    while not quiet.sequences[0].num_output_tokens:
        server.step()
    assert not busy.sequences[0].num_output_tokens


def test_a_prompt_that_comes_later_takes_little_of_a_step_from_one_of_a_tenant_that_received_less() -> None:
    server = tenants_server(seqs=8, budget=32)
    for _ in range(4):
        server.add(30, 2, tenant="busy")
        while server.scheduler.has_work:
            server.step()
    quiet = server.add(60, 2, tenant="quiet")
    server.step()
    server.add(30, 2, tenant="busy")
    server.step()
    assert quiet.sequences[0].num_output_tokens == 1


def test_a_preempted_sequence_comes_back_before_tenants_a_little_behind() -> None:
    counter = VirtualTokenCounter()
    queue = WaitingQueue(counter)
    preempted, other = make_request([1] * 10, tenant="a").sequences[0], make_request([1] * 10, tenant="b").sequences[0]
    preempted.num_preemptions = 1
    for seq in (preempted, other):
        queue.push(seq)
    counter.charge("a", 9)
    assert queue.first(2) == [preempted, other]
    counter.charge("a", 2)
    assert queue.first(2) == [other, preempted]


def test_what_was_received_of_late_halves_with_time() -> None:
    counter = VirtualTokenCounter()
    request = make_request([1], tenant="a")
    request.weight = 2.0
    counter.arrive(request, [])
    counter.drawn(request.sequences * 400)
    assert counter.recent("a") == 400
    later = make_request([1], tenant="b")
    later.arrival_time = counter._now + RECENT_HALF_LIFE
    counter.admitted(later.sequences[0])
    assert counter.recent("a") == pytest.approx(200)
    assert counter.received("a") == 400


def test_first_come_first_served_lets_the_flood_go_first() -> None:
    server = tenants_server("fcfs", seqs=2)
    for _ in range(50):
        server.add(10, 5, tenant="flood")
    quiet = server.add(10, 5, tenant="quiet")
    for _ in range(60):
        server.step()
    assert not quiet.sequences[0].num_output_tokens


def test_cached_tokens_of_a_prompt_are_not_charged_and_neither_is_recomputation() -> None:
    server = tenants_server()
    prompt = list(range(20))
    server.add(prompt, 1, tenant="a")
    server.step()
    assert received_by(server, "a") == 20 + OUTPUT_TOKEN
    seq = server.add(prompt, 8, tenant="a").sequences[0]
    server.step()
    # 16 of 20 are in full blocks before the last token.
    assert received_by(server, "a") == 20 + 4 + 2 * OUTPUT_TOKEN
    server.scheduler.preempt(seq)
    server.kv.reset_prefix_cache()  # so that the whole prompt is computed again
    while not seq.finished:
        server.step()
    assert received_by(server, "a") == 20 + 4 + 9 * OUTPUT_TOKEN


def test_what_was_charged_of_a_prompt_that_is_aborted_before_it_is_computed_is_given_back() -> None:
    server = tenants_server(budget=8)
    request = server.add(40, 4, tenant="a")
    server.step()
    assert received_by(server, "a") == 40
    server.step()
    server.scheduler.end_request(request.request_id)
    assert received_by(server, "a") == 16  # two chunks of 8
    server.kv.audit()


def test_what_was_computed_of_a_prompt_is_charged_though_a_preemption_threw_it_away() -> None:
    server = tenants_server(budget=8)
    request = server.add(40, 4, tenant="a")
    for _ in range(3):
        server.step()
    server.scheduler.preempt(request.sequences[0])
    server.scheduler.end_request(request.request_id)
    assert received_by(server, "a") == 24


def test_nothing_is_given_back_of_a_prompt_that_was_computed() -> None:
    server = tenants_server()
    request = server.add(20, 4, tenant="a")
    server.step()
    server.scheduler.end_request(request.request_id)
    assert received_by(server, "a") == 20 + OUTPUT_TOKEN
    assert request.uncomputed_charge == 0


def test_a_weight_of_three_is_served_three_times_as_much() -> None:
    server = tenants_server(seqs=3)
    for tenant, weight in (("one", 1.0), ("three", 3.0)):
        for _ in range(120):
            server.add(10, 5, tenant=tenant, weight=weight)
    while waiting_tenants(server) == {"one", "three"}:
        server.step()
    ended = {"one": 0, "three": 0}
    for tenant in ended:
        ended[tenant] = 120 - sum(request.tenant == tenant for request in server.scheduler.requests)
    assert 2.7 < ended["three"] / ended["one"] < 3.3


def test_the_tenant_that_received_most_yields_its_blocks() -> None:
    counter = VirtualTokenCounter()

    def running(tenant: str) -> Sequence:
        return make_request([1], tenant=tenant).sequences[0]

    sequences = [running("much"), running("little"), running("much"), running("little")]
    counter.charge("much", 100)
    counter.charge("little", 10)
    assert max(sequences, key=counter.key) is sequences[2]
    assert max(sequences[3:], key=counter.key) is sequences[3]


def test_where_blocks_run_out_streams_of_the_least_served_keep_theirs() -> None:
    server = tenants_server(num_blocks=14, seqs=6, headroom=0)
    flood = [server.add(8, 30, tenant="flood") for _ in range(3)]
    for _ in range(6):
        server.step()
    # Later than all the others, and so the last in order of service.
    quiet = server.add(4, 12, tenant="quiet")
    while not quiet.finished:
        server.step()
    assert quiet.sequences[0].num_preemptions == 0
    while server.scheduler.has_work:
        server.step()
    assert sum(request.sequences[0].num_preemptions for request in flood) > 0
    server.kv.audit()


def test_where_prefixes_count_the_longest_cached_prefix_of_the_tenant_in_turn_is_first() -> None:
    server = tenants_server(seqs=1, budget=64, by_prefix=True)
    shared = list(range(40))
    server.add(shared, 1, tenant="a")
    server.step()
    later = [server.add(20, 1, tenant="a"), server.add([*shared, 1], 1, tenant="a"), server.add(20, 1, tenant="b")]
    assert isinstance(server.scheduler.policy, VirtualTokenCounter)
    server.scheduler.policy.charge("a", 10)
    server.step()
    assert later[2].finished, "its tenant has received less"
    server.step()
    assert later[1].finished
    server.run()


def test_tenants_that_come_and_go_are_forgotten() -> None:
    counter = VirtualTokenCounter()
    queue = WaitingQueue(counter)
    for number in range(6000):
        seq = make_request([1], tenant=f"t{number}").sequences[0]
        if number % 1000:
            counter.arrive(seq.request, [])
            continue
        queue.push(seq)
        queue.admit(seq)
        counter.drawn([seq])
    assert len(counter._received) <= 4097
    assert len(counter._recent) <= 6

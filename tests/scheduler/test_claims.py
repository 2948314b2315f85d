"""Who may take the place of somebody that runs, on whole schedulers without a model."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.request import Request
from tests.scheduler.kit import Harness, running
from tests.scheduler.test_fairness import tenants_server


def urgent(server: Harness, priority: int, prompt: int, output: int) -> Request:
    """A request of this priority."""
    return server.add(prompt, output, priority=priority)


def test_a_more_urgent_request_takes_the_place_of_the_last_less_urgent_one() -> None:
    server = tenants_server("priority", seqs=2)
    first, second = (urgent(server, 1, 8, 30) for _ in range(2))
    server.step()
    third = urgent(server, 0, 8, 4)
    server.step()
    assert [running(request) for request in (first, second, third)] == [True, False, True]
    server.run()
    assert second.sequences[0].num_output_tokens == 30


def test_a_more_urgent_request_takes_blocks_only_where_that_suffices() -> None:
    server = tenants_server("priority", seqs=4, num_blocks=16, headroom=0)
    held = [urgent(server, 0, 24, 8), urgent(server, 2, 16, 8)]
    server.step()
    # Nobody but the second may be taken from, and its 4 blocks and 5 free ones do not hold 40 tokens.
    large = urgent(server, 1, 40, 4)
    server.step()
    assert [running(request) for request in (*held, large)] == [True, True, False]
    small = urgent(server, -1, 24, 4)
    server.step()
    assert running(small)
    assert not running(held[1])
    server.run()


@pytest.mark.parametrize("priorities", [(0, 0), (0, 1)])
def test_no_request_takes_the_place_of_one_as_urgent_or_more(priorities: tuple[int, int]) -> None:
    server = tenants_server("priority", seqs=1)
    first = urgent(server, priorities[0], 8, 30)
    server.step()
    second = urgent(server, priorities[1], 8, 4)
    server.step()
    assert (running(first), running(second)) == (True, False)


def test_a_request_that_waited_long_enough_goes_ahead_of_more_urgent_ones() -> None:
    server = tenants_server("priority", seqs=1)
    patient = urgent(server, 1, 8, 4)
    for _ in range(58):
        next(server.arrivals)
    # A request as urgent as can be arrives whenever one ends; a step of priority is worth 60 seconds.
    urgents = [urgent(server, 0, 8, 4) for _ in range(10)]
    drain_order: list[Request] = []
    while server.scheduler.has_work:
        server.step()
        drain_order += [r for r in (patient, *urgents) if r.finished and r not in drain_order]
    assert drain_order.index(patient) == 1
    server.kv.audit()


def test_a_tenant_without_a_place_takes_one_of_the_tenant_that_has_most() -> None:
    server = tenants_server(seqs=4)
    flood = [server.add(8, 30, tenant="flood") for _ in range(10)]
    server.step()
    other = server.add(8, 30, tenant="other")
    server.step()
    quiet = server.add(8, 4, tenant="quiet")
    server.step()
    assert running(other)
    assert running(quiet)
    assert [running(request) for request in flood[:4]] == [True, True, False, False]
    server.run()


def test_a_tenant_with_few_places_takes_from_one_that_keeps_twice_as_many() -> None:
    server = tenants_server(seqs=6)
    for _ in range(8):
        server.add(8, 30, tenant="flood")
    server.step()
    quiet = [server.add(8, 30, tenant="quiet") for _ in range(4)]
    for _ in range(4):
        server.step()
    assert [running(request) for request in quiet] == [True, True, False, False]
    server.run()


def test_prompts_of_a_tenant_with_few_places_are_computed_first() -> None:
    server = tenants_server(seqs=12, budget=16)
    for _ in range(8):
        server.add(30, 30, tenant="flood")
    server.step()
    quiet = server.add(40, 2, tenant="quiet")
    for _ in range(5):
        server.step()
    # Of 16 tokens a step each stream takes one, and one goes to the prompt that arrived first.
    assert quiet.sequences[0].num_output_tokens >= 1
    server.run()


def test_a_weight_counts_where_places_are_taken() -> None:
    server = tenants_server(seqs=6)
    for _ in range(8):
        server.add(8, 30, tenant="flood")
    server.step()
    heavy = [server.add(8, 30, tenant="heavy", weight=5.0) for _ in range(6)]
    for _ in range(6):
        server.step()
    assert sum(map(running, heavy)) == 4
    server.run()


def test_a_request_that_needs_most_of_the_pool_takes_it_from_tenants_far_ahead() -> None:
    server = tenants_server(num_blocks=20, seqs=4)
    long = [server.add(4, 60, tenant=tenant) for tenant in "ab"]
    for _ in range(10):
        server.step()
    large = server.add(44, 4, tenant="c")
    # It lacks blocks, and its tenant, which paused, begins level with the others: they go on until they are ahead.
    steps = 0
    while not running(large):
        server.step()
        steps += 1
    assert steps < 60
    assert any(request.sequences[0].num_preemptions for request in long) or any(r.finished for r in long)
    server.run()
    assert [r.sequences[0].num_output_tokens for r in (*long, large)] == [60, 60, 4]


def test_a_tenants_only_place_is_never_taken() -> None:
    server = tenants_server(seqs=3)
    requests = [server.add(8, 30, tenant=tenant) for tenant in "abc"]
    server.step()
    late = server.add(8, 4, tenant="d")
    server.step()
    assert [running(request) for request in (*requests, late)] == [True, True, True, False]
    server.run()


@pytest.mark.parametrize("policy", ["priority", "vtc"])
def test_everybody_ends_however_often_places_are_taken(policy: str) -> None:
    options: dict[str, Any] = {"num_blocks": 24, "seqs": 3, "headroom": 0}
    server = tenants_server(policy, **options)
    requests = []
    for number in range(60):
        request = server.request(3 + number % 30, 1 + number % 13, tenant=f"t{number % 7 if number % 3 else 0}")
        request.priority = number % 4
        server.scheduler.add(request)
        requests.append(request)
        server.step()
    server.run()
    assert all(request.sequences[0].num_output_tokens == request.params.max_tokens for request in requests)

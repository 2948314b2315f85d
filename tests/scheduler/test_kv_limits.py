"""Floors and caps: what each tenant can always hold of the pool, and what it may hold at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from octavo.errors import CapacityError, ConfigError
from octavo.kvcache.spec import KVCacheSpec
from octavo.request import PinRequest, Request
from octavo.scheduler.kv_limits import Amount, KVLimits, TenantLimits, resolve_limits
from tests.kvcache.caches import FULL, make_request, sliding
from tests.scheduler.kit import Harness, running
from tests.scheduler.test_fairness import tenants_server

POLICIES = ["fcfs", "priority", "vtc"]
SPEC = KVCacheSpec.build((FULL,), 4, "float32")


def server_with(limits: Mapping[str, KVLimits], policy: str = "fcfs", **options: Any) -> Harness:
    """Blocks of 4 tokens: 40 of them."""
    server = tenants_server(policy, **{"num_blocks": 41, "seqs": 8, "headroom": 4, **options})
    server.scheduler.set_limits(limits)
    return server


def held(server: Harness, tenant: str) -> int:
    owners = server.kv.pool.owners
    assert owners is not None
    return owners.held(tenant)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_floor_is_there_at_once_whatever_others_hold(policy: str) -> None:
    server = server_with({"quiet": KVLimits(floor=16)}, policy)
    flood = [server.add(12, 40, tenant="flood") for _ in range(8)]
    for _ in range(15):
        server.step()
        assert held(server, "flood") <= 24
    assert any(map(running, flood))
    before = server.scheduler.counters.num_preemptions
    quiet = server.add(40, 20, tenant="quiet")
    server.step()
    assert running(quiet)
    while not quiet.finished:
        server.step()
    assert quiet.sequences[0].num_preemptions == 0
    # Places may be claimed by service, blocks need not be.
    assert policy == "vtc" or server.scheduler.counters.num_preemptions - before < 8
    server.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cap_bounds_what_a_tenants_requests_hold_and_delays_nobody_else(policy: str) -> None:
    server = server_with({"flood": KVLimits(cap=10)}, policy)
    for _ in range(30):
        server.add(12, 8, tenant="flood")
    for _ in range(4):
        server.step()
        assert held(server, "flood") <= 10
    other = server.add(12, 4, tenant="other")
    server.step()
    assert running(other)
    while server.scheduler.has_work:
        server.step()
        assert held(server, "flood") <= 10
    server.run()


def test_a_cap_leaves_its_tenants_order_as_it_is() -> None:
    server = server_with({"a": KVLimits(cap=8)})
    requests = [server.add(16, 4, tenant="a") for _ in range(6)]
    urgent = server.request(16, 4, tenant="a")
    urgent.priority = -1
    server.step()
    server.scheduler.add(urgent)
    ended: list[Request] = []
    while server.scheduler.has_work:
        server.step()
        ended += [request for request in (*requests, urgent) if request.finished and request not in ended]
    assert ended == [requests[0], urgent, *requests[1:]]
    server.run()


def test_a_capped_tenants_waiting_requests_can_be_aborted_wherever_they_stand() -> None:
    server = server_with({"a": KVLimits(cap=8)})
    requests = [server.add(20, 4, tenant="a") for _ in range(6)]
    server.step()
    assert server.scheduler.num_waiting == 5
    for number in (1, 4, 2):
        server.scheduler.end_request(requests[number].request_id)
    assert server.scheduler.num_waiting == 2
    server.run()
    assert [request.sequences[0].num_output_tokens for request in requests] == [4, 0, 0, 4, 0, 4]


def test_a_long_prompt_counts_as_what_its_window_keeps() -> None:
    server = server_with({"a": KVLimits(cap=12)}, layers=(sliding(8),), budget=8)
    short = server.add(4, 30, tenant="a")
    server.step()
    long = server.add(60, 4, tenant="a")  # 15 blocks, of which steps of 8 tokens need 5 at a time
    server.step()
    assert running(short)
    assert running(long)
    while server.scheduler.has_work:
        server.step()
        assert held(server, "a") <= 12
    server.run()


def test_what_several_sequences_of_a_tenant_share_counts_once() -> None:
    server = server_with({"a": KVLimits(cap=15)})
    prompt = list(range(33))
    for _ in range(3):
        server.add(prompt, 8, tenant="a")
        server.step()
    # 8 blocks of the prompt, shared, and 2 of its own for each.
    assert server.scheduler.num_running == 3
    assert held(server, "a") <= 15
    server.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_its_cap_cannot_hold_is_refused_with_the_numbers(policy: str) -> None:
    server = server_with({"a": KVLimits(cap=10)}, policy)
    server.add(40, 5, tenant="b")
    with pytest.raises(CapacityError) as error:
        server.add(40, 5, tenant="a")
    assert str(error.value) == (
        "40 prompt tokens and 5 output tokens need 11 KV blocks of 4 tokens, but this API key's tenant may hold 10 at "
        "once (kv_cap)"
    )
    server.add(40, 1, tenant="a")
    server.run()


def test_a_request_that_others_floors_leave_no_room_for_is_refused_with_the_numbers_of_its_own_tenant_alone() -> None:
    server = server_with({"a": KVLimits(floor=20), "b": KVLimits(floor=10)})
    with pytest.raises(CapacityError) as error:
        server.add(44, 5, tenant="c")
    assert str(error.value) == (
        "44 prompt tokens and 5 output tokens need 12 KV blocks of 4 tokens, but at most 10 are available to this API "
        "key's tenant"
    )
    server.add(59, 5, tenant="a")
    server.run()


def test_the_longest_output_is_that_of_the_tenant() -> None:
    tenants = server_with({"a": KVLimits(cap=4), "b": KVLimits(floor=30)}).scheduler.tenants
    # The last token's key and value are never needed.
    assert [tenants.max_sequence_tokens(tenant) for tenant in ("a", "b", "c")] == [17, 64, 41]


def test_the_longest_output_is_that_of_the_tenant_while_another_thread_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = server_with({"a": KVLimits(cap=4)}).scheduler.tenants
    left_by = {tenant: (tenants.max_sequence_tokens(tenant), tenants._longest)[1] for tenant in ("a", "b")}
    reads = iter([left_by["a"], left_by["b"]])
    monkeypatch.setattr(TenantLimits, "_longest", property(lambda _: next(reads)), raising=False)
    assert tenants.max_sequence_tokens("a") == 17


def test_pins_yield_for_a_floor() -> None:
    server = server_with({"quiet": KVLimits(floor=32)}, pin_budget=0.5)
    pinned = make_request(list(range(500, 532)), tenant="other", max_tokens=1, ignore_eos=True)
    pinned.pins = (PinRequest(32, 1e9),)
    server.scheduler.add(pinned)
    while server.scheduler.has_work:
        server.step()
    server.add(8, 20, tenant="other")
    server.step()
    assert server.kv.pool.num_pinned == 8
    quiet = [server.add(52, 12, tenant="quiet"), server.add(52, 12, tenant="quiet")]
    most = 0
    for _ in range(30):
        server.step()
        most = max(most, held(server, "quiet"))
    assert most > 28
    assert all(request.sequences[0].num_preemptions == 0 for request in quiet)
    assert not list(server.kv.pins)
    server.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_limits_that_change_while_requests_run_lose_nothing(policy: str) -> None:
    server = server_with({}, policy)
    requests = [server.add(20, 20, tenant=tenant) for tenant in "abcabc"]
    for limits in (
        {"a": KVLimits(floor=30), "b": KVLimits(cap=6)},
        {"c": KVLimits(floor=40), "a": KVLimits(cap=5)},
        {"b": KVLimits(floor=10, cap=10)},
        {},
    ):
        for _ in range(4):
            server.step()
            server.kv.audit()
        server.scheduler.set_limits(limits)
    server.scheduler.set_limits({"a": KVLimits(floor=20, cap=20), "b": KVLimits(cap=4), "c": KVLimits(floor=20)})
    server.run()
    assert all(request.sequences[0].num_output_tokens == 20 for request in requests)


def test_a_step_that_fails_leaves_floors_and_caps_as_they_were() -> None:
    server = server_with({"a": KVLimits(floor=10, cap=10)})
    for tenant in "aabb":
        server.add(20, 6, tenant=tenant)
    server.step()
    server.scheduler.schedule()
    server.scheduler.restart()
    assert held(server, "a") == held(server, "b") == 0
    while server.scheduler.has_work:
        server.step()
        assert held(server, "a") <= 10
        assert held(server, "b") <= 30
    server.run()


def resolved(num_blocks: int = 100, **amounts: tuple[Amount | None, Amount | None]) -> dict[str, KVLimits]:
    return resolve_limits(amounts, SPEC, num_blocks, 32)


def test_amounts_are_tokens_or_a_part_of_the_pool() -> None:
    assert resolved(a=(9, 0.5), b=(0.25, None), c=(None, 1_000_000), d=(None, None)) == {
        "a": KVLimits(3, 50),
        "b": KVLimits(25, None),
        "c": KVLimits(0, 100),
    }
    slides = KVCacheSpec.build((FULL, sliding(8)), 4, "float32")
    assert resolve_limits({"a": (400, None)}, slides, 1000, 32)["a"].floor == slides.peak_blocks(400, 32)


def test_floors_beyond_the_pool_are_refused_with_the_numbers() -> None:
    assert resolved(a=(0.5, None), b=(0.5, None))["b"].floor == 50
    with pytest.raises(ConfigError) as error:
        resolved(a=(0.5, None), b=(240, None))
    assert str(error.value) == (
        "the tenants' kv_floor add up to 110 KV blocks of 4 tokens, but the cache has 100: b 60, a 50"
    )


def test_a_cap_below_its_floor_or_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cap of tenant a is 10 KV blocks of 4 tokens, below its kv_floor of 20"):
        resolved(a=(80, 40))
    with pytest.raises(ConfigError, match="kv_cap of tenant a is less than one KV block of 4 tokens"):
        resolved(a=(None, 0.001))

"""Why the cache did not help, who is told, and whose bytes are whose."""

from __future__ import annotations

import pytest

from octavo.kvcache.block import BlockState
from octavo.kvcache.ledger import RequestHolding
from octavo.kvcache.manager import KVCacheManager
from octavo.request import CacheOutcome, CacheReport, PinRequest, Request, Sequence
from tests.kvcache.caches import FULL, Clock, admit_and_compute, make_manager, make_sequence, sliding

TOKENS = list(range(16))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(clock: Clock) -> KVCacheManager:
    return make_manager(40, clock=clock)


def start(manager: KVCacheManager, tokens: list[int], salt: str = "", tenant: str = "") -> Sequence:
    """Compute a request's prompt; its report is what the cache did for it. All tenants share their blocks."""
    seq = make_sequence(tokens, salt, tenant=tenant, group="")
    report = manager.explain(seq, manager.match(seq))
    admit_and_compute(manager, seq)
    manager.ledger.admitted(seq.request, report)
    manager.audit()
    return seq


def report(manager: KVCacheManager, tokens: list[int], salt: str = "", tenant: str = "") -> CacheReport:
    """The report of a request that has ended since."""
    seq = start(manager, tokens, salt, tenant)
    manager.forget(seq)
    found = seq.request.cache_report
    assert found is not None
    return found


def test_the_first_prompt_is_cold(manager: KVCacheManager) -> None:
    assert report(manager, TOKENS) == CacheReport(16, 0, CacheOutcome.COLD)


def test_a_prompt_whose_every_full_block_was_cached_is_complete(manager: KVCacheManager) -> None:
    report(manager, TOKENS)
    assert report(manager, [*TOKENS, 1]) == CacheReport(17, 16, CacheOutcome.COMPLETE)
    assert report(manager, TOKENS) == CacheReport(16, 12, CacheOutcome.COMPLETE), "the last token is always computed"


def test_a_prompt_that_goes_on_where_the_cached_one_ended_is_cold_from_there(manager: KVCacheManager) -> None:
    report(manager, TOKENS[:8])
    assert report(manager, TOKENS) == CacheReport(16, 8, CacheOutcome.COLD)


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_prompt_without_a_full_block_before_its_last_token_is_too_short(manager: KVCacheManager, length: int) -> None:
    assert report(manager, TOKENS[:length]).outcome is CacheOutcome.TOO_SHORT


@pytest.mark.parametrize("at", [1, 4, 6, 7, 8, 11])
def test_divergence_names_the_token_and_the_request_that_went_another_way(manager: KVCacheManager, at: int) -> None:
    rival = start(manager, TOKENS).request
    found = report(manager, [*TOKENS[:at], *range(50, 66 - at)])
    assert found.outcome is CacheOutcome.DIVERGED
    assert (found.diverged_at, found.diverged_from) == (at, rival.request_id)
    assert found.num_cached_tokens == at // 4 * 4


def test_a_prompt_that_differs_from_its_first_token_is_cold(manager: KVCacheManager) -> None:
    report(manager, TOKENS)
    assert report(manager, list(range(50, 66))).outcome is CacheOutcome.COLD


def test_an_eviction_is_remembered_with_its_time(manager: KVCacheManager, clock: Clock) -> None:
    report(manager, TOKENS)
    clock.now += 5
    manager.reset_prefix_cache()
    clock.now += 30
    found = report(manager, TOKENS)
    assert (found.outcome, found.evicted_seconds_ago) == (CacheOutcome.EVICTED, 30)


def test_of_many_evictions_the_oldest_are_forgotten(manager: KVCacheManager) -> None:
    for start_token in range(0, 16 * 200, 16):
        report(manager, list(range(start_token, start_token + 16)))
        manager.reset_prefix_cache()
    assert len(manager.ledger._evictions) == 40
    assert report(manager, list(range(16))).outcome is CacheOutcome.COLD
    assert report(manager, list(range(16 * 199, 16 * 200))).outcome is CacheOutcome.EVICTED


def test_the_same_prompt_under_another_salt_is_told_to_the_admin_alone(manager: KVCacheManager) -> None:
    report(manager, TOKENS, salt="pepper")
    found = report(manager, TOKENS, salt="cinnamon")
    assert found.outcome is CacheOutcome.SALT
    assert found.visible_to("") == CacheReport(16, 0, CacheOutcome.COLD)


def test_a_prompt_under_another_salt_is_told_only_as_long_as_it_is_cached(manager: KVCacheManager) -> None:
    report(manager, TOKENS, salt="pepper")
    manager.reset_prefix_cache()
    # Its block has others' tokens now.
    report(manager, list(range(50, 66)), salt="pepper")
    assert report(manager, TOKENS, salt="cinnamon").outcome is CacheOutcome.COLD


def test_a_window_that_lost_a_block_is_called_evicted(clock: Clock) -> None:
    manager = make_manager(12, layers=(FULL, sliding(6)), clock=clock)
    report(manager, TOKENS)
    report(manager, list(range(50, 66)))
    assert report(manager, TOKENS).outcome is CacheOutcome.EVICTED


@pytest.mark.parametrize("tell", ["diverged", "evicted"])
def test_within_a_group_a_tenant_is_not_told_what_became_of_anothers_prompt(manager: KVCacheManager, tell: str) -> None:
    report(manager, TOKENS, tenant="a")
    if tell == "evicted":
        manager.reset_prefix_cache()
    found = report(manager, [*TOKENS[:6], *range(50, 60)] if tell == "diverged" else TOKENS, tenant="b")
    assert found.outcome is CacheOutcome(tell)
    told = found.visible_to("b")
    assert told == CacheReport(16, found.num_cached_tokens, CacheOutcome.COLD)
    assert found.visible_to("a") == found


def test_without_prefix_caching_it_is_bypassed() -> None:
    manager = make_manager(prefix_caching=False)
    assert report(manager, TOKENS).outcome is CacheOutcome.BYPASSED
    assert len(manager.ledger._evictions) == 0


def test_cached_and_uncached_tokens_add_up_to_those_queried(manager: KVCacheManager) -> None:
    for tenant in ("a", "b", "a"):
        for length in (3, 8, 16, 9):
            report(manager, TOKENS[:length], tenant=tenant)
    totals = manager.ledger.totals
    assert {tenant: t.queried_tokens for tenant, t in totals.items()} == {"a": 72, "b": 36}
    for t in totals.values():
        assert t.queried_tokens == t.cached_tokens + t.uncached_tokens.total()
    assert sum(t.requests.total() for t in totals.values()) == 12


def test_every_block_is_counted_for_exactly_one_tenant(manager: KVCacheManager) -> None:
    first = start(manager, [*TOKENS, 1, 2], tenant="a")
    second = start(manager, [*TOKENS, 3, 4, 5], tenant="b")
    pinned: Request = first.request
    manager.pin(pinned, PinRequest(8, 60))
    third = start(manager, list(range(50, 59)), tenant="c")
    manager.forget(third)
    stock = manager.stock([first.request, second.request])
    # b's four shared blocks are a's, who computed them.
    assert {tenant: dict(states) for tenant, states in stock.tenants.items()} == {
        "a": {BlockState.ACTIVE: 5},
        "b": {BlockState.ACTIVE: 1},
        "c": {BlockState.CACHED: 2},
    }
    assert list(stock.requests.values()) == [RequestHolding(active=5, shared=4, published=4, pinned=2)] * 2
    assert stock.swapped == {}
    manager.forget(first)
    manager.forget(second)
    after, states = manager.stock([]), manager.audit()
    assert states[BlockState.PINNED] == 2
    assert states[BlockState.FREE] + sum(sum(t.values()) for t in after.tenants.values()) == 39


def test_a_swapped_block_is_the_tenants_whose_sequence_it_belongs_to(clock: Clock) -> None:
    manager = make_manager(12, clock=clock, num_host_blocks=8)
    first = start(manager, [*TOKENS[:8], 1, 2], tenant="a")
    second = start(manager, [*TOKENS[:8], 3, 4, 5], tenant="b")
    for seq in (first, second):
        assert manager.demote(seq)
    requests = [first.request, second.request]
    stock = manager.stock(requests)
    assert stock.swapped == {"a": 1, "b": 1}, "what is published stays cached, and its first computer's"
    assert stock.tenants == {"a": {BlockState.CACHED: 2}}
    assert list(stock.requests.values()) == [RequestHolding(swapped=1)] * 2
    manager.reset_prefix_cache()
    assert manager.stock(requests).swapped == {"a": 3, "b": 1}, "evicted, it is kept once for both who hope for it"
    manager.audit()
    manager.forget(first)
    assert manager.stock(requests[1:]).swapped == {"b": 3}

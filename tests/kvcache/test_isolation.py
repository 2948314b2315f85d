"""No tenant finds another's blocks, in any store, whatever salt it sends, nor is told anything that depends on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest

from octavo.kvcache.manager import KVCacheManager
from octavo.request import CacheOutcome, CacheReport, PinReceipt, PinRequest, Request, Sequence, cache_scope
from tests.kvcache.caches import (
    FULL,
    admit_and_compute,
    make_manager,
    make_request,
    make_sequence,
    resume,
    sliding,
)

SECRET = list(range(16))


@pytest.fixture(params=[(FULL,), (FULL, sliding(6))], ids=str)
def make(request: pytest.FixtureRequest) -> Callable[[], KVCacheManager]:
    return partial(make_manager, 60, layers=request.param, num_host_blocks=30)


@pytest.fixture
def manager(make: Callable[[], KVCacheManager]) -> KVCacheManager:
    return make()


def serve(
    manager: KVCacheManager, tokens: list[int], tenant: str, salt: str = "", group: str | None = None
) -> tuple[CacheReport, Sequence]:
    """Compute a prompt; returns what its tenant is told, and the sequence, which still holds its blocks."""
    seq = make_sequence(tokens, salt, tenant=tenant, group=group)
    report = manager.explain(seq, manager.match(seq))
    admit_and_compute(manager, seq)
    manager.ledger.admitted(seq.request, report)
    manager.audit()
    return report.visible_to(tenant), seq


def cached(manager: KVCacheManager, tenant: str, salt: str = "", group: str | None = None) -> int:
    """Tokens of the secret that a request finds cached."""
    seq = make_sequence([*SECRET, 99], salt, tenant=tenant, group=group)
    found = manager.match(seq).num_tokens
    manager.forget(seq)
    return found


def forgeries(victim: Request) -> list[str]:
    """Salts by which somebody might hope to name another's part of the cache."""
    scope = victim.cache_scope
    return ["", victim.tenant, victim.cache_salt, scope, "tenant", f"tenant{victim.tenant}", f"{victim.tenant}\0", "\0"]


@pytest.mark.parametrize("salt", ["", "pepper"])
def test_the_same_tenant_hits_and_another_does_not_whatever_salt_it_sends(manager: KVCacheManager, salt: str) -> None:
    _, seq = serve(manager, SECRET, "ada", salt)
    manager.forget(seq)
    assert cached(manager, "ada", salt) == 16
    for forged in forgeries(seq.request):
        assert cached(manager, "bob", forged) == cached(manager, "", forged) == 0


def test_blocks_in_use_are_not_found_either(manager: KVCacheManager) -> None:
    serve(manager, SECRET, "ada")
    assert (cached(manager, "ada"), cached(manager, "bob")) == (16, 0)


def test_a_salt_divides_one_tenants_cache(manager: KVCacheManager) -> None:
    serve(manager, SECRET, "ada", "pepper")
    assert (cached(manager, "ada", "pepper"), cached(manager, "ada", "cinnamon"), cached(manager, "ada")) == (16, 0, 0)


def test_only_tenants_of_a_group_share_a_cache(manager: KVCacheManager) -> None:
    serve(manager, SECRET, "ada", group="lab")
    assert cached(manager, "bob", group="lab") == 16
    assert cached(manager, "bob", "pepper", group="lab") == 0
    assert [cached(manager, *other) for other in (("eve",), ("lab",), ("eve", "", "other"), ("eve", "lab"))] == [0] * 4


def test_a_swapped_sequence_is_found_by_its_own_tenant_alone(manager: KVCacheManager) -> None:
    _, seq = serve(manager, [*SECRET, 1, 2], "ada")
    assert manager.demote(seq)
    assert (cached(manager, "ada"), cached(manager, "bob", "ada")) == (16, 0)
    manager.reset_prefix_cache()
    assert list(manager.hierarchy.host_blocks(seq.seq_id))
    assert (cached(manager, "ada"), cached(manager, "bob", "ada")) == (0, 0), "host memory is nobody's prefix cache"
    assert resume(manager, seq)
    manager.audit()
    assert cached(manager, "bob", "ada") == 0


def test_a_pin_is_its_tenants_alone(manager: KVCacheManager) -> None:
    _, seq = serve(manager, SECRET, "ada")
    mine = manager.pin(seq.request, PinRequest(16, 60))
    manager.forget(seq)
    assert mine.num_pinned_tokens == 16
    stranger = make_request(SECRET, tenant="bob")
    assert manager.pin(stranger, PinRequest(16, 60)) == PinReceipt(None, 16, 0, 60)
    assert cached(manager, "bob") == 0
    manager.audit()


@pytest.mark.parametrize("probe", ["same", "diverges in its first block", "diverges later", "after an eviction"])
def test_what_a_tenant_is_told_is_the_same_whatever_others_have_cached(
    probe: str, make: Callable[[], KVCacheManager]
) -> None:
    """The tenant first sends something like its guess, so that its own cache has a place to diverge from."""
    guess = SECRET
    near = {
        "diverges in its first block": [*SECRET[:3], *range(50, 63)],
        "diverges later": [*SECRET[:6], *range(50, 60)],
    }
    own = near.get(probe, guess)

    def told(with_a_victim: bool) -> list[CacheReport]:
        manager = make()
        if with_a_victim:
            manager.forget(serve(manager, SECRET, "ada")[1])
        reports = []
        for tokens in (own, guess, [*guess, 7]):
            report, seq = serve(manager, tokens, "bob")
            manager.forget(seq)
            if probe == "after an eviction":
                manager.reset_prefix_cache()
            # The request's own id differs from run to run.
            reports.append(
                CacheReport(report.num_prompt_tokens, report.num_cached_tokens, report.outcome, report.diverged_at)
            )
        return reports

    assert told(with_a_victim=True) == told(with_a_victim=False)


def test_the_operator_is_told_that_another_tenant_has_it(manager: KVCacheManager) -> None:
    serve(manager, SECRET, "ada")
    _, seq = serve(manager, SECRET, "bob")
    assert seq.request.cache_report is not None
    assert seq.request.cache_report.outcome is CacheOutcome.SALT


def test_parts_of_a_scope_cannot_be_shifted_into_one_another() -> None:
    names = ["", "a", "ab", "b", "tenant", "group", "\0"]
    scopes = [cache_scope(tenant, group, salt) for tenant, group, salt in product(names, [None, *names], names)]
    # Tenants of one group share by intention, and no tenant is the same as the group of that name "".
    distinct = {
        ((None, tenant) if group is None and tenant else ("g", group or ""), salt)
        for tenant, group, salt in product(names, [None, *names], names)
    }
    assert len(set(scopes)) == len(distinct)


def test_without_tenant_group_and_salt_nothing_is_added_to_the_keys() -> None:
    assert cache_scope("", None, "") == cache_scope("", "", "") == cache_scope("ada", "", "") == ""

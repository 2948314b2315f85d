"""Pinned prefixes: for a time, within a budget, and never in the way of a request that fits."""

from __future__ import annotations

import pytest

from octavo.errors import CacheError
from octavo.kvcache.block import BlockId, BlockState
from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.kvcache.manager import KVCacheManager
from octavo.request import PinReceipt, PinRequest, Request
from tests.kvcache.caches import FULL, Clock, admit_and_compute, make_manager, make_sequence, sliding

TOKENS = list(range(16))
FIVE_MINUTES = 300.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(clock: Clock) -> KVCacheManager:
    """39 blocks of 4 tokens, of which 9 may be pinned."""
    return make_manager(40, clock=clock)


def computed(manager: KVCacheManager, tokens: list[int], salt: str = "", tenant: str = "") -> Request:
    """A request whose prompt has been computed, and which has ended; all tenants share their blocks."""
    seq = make_sequence(tokens, salt, tenant=tenant, group="")
    admit_and_compute(manager, seq)
    manager.forget(seq)
    return seq.request


def pin(
    manager: KVCacheManager, tokens: list[int], ttl: float = FIVE_MINUTES, salt: str = "", tenant: str = ""
) -> PinReceipt:
    receipt = manager.pin(computed(manager, tokens, salt, tenant), PinRequest(len(tokens), ttl))
    manager.audit()
    return receipt


def counts(manager: KVCacheManager) -> tuple[int, int, int]:
    """(cached, pinned, active) blocks."""
    found = manager.audit()
    return tuple(found.get(state, 0) for state in (BlockState.CACHED, BlockState.PINNED, BlockState.ACTIVE))  # type: ignore[return-value]


def flood(manager: KVCacheManager, pools: int = 2) -> None:
    """Compute prompts of other tokens, together as long as so many pools."""
    for start in range(pools * manager.pool.num_blocks // 4 + 1):
        computed(manager, [1000 + 16 * start + i for i in range(16)])


def hit(manager: KVCacheManager, tokens: list[int], salt: str = "") -> int:
    return manager.match(make_sequence([*tokens, 7], salt)).num_tokens


def test_a_pinned_prefix_is_still_there_after_others_have_filled_the_pool(manager: KVCacheManager) -> None:
    receipt = pin(manager, TOKENS)
    assert (receipt.num_requested_tokens, receipt.num_pinned_tokens) == (16, 16)
    flood(manager)
    assert hit(manager, TOKENS) == 16
    assert counts(manager)[1] == 4


def test_an_expired_pin_is_an_ordinary_cached_prefix(manager: KVCacheManager, clock: Clock) -> None:
    pin(manager, TOKENS)
    clock.now += FIVE_MINUTES - 1
    assert manager.pins.expire() == 0
    clock.now += 1
    assert manager.pins.expire() == 1
    assert counts(manager) == (4, 0, 0)
    assert len(manager.pins) == 0
    flood(manager)
    assert hit(manager, TOKENS) == 0


def test_pins_expire_each_at_its_own_time(manager: KVCacheManager, clock: Clock) -> None:
    pin(manager, TOKENS, ttl=10)
    pin(manager, [90, 91, 92, 93], ttl=5)
    assert [p.ttl_seconds for p in manager.pins] == [5, 10]
    clock.now += 7
    manager.pins.expire()
    assert counts(manager) == (1, 4, 0)


def test_pinning_again_renews(manager: KVCacheManager, clock: Clock) -> None:
    first = pin(manager, TOKENS)
    clock.now += 200
    second = pin(manager, TOKENS)
    assert first.pin_id == second.pin_id
    clock.now += 200
    assert manager.pins.expire() == 0
    assert (len(manager.pins), manager.pins.counters.num_pinned) == (1, 1)


def test_a_shorter_renewal_does_not_shorten_a_pins_life(manager: KVCacheManager, clock: Clock) -> None:
    pin(manager, TOKENS, ttl=100)
    pin(manager, TOKENS, ttl=1)
    clock.now += 50
    assert manager.pins.expire() == 0


def test_over_the_budget_the_receipt_says_how_much_is_pinned(manager: KVCacheManager) -> None:
    receipt = pin(manager, list(range(60)))
    assert (receipt.num_requested_tokens, receipt.num_pinned_tokens) == (60, 9 * 4)
    nothing = pin(manager, [90, 91, 92, 93])
    assert (nothing.pin_id, nothing.num_pinned_tokens) == (None, 0)
    assert len(manager.pins) == 1


def test_what_is_pinned_already_costs_no_budget_again(manager: KVCacheManager) -> None:
    pin(manager, list(range(32)))
    longer = pin(manager, list(range(36)), tenant="other")
    assert longer.num_pinned_tokens == 36
    assert counts(manager)[1] == 9


def test_the_prefix_of_two_pins_stays_until_both_are_gone(manager: KVCacheManager) -> None:
    short = pin(manager, TOKENS[:8])
    long = pin(manager, TOKENS)
    assert manager.pins.unpin(str(long.pin_id))
    assert counts(manager) == (2, 2, 0)
    assert manager.pins.unpin(str(short.pin_id))
    assert counts(manager) == (4, 0, 0)
    assert not manager.pins.unpin(str(short.pin_id))


def test_a_prefix_without_a_full_block_cannot_be_pinned(manager: KVCacheManager) -> None:
    assert pin(manager, [1, 2, 3]).num_pinned_tokens == 0


def test_asking_over_and_over_with_other_tails_makes_no_more_pins(manager: KVCacheManager) -> None:
    for tail in range(3):
        pin(manager, [*TOKENS, 100 + tail])
    assert len(manager.pins) == 1


def test_tenants_and_salts_have_pins_of_their_own(manager: KVCacheManager) -> None:
    ids = {pin(manager, TOKENS, tenant=tenant, salt=salt).pin_id for tenant in ("a", "b") for salt in ("", "pepper")}
    assert len(ids) == 4
    assert counts(manager)[1] == 8, "tenants share what one salt has"
    flood(manager)
    assert hit(manager, TOKENS) == hit(manager, TOKENS, "pepper") == 16
    assert hit(manager, TOKENS, "cinnamon") == 0


def test_a_pinned_block_in_use_is_active_and_pinned_again_afterwards(manager: KVCacheManager) -> None:
    pin(manager, TOKENS)
    seq = make_sequence([*TOKENS, 1, 2])
    assert admit_and_compute(manager, seq) == 16
    assert counts(manager) == (0, 0, 5)
    assert manager.usage == pytest.approx(5 / 39)
    manager.release(seq)
    assert counts(manager) == (0, 4, 0)


def test_a_pin_let_go_while_its_blocks_are_in_use_leaves_them_cached(manager: KVCacheManager) -> None:
    receipt = pin(manager, TOKENS)
    seq = make_sequence([*TOKENS, 1])
    admit_and_compute(manager, seq)
    manager.pins.unpin(str(receipt.pin_id))
    manager.release(seq)
    assert counts(manager) == (4, 0, 0)


def test_resetting_the_cache_keeps_pinned_blocks(manager: KVCacheManager) -> None:
    pin(manager, TOKENS)
    computed(manager, list(range(100, 116)))
    assert manager.reset_prefix_cache() == 4
    assert hit(manager, TOKENS) == 16


def test_the_pin_that_yields_is_the_soonest_to_expire(manager: KVCacheManager) -> None:
    pin(manager, TOKENS, ttl=100)
    pin(manager, [90, 91, 92, 93], ttl=50)
    assert manager.pins.yield_one()
    assert [p.num_tokens for p in manager.pins] == [16]
    assert manager.pins.yield_one()
    assert not manager.pins.yield_one()
    assert manager.pins.counters.num_yielded == 2


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
@pytest.mark.parametrize("layers", [(FULL,), (sliding(6),), (FULL, sliding(6))])
def test_under_every_policy_and_any_layers_a_pin_holds_and_lets_go(eviction: str, layers: tuple) -> None:
    clock = Clock()
    manager = make_manager(60, layers=layers, eviction=eviction, clock=clock)
    assert pin(manager, TOKENS).num_pinned_tokens == 16
    flood(manager, pools=3)
    assert hit(manager, TOKENS) == 16
    clock.now += FIVE_MINUTES
    manager.pins.expire()
    manager.audit()
    assert manager.reset_prefix_cache() > 0
    assert hit(manager, TOKENS) == 0


def test_under_a_sliding_window_only_what_a_hit_needs_is_pinned() -> None:
    manager = make_manager(40, layers=(sliding(6),))
    assert pin(manager, list(range(32))).num_pinned_tokens == 32
    assert counts(manager)[1] == 2, "the token after the prefix sees five before it, in two blocks"


def test_without_prefix_caching_nothing_is_pinned() -> None:
    manager = make_manager(40, prefix_caching=False)
    assert pin(manager, TOKENS).num_pinned_tokens == 0


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan")])
def test_a_pin_must_live_for_some_time(manager: KVCacheManager, ttl: float) -> None:
    with pytest.raises(CacheError, match="time to live must be positive"):
        pin(manager, TOKENS, ttl=ttl)


def test_the_pool_refuses_to_pin_what_nothing_could_find(manager: KVCacheManager) -> None:
    (block,) = manager.pool.allocate(1)
    with pytest.raises(CacheError, match="is active and cannot be pinned"):
        manager.pool.pin([block])
    with pytest.raises(CacheError, match="unpinned more often than pinned"):
        manager.pool.unpin([block])


def test_the_pool_removes_all_of_the_pins_that_it_is_told_to_or_none(manager: KVCacheManager) -> None:
    assert pin(manager, TOKENS).num_pinned_tokens == 16
    (held,) = [held.blocks for held in manager.pins]
    other = next(b for b in range(1, manager.pool.num_blocks) if not manager.pool.blocks.pins[b])
    with pytest.raises(CacheError, match=f"block {other} is unpinned more often than pinned"):
        manager.pool.unpin([*held, BlockId(other)])
    assert (manager.pool.num_with_pins, manager.pool.num_pinned) == (4, 4)
    manager.audit()


@pytest.fixture
def shared(clock: Clock) -> KVCacheManager:
    """The same, of whose budget of 9 blocks no tenant has more than 4."""
    return make_manager(40, clock=clock, pin_tenant_share=0.5)


def test_over_its_share_a_tenant_is_told_how_much_is_pinned_and_others_have_theirs(shared: KVCacheManager) -> None:
    first = pin(shared, list(range(60)), tenant="a")
    assert (first.num_requested_tokens, first.num_pinned_tokens) == (60, 4 * 4)
    nothing = pin(shared, [90, 91, 92, 93], tenant="a")
    assert (nothing.pin_id, nothing.num_pinned_tokens) == (None, 0)
    assert pin(shared, list(range(100, 160)), tenant="b").num_pinned_tokens == 4 * 4
    assert pin(shared, list(range(200, 260)), tenant="c").num_pinned_tokens == 1 * 4, "the budget's last block"
    assert [shared.pins.num_blocks_of(tenant) for tenant in "abcd"] == [4, 4, 1, 0]


def test_a_block_that_two_tenants_pin_counts_against_both_shares_and_once_against_the_budget(
    shared: KVCacheManager,
) -> None:
    for tenant in ("a", "b"):
        assert pin(shared, TOKENS, tenant=tenant).num_pinned_tokens == 16
    assert [shared.pins.num_blocks_of(tenant) for tenant in "ab"] == [4, 4]
    assert shared.pool.num_with_pins == 4
    assert pin(shared, [90, 91, 92, 93], tenant="b").num_pinned_tokens == 0


def test_what_a_tenant_has_pinned_already_costs_its_share_nothing_again(shared: KVCacheManager) -> None:
    short = pin(shared, TOKENS[:8], tenant="a")
    assert pin(shared, TOKENS, tenant="a").num_pinned_tokens == 16
    assert pin(shared, TOKENS[:8], tenant="a").pin_id == short.pin_id, "renewed at its share's end"


def test_a_share_is_free_again_when_its_pin_ends(shared: KVCacheManager, clock: Clock) -> None:
    held = pin(shared, TOKENS, ttl=5, tenant="a")
    assert pin(shared, [90, 91, 92, 93], tenant="a").num_pinned_tokens == 0
    clock.now += 5
    assert pin(shared, [90, 91, 92, 93], tenant="a").num_pinned_tokens == 4
    assert not shared.pins.unpin(str(held.pin_id))
    assert shared.pins.num_blocks_of("a") == 1
    shared.audit()


def test_of_equal_blocks_those_are_pinned_that_the_prefix_cache_has(manager: KVCacheManager) -> None:
    first, second = make_sequence(TOKENS), make_sequence(TOKENS)
    for seq in (first, second):
        assert manager.admit(seq, manager.no_hit, 16)
    for seq in (first, second):
        seq.num_computed = 16
        manager.commit(seq)
    assert manager.pin(second.request, PinRequest(16, FIVE_MINUTES)).num_pinned_tokens == 16
    for seq in (first, second):
        manager.forget(seq)
    flood(manager)
    assert hit(manager, TOKENS) == 16
    assert counts(manager)[1] == 4

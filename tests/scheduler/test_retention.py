"""Pins under a real scheduler: they survive floods, end on time, and never keep a request that fits from running."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from octavo.kvcache.block import BlockState
from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.request import FinishReason, PinReceipt, PinRequest, Request
from octavo.scheduler.lifecycle import DEFAULT_HEADROOM_TOKENS
from tests.kvcache.caches import make_request
from tests.scheduler.kit import Harness

BLOCK_SIZE = 16
NUM_BLOCKS = 601
PREFIX = list(range(2000))
ROUNDS = 20


class Service(Harness):
    """A cache of 601 blocks of 16 tokens, and tokens that nobody sent before."""

    def __init__(self, eviction: str = "lru", num_blocks: int = NUM_BLOCKS, **cache: Any):
        super().__init__(
            num_blocks,
            BLOCK_SIZE,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_model_len=40_000,
            headroom_tokens=DEFAULT_HEADROOM_TOKENS,
            audits=False,
            eviction=eviction,
            **cache,
        )
        self._fresh = itertools.count(10_000)

    def complete(self, tokens: list[int], max_tokens: int = 4, ttl: float | None = None) -> Request:
        """Serve a request to its end."""
        request = self.add(tokens, max_tokens, ttl=ttl)
        self.steps_until(lambda: request.finished)
        return request

    def other_tokens(self, count: int) -> list[int]:
        return list(itertools.islice(self._fresh, count))

    def flood_once(self) -> None:
        """Requests without a token in common that together fill the pool once."""
        total = (NUM_BLOCKS - 1) * BLOCK_SIZE
        for _ in range(total // 480):
            self.add(self.other_tokens(480), 4)
        self.run()

    def hit_rate_under_flood(self) -> float:
        """Share of the prefix's tokens that are found, asked once after each of 20 times a poolful."""
        hits = 0
        for _ in range(ROUNDS):
            self.flood_once()
            hits += min(self.complete([*PREFIX, *self.other_tokens(20)]).num_cached_tokens or 0, len(PREFIX))
        self.kv.audit()
        return hits / (ROUNDS * len(PREFIX))


@pytest.mark.slow
@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
def test_a_pinned_prefix_of_2000_tokens_survives_a_flood_of_20_pools(eviction: str) -> None:
    service = Service(eviction)
    receipt = service.complete(PREFIX, ttl=3600).pin_receipts
    assert receipt == [PinReceipt(receipt[0].pin_id, 2000, 2000, 3600)]
    rate = service.hit_rate_under_flood()
    print(f"{eviction}: {rate:.1%}")
    assert rate >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_the_same_prefix_unpinned_is_lost_in_the_flood(eviction: str) -> None:
    service = Service(eviction)
    service.complete(PREFIX)
    rate = service.hit_rate_under_flood()
    print(f"{eviction}: {rate:.1%}")
    assert rate < 0.05


def test_an_expired_pin_is_let_go_by_the_next_step() -> None:
    service = Service()
    service.complete(PREFIX, ttl=60)
    service.clock.now += 60
    service.add([1])
    service.step()
    assert len(service.kv.pins) == 0
    assert not service.kv.audit()[BlockState.PINNED]


def test_pins_yield_to_a_request_that_needs_the_whole_pool() -> None:
    service = Service(num_blocks=41, pin_budget=1.0)
    service.complete(list(range(320)), ttl=3600)
    service.complete(list(range(1000, 1160)), ttl=60)
    assert service.kv.pool.num_pinned == 30
    whole = service.complete(service.other_tokens(40 * BLOCK_SIZE - 8), max_tokens=8)
    assert whole.sequences[0].finish_reason is FinishReason.LENGTH
    assert service.kv.pins.counters.num_yielded == 2
    service.kv.audit()


def test_the_pin_that_would_expire_first_yields_and_the_other_stays_where_that_is_enough() -> None:
    service = Service(num_blocks=41, pin_budget=1.0)
    kept = service.complete(list(range(160)), ttl=3600).pin_receipts[0]
    service.complete(list(range(1000, 1160)), ttl=60)
    service.complete(service.other_tokens(25 * BLOCK_SIZE), max_tokens=8)
    assert [pin.pin_id for pin in service.kv.pins] == [kept.pin_id]


def test_pins_yield_to_a_request_that_grows_while_it_runs_alone() -> None:
    service = Service(num_blocks=21, pin_budget=1.0)
    service.complete(list(range(160)), ttl=3600)
    grown = service.complete(service.other_tokens(80), max_tokens=230)
    assert grown.sequences[0].num_output_tokens == 230
    assert grown.sequences[0].num_preemptions == 0
    assert service.kv.pins.counters.num_yielded == 1


def test_pins_do_not_yield_while_others_run_and_will_end() -> None:
    service = Service(num_blocks=41, pin_budget=1.0)
    service.complete(list(range(320)), ttl=3600)
    requests = [service.add(service.other_tokens(100), max_tokens=40) for _ in range(8)]
    while service.scheduler.has_work:
        service.step()
    assert all(r.finished for r in requests)
    assert service.kv.pins.counters.num_yielded == 0


def test_several_prefixes_of_one_prompt_are_pinned_as_each_is_computed() -> None:
    service = Service()
    request = make_request(list(range(3000)), max_tokens=1, ignore_eos=True)
    request.pins = (PinRequest(1000, 60), PinRequest(3000, 3600))
    service.scheduler.add(request)
    service.step()
    assert [r.num_pinned_tokens for r in request.pin_receipts] == [1000 // 16 * 16]
    service.step()
    # The pool's quarter is 150 blocks.
    assert [r.num_pinned_tokens for r in request.pin_receipts] == [992, 150 * 16]


def test_an_aborted_requests_prefix_is_not_pinned() -> None:
    service = Service()
    request = service.add(list(range(3000)), ttl=60)
    service.step()
    service.scheduler.end_request(request.request_id)
    service.complete([1, 2, 3])
    assert request.pin_receipts == []
    assert len(service.kv.pins) == 0

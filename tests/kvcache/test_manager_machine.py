"""A state machine drives pool, tables, forks and prefix cache at random; after each step `audit()` and a model agree.

The model keeps for every block what was written into it, and follows copies: a block that is shared by mistake, handed
out while in use or found for the wrong prefix shows as a sequence reading another's tokens.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.kvcache.block import NULL_BLOCK, BlockId
from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.request import PinRequest, Sequence
from tests.kvcache.caches import FULL, Clock, make_manager, make_sequence, sliding

SOAK_STEPS = 100_000
LAYERS = [(FULL,), (sliding(5),), (FULL, sliding(3)), (FULL, sliding(6), sliding(6))]


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([40, 24, 12, 6, 2]),
        block_size=st.sampled_from([1, 2, 4]),
        layers=st.sampled_from(LAYERS),
        prefix_cache=st.sampled_from(["hashed", "radix", None]),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
    )
    def build(self, num_blocks: int, block_size: int, layers: tuple, prefix_cache: str | None, eviction: str) -> None:
        self.combination = (prefix_cache, eviction)
        self.clock = Clock()
        self.manager = make_manager(
            num_blocks,
            block_size,
            layers,
            prefix_cache is not None,
            prefix_cache or "",
            eviction,
            pin_budget=0.5,
            clock=self.clock,
        )
        self.pinned: dict[str, tuple[list[int], str]] = {}
        self.block_size = block_size
        self.written: dict[tuple[BlockId, int], tuple[int, tuple[int, ...]]] = {}
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []

    def write(self, seq: Sequence, count: int) -> None:
        """What the runner does: store each new token, with all before it, at its slot."""
        for position in range(seq.num_computed, seq.num_computed + count):
            for group, table in enumerate(self.manager.tables(seq)):
                block = table[position // self.block_size]
                self.written[block, position % self.block_size] = (group, tuple(seq.token_ids[: position + 1]))
        seq.num_computed += count
        self.manager.commit(seq)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from("aab"),
        priority=st.integers(-1, 1),
    )
    def arrive(self, tokens: list[int], salt: str, priority: int) -> None:
        self.waiting.append(make_sequence(tokens, salt, priority=priority))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=st.integers(1, 20))
    def admit(self, data: st.DataObject, chunk: int) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        hit = self.manager.match(seq)
        chunk = min(chunk, seq.num_tokens - hit.num_tokens)
        if self.manager.admit(seq, hit, chunk):
            self.waiting.remove(seq)
            self.live.append(seq)
            seq.num_computed = hit.num_tokens
            self.write(seq, chunk)

    @precondition(lambda self: self.live)
    @rule(chunk=st.integers(1, 6))
    def step(self, chunk: int) -> None:
        """All live sequences go on, each its own way."""
        for index, seq in enumerate(self.live):
            self.compute(seq, index, chunk)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1), chunk=st.integers(1, 6))
    def compute_one(self, data: st.DataObject, token: int, chunk: int) -> None:
        self.compute(data.draw(st.sampled_from(self.live)), token, chunk)

    def compute(self, seq: Sequence, token: int, chunk: int) -> None:
        if seq.num_computed == seq.num_tokens:
            seq.token_ids.append(token)
        chunk = min(chunk, seq.num_tokens - seq.num_computed)
        copies = self.manager.extend(seq, chunk)
        for copy in copies or ():
            for offset in range(self.block_size):
                if (copy.source, offset) in self.written:
                    self.written[copy.destination, offset] = self.written[copy.source, offset]
        if copies is not None:
            self.write(seq, chunk)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = make_sequence(list(parent.token_ids), parent.request.cache_salt)
        self.manager.fork(parent, child)
        child.num_computed = parent.num_computed
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.live))
        self.manager.release(seq)
        seq.num_computed = 0
        self.live.remove(seq)
        self.waiting.append(seq)

    @precondition(lambda self: self.live or self.waiting)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([*self.live, *self.waiting]))
        self.manager.forget(seq)
        (self.live if seq in self.live else self.waiting).remove(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ttl=st.integers(1, 9), num_tokens=st.integers(1, 20))
    def pin(self, data: st.DataObject, ttl: int, num_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.live)).request
        receipt = self.manager.pin(request, PinRequest(num_tokens, ttl))
        assert receipt.num_pinned_tokens <= min(num_tokens, len(request.prompt_token_ids))
        if receipt.pin_id is not None:
            tokens = request.prompt_token_ids[: receipt.num_pinned_tokens]
            self.pinned[receipt.pin_id] = (tokens, request.cache_salt)

    @precondition(lambda self: getattr(self, "pinned", None))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.manager.pins.unpin(data.draw(st.sampled_from(sorted(self.pinned))))

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds
        self.manager.pins.expire()

    @rule()
    def a_pin_yields(self) -> None:
        assert self.manager.pins.yield_one() == bool(self.pinned)

    @invariant()
    def what_is_pinned_is_found(self) -> None:
        if hasattr(self, "manager"):
            pins = {pin.pin_id: pin for pin in self.manager.pins}
            assert pins.keys() <= self.pinned.keys()
            self.pinned = {pin_id: self.pinned[pin_id] for pin_id in pins}
            for pin_id, (tokens, salt) in self.pinned.items():
                assert pins[pin_id].expires_at > self.clock.now
                seeker = make_sequence([*tokens, 9], salt)
                assert self.manager.match(seeker).num_tokens == len(tokens)
                self.manager.forget(seeker)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "manager"):
            self.manager.audit()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for seq in getattr(self, "live", ()):
            for group, table in enumerate(self.manager.tables(seq)):
                window = self.manager.spec.groups[group].sliding_window
                first = 0 if window is None else max(0, seq.num_computed - window + 1)
                for position in range(first, seq.num_computed):
                    block = table[position // self.block_size]
                    found = self.written[block, position % self.block_size]
                    expected = (group, tuple(seq.token_ids[: position + 1]))
                    if block == NULL_BLOCK or found != expected:
                        raise AssertionError(f"position {position} of {seq.token_ids}: block {block} holds {found}")


CacheMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=80, deadline=None)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps_over_every_policy_and_cache() -> None:
    combinations: Counter[tuple[str | None, str]] = Counter()

    class Soak(CacheMachine):
        num_steps = 0

        @invariant()
        def count(self) -> None:
            if hasattr(self, "combination"):
                Soak.num_steps += 1
                combinations[self.combination] += 1

    started, rounds = time.perf_counter(), 0
    while Soak.num_steps < SOAK_STEPS:
        rounds += 1
        limits = settings(max_examples=300, stateful_step_count=200, deadline=None, database=None, derandomize=False)
        run_state_machine_as_test(Soak, settings=limits)
    assert len(combinations) == 3 * len(EVICTION_POLICIES)
    print(f"{Soak.num_steps:,} steps in {rounds} rounds, {time.perf_counter() - started:.0f} s")
    for (cache, policy), steps in sorted(combinations.items(), key=str):
        print(f"| {cache or 'none'} | {policy} | {steps:,} |")

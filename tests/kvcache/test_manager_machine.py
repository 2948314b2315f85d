"""A state machine drives pool, tables, forks, swaps and prefix cache at random; after each step `audit()` and a model
agree.

The model keeps for every block, of the device and of the host, what was written into it, and follows copies and swaps:
a block that is shared by mistake, handed out while in use, found for the wrong prefix or tenant, or overwritten before
it was moved shows as a sequence reading another's tokens.

Transfers are carried out as a step does: out, copies, in, before anything is computed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.kvcache.block import NULL_BLOCK, BlockCopy, BlockId, BlockState, HostBlockId
from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.request import PinRequest, Request, Sequence
from tests.kvcache.caches import COPIES, FULL, Clock, make_manager, make_sequence, positions_seen, sliding
from tests.kvcache.event_index import Blocks, EventIndex, findable

SOAK_STEPS = 100_000
LAYERS = [(FULL,), (sliding(5),), (FULL, sliding(3)), (FULL, sliding(6), sliding(6))]

LIMITS: dict[str, Any] = {
    "num_blocks": st.sampled_from([40, 24, 12, 6, 2]),
    "block_size": st.sampled_from([1, 2, 4]),
    "layers": st.sampled_from(LAYERS),
    "dtype": st.sampled_from(["float32", "float32", COPIES]),
    "num_host_blocks": st.sampled_from([0, 1, 4, 30]),
    "num_prefix_blocks": st.sampled_from([0, 0, 1, 4, 30]),
    "demotion": st.sampled_from(["on_evict", "on_second_use", "all"]),
    "pin_tenant_share": st.sampled_from([0.5, 1.0]),
}


def alike(tokens: list[int], request: Request) -> Sequence:
    """A sequence of another request that may see what `request` may see."""
    return make_sequence(tokens, request.cache_salt, tenant=request.tenant, group=request.cache_group)


def written_by(seq: Sequence, group: int, position: int) -> tuple[int, str, tuple[int, ...]]:
    """What a sequence writes at a position: every token before it, for whoever may see the same part of the cache."""
    return group, seq.request.cache_scope, tuple(seq.token_ids[: position + 1])


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        **LIMITS,
        prefix_caching=st.sampled_from([True, True, False]),
        eviction=st.sampled_from(sorted(EVICTION_POLICIES)),
    )
    def build(self, prefix_caching: bool, num_prefix_blocks: int, **limits: Any) -> None:
        self.clock = Clock()
        self.manager = make_manager(
            **limits,
            prefix_caching=prefix_caching,
            num_prefix_blocks=num_prefix_blocks if prefix_caching else 0,
            pin_budget=0.5,
            clock=self.clock,
            logs_events=True,
        )
        self.block_size: int = limits["block_size"]
        self.index = EventIndex(self.block_size)
        self.pinned: dict[str, tuple[list[int], Request]] = {}
        self.written: dict[tuple[BlockId, int], tuple[int, str, tuple[int, ...]]] = {}
        self.host: dict[tuple[HostBlockId, int], tuple[int, tuple[int, ...]]] = {}
        self.live: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.seen: Counter[str] = Counter()
        self.waiting: list[Sequence] = []

    def move(self, copies: Iterable[BlockCopy] = ()) -> None:
        """What the runner does first in a step: blocks to the host, copies, blocks from the host."""
        out, into = self.manager.hierarchy.take()
        assert len({swap.host for swap in out}) == len(out)
        for swap in out:
            for offset in range(self.block_size):
                # Of a block that is not full, the rest was never written.
                if (swap.device, offset) in self.written:
                    self.host[swap.host, offset] = self.written[swap.device, offset]  # type: ignore[assignment]
                else:
                    self.host.pop((swap.host, offset), None)
        for copy in copies:
            for offset in range(self.block_size):
                if (copy.source, offset) in self.written:
                    self.written[copy.destination, offset] = self.written[copy.source, offset]
        for swap in into:
            for offset in range(self.block_size):
                if (swap.host, offset) in self.host:
                    self.written[swap.device, offset] = self.host[swap.host, offset]  # type: ignore[assignment]
        self.seen["out"] += len(out)
        self.seen["in"] += len(into)
        self.step_ends()

    def step_ends(self) -> None:
        self.manager.hierarchy.complete()

    def write(self, seq: Sequence, count: int) -> None:
        """What the runner does then: store each new token, with all before it, at its slot."""
        for position in range(seq.num_computed, seq.num_computed + count):
            for group, table in enumerate(self.manager.tables(seq)):
                block = table[position // self.block_size]
                self.written[block, position % self.block_size] = written_by(seq, group, position)
        seq.num_computed += count
        self.manager.commit(seq)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from("aab"),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("xy"),
        cache_group=st.sampled_from(["g", "g", "g", None]),
    )
    def arrive(self, tokens: list[int], salt: str, priority: int, tenant: str, cache_group: str | None) -> None:
        self.waiting.append(make_sequence(tokens, salt, priority=priority, tenant=tenant, group=cache_group))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunk=st.integers(1, 20))
    def admit(self, data: st.DataObject, chunk: int) -> None:
        self.start(data.draw(st.sampled_from(self.waiting)), chunk)

    def start(self, seq: Sequence, chunk: int) -> None:
        hit = self.manager.match(seq)
        chunk = min(chunk, seq.num_tokens - hit.num_tokens)
        if self.manager.admit(seq, hit, chunk):
            self.waiting.remove(seq)
            self.live.append(seq)
            seq.num_computed = hit.num_tokens
            self.move()
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
            seq.output_token_ids.append(token)
        chunk = min(chunk, seq.num_tokens - seq.num_computed)
        copies = self.manager.extend(seq, chunk)
        if copies is not None:
            self.move(copies)
            self.write(seq, chunk)

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 1), only_full=st.booleans())
    def step_at_once(self, token: int, only_full: bool) -> None:
        """The live sequences that need a block get one together, if all of them may: none may need a copy."""
        manager = self.manager
        lengths = {seq.seq_id: len(manager.tables(seq)[0]) for seq in self.live}
        full = [seq for seq in self.live if seq.num_computed == lengths[seq.seq_id] * self.block_size]
        some = full if only_full else self.live
        enough = len(some) * len(manager.spec.groups) <= manager.pool.num_available
        assert manager.extend_all(some) == (enough and len(some) == len(full))
        for seq in self.live:
            has_grown = enough and seq in full and len(some) == len(full)
            assert {len(table) for table in manager.tables(seq)} == {lengths[seq.seq_id] + has_grown}
            if has_grown:
                self.compute(seq, token, 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = alike(list(parent.token_ids), parent.request)
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

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        """Or nothing at all, where the host has no room."""
        seq = data.draw(st.sampled_from(self.live))
        tables = [list(table) for table in self.manager.tables(seq)]
        if not self.manager.demote(seq):
            self.seen["full"] += 1
            assert [list(table) for table in self.manager.tables(seq)] == tables
            return
        self.live.remove(seq)
        self.swapped.append(seq)

    @precondition(lambda self: self.live)
    @rule()
    def swap_all_out(self) -> None:
        """Until the host is full."""
        for seq in list(self.live):
            if self.manager.demote(seq):
                self.live.remove(seq)
                self.swapped.append(seq)

    @precondition(lambda self: self.swapped)
    @rule(
        data=st.data(),
        token=st.integers(0, 1),
        chunk=st.integers(1, 6),
        reserve=st.sampled_from([0, 0, 2]),
        evict=st.booleans(),
    )
    def swap_in(self, data: st.DataObject, token: int, chunk: int, reserve: int, evict: bool) -> None:
        """All of what is left of it on the device, in the prefix cache and on the host, or nothing; it goes on at once,
        also in the very step that moves it out, or that moves the evicted blocks of others out."""
        seq = data.draw(st.sampled_from(self.swapped))
        if not self.manager.can_resume(seq):
            # Given up, because a block of it was evicted when the host had no room.
            self.seen["lost"] += 1
            self.start_over(seq)
            return
        if seq.num_computed == seq.num_tokens:
            seq.output_token_ids.append(token)
        chunk = min(chunk, seq.num_tokens - seq.num_computed)
        num_there = len(list(self.manager.hierarchy.host_blocks(seq.seq_id)))
        half = 0 < num_there < self.manager.spec.blocks_for_tokens(seq.num_computed)
        available, hit = self.manager.pool.num_available, self.manager.match(seq)
        assert hit.num_tokens == seq.num_computed
        if not self.manager.admit(seq, hit, chunk, reserve):
            assert self.manager.can_resume(seq)
            assert self.manager.pool.num_available == available
            return
        assert self.manager.pool.num_available >= reserve
        self.seen["half"] += half
        self.swapped.remove(seq)
        self.live.append(seq)
        if evict:
            self.manager.reset_prefix_cache()
        self.move()
        self.write(seq, chunk)

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        count=st.integers(1, 3),
        tokens=st.lists(st.integers(2, 3), min_size=1, max_size=20),
        stay=st.booleans(),
        chunk=st.integers(1, 6),
    )
    def swap_out_and_press(self, data: st.DataObject, count: int, tokens: list[int], stay: bool, chunk: int) -> None:
        """Others take the room of some that are swapped out, and their cached blocks with it; then one may return."""
        for _ in range(min(count, len(self.live))):
            self.swap_out(data)
        other = make_sequence(tokens)
        self.waiting.append(other)
        self.start(other, len(tokens))
        if not stay and other in self.live:
            self.manager.forget(other)
            self.live.remove(other)
        if self.swapped:
            self.swap_in(data, 0, chunk, 0, stay)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A swapped sequence is computed anew instead."""
        self.start_over(data.draw(st.sampled_from(self.swapped)))

    def start_over(self, seq: Sequence) -> None:
        self.manager.release(seq)
        seq.num_computed = 0
        self.swapped.remove(seq)
        self.waiting.append(seq)

    @rule()
    def a_step_begins_that_never_ends(self) -> None:
        """Its transfers are made, and stay in flight until the next one is over."""
        self.step_ends, ends = lambda: None, self.step_ends
        self.move()
        self.step_ends = ends

    @rule(moved=st.booleans())
    def a_step_fails(self, moved: bool) -> None:
        """Nobody knows whether it moved anything; everybody starts over."""
        transfers = self.manager.hierarchy
        if moved:
            self.step_ends, ends = transfers.fail, self.step_ends
            self.move()
            self.step_ends = ends
        else:
            transfers.take()
            transfers.fail()
        for seq in [*self.live, *self.swapped]:
            self.manager.release(seq)
            seq.num_computed = 0
            self.waiting.append(seq)
        self.live.clear()
        self.swapped.clear()

    @precondition(lambda self: self.live or self.waiting or self.swapped)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """An end or an abort, wherever the sequence is."""
        seq = data.draw(st.sampled_from([*self.live, *self.waiting, *self.swapped]))
        self.manager.forget(seq)
        next(where for where in (self.live, self.waiting, self.swapped) if seq in where).remove(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ttl=st.integers(1, 9), num_tokens=st.integers(1, 20))
    def pin(self, data: st.DataObject, ttl: int, num_tokens: int) -> None:
        request = data.draw(st.sampled_from(self.live)).request
        receipt = self.manager.pin(request, PinRequest(num_tokens, ttl))
        assert receipt.num_pinned_tokens <= min(num_tokens, len(request.prompt_token_ids))
        if receipt.pin_id is not None:
            tokens = list(request.prompt_token_ids[: receipt.num_pinned_tokens])
            self.pinned[receipt.pin_id] = (tokens, request)

    @precondition(lambda self: getattr(self, "pinned", None))  # type: ignore[arg-type, return-value]
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
            for pin_id, (tokens, request) in self.pinned.items():
                assert pins[pin_id].expires_at > self.clock.now
                seeker = alike([*tokens, 9], request)
                assert self.manager.cached_length(seeker) == len(tokens)
                self.manager.forget(seeker)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "manager"):
            self.manager.audit()

    @invariant()
    def events_tell_an_index_exactly_what_a_prefix_can_find(self) -> None:
        if hasattr(self, "manager") and self.manager.events is not None:
            self.index.apply(self.manager.events.take())
            assert self.index.blocks == findable(self.manager)
            assert self.clock.now % 7 or self.of_snapshot() == self.index.blocks

    def of_snapshot(self) -> Blocks:
        """What an index knows that begins with all blocks."""
        assert self.manager.events is not None
        snapshot, index = self.manager.events.snapshot(), EventIndex(self.block_size)
        for events in snapshot.events(3):
            index.apply(events)
        return index.blocks

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for seq in getattr(self, "live", ()):
            for group, table in enumerate(self.manager.tables(seq)):
                for position in positions_seen(self.manager.spec, group, seq.num_computed):
                    block = table[position // self.block_size]
                    found = self.written[block, position % self.block_size]
                    expected = written_by(seq, group, position)
                    if block == NULL_BLOCK or found != expected:
                        raise AssertionError(f"position {position} of {seq.token_ids}: block {block} holds {found}")

    def teardown(self) -> None:
        """Whatever is alive ends; nothing is left on either side but what the prefix cache keeps."""
        if not hasattr(self, "manager"):
            return
        self.move()
        for seq in [*self.live, *self.waiting, *self.swapped]:
            self.manager.forget(seq)
        hierarchy, host = self.manager.hierarchy, self.manager.hierarchy.host
        assert not self.manager.audit()[BlockState.ACTIVE]
        assert (len(self.manager.holdings), hierarchy.num_preempted, hierarchy.num_kept) == (0, 0, 0)
        assert host.pool.num_available == host.num_slots


CacheMachine.TestCase.settings = settings(max_examples=180, stateful_step_count=80, deadline=None)
TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)


def machine_of(caches: bool, policy: str) -> Any:
    """A machine with that eviction policy alone, and with or without prefix caching; its class counts."""

    class Soak(CacheMachine):
        counts: ClassVar[Counter[str]] = Counter()

        @initialize(**LIMITS, prefix_caching=st.just(caches), eviction=st.just(policy))
        def build(self, **options: Any) -> None:
            CacheMachine.build(self, **options)

        @invariant()
        def count(self) -> None:
            self.counts["steps"] += hasattr(self, "manager")

        def teardown(self) -> None:
            super().teardown()
            self.counts.update(getattr(self, "seen", {}))

    return Soak


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps_over_every_policy_and_cache() -> None:
    # A failure is shown as it was found: to make it smaller takes longer than all the rest.
    how: dict[str, Any] = {"deadline": None, "database": None, "derandomize": False, "phases": [Phase.generate]}
    limits = settings(max_examples=100, stateful_step_count=200, suppress_health_check=list(HealthCheck), **how)
    combinations = [(caches, policy) for caches in (True, False) for policy in sorted(EVICTION_POLICIES)]
    started, total = time.perf_counter(), Counter[str]()
    print()
    for caches, policy in combinations:
        machine = machine_of(caches, policy)
        while machine.counts["steps"] * len(combinations) < SOAK_STEPS:
            run_state_machine_as_test(machine, settings=limits)
        total += machine.counts
        names = ("steps", "out", "in", "half", "lost", "full")
        figures = " | ".join(f"{machine.counts[name]:,}" for name in names)
        print(f"| {'on' if caches else 'off'} | {policy} | {figures} |")
    print(f"{total['steps']:,} steps, {time.perf_counter() - started:.0f} s")
    assert min(total[name] for name in ("out", "in", "half", "lost", "full")) > 0

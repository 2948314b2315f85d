"""A state machine drives the scheduler with random arrivals, aborts, lengths and tiny pools.

The runner is played by a rule that "computes" any plan; what a block holds is checked against what was planned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.errors import RequestError
from octavo.kv_budget import MODES, KVBudget
from octavo.kvcache.attended import Masses
from octavo.kvcache.block import NULL_BLOCK, BlockState
from octavo.kvcache.eviction import EVICTION_POLICIES
from octavo.kvcache.ledger import CacheTotals
from octavo.request import CacheOutcome, FinishReason, PinRequest, Request, Sequence, SequenceStatus
from octavo.scheduler.beam import BeamDecoding
from octavo.scheduler.kv_limits import KVLimits
from octavo.scheduler.lifecycle import SchedulerConfig
from octavo.scheduler.plan import SequenceDropped, StepPlan, StepResult
from octavo.scheduler.policy import AgeingPriority, make_policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.scheduler import Scheduler
from tests.kvcache.caches import COPIES, FULL, Clock, make_manager, make_request, positions_seen, sliding
from tests.scheduler import beams
from tests.scheduler.plans import ToldRunner, rows_of
from tests.scheduler.results import Draw, result_of

LAYERS = [(FULL,), (sliding(5),), (FULL, sliding(3))]


# What an engine is built with: its limits, and its policies.
LIMITS: dict[str, Any] = {
    "num_blocks": st.integers(2, 20),
    "block_size": st.sampled_from([1, 2, 4]),
    "layers": st.sampled_from(LAYERS),
    "dtype": st.sampled_from(["float32", "float32", COPIES]),
    "max_num_seqs": st.integers(1, 6),
    "budget": st.integers(1, 24),
    "pin_budget": st.sampled_from([0.25, 1.0]),
    "pin_tenant_share": st.sampled_from([0.5, 1.0]),
    "num_host_blocks": st.sampled_from([0, 1, 4, 100]),
    "num_prefix_blocks": st.sampled_from([0, 0, 3, 20]),
    "demotion": st.sampled_from(["on_evict", "on_second_use", "all"]),
    "headroom": st.sampled_from([0, 0, 3]),
    # At 6 ms, streams of both tenants take turns.
    "itl_slo_ms": st.sampled_from([None, None, 20.0, 6.0]),
    # Floor and cap of the second tenant, and the floor of the first, as parts of the pool.
    "kv_shares": st.sampled_from([None, None, (0.5, None, 0.0), (0.0, 0.5, 0.0), (0.3, 0.6, 0.3), (0.5, 0.5, 0.5)]),
}
POLICIES: dict[str, Any] = {
    "prefix_cache": st.sampled_from(["hashed", "radix", None]),
    "eviction": st.sampled_from(sorted(EVICTION_POLICIES)),
    "mode": st.sampled_from(["swap", "auto", "recompute"]),
    "policy": st.sampled_from(["fcfs", "fcfs", "priority", "vtc"]),
}
# What a machine has that chooses nothing else.
PLAIN: dict[str, Any] = {
    "num_blocks": 12, "block_size": 4, "layers": (FULL,), "dtype": "float32", "prefix_cache": None, "eviction": "fifo",
    "pin_budget": 0.25, "pin_tenant_share": 0.5, "num_host_blocks": 0, "num_prefix_blocks": 0, "demotion": "on_evict",
    "max_num_seqs": 6, "budget": 24, "headroom": 0, "itl_slo_ms": None, "kv_shares": None, "mode": "recompute",
    "policy": "fcfs",
}  # fmt: skip
OF_THE_CACHE = (
    *("num_blocks", "block_size", "layers", "dtype", "eviction", "pin_budget", "pin_tenant_share", "num_host_blocks"),
    "demotion",
)
TENANTS = ("", "ada")
BUDGETS = [KVBudget(mode=mode, tokens=tokens) for mode in MODES for tokens in (8, 15)]


class _InjectedError(Exception):
    """What the injected faults raise."""


class _Raising:
    """Raises at the `nth` call of all it stands in for, and once."""

    def __init__(self, nth: int, done: bool) -> None:
        self._left = nth
        self._done = done

    def instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*args: Any, **options: Any) -> Any:
            self._left -= 1
            raises = self._left == -1
            if raises and not self._done:
                raise _InjectedError
            result = original(*args, **options)
            if raises:
                raise _InjectedError
            return result

        return replaced


def reserve_of(scheduler: Scheduler) -> int:
    """What running sequences are bound to take, recounted from the block tables."""
    running, total = scheduler.running, 0
    for seq in running.order:
        place, fresh = seq.state.placed, running._place(seq, seq.num_pending_siblings)
        fresh.base, fresh.copies = place.base, place.copies
        total += running._bound(fresh, len(scheduler.kv.tables(seq)[0]))
    return total


def computed_from(seq: Sequence, position: int, block_size: int) -> tuple[Any, ...]:
    """What a position's keys and values depend on: the tokens up to there, and a budget from where it matters."""
    budget, tokens = seq.request.params.kv_budget, tuple(seq.token_ids[: position + 1])
    if budget is None or position < budget.reads_all_before(seq.num_prompt_tokens, block_size):
        return tokens
    return (str(budget), *tokens)


class SchedulerMachine(RuleBasedStateMachine):
    """All of it together; a subclass may leave something out.

    Attributes:
        samples: whether requests draw their tokens, and at most how many sequences each.
        beams, pins, aborts, faults: whether there are any.
    """

    samples = 3
    beams = True
    pins = True
    aborts = True
    faults = True

    @initialize(**LIMITS, **POLICIES)
    def build(self, **chosen: Any) -> None:
        has = {**PLAIN, **chosen}
        self.clock = Clock()
        kv = make_manager(
            **{name: has[name] for name in OF_THE_CACHE},
            prefix_caching=has["prefix_cache"] is not None,
            num_prefix_blocks=has["num_prefix_blocks"] if has["prefix_cache"] else 0,
            clock=self.clock,
        )
        # A block out and back costs what three tokens do: some victims are cheaper one way, some the other.
        speed = Preemption(1.0, 1.5, has["mode"])
        self.scheduler = Scheduler(
            SchedulerConfig(
                has["max_num_seqs"],
                has["budget"],
                max_model_len=40,
                headroom_tokens=has["headroom"],
                itl_slo_ms=has["itl_slo_ms"],
            ),
            kv,
            policy=AgeingPriority(3.0) if has["policy"] == "priority" else make_policy(has["policy"]),
            preemption=speed,
            by_prefix=has["prefix_cache"] == "radix",
        )
        self.limits: dict[str, KVLimits] = {}
        if has["kv_shares"] is not None:
            floor, cap, other = (
                None if part is None else int(part * (has["num_blocks"] - 1)) for part in has["kv_shares"]
            )
            self.limits = {TENANTS[0]: KVLimits(other or 0), TENANTS[1]: KVLimits(floor or 0, cap)}
            self.scheduler.set_limits(self.limits)
        self.requests: list[Request] = []
        self.computed: dict[tuple[int, int], tuple[int, ...]] = {}
        self.host: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_steps = 0
        self.num_contained = 0  # requests that ended because an update raised for them alone
        self.runner = ToldRunner()
        self.mass: dict[int, dict[int, tuple[Masses, ...]]] = {}  # measured in steps whose results are awaited
        self.kept: dict[tuple[Any, ...], list[list[int]]] = {}  # blocks that a position saw

    @precondition(lambda self: self.samples)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.integers(0, 1),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        penalty=st.sampled_from([0.0, 0.0, 1.0]),
        salt=st.sampled_from(["", "", "s"]),
        pin=st.sampled_from([None, None, PinRequest(8, 3), PinRequest(30, 30)]),
        tenant=st.sampled_from(TENANTS),
        kv_budget=st.sampled_from([None, None, *BUDGETS]),
    )
    def arrive(
        self,
        tokens: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        prompt_logprobs: int | None,
        penalty: float,
        salt: str,
        pin: PinRequest | None,
        tenant: str,
        kv_budget: KVBudget | None = None,
    ) -> None:
        n = min(n, self.samples)
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "prompt_logprobs": prompt_logprobs,
            "presence_penalty": penalty,
            "kv_budget": kv_budget,
        }
        request = make_request(tokens, salt, n, tenant=tenant, **options)
        request.priority = priority
        request.pins = (
            () if pin is None or not self.pins else (PinRequest(min(pin.num_tokens, len(tokens)), pin.ttl_seconds),)
        )
        try:
            self.scheduler.add(request)
        except RequestError:
            return
        self.requests.append(request)

    @precondition(lambda self: self.beams)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        width=st.integers(1, 5),
        priority=st.integers(0, 1),
        length_penalty=st.sampled_from([0.0, 1.0]),
        early_stopping=st.sampled_from([False, True, "never"]),
        seed=st.sampled_from([None, 1]),
        kv_budget=st.sampled_from([None, None, *BUDGETS]),
    )
    def search(
        self,
        tokens: list[int],
        max_tokens: int,
        width: int,
        priority: int,
        length_penalty: float,
        early_stopping: Any,
        seed: int | None,
        kv_budget: KVBudget | None = None,
    ) -> None:
        how: dict[str, Any] = {
            "kv_budget": kv_budget,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "seed": seed,
        }
        n = (width + 1) // 2
        request = make_request(tokens, "", n, max_tokens=max_tokens, best_of=width, use_beam_search=True, **how)
        request.priority, request.eos_token_ids = priority, frozenset({beams.EOS})
        try:
            self.scheduler.add(request)
        except RequestError:
            return
        self.requests.append(request)

    @precondition(lambda self: self.aborts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if live := [r for r in self.requests if not r.finished]:
            request = data.draw(st.sampled_from(live))
            self.scheduler.end_request(request.request_id)
            assert request.finished

    @precondition(lambda self: self.samples)
    @rule(data=st.data())
    def stop_one_sequence(self, data: st.DataObject) -> None:
        """What a stop string does, between two steps."""
        drawing = [r for r in self.requests if not r.params.use_beam_search]
        live = [s for r in drawing for s in r.sequences if s.status is SequenceStatus.RUNNING and s.num_output_tokens]
        if live:
            self.scheduler.finish(data.draw(st.sampled_from(live)), FinishReason.STOP, "stop")

    @rule()
    def step(self) -> None:
        self.clock.now += 1
        streams = self.streams()
        preemptions = self.scheduler.counters.num_preemptions
        plan = self.scheduler.schedule()
        served = set(plan.seq_ids)
        missed = [seq for seq in streams if seq.status is SequenceStatus.RUNNING and seq.seq_id not in served]
        tenants = {seq.request.tenant for seq in streams}
        if self.scheduler.config.itl_slo_ms is None or len(tenants) == 1:
            assert not missed, "every running stream has its token in every step"
        assert not streams or len(missed) < len(streams), "one of them has its turn in every step"
        if preemptions == self.scheduler.counters.num_preemptions:
            assert all(seq.status is SequenceStatus.RUNNING for seq in streams)
        assert all(pin.expires_at > self.clock.now for pin in self.scheduler.kv.pins), "an expired pin is let go"
        self.check_limits(plan)
        self.play_runner(plan)
        self.take_in(plan)
        self.num_steps += 1

    def streams(self) -> list[Sequence]:
        """Running sequences that lack one token."""
        sequences = [seq for request in self.requests for seq in request.sequences]
        running = [seq for seq in sequences if seq.status is SequenceStatus.RUNNING]
        return [seq for seq in running if seq.num_tokens - seq.num_computed == 1]

    def sample(self, seq: Sequence) -> Draw:
        # Parallel samples differ, or sharing a block by mistake would not show.
        if seq.request.params.use_beam_search:
            return beams.sample(seq)
        return Draw((self.num_steps + seq.index) % 3)

    def check_limits(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert plan.num_tokens == sum(plan.lengths) <= config.max_num_batched_tokens
        assert plan.num_rows <= self.scheduler.num_running <= config.max_num_seqs
        assert bool(plan) == self.scheduler.has_work, "whoever has work makes progress"

    @rule(
        count=st.integers(2, 5),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        n=st.integers(1, 2),
        steps=st.integers(3, 10),
    )
    def crowd(self, count: int, tokens: list[int], n: int, steps: int) -> None:
        """Several who begin small and grow together, until the blocks run out."""
        for i in range(count):
            if self.samples:
                self.arrive(
                    tokens[i % len(tokens) :] or [1], 12, n, i % 2, None, 0.0, "", PinRequest(30, steps), TENANTS[i % 2]
                )
            else:
                self.search(tokens[i % len(tokens) :] or [1], 12, 1 + n, i % 2, 1.0, False, None)
        for _ in range(steps):
            self.step()

    @rule(count=st.integers(1, 12), lost=st.booleans(), data=st.data())
    def steps_ahead(self, count: int, lost: bool, data: st.DataObject) -> None:
        """Each planned while the one before is computed, and requests end while there is one in flight."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        self.play_runner(plan)
        while plan:
            self.clock.now += 1
            preemptions, published = scheduler.counters.num_preemptions, scheduler.kv.pool.num_published_ever
            before = [(seq.num_computed, seq.num_tokens) for r in self.requests for seq in r.sequences]
            ahead = scheduler.schedule() if count else StepPlan()
            count -= bool(ahead)
            assert (ahead.stores, ahead.copies, ahead.loads) == ((), (), ())
            assert all(isinstance(change, SequenceDropped) for change in ahead.changes)
            assert not ahead.reset
            assert not {new.seq_id for new in ahead.new} & set(plan.seq_ids)
            assert preemptions == scheduler.counters.num_preemptions
            assert published == scheduler.kv.pool.num_published_ever
            assert before == [(seq.num_computed, seq.num_tokens) for r in self.requests for seq in r.sequences]
            if lost and not count:
                scheduler.abandon_step()
                return
            self.take_in(plan)
            scheduler.kv.audit()
            self.num_steps += 1
            if ahead and self.aborts and data.draw(st.booleans()):
                self.abort(data)
            if ahead and self.samples and data.draw(st.booleans()):
                self.stop_one_sequence(data)
            # The device computes it behind the other, before anything that is planned from here on.
            self.play_runner(ahead)
            plan = ahead

    @rule(told=st.booleans())
    def step_that_is_lost(self, told: bool) -> None:
        """The runner fails before it has read all of a plan, or after it has: what it moves has been moved."""
        plan = self.scheduler.schedule()
        if told:
            self.play_runner(plan)
        else:
            self.play_transfers(plan)
        self.scheduler.abandon_step()

    @rule(data=st.data())
    def step_that_fails(self, data: st.DataObject) -> None:
        """The model gives no usable logits for one request: all is computed, and nobody is told."""
        plan = self.scheduler.schedule()
        self.play_runner(plan)
        planned = self.scheduler.planned
        self.scheduler.abandon_step()
        if plan:
            ailing = data.draw(st.sampled_from([seq.request for seq in planned]))
            self.scheduler.end_request(ailing.request_id, FinishReason.ERROR)

    @precondition(lambda self: self.faults)
    @rule(
        place=st.sampled_from(("schedule", "before compute", "after compute", "update")),
        operation=st.sampled_from(("match", "admit", "extend", "demote", "demote", "commit", "take")),
        nth=st.integers(0, 4),
        done=st.booleans(),
        is_ahead=st.booleans(),
        data=st.data(),
    )
    def step_that_raises(
        self, place: str, operation: str, nth: int, done: bool, is_ahead: bool, data: st.DataObject
    ) -> None:
        """Something raises, before or after what it was asked for was done; the scheduler starts over.

        The step may have been planned while another was in flight, whose result may be what raises.
        """
        self.clock.now += 1
        scheduler = self.scheduler
        with ExitStack() as stack:
            if place in ("schedule", "update"):
                taking: list[tuple[Any, str]] = [(Scheduler, "_append"), (BeamDecoding, "take")]
                raising = _Raising(nth, done)
                for owner, name in taking if operation == "take" else [(scheduler.kv, operation)]:
                    stack.enter_context(patch.object(owner, name, raising.instead_of(getattr(owner, name))))
            try:
                if is_ahead:
                    first = scheduler.schedule()
                    self.play_runner(first)
                plan = scheduler.schedule()
                if is_ahead:
                    self.take_in(first)
                if place == "before compute":
                    self.play_transfers(plan)
                    raise _InjectedError
                self.play_runner(plan)
                if place == "after compute":
                    raise _InjectedError
                self.take_in(plan)
            except _InjectedError:
                self.start_over(data)
        for request, error in scheduler.take_failures():
            assert isinstance(error, _InjectedError)
            assert request.finished
            self.num_contained += 1
        self.num_steps += 1

    def start_over(self, data: st.DataObject) -> None:
        """As the engine does: all at once, or cut down first."""
        scheduler = self.scheduler
        if data.draw(st.booleans()):
            chosen = {name for i, name in enumerate(list(scheduler.live)) if i % 2}
            scheduler.restart(chosen.__contains__)
            scheduler.kv.audit()
            for _ in range(2):
                plan = scheduler.schedule()
                assert {seq.request.request_id for seq in scheduler.planned} <= chosen
                self.play_runner(plan)
                self.take_in(plan)
                scheduler.kv.audit()
        scheduler.restart()
        assert scheduler.num_running == scheduler.num_swapped == 0

    def take_in(self, plan: StepPlan) -> None:
        mass = self.mass.pop(plan.step, {})
        samples = [self.sample(seq) for seq in self.scheduler.drawing]
        scored = [[None] * len(scores.targets) for scores in plan.scores]
        if plan:
            self.scheduler.update(plan, replace(result_of(samples, scored), mass=mass))  # type: ignore[arg-type]
            self.scheduler.observe(plan, 0.005 + 0.002 * plan.num_tokens)

    def play_runner(self, plan: StepPlan) -> None:
        self.play_transfers(plan)
        self.play_model(plan)

    def play_transfers(self, plan: StepPlan) -> None:
        size = self.scheduler.kv.spec.block_size
        # A block that is evicted in a step may be wanted back in the same one: out, then in.
        assert len({swap.host for swap in plan.stores}) == len(plan.stores)
        assert len({swap.device for swap in plan.loads}) == len(plan.loads)
        for swap in plan.stores:
            for offset in range(size):
                self.host[swap.host, offset] = self.computed.get((swap.device, offset), ())
        for copy in plan.copies:
            for offset in range(size):
                self.computed[copy.destination, offset] = self.computed.get((copy.source, offset), ())
        for swap in plan.loads:
            for offset in range(size):
                self.computed[swap.device, offset] = self.host[swap.host, offset]

    def play_model(self, plan: StepPlan) -> None:
        size = self.scheduler.kv.spec.block_size
        self.runner.apply(plan, self.scheduler.planned, self.scheduler.kv)
        self.runner.check(plan, self.scheduler.planned)
        self.mass[plan.step] = self.runner.mass(plan, self.scheduler.planned, size)
        assert len(self.runner.tables) <= self.scheduler.config.max_num_seqs
        rows = [
            (row, seq, self.runner.tables[row.seq_id])
            for row, seq in zip(rows_of(plan), self.scheduler.planned, strict=True)
        ]
        for row, seq, tables in rows:
            for position in range(row.start, row.end):
                for table in tables:
                    self.computed[table[position // size], position % size] = computed_from(seq, position, size)
        for row, seq, tables in rows:
            self.check_what_it_reads(seq, row.end, tables)

    def check_what_it_reads(self, seq: Sequence, context: int, tables: list) -> None:
        spec, budget = self.scheduler.kv.spec, seq.request.params.kv_budget
        size = spec.block_size
        if seq.measured_from is not None:
            # However it came to be computed: after a hit, in chunks, again.
            kept = [[i for i in indices if i * size < context] for indices in self.runner.kept[seq.seq_id]]
            seen = (str(seq.request.params), seq.num_prompt_tokens, *computed_from(seq, context - 1, size))
            assert self.kept.setdefault(seen, kept) == kept
            assert budget is not None
            if context > budget.first_eviction(seq.num_prompt_tokens):
                full = [indices for indices, window in zip(kept, spec.windows(), strict=True) if window is None]
                assert all(len(indices) <= max(2, budget.tokens // size) for indices in full)
        for group, table in enumerate(tables):
            # The last of its tokens reads what lies before it, and itself.
            positions = [*positions_seen(spec, group, context - 1, budget), context - 1]
            if seq.measured_from is not None:
                positions = [position for position in positions if table[position // size] != NULL_BLOCK]
                assert positions
            for position in positions:
                found = self.computed[table[position // size], position % size]
                assert found == computed_from(seq, position, size)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.kv.audit()

    @invariant()
    def what_is_kept_up_is_what_a_recount_finds(self) -> None:
        if hasattr(self, "scheduler"):
            scheduler = self.scheduler
            sequences = [seq for request in scheduler.requests for seq in request.sequences]
            waiting = [seq for seq in sequences if seq.status is SequenceStatus.WAITING]
            assert scheduler.running.reserve == reserve_of(scheduler)
            assert scheduler.num_waiting == len(waiting)
            pending = [seq for seq in sequences if seq.status is SequenceStatus.FORK_PENDING]
            promised = [seq for seq in pending if seq.request.sequences[0].status is SequenceStatus.RUNNING]
            assert scheduler.running.num_promised == len(promised)
            assert scheduler.num_running + len(promised) <= scheduler.config.num_places

    @invariant()
    def floors_stay_free_and_caps_hold(self) -> None:
        if hasattr(self, "scheduler") and self.limits:
            pool, running = self.scheduler.kv.pool, list(self.scheduler.running)
            assert pool.owners is not None
            unused = 0
            for tenant, limit in self.limits.items():
                held, own = pool.owners.held(tenant), [seq for seq in running if seq.request.tenant == tenant]
                unused += max(0, limit.floor - held)
                assert limit.cap is None or held <= limit.cap or len(own) <= 1
            # One that runs alone is held to no floor (docs/operate/fairness.md), but fits beside the others'.
            assert pool.num_available + pool.num_pinned >= unused

    @invariant()
    def every_byte_is_somebodys(self) -> None:
        if hasattr(self, "scheduler"):
            kv = self.scheduler.kv
            stock = kv.stock(self.scheduler.requests)
            assert sum(stock.swapped.values()) == kv.hierarchy.num_kept
            for state, count in kv.pool.count_states().items():
                owned = sum(of_tenant.get(state, 0) for of_tenant in stock.tenants.values())
                assert owned == (0 if state is BlockState.FREE else count)

    @invariant()
    def every_prompt_token_is_booked_once(self) -> None:
        if hasattr(self, "scheduler"):
            for tenant in TENANTS:
                self.check_what_is_booked(tenant)

    def check_what_is_booked(self, tenant: str) -> None:
        booked = [r for r in self.requests if r.cache_report is not None and r.tenant == tenant]
        totals = self.scheduler.kv.ledger.totals.get(tenant, CacheTotals())
        assert totals.queried_tokens == sum(len(r.prompt_token_ids) for r in booked)
        assert totals.cached_tokens == sum(r.num_cached_tokens or 0 for r in booked)
        assert totals.requests.total() == len(booked)
        for outcome in CacheOutcome:
            told = [r.cache_report for r in booked if r.cache_report and r.cache_report.outcome is outcome]
            assert totals.uncached_tokens[outcome] == sum(r.num_uncached_tokens for r in told)

    def teardown(self) -> None:
        """Everything finishes within a bounded number of steps, and nothing leaks."""
        if not hasattr(self, "scheduler"):
            return
        self.finish_all()

    def finish_all(self) -> None:
        # A step may compute no more than one token, of a prompt again and again while beams fork.
        left = sum(not seq.finished for request in self.requests for seq in request.sequences)
        for _ in range(500 * left):
            if not self.scheduler.has_work:
                break
            self.step()
        assert all(r.finished for r in self.requests)
        for request in self.requests:
            kept = (FinishReason.LENGTH, FinishReason.STOP)
            if request.params.use_beam_search and all(s.finish_reason in kept for s in request.sequences):
                found = beams.search_alone(request)
                nothing: list[list[int]] = [[]] * (request.params.n - len(found))
                assert [s.output_token_ids for s in request.sequences] == found + nothing
            if request.num_cached_tokens is not None and request.sequences[0].num_output_tokens:
                assert len(request.pin_receipts) == len(request.pins), "whoever was computed has its answer"
            if all(s.finish_reason is FinishReason.LENGTH for s in request.sequences):
                assert [s.num_output_tokens for s in request.sequences] == [
                    request.params.max_tokens
                ] * request.params.n
                wanted = request.params.prompt_logprobs is not None
                assert len(request.prompt_logprobs) == (len(request.prompt_token_ids) - 1 if wanted else 0)
        assert not self.scheduler.kv.audit()[BlockState.ACTIVE]
        if (plan := self.scheduler.idle_plan()) is not None:
            self.play_transfers(plan)
            self.scheduler.update(plan, StepResult())
            self.scheduler.kv.audit()
        host = self.scheduler.kv.hierarchy.host
        assert host.pool.num_available == host.num_slots
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.scheduler.running.num_promised) == (
            0,
            0,
            0,
        )


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)


def test_a_claim_that_its_victims_blocks_do_not_satisfy_preempts_nobody() -> None:
    """Two beams kept their blocks, a third was preempted in every other step for a request that never fitted."""
    machine = _MachineByHand(budget=4, policy="vtc")
    machine.find(prompt=12, max_tokens=1, width=1)
    machine.arrive([0] * 25, 1, 2, 1, None, 0.0, "", None, "ada")
    machine.find(prompt=6, max_tokens=12, width=2)
    machine.find(prompt=1, max_tokens=1, width=1)
    machine.teardown()


def test_a_newcomer_leaves_a_sliding_window_the_blocks_that_fill_it() -> None:
    """A beam and a sample admitted each other away: nothing was kept for the rest of their windows."""
    machine = _MachineByHand(block_size=1, layers=(sliding(5),), headroom=3, policy="vtc")
    machine.find(prompt=1, max_tokens=6, width=3)
    machine.arrive([0] * 4, 3, 2, 0, None, 0.0, "", None, "ada")
    machine.teardown()


def test_a_resumption_without_loads_leaves_the_loads_of_another_planned() -> None:
    """The other's slot was let go before the step had taken the load, and then counted as kept for ever."""
    cache = {"num_blocks": 13, "block_size": 1, "prefix_cache": "hashed", "eviction": "adaptive", "num_host_blocks": 1}
    machine = _MachineByHand(**cache, max_num_seqs=3, budget=3, mode="swap")
    machine.crowd(count=5, n=1, steps=3, tokens=[0])
    machine.teardown()


class _MachineByHand(SchedulerMachine):
    def __init__(self, **chosen: Any) -> None:
        super().__init__()
        self.build(**chosen)

    def find(self, prompt: int, max_tokens: int, width: int) -> None:
        self.search([0] * prompt, max_tokens, width, 0, 1.0, "never", None)

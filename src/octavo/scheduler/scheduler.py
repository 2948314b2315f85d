"""Continuous batching over the KV cache: decides what each step computes. Pure bookkeeping, no tensors.

One rule: each sequence's `num_computed` catches up with its `num_tokens`. A new prompt, a chunk of one, a decode step
and a resumption after preemption differ only in the distance.

    add ──> waiting ──admit──> running ──> finished      transitions are in `scheduler/lifecycle.py`
               ^                  │
               └────preempt───────┘    blocks released and num_computed = 0, or swapped out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain

from octavo.errors import RequestError
from octavo.kvcache.manager import KVCacheManager
from octavo.request import Request, Sequence, SequenceStatus
from octavo.scheduler.admission import Admission
from octavo.scheduler.beam import BeamDecoding
from octavo.scheduler.composer import StepComposer
from octavo.scheduler.kv_limits import Capacity, KVAmounts, KVLimits, resolve_limits
from octavo.scheduler.lifecycle import Lifecycle, MayRun, SchedulerConfig
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.policy import Policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.results import ResultApplier
from octavo.scheduler.speculation import Speculator
from octavo.scheduler.step_budget import LatencyTarget
from octavo.scheduler.step_time import StepLoad, StepTimeModel
from octavo.scheduler.waiting import Fetching

_MOMENT = 0.005


class Scheduler:
    """Decides each step, and advances the sequences by its result.

    Args:
        config, kv, policy, preemption, by_prefix, fetching: see `Lifecycle`.
        speculator: chooses drafts for steps to verify; by default, there are none.

    Attributes:
        lifecycle: the requests that have not ended, and the transitions of their sequences.
        live, running, waiting, counters: those of `lifecycle`.
        capacity: checks which requests can ever be served.
        on_admitted: called once with each request, when it is first admitted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
        *,
        by_prefix: bool = False,
        fetching: Fetching | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        on_ended = None if speculator is None else speculator.ended
        lifecycle = Lifecycle(config, kv, policy, preemption, by_prefix=by_prefix, fetching=fetching, on_ended=on_ended)
        self.lifecycle = lifecycle
        self.config, self.kv, self.policy, self.counters = config, kv, lifecycle.policy, lifecycle.counters
        self.live, self.running, self.waiting = lifecycle.live, lifecycle.running, lifecycle.waiting
        self._builder, self._tenants = lifecycle.builder, lifecycle.tenants
        self.speculator = speculator
        times = StepTimeModel() if speculator is None else speculator.times
        self._latency = None if config.itl_slo_ms is None else LatencyTarget(config.itl_slo_ms / 1e3, times)
        self._admission = Admission(lifecycle)
        self._composer = StepComposer(lifecycle, self._admission, self._latency, speculator)
        self._results = ResultApplier(lifecycle)
        self._to_pin: list[Sequence] = []  # whose prefixes are still to be pinned
        self.on_admitted: Callable[[Request], None] = lambda request: None
        self.capacity = Capacity(
            kv.spec,
            kv.pool.num_blocks - 1,
            max_num_seqs=config.num_places,
            max_model_len=config.max_model_len,
            max_step=config.max_num_batched_tokens,
        )

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + (0 if self.lifecycle.fetching is None else len(self.lifecycle.fetching))

    @property
    def num_swapped(self) -> int:
        """The number of waiting sequences with keys and values in host memory."""
        return self.kv.hierarchy.num_preempted

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return list(self.live.values())

    @property
    def planned(self) -> list[Sequence]:
        """The sequence of each row of the plan in flight; of two plans, the first."""
        return self._builder.in_flight.sequences

    @property
    def drawing(self) -> list[Sequence]:
        """The sequence of each draw of the plan in flight; of two plans, the first."""
        return self._builder.in_flight.drawing

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the request id is in use, or `Capacity.check` refuses the request; nothing has changed.
        """
        if request.request_id in self.live:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        params = request.params
        self.capacity.check(
            len(request.prompt_token_ids),
            request.most_output_tokens,
            params.num_sequences,
            params.width_param,
            request.tenant,
            params.kv_budget,
        )
        self.policy.queued(request)
        self.live[request.request_id] = request
        if params.use_beam_search:
            request.search = BeamDecoding(request, self.lifecycle)
        seq = request.sequences[0]
        if self.lifecycle.fetching is None or seq.request.needs_all_tokens or not self.lifecycle.fetching.begin(seq):
            self.waiting.push(seq)

    def resolve_limits(self, amounts: KVAmounts) -> dict[str, KVLimits]:
        """Convert floors and caps to blocks; raises `ConfigError` if they do not fit the cache. Thread-safe."""
        return resolve_limits(amounts, self.kv.spec, self.kv.pool.num_blocks - 1, self.config.max_num_batched_tokens)

    def set_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Replace the tenants' floors and caps.

        Running sequences continue. A raised floor takes full effect once others have released what they hold beyond
        their own floors, and a lowered cap once enough of the tenant's requests have ended.
        """
        waiting = [seq for r in self.live.values() for seq in r.sequences if seq.status is SequenceStatus.WAITING]
        before = self._tenants.limits
        moving = [seq for seq in waiting if before.get(seq.request.tenant) != limits.get(seq.request.tenant)]
        for seq in moving:
            self.waiting.discard(seq)
        self.capacity.set_limits(limits)
        self._tenants.set_limits(limits)
        if limits and self.kv.pool.owners is None:
            self.kv.count_owners(self.live.values())
        for seq in moving:
            self.waiting.push(seq)
        for seq in waiting:
            seq.state.refusal = None  # it may fit the new floors and caps

    def schedule(self) -> StepPlan:
        """Plan the next step: a token for each running stream, then chunks of prompts (`scheduler/composer.py`).

        With a step in flight, plan the one after it, in which each token that it draws is pending; the plan is empty if
        its result must be awaited first. `update` must be called for both in order; what a sequence that ends in the
        first computes in the second is discarded. A step that gives no result must be abandoned first.
        """
        builder, fetching = self._builder, self.lifecycle.fetching
        if builder.is_building:
            self.lifecycle.abandon_plans()  # planning the last step raised
        if builder.num_in_flight:
            # Two steps are in flight at most, and only a step with none before it admits requests that were fetched.
            if builder.num_in_flight > 1 or (fetching is not None and len(fetching) > 0):
                return StepPlan()
            with builder.pending(self.config.max_model_len) as num_ending:
                return builder.build(self._composer.compose(builder.in_flight, num_ending))
        self.kv.pins.expire()
        hierarchy = self.kv.hierarchy
        # `update` is not called for a failed step, so clean up after it here.
        hierarchy.fail()
        if fetching is not None:
            for seq in fetching.arrived():
                self.waiting.push(seq)
        draft = self._composer.compose()
        for seq_id, (seq, _) in draft.chunks.items():
            if seq_id in draft.admitted:
                self._note_admitted(seq)
        if draft and hierarchy.host.has_transfers:
            return builder.build(draft, *hierarchy.take())
        return builder.build(draft)

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Process a step's result: publish blocks, then continue each request with what was drawn for it.

        An exception in one request ends only that request; `take_failures` returns those.
        """
        if len(result.token_ids) != plan.num_draws:
            raise ValueError(f"{plan.num_draws} tokens were to be drawn, {len(result.token_ids)} came back")
        rows = self._builder.complete(plan)
        finished = SequenceStatus.FINISHED
        first = chain(rows.sequences[: plan.num_streams], chain.from_iterable(rows.draws))
        self.policy.drawn(seq for seq in first if seq.status is not finished)
        self.kv.hierarchy.complete()
        updates = self._results.apply(result, rows)
        if result.forced or rows.drafts:
            more = (update for update in updates if update.seq.request.search is None)
            self.policy.drawn(update.seq for update in more for _ in update.token_ids[1:])
        if self.speculator is not None:
            self.speculator.learn({rows.sequences[row].seq_id: ids for row, ids in rows.drafts.items()}, updates)
        if self._to_pin:
            self._to_pin = [seq for seq in self._to_pin if not self._pin_computed(seq)]
        return updates

    def restart(self, may_run: MayRun | None = None) -> None:
        """Start over after a failed step, relying only on the requests and their tokens.

        All plans are dropped. Every sequence releases its blocks, on the device and in host memory, and waits to be
        recomputed; full blocks that were computed are found in the prefix cache.

        Args:
            may_run: whether a request may run before the next restart; the others keep waiting. By default all may.
        """
        self.abandon_step()
        self._composer.start_over()
        self._admission.start_over()
        for request in self.live.values():
            if request.sequences[0].status is SequenceStatus.RUNNING:
                self._note_admitted(request.sequences[0])
        self.lifecycle.start_over(may_run)

    def hold(self, request: Request) -> None:
        """Make a request that was just added wait until a `restart` that lets it run."""
        seq = request.sequences[0]
        if self.lifecycle.fetching is not None and self.lifecycle.fetching.is_waiting(seq):
            self.lifecycle.fetching.release(seq)
            self.waiting.push(seq)
        self.lifecycle.hold_back(seq)

    def observe(self, plan: StepPlan, seconds: float, moving_seconds: float = 0.0) -> None:
        """Learn from a step's duration, measured from the end of the previous step if there was no pause in between.

        Args:
            moving_seconds: how long the plan's stores and loads took.
        """
        num_chunk_tokens = 0 if plan.is_decodes else plan.num_tokens - plan.num_streams
        if self._latency is not None and (num_chunk_tokens or plan.num_streams == plan.num_rows):
            load = StepLoad.of(plan.starts, plan.lengths, num_streams=plan.num_streams)
            self._latency.observe(load, seconds, num_chunk_tokens=num_chunk_tokens if plan.num_streams else 0)
        if self.speculator is not None and plan.is_decodes:
            self.speculator.observe(plan, seconds)
        self.lifecycle.preemption.computed(num_chunk_tokens, seconds)
        self.lifecycle.preemption.moved(len(plan.stores) + len(plan.loads), moving_seconds)

    def wait_for_loads(self) -> None:
        """Wait up to 5 ms for blocks from stores, while there is nothing to compute."""
        if self.lifecycle.fetching is not None and len(self.lifecycle.fetching):
            self.lifecycle.fetching.tiers.wait(_MOMENT)

    def idle_plan(self) -> StepPlan | None:
        """Return a plan with the pending stores that makes the runner forget grammars; call `idle_done` after it.

        None if requests are left, or there is no need.
        """
        hierarchy = self.kv.hierarchy
        if self.live:
            return None
        return self._builder.idle_plan(hierarchy.take()[0] if hierarchy.host.has_transfers else ())

    def idle_done(self, *, done: bool) -> None:
        """Note that the plan from `idle_plan` is done, or has failed."""
        if done:
            self.kv.hierarchy.complete()
        else:
            self.abandon_step()

    def abandon_step(self) -> None:
        """Abandon the plans in flight, which gave no result; their stores are lost, the runner's state is unknown."""
        self.lifecycle.abandon_plans()
        self.kv.hierarchy.fail()

    def _note_admitted(self, seq: Sequence) -> None:
        request = seq.request
        if seq.index:
            return
        if self.lifecycle.fetching is not None:
            self.lifecycle.fetching.release(seq)
        if not request.was_admitted:
            request.was_admitted = True
            self.on_admitted(request)
        if request.pins and seq not in self._to_pin:
            self._to_pin.append(seq)

    def _pin_computed(self, seq: Sequence) -> bool:
        """Pin the prefixes of an admitted request that are computed by now; returns whether none is left to pin.

        Must run after a step and before anything else is allocated, while sequences that ended in it are still cached.
        """
        request, size = seq.request, self.kv.spec.block_size
        for wanted in request.pins[len(request.pin_receipts) :]:
            if seq.num_computed < wanted.num_tokens // size * size:
                return seq.finished
            try:
                request.pin_receipts.append(self.kv.pin(request, wanted))
            except Exception as error:
                self.lifecycle.fail(request, error)
                return True
        return True

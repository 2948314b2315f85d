"""Continuous batching over the KV cache: decides what each step computes. Pure bookkeeping, no tensors.

One rule: each sequence's `num_computed` catches up with its `num_tokens`. A new prompt, a chunk of one, a decode step
and a resumption after preemption differ only in the distance.

    add ──> waiting ──admit──> running ──> finished      transitions are in `scheduler/lifecycle.py`
               ^                  │
               └────preempt───────┘    blocks released and num_computed = 0, or swapped out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from octavo.errors import RequestError
from octavo.kvcache.manager import KVCacheManager
from octavo.request import FinishReason, Request, RequestId, Sequence, SequenceStatus
from octavo.scheduler.admission import Admission
from octavo.scheduler.beam import BeamDecoding
from octavo.scheduler.composer import StepComposer
from octavo.scheduler.kv_limits import Capacity, KVAmounts, KVLimits, resolve_limits
from octavo.scheduler.lifecycle import Lifecycle, MayRun, SchedulerCounters
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.policy import FirstComeFirstServed, Policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.results import ResultApplier
from octavo.scheduler.speculation import Speculator
from octavo.scheduler.step_budget import LatencyTarget
from octavo.scheduler.step_time import StepLoad, StepTimeModel
from octavo.scheduler.waiting import Fetching

_MOMENT = 0.005

DEFAULT_WATERMARK = 0.01
DEFAULT_HEADROOM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one step.

    Attributes:
        watermark: share of the pool that admission leaves available, so that a newcomer does not force a
            preemption in the next few steps. Not applied while nothing runs.
        headroom_tokens: tokens, rounded up to blocks, that each running sequence, the newcomer and its parallel samples
            must be able to grow by after an admission, as far as max_tokens lets them, on top of the rest of their
            prompts.
        itl_slo_ms: target for the time between two tokens of a running stream, in milliseconds, which limits the chunks
            of prompts, and the streams of several tenants; if None, only the token budget limits them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = DEFAULT_WATERMARK
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS
    itl_slo_ms: float | None = None

    @property
    def num_places(self) -> int:
        """The maximum number of sequences that run at once: each running stream has a token in each step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Scheduler:
    """Decides each step, and advances the sequences by its result.

    Args:
        policy: orders sequences; by default, first come, first served.
        preemption: decides whether a preempted sequence is swapped; by default, all are recomputed. It learns how long
            computing and moving blocks takes.
        by_prefix: whether waiting requests with the longest cached prefix are admitted first, as far as the policy
            allows.
        fetching: requests that wait for stores below host memory; None if there are no stores.
        speculator: chooses drafts for steps to verify; by default, there are none.

    Attributes:
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
        self.config = config
        self.speculator = speculator
        self.kv = kv
        self.policy = policy or FirstComeFirstServed()
        self.preemption = preemption or Preemption()
        self._lifecycle = lifecycle = Lifecycle(
            kv,
            self.policy,
            self.preemption,
            by_prefix=by_prefix,
            max_num_seqs=config.num_places,
            headroom_tokens=config.headroom_tokens,
            fetching=fetching,
        )
        self._running, self._waiting, self._builder = lifecycle.running, lifecycle.waiting, lifecycle.builder
        self._requests = lifecycle.requests
        times = StepTimeModel() if speculator is None else speculator.times
        self._latency = None if config.itl_slo_ms is None else LatencyTarget(config.itl_slo_ms / 1e3, times)
        self._admission = Admission(
            lifecycle,
            max_num_batched_tokens=config.max_num_batched_tokens,
            watermark_blocks=int(config.watermark * kv.pool.num_blocks),
        )
        self._composer = StepComposer(
            lifecycle,
            self._admission,
            max_num_batched_tokens=config.max_num_batched_tokens,
            latency=self._latency,
            speculator=speculator,
        )
        self._results = ResultApplier(lifecycle, config.max_model_len)
        self._to_pin: list[Sequence] = []  # whose prefixes are still to be pinned
        self.on_admitted: Callable[[Request], None] = lambda request: None
        self.fetching = fetching
        self.capacity = Capacity(
            kv.spec,
            kv.pool.num_blocks - 1,
            max_num_seqs=config.num_places,
            max_model_len=config.max_model_len,
            max_step=config.max_num_batched_tokens,
        )

    @property
    def counters(self) -> SchedulerCounters:
        return self._lifecycle.counters

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold blocks."""
        return list(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + (0 if self.fetching is None else len(self.fetching))

    @property
    def num_swapped(self) -> int:
        """The number of waiting sequences with keys and values in host memory."""
        return self.kv.hierarchy.num_preempted

    @property
    def request_ids(self) -> list[RequestId]:
        """The ids of all requests that have not ended."""
        return list(self._requests)

    @property
    def requests(self) -> list[Request]:
        """All requests that have not ended."""
        return list(self._requests.values())

    def request(self, request_id: RequestId) -> Request | None:
        """Return the request with this id; None if it is unknown or has ended."""
        return self._requests.get(request_id)

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
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the request id is in use, or `Capacity.check` refuses the request; nothing has changed.
        """
        if request.request_id in self._requests:
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
        self._requests[request.request_id] = request
        if params.use_beam_search:
            request.search = BeamDecoding(request, self._lifecycle)
        seq = request.sequences[0]
        if self.fetching is None or seq.request.needs_all_tokens or not self.fetching.begin(seq):
            self._waiting.push(seq)

    def resolve_limits(self, amounts: KVAmounts) -> dict[str, KVLimits]:
        """Convert floors and caps to blocks; raises `ConfigError` if they do not fit the cache. Thread-safe."""
        return resolve_limits(amounts, self.kv.spec, self.kv.pool.num_blocks - 1, self.config.max_num_batched_tokens)

    @property
    def limits(self) -> Mapping[str, KVLimits]:
        """Tenants' floors and caps, in blocks."""
        return self._lifecycle.tenants.limits

    def set_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Replace the tenants' floors and caps.

        Running sequences continue. A raised floor takes full effect once others have released what they hold beyond
        their own floors, and a lowered cap once enough of the tenant's requests have ended.
        """
        waiting = [seq for r in self._requests.values() for seq in r.sequences if seq.status is SequenceStatus.WAITING]
        before = self.limits
        moving = [seq for seq in waiting if before.get(seq.request.tenant) != limits.get(seq.request.tenant)]
        for seq in moving:
            self._waiting.discard(seq)
        self.capacity.set_limits(limits)
        self._lifecycle.tenants.set_limits(limits)
        if limits and self.kv.pool.owners is None:
            self.kv.count_owners(self._requests.values())
        for seq in moving:
            self._waiting.push(seq)
        for seq in waiting:
            seq.state.refusal = None  # it may fit the new floors and caps

    def end_request(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End every sequence of a request and free its blocks; None if the request is unknown or has ended."""
        return self._lifecycle.finish_request(request_id, reason)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence and free its blocks; does nothing if it has already ended."""
        self._lifecycle.finish(seq, reason, stop_reason)

    def schedule(self) -> StepPlan:
        """Plan the next step: a token for each running stream, then chunks of prompts (`scheduler/composer.py`).

        With a step in flight, plan the one after it, in which each token that it draws is pending; the plan is empty if
        its result must be awaited first. `update` must be called for both in order; what a sequence that ends in the
        first computes in the second is discarded. A step that gives no result must be abandoned first.
        """
        builder, fetching = self._builder, self.fetching
        if builder.is_building:
            self._lifecycle.abandon_plans()  # planning the last step raised
        if builder.num_in_flight:
            # Two steps are in flight at most, and only a step with none before it admits requests that were fetched.
            if builder.num_in_flight > 1 or (fetching is not None and len(fetching) > 0):
                return StepPlan()
            with builder.pending(self.config.max_model_len) as num_ending:
                return builder.build(self._composer.compose_ahead(builder.in_flight, num_ending=num_ending))
        self.kv.pins.expire()
        hierarchy = self.kv.hierarchy
        # `update` is not called for a failed step, so clean up after it here.
        hierarchy.fail()
        if fetching is not None:
            for seq in fetching.arrived():
                self._waiting.push(seq)
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

    def take_failures(self) -> list[tuple[Request, Exception]]:
        """Return the requests ended with `FinishReason.ERROR` because an update raised, each once."""
        return self._lifecycle.take_failures()

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
        for request in self._requests.values():
            if request.sequences[0].status is SequenceStatus.RUNNING:
                self._note_admitted(request.sequences[0])
        self._lifecycle.start_over(may_run)

    def hold(self, request: Request) -> None:
        """Make a request that was just added wait until a `restart` that lets it run."""
        seq = request.sequences[0]
        if self.fetching is not None and self.fetching.is_waiting(seq):
            self.fetching.release(seq)
            self._waiting.push(seq)
        self._lifecycle.hold_back(seq)

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
        self.preemption.computed(num_chunk_tokens, seconds)
        self.preemption.moved(len(plan.stores) + len(plan.loads), moving_seconds)

    def wait_for_loads(self) -> None:
        """Wait up to 5 ms for blocks from stores, while there is nothing to compute."""
        if self.fetching is not None and len(self.fetching):
            self.fetching.tiers.wait(_MOMENT)

    def release(self) -> StepPlan | None:
        """Return a plan that makes the runner forget every sequence, if no request is left and it may hold grammars."""
        return None if self._requests else self._builder.release()

    def flush(self) -> StepPlan | None:
        """Return a plan with the pending stores, if no request is left; call `flushed` after executing it."""
        hierarchy = self.kv.hierarchy
        if self._requests or not hierarchy.host.has_transfers:
            return None
        return self._builder.flush(hierarchy.take()[0])

    def flushed(self, *, done: bool) -> None:
        """Note that the plan from `flush` is done, or has failed."""
        if done:
            self.kv.hierarchy.complete()
        else:
            self.kv.hierarchy.fail()

    def abandon_step(self) -> None:
        """Abandon the plans in flight, which gave no result; their stores are lost, the runner's state is unknown."""
        self._lifecycle.abandon_plans()
        self.kv.hierarchy.fail()

    def _note_admitted(self, seq: Sequence) -> None:
        request = seq.request
        if seq.index:
            return
        if self.fetching is not None:
            self.fetching.release(seq)
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
                self._lifecycle.fail(request, error)
                return True
        return True

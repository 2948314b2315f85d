"""Continuous batching over the KV cache: decides what each step computes. Pure bookkeeping, no tensors.

One rule: each sequence's `num_computed` chases its `num_tokens`. A new prompt, a chunk of one, a decode step and a
resumption after preemption differ only in how far behind they are.

    add ──> waiting ──admit──> running ──finish──> finished
               ^                  │
               └────preempt───────┘    blocks given back and num_computed = 0, or swapped out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.errors import RequestError
from octavo.kvcache.manager import KVCacheManager
from octavo.request import FinishReason, Request, RequestId, Sequence, SequenceStatus
from octavo.scheduler.advancing import Advancing
from octavo.scheduler.budget import TimeLimit
from octavo.scheduler.capacity import Capacity
from octavo.scheduler.claims import Claims
from octavo.scheduler.fairness import VirtualTokenCounter
from octavo.scheduler.fetching import Fetching
from octavo.scheduler.kv_limits import KVAmounts, KVLimits, resolve_limits
from octavo.scheduler.parts import compose
from octavo.scheduler.pinning import Pinning
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.preemption import LowestPriority, PreemptionMode, Recompute, VictimPolicy
from octavo.scheduler.queue import ArrivalOrder, WaitingQueue
from octavo.scheduler.restart import HeldBack, MayRun
from octavo.scheduler.scheduler_config import SchedulerConfig
from octavo.scheduler.step_time import LatencyTarget, StepLoad
from octavo.scheduler.waiting import needs_all_tokens
from octavo.scheduler.yielding import SchedulerCounters

_MOMENT = 0.005


class Scheduler:
    """Decides each step, and advances the sequences by its result.

    Args:
        builder: writes the plans; the simulator has one for plans that nobody carries out.
        tells_all: see `Advancing`.

    Attributes:
        capacity: what can never be served.
        turns: whose turn it is, where tenants take turns (`TenantQueue`).
        claims: who may take places and blocks of those that run; None: nobody.
        fetching: requests that wait for stores below host memory; None: there are none.
        on_admitted: told of each request once, when it is given its place for the first time.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        victims: VictimPolicy | None = None,
        waiting: WaitingQueue | None = None,
        preemption: PreemptionMode | None = None,
        turns: VirtualTokenCounter | None = None,
        claims: Claims | None = None,
        builder: PlanBuilder | None = None,
        *,
        tells_all: bool = True,
    ) -> None:
        self.config = config
        self.kv = kv
        self.turns = turns
        self.claims = claims
        self._builder = builder or PlanBuilder(kv)
        self._latency = None if config.itl_slo_ms is None else LatencyTarget(config.itl_slo_ms / 1e3)
        queue = ArrivalOrder() if waiting is None else waiting
        self._limits: Mapping[str, KVLimits] = {}
        self._compose(queue, victims or LowestPriority(), preemption or Recompute())
        self._requests: dict[RequestId, Request] = {}
        self._pinning = Pinning(kv, self._fail)
        self._held_back = HeldBack()
        self._advancing = Advancing(kv, self, turns, config.max_model_len, self._fail, tells_all=tells_all)
        self._noted: set[RequestId] = set()  # whose admission has been told
        self.on_admitted: Callable[[Request], None] = lambda request: None
        self.fetching: Fetching | None = None
        self._failures: list[tuple[Request, Exception]] = []
        self.capacity = Capacity(
            kv.spec,
            kv.pool.num_blocks - 1,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_step=config.max_num_batched_tokens,
        )

    def _compose(self, queue: WaitingQueue, victims: VictimPolicy, mode: PreemptionMode) -> None:
        """Nobody runs, and nobody waits: the queue is empty."""
        parts = compose(
            self.config,
            self.kv,
            queue,
            victims,
            mode,
            limits=self._limits,
            turns=self.turns,
            claims=self.claims,
            time_limit=None if self._latency is None else self._time_limit,
            on_leave=self._builder.drop,
        )
        self._running, self._tenants, self._waiting = parts.running, parts.tenants, parts.waiting
        self._yielding, self._admission = parts.yielding, parts.admission
        self._service, self._look_ahead = parts.service, parts.look_ahead

    @property
    def counters(self) -> SchedulerCounters:
        return self._yielding.counters

    @property
    def victims(self) -> VictimPolicy:
        """Chooses who yields its blocks."""
        return self._yielding.victims

    @property
    def preemption(self) -> PreemptionMode:
        """Decides how a victim gets its keys and values back."""
        return self._yielding.mode

    @property
    def queue(self) -> WaitingQueue:
        """Orders those that wait."""
        return self._waiting.queue

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + (0 if self.fetching is None else len(self.fetching))

    @property
    def num_waiting_tokens(self) -> int:
        """Of all sequences that wait: prompts, and what they had drawn before a preemption. O(1)."""
        return self._waiting.num_tokens

    @property
    def num_promised_places(self) -> int:
        """Places of parallel samples and beams whose prompt is still being computed."""
        return self._running.num_promised

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that running sequences are bound to take yet."""
        return self._running.reserve

    @property
    def num_swapped(self) -> int:
        """Of those that wait, how many have keys and values in host memory."""
        return len(self.kv.hierarchy.preempted)

    @property
    def request_ids(self) -> list[RequestId]:
        """Every request that has not ended."""
        return list(self._requests)

    @property
    def requests(self) -> list[Request]:
        """Every request that has not ended."""
        return list(self._requests.values())

    def request(self, request_id: RequestId) -> Request | None:
        """The request of that id, as long as it has not ended."""
        return self._requests.get(request_id)

    @property
    def planned(self) -> list[Sequence]:
        """The sequence of each row of the plan whose result is awaited; of two the first."""
        return self._builder.in_flight.sequences

    @property
    def drawing(self) -> list[Sequence]:
        """The sequence of each draw of the plan whose result is awaited; of two the first."""
        return self._builder.in_flight.drawing

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request; raises as `Capacity.check` does, and where its id is in use, before anything changes."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        params = request.params
        self.capacity.check(
            len(request.prompt_token_ids),
            request.most_output_tokens,
            params.num_sequences,
            params.width_param,
            request.tenant,
        )
        if self.config.priority_seconds is not None:
            request.due_time = request.arrival_time + self.config.priority_seconds * request.priority
        self._requests[request.request_id] = request
        self._advancing.begin(request)
        seq = request.sequences[0]
        if self.fetching is None or needs_all_tokens(seq) or not self.fetching.begin(seq):
            self._waiting.push(seq)

    def resolve_limits(self, amounts: KVAmounts) -> dict[str, KVLimits]:
        """Floors and caps in blocks of this cache; raises `ConfigError` where they do not go into it. Thread-safe."""
        return resolve_limits(amounts, self.kv.spec, self.kv.pool.num_blocks - 1, self.config.max_num_batched_tokens)

    @property
    def limits(self) -> Mapping[str, KVLimits]:
        """Tenants' floors and caps, in blocks."""
        return self._limits

    def set_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Tenants' floors and caps from now on.

        What runs goes on. A floor that was raised is whole once others have given back what they hold beyond theirs,
        and a cap that was lowered once some of the tenant's requests have ended.
        """
        waiting = [seq for r in self._requests.values() for seq in r.sequences if seq.status is SequenceStatus.WAITING]
        before = self._limits
        moving = [seq for seq in waiting if before.get(seq.request.tenant) != limits.get(seq.request.tenant)]
        for seq in moving:
            self._waiting.discard(seq)
        self._limits = limits
        self.capacity.set_limits(limits)
        self._tenants.set_limits(limits)
        if limits and self.kv.pool.owners is None:
            self.kv.count_owners(self._requests.values())
        for seq in moving:
            self._waiting.push(seq)
        self._admission.forget_refusals()

    def end_request(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End every sequence of a request and free its blocks; None where it is not (any more) known."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        # The last first: each looks whether all have ended, from the first on.
        waits = request.sequences[0].status is SequenceStatus.WAITING
        for seq in reversed(request.sequences):
            if waits and seq.status is SequenceStatus.FORK_PENDING:
                # It holds nothing and nobody knows it: crowds of requests are given up while they wait.
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
            else:
                self.finish(seq, reason)
        return request

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Fork `child` from `parent` over the same blocks; releases what the child held.

        Where the parent has lost its blocks, or all places are taken, the child waits to be computed anew.
        """
        self._vacate(child)
        child.become_child_of(parent)
        child.status = SequenceStatus.PARKED
        has_place = self._running.num_places < self.config.max_num_seqs
        if parent.status is SequenceStatus.RUNNING and has_place:
            self.kv.fork(parent, child)
            self._builder.fork(parent, child)
            child.status = SequenceStatus.RUNNING
            self._running.fork(parent, child)
        else:
            child.num_computed = 0

    def resume(self, seq: Sequence) -> None:
        """Resume a sequence with a next token to compute: queue it if it holds no blocks."""
        if seq.status is SequenceStatus.PARKED:
            self._waiting.push(seq)

    def vacate(self, seq: Sequence) -> None:
        """Suspend a sequence without a next token: release its blocks and its place among the running."""
        self._vacate(seq)
        seq.num_computed = 0
        seq.status = SequenceStatus.PARKED

    def _vacate(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._running.leave(seq)
        elif seq.status is SequenceStatus.FORK_PENDING:
            self._running.lose_sibling(seq.request.sequences[0])
        self.kv.forget(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence and free its blocks; nothing happens if it has ended."""
        if seq.finished:
            return
        if seq.status is SequenceStatus.WAITING:
            self._waiting.discard(seq)
            self._admission.forget(seq)
        self._held_back.forget(seq)
        if self.fetching is not None:
            self.fetching.release(seq)
        self._vacate(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.request.finished:
            self._requests.pop(seq.request.request_id, None)
            self._noted.discard(seq.request.request_id)
            self._advancing.forget(seq.request)
            if self.turns is not None:
                self.turns.ended(seq.request)

    def schedule(self) -> StepPlan:
        """The next step: a token for each running stream, then chunks of prompts (`scheduler/service.py`)."""
        builder = self._builder
        builder.begin()
        self.kv.pins.expire()
        host = self.kv.hierarchy.host
        # A step that failed was never told to `update`.
        host.fail()
        if self.fetching is not None:
            for seq in self.fetching.arrived():
                self._waiting.push(seq)
        shares = self._service.share()
        builder.copies.extend(shares.copies)
        for seq in builder.add_streams(shares.streams, shares.copied):
            self._plan_sequence(seq, 1, copied=seq.seq_id in shares.copied)
        for seq, num_new in shares.chunks.values():
            if seq.seq_id in shares.admitted:
                self._note_admitted(seq)
            self._plan_sequence(seq, num_new, copied=seq.seq_id in shares.copied)
        if builder and host.has_transfers:
            return builder.finish(*host.take_transfers())
        return builder.finish()

    def schedule_ahead(self) -> StepPlan:
        """The step after the one in flight, while that is computed; empty where its result must be awaited first.

        Both are in flight then, and `update` is called for the one, then for the other. What a sequence that has ended
        meanwhile computes in the second is thrown away.
        """
        builder = self._builder
        rows = builder.in_flight
        # Whoever waits for a store is let into the line by `schedule`.
        is_fetching = self.fetching is not None and len(self.fetching) > 0
        if not rows.draws and not is_fetching:
            streams = self._look_ahead.streams(rows.sequences, is_awaited=len(self._waiting) > 0)
            if streams:
                builder.add_ahead(streams)
        return builder.finish()

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Process a step's result: publish blocks, then let each request's `Decoding` continue.

        Where that raises for one request, the others are unharmed: `take_failures` says which have ended so.
        """
        if len(result.token_ids) != plan.num_draws:
            raise ValueError(f"{plan.num_draws} tokens were to be drawn, {len(result.token_ids)} came back")
        rows = self._builder.settle(plan)
        if self.turns is not None:
            drew = rows.drawing
            self.turns.drawn(seq for seq in drew if not seq.finished)
            self.turns.drawn(drew[i] for i, following in result.forced.items() for _ in following)
        self.kv.hierarchy.host.complete()
        updates = self._advancing.advance(plan, result, rows.sequences, rows.draws, self._running)
        self._pinning.settle()
        return updates

    def take_failures(self) -> list[tuple[Request, Exception]]:
        """Requests that have ended with `FinishReason.ERROR` because an update raised, each once."""
        failures, self._failures = self._failures, []
        return failures

    def _fail(self, request: Request, error: Exception) -> None:
        for seq in request.sequences:
            self.finish(seq, FinishReason.ERROR)
        self._failures.append((request, error))

    def restart(self, may_run: MayRun | None = None) -> None:
        """After a step that failed anywhere: rely on nothing but the requests and their tokens.

        Whatever was planned is void. Every sequence gives its blocks back, on the device and in host memory, and waits
        to be computed anew; full blocks that were computed are found again in the prefix cache.

        Args:
            may_run: which requests are computed until the next restart; the others keep waiting. By default all.
        """
        self.abandon_step()
        queue, counters = self.queue, self.counters
        while queue.peek() is not None:
            queue.pop()
        self._compose(queue, self.victims, self.preemption)
        self._yielding.counters = counters
        for request in self._requests.values():
            if request.sequences[0].status is SequenceStatus.RUNNING:
                self._note_admitted(request.sequences[0])
        self._held_back.requeue(self._requests.values(), may_run, self.kv, self._waiting, counters)

    def hold(self, request: Request) -> None:
        """Let a request that was just added wait until the next `restart` that lets it run."""
        seq = request.sequences[0]
        if self.fetching is not None and self.fetching.is_waiting(seq):
            self.fetching.release(seq)
            self._waiting.push(seq)
        self._held_back.hold(seq, self._waiting)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long, from the end of the step before where the engine went straight on to its own end."""
        if self._latency is not None:
            self._latency.observe(StepLoad.of(plan.starts, plan.lengths, num_streams=plan.num_streams), seconds)
        if self.fetching is not None:
            self.fetching.observe(plan.num_tokens - plan.num_streams, seconds)

    def wait_for_loads(self) -> None:
        """Where there is nothing to compute: until a block arrives that a request waits for, or for a moment."""
        if self.fetching is not None and len(self.fetching):
            self.fetching.wait(_MOMENT)

    def release(self) -> StepPlan | None:
        """A plan that makes the runner forget every sequence, where nothing is left to compute and it is worth it."""
        return None if self._requests else self._builder.release()

    def flush(self) -> StepPlan | None:
        """A plan of the stores that wait for a step, where nothing is left to compute; `flushed` must follow."""
        host = self.kv.hierarchy.host
        if self._requests or not host.has_transfers:
            return None
        return self._builder.flush(host.take_transfers()[0])

    def flushed(self, *, done: bool) -> None:
        """What `flush` planned is done, or has failed."""
        host = self.kv.hierarchy.host
        if done:
            host.complete()
        else:
            host.fail()

    def abandon_step(self) -> None:
        """Abandon the last planned step, which gave no result: its transfers are done, the runner's state unknown."""
        self._builder.abandon()
        self.kv.hierarchy.host.fail()

    def _time_limit(self, streams: list[Sequence]) -> TimeLimit | None:
        assert self._latency is not None
        return self._latency.limit(seq.num_tokens for seq in streams)

    def _note_admitted(self, seq: Sequence) -> None:
        request = seq.request
        if seq.index:
            return
        if self.fetching is not None:
            self.fetching.release(seq)
        if request.request_id not in self._noted:
            self._noted.add(request.request_id)
            self.on_admitted(request)
        self._pinning.admitted(seq)

    def _plan_sequence(self, seq: Sequence, num_new: int, *, copied: bool) -> None:
        start, end = seq.num_computed, seq.num_computed + num_new
        draws = self._advancing.decoding(seq).drawing(seq) if end == seq.num_tokens else ()
        self._builder.add(seq, num_new, draws, copied=copied)
        if seq.request.params.prompt_logprobs is not None:
            first = max(start, len(seq.request.prompt_logprobs))
            last = min(end, seq.num_prompt_tokens - 1)
            if first < last:
                self._builder.score_prompt(first, last)
        if (pooled := seq.request.pooled) is not None:
            first, last = max(start, pooled.next_position), min(end, seq.num_prompt_tokens)
            if first < last:
                self._builder.pool_prompt(first, last)

"""Continuous batching over the KV cache: decides what each step computes. Pure bookkeeping, no tensors.

One rule: each sequence's `num_computed` catches up with its `num_tokens`. A new prompt, a chunk of one, a decode step
and a resumption after preemption differ only in the distance.

    add ──> waiting ──admit──> running ──> finished      transitions are in `scheduler/lifecycle.py`
               ^                  │
               └────preempt───────┘    blocks released and num_computed = 0, or swapped out
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import chain
from weakref import proxy

from octavo.errors import RequestError
from octavo.kvcache.manager import KVCacheManager
from octavo.request import FinishReason, Request, Sequence, SequenceStatus
from octavo.scheduler.beam import BeamDecoding
from octavo.scheduler.composer import StepComposer
from octavo.scheduler.kv_limits import KVAmounts, KVLimits, resolve_limits
from octavo.scheduler.lifecycle import Lifecycle, MayRun, SchedulerConfig
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.plan_builder import PlannedStep
from octavo.scheduler.policy import Policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.speculation import Speculator
from octavo.scheduler.step_budget import LatencyTarget
from octavo.scheduler.step_time import StepLoad, StepTimeModel
from octavo.scheduler.waiting import Fetching

_MOMENT = 0.005


class Scheduler(Lifecycle):
    """Decides each step, and advances the sequences by its result.

    Args:
        config, kv, policy, preemption, by_prefix, fetching: see `Lifecycle`.
        speculator: chooses drafts for steps to verify; by default, there are none.
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
        super().__init__(config, kv, policy, preemption, by_prefix=by_prefix, fetching=fetching)
        self.speculator = speculator
        if speculator is not None:
            self.on_ended = speculator.ended
        times = StepTimeModel() if speculator is None else speculator.times
        self._latency = None if config.itl_slo_ms is None else LatencyTarget(config.itl_slo_ms / 1e3, times)
        # By a proxy: in a circle, a dropped engine would keep its memory until the collector runs.
        self._composer = StepComposer(proxy(self), self._latency, speculator)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + (0 if self.fetching is None else len(self.fetching))

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
        return self.builder.in_flight.sequences

    @property
    def drawing(self) -> list[Sequence]:
        """The sequence of each draw of the plan in flight; of two plans, the first."""
        return self.builder.in_flight.drawing

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the request id is in use, or `TenantLimits.check` refuses the request; nothing has changed.
        """
        if request.request_id in self.live:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self.tenants.check(request)
        self.policy.queued(request)
        self.live[request.request_id] = request
        if request.params.use_beam_search:
            request.search = BeamDecoding(request, self)
        seq = request.sequences[0]
        if self.fetching is None or seq.request.needs_all_tokens or not self.fetching.begin(seq):
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
        before = self.tenants.limits
        moving = [seq for seq in waiting if before.get(seq.request.tenant) != limits.get(seq.request.tenant)]
        for seq in moving:
            self.waiting.discard(seq)
        self.tenants.set_limits(limits)
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
        builder, fetching = self.builder, self.fetching
        if builder.is_building:
            self.abandon_step()  # planning the last step raised
        if builder.num_in_flight:
            # Two steps are in flight at most, and only a step with none before it admits requests that were fetched.
            if builder.num_in_flight > 1 or (fetching is not None and len(fetching) > 0):
                return StepPlan()
            with builder.pending(self.config.max_model_len) as num_ending:
                return builder.build(self._composer.compose_ahead(builder.in_flight, num_ending))
        self.kv.pins.expire()
        hierarchy = self.kv.hierarchy
        # `update` is not called for a failed step, so clean up after it here.
        hierarchy.fail()
        if fetching is not None:
            for seq in fetching.arrived():
                self.waiting.push(seq)
        step = self._composer.compose()
        return builder.build(step, *(hierarchy.take() if step and hierarchy.host.has_transfers else ()))

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Process a step's result: publish blocks, then continue each request with what was drawn for it.

        An exception in one request ends only that request; `take_failures` returns those.
        """
        if len(result.token_ids) != plan.num_draws:
            raise ValueError(f"{plan.num_draws} tokens were to be drawn, {len(result.token_ids)} came back")
        step = self.builder.complete(plan)
        finished = SequenceStatus.FINISHED
        first = chain(step.sequences[: plan.num_streams], chain.from_iterable(step.draws))
        self.policy.drawn(seq for seq in first if seq.status is not finished)
        self.kv.hierarchy.complete()
        updates = self._apply(result, step)
        if result.forced or step.drafts:
            more = (update for update in updates if update.seq.request.search is None)
            self.policy.drawn(update.seq for update in more for _ in update.token_ids[1:])
        if self.speculator is not None:
            self.speculator.learn(step.drafts, updates)
        return updates

    def _apply(self, result: StepResult, step: PlannedStep) -> list[SequenceUpdate]:
        """Advance the sequence of each row, and return the tokens that they gained."""
        plan, sequences = step.plan, step.sequences
        for scores, logprobs in zip(plan.scores, result.prompt_logprobs, strict=True):
            sequences[scores.row].request.prompt_logprobs.extend(logprobs)
        for pool, total in zip(plan.pools, result.pooled, strict=True):
            if (states := sequences[pool.row].request.pooled) is not None:
                states.add(pool.num_tokens, total)
        updates: list[SequenceUpdate] = []
        forced = result.forced
        for row, (of_token, *_) in result.mass.items():
            if row < plan.num_streams and sequences[row].state.place is not None:
                self.kv.measured(sequences[row], of_token)
        for draw, (seq, token_id) in enumerate(zip(sequences[: plan.num_streams], result.token_ids, strict=False)):
            if (place := seq.state.place) is None:
                continue  # it has ended after the step was planned
            computed = seq.num_computed = seq.num_computed + 1
            if computed >= place.publish_at and not self._publish(seq):
                continue
            if computed >= place.more_from or token_id in place.ending_ids or draw in forced:
                self._draw((seq,), draw, result, updates)
            else:  # nearly every stream only gains a token
                seq.output_token_ids.append(token_id)
                updates.append(SequenceUpdate(seq, (token_id,)))
        draw = plan.num_streams
        for row, drawing in enumerate(step.draws, start=plan.num_streams):
            seq = sequences[row]
            draft = step.drafts.get(seq.seq_id, ())
            first, draw = draw, draw + len(draft) + len(drawing)
            if seq.finished:
                continue  # it has ended after the step was planned
            accepted = self._num_accepted(seq, draft, result.token_ids[first : first + len(draft)])
            seq.output_token_ids.extend(draft[:accepted])
            seq.num_computed = plan.starts[row] + plan.lengths[row] - len(draft) + accepted
            self.policy.computed(seq)
            for mass in result.mass.get(row, ())[: plan.lengths[row] - len(draft) + accepted]:
                self.kv.measured(seq, mass)
            if self._publish(seq) and drawing:
                self._draw(drawing, first, result, updates, accepted)
            if accepted < len(draft):
                self.trim(seq)
        return updates

    def _num_accepted(self, seq: Sequence, draft: Seq[int], drawn: Seq[int]) -> int:
        """Return how many tokens of a draft were drawn too, up to the one that ends the sequence, exclusively."""
        num_output = len(seq.output_token_ids)
        for place, (token_id, wanted) in enumerate(zip(drawn, draft, strict=True)):
            if token_id != wanted or self._ending(seq, token_id, num_output + place + 1) is not None:
                return place
        return len(draft)

    def _publish(self, seq: Sequence) -> bool:
        """Publish the blocks that a sequence has filled, and pin those that its request wants pinned.

        Returns:
            False if that failed, and the request has ended.
        """
        place, computed, size = seq.state.placed, seq.num_computed, self.kv.spec.block_size
        if computed < place.publish_at:
            return True
        try:
            if self.kv.commit(seq):
                place.num_sent = min(place.num_sent, 0)  # the runner's tables have blocks that are gone
            request = seq.request
            for wanted in request.pins[len(request.pin_receipts) :]:
                if computed < wanted.num_tokens // size * size:
                    break
                request.pin_receipts.append(self.kv.pin(request, wanted))
        except Exception as error:
            self.fail(seq.request, error)
            return False
        place.publish_at = self.kv.holdings[seq].commit_at(computed, size)
        return True

    def _draw(
        self,
        seqs: tuple[Sequence, ...],
        draw: int,
        result: StepResult,
        updates: list[SequenceUpdate],
        num_accepted: int = 0,
    ) -> None:
        """Continue a request's sequences, which have the draws from number `draw` on; if that fails, it ends.

        Args:
            num_accepted: draws before the only sequence's last, which it has appended already.
        """
        request = seqs[0].request
        try:
            if request.search is not None:
                request.search.take(seqs, draw, result, updates)
                return
            self._append(seqs, draw, result, updates, num_accepted)
            place = seqs[0].state.place
            if place is not None and not place.more_from and not request.params.needs_logprobs:
                # The last token's key and value are never computed.
                place.more_from = seqs[0].max_num_tokens(self.config.max_model_len) - 1
                place.ending_ids = request.ending_ids
        except Exception as error:
            self.fail(request, error)

    def _append(
        self,
        seqs: Seq[Sequence],
        first_draw: int,
        result: StepResult,
        updates: list[SequenceUpdate],
        num_accepted: int,
    ) -> None:
        """Append to each sequence the token it drew, and what its grammar forces after it.

        Args:
            seqs: the one that computed the prompt, whose blocks are committed, and those that are forked from it.
            num_accepted: draws before these, which the only sequence has appended already.
        """
        for sibling in seqs[1:]:
            self.fork(seqs[0], sibling)
        logprobs_of, forced = result.logprobs, result.forced
        for draw, seq in enumerate(seqs, start=first_draw + num_accepted):
            update = SequenceUpdate(seq, result.token_ids[draw - num_accepted : draw + 1])
            update.earlier_logprob = seq.cumulative_logprob
            if draw in logprobs_of:
                update.logprobs = tuple(logprobs_of[i] for i in range(draw - num_accepted, draw + 1))
                for known in update.logprobs:
                    seq.cumulative_logprob += known.logprob
            update.cumulative_logprob = seq.cumulative_logprob
            if draw in forced:
                update.token_ids = (*update.token_ids, *forced[draw])
            for length, token_id in enumerate(update.token_ids[num_accepted:], start=num_accepted + 1):
                seq.output_token_ids.append(token_id)
                if (ending := self._ending(seq, token_id, len(seq.output_token_ids))) is not None:
                    self.finish(seq, *ending)
                    update.token_ids = update.token_ids[:length]
                    update.note_end()
                    break
            updates.append(update)

    def _ending(self, seq: Sequence, token_id: int, num_output: int) -> tuple[FinishReason, int | None] | None:
        """Return the finish and stop reasons of a sequence if its output token number `num_output` ends it."""
        request, params = seq.request, seq.request.params
        # A grammar allows end-of-sequence before `min_tokens` only if no other token fits.
        may_stop = num_output >= params.min_tokens or params.structured_outputs is not None
        if may_stop and token_id in (ending_ids := request.ending_ids):
            return FinishReason.STOP, ending_ids[token_id]
        if num_output >= (params.max_tokens or 1) or seq.num_prompt_tokens + num_output >= self.config.max_model_len:
            return FinishReason.LENGTH, None
        return None

    def restart(self, may_run: MayRun | None = None) -> None:
        super().restart(may_run)
        # What the composer knew of running sequences is void.
        self._composer = StepComposer(proxy(self), self._latency, self.speculator)

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

    def idle_plan(self) -> StepPlan | None:
        """Return a plan with the pending stores that makes the runner forget grammars; its result is for `update`.

        None if requests are left, or there is no need.
        """
        hierarchy = self.kv.hierarchy
        if self.live:
            return None
        return self.builder.idle_plan(hierarchy.take()[0] if hierarchy.host.has_transfers else ())

"""The step composer decides which tokens a step computes: running streams first, then prompts by what they have left.

1. **Streams.** Every running sequence that lacks one token has it computed, whatever else waits: no prompt and no
   priority can take a running stream's token. Those of tenants that take more than their share of the time take turns
   (`StreamTurns`), if there is a latency target that the streams of several tenants exceed.
2. **Prompts** share the remaining tokens, and the remaining time if streams have a latency target (`StepBudget`): those
   in chunks, those that resume after a preemption, and those that wait. A quarter goes to the first of them in order of
   service, by priority and arrival. The rest goes to the prompt with the least left to compute, within a priority. If
   priorities age, the rest follows the order of service too; if tenants take turns, it goes to the tenant that has
   recently received least for its weight, and 1 / 32 to the prompt that arrived first.

Before that, the claimant may have claimed places and blocks of others (`claimant` and `victims` of the policy). It is
then served among the prompts of the same step.

The reasons: shortest remaining first minimises the mean time to the first token (Schrage 1968), and a short prompt
never waits behind a long one. On its own it would starve long prompts under a stream of short ones. The quarter is the
ageing: as requests before it end, each prompt becomes the first in order of service, and from then on a stream of
others costs it at most three quarters of its speed. Equal shares (processor sharing) would bound both as well, but
delay the first of k long prompts k times for nothing.

Blocks may run out. A stream then takes those of the last sequence behind it; a prompt takes what
is available, then the blocks of prompts behind it, and otherwise waits.

Every request ends eventually, because the first in order of service among those with tokens to compute yields to no
other, and if it found no blocks in a step, it gets them before any other in the next. Running beams that wait for their
siblings have nothing to compute: they keep their blocks as long as a sequence behind can yield, but block no other.
Drawn tokens are never lost, so each time the first draws a token, less work remains.
"""

from __future__ import annotations

import bisect
from operator import attrgetter

from octavo.request import Sequence, SequenceStatus
from octavo.scheduler.admission import MOST_REFUSED, Admission
from octavo.scheduler.lifecycle import Lifecycle
from octavo.scheduler.plan import MOST_FORCED
from octavo.scheduler.plan_builder import PlannedStep
from octavo.scheduler.speculation import Speculator
from octavo.scheduler.step_budget import LatencyTarget, StepBudget
from octavo.scheduler.stream_turns import StreamTurns


class StepComposer:
    """Composes each step.

    Args:
        latency: limits the time of prompts, and of streams of several tenants.
        speculator: chooses drafts to verify.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        latency: LatencyTarget | None,
        speculator: Speculator | None = None,
    ) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._running = lifecycle.running
        self._waiting = lifecycle.waiting
        self._tenants = lifecycle.tenants
        self._policy = lifecycle.policy
        self._admission = Admission(lifecycle)
        self._max_tokens = lifecycle.config.max_num_batched_tokens
        self._latency = latency
        self._speculator = speculator
        self._turns = StreamTurns(latency)
        self._stalled: Sequence | None = None  # the first in order of service, if it found no blocks in the last step
        self._lacked_blocks = False  # whether a step composed ahead lacked some, for which others may have to yield

    def compose(self) -> PlannedStep:
        """Decide how many tokens each sequence computes in the next step, with blocks for all of them."""
        step = PlannedStep()
        self._admission.begin_step()
        self._lacked_blocks = False
        budget = self._share(step, self._claim() if self._policy.may_claim else None)
        while not step and len(self._running):
            # No sequence with tokens to compute found blocks, so beams that wait for siblings must yield.
            order = self._running.order
            idle = [seq for seq in order if not seq.num_missing]
            self._lifecycle.preempt_one_of(idle or order[1:] or order)
            budget = self._share(step)
        if budget is not None:
            budget.settle()
        for seq, num_new in list(step.chunks.values()):
            # One that resumes, or has more of its output to compute again after a preemption, goes on in a chunk.
            is_output = seq.num_computed >= seq.num_prompt_tokens and seq.state.placed.num_sent >= 0
            if is_output and num_new == seq.num_missing <= MOST_FORCED + 1:
                step.runs[seq.seq_id] = step.chunks.pop(seq.seq_id)
        if self._speculator is not None and not step.chunks:
            self._add_drafts(self._speculator, step)
        return step

    def compose_ahead(self, computing: PlannedStep, num_ending: int) -> PlannedStep:
        """Compose the step after the one in flight, with the tokens that it draws pending (`PlanBuilder.pending`).

        The step is empty if the result must be awaited first (`_must_await`), and in these cases:

        - Streams take turns, or need blocks that are shared, or that a tenant or the pool does not have: others may
          have to yield. Prompts take what is available, but the next step is not composed ahead then.
        - A block was evicted that must be stored first. Those that were taken are kept for the next step.

        Args:
            num_ending: how many sequences of the step in flight draw their last token, so that others may have their
                places.
        """
        step = PlannedStep(ahead=True)
        if self._must_await(computing, num_ending):
            return step
        budget = self._share(step)
        if self._moves_blocks:
            return PlannedStep(ahead=True)
        if step:
            self._admission.begin_step()
        if budget is not None:
            budget.settle()
        return step

    def _must_await(self, computing: PlannedStep, num_ending: int) -> bool:
        """Whether the result of the step in flight must be known before another is composed, in these cases:

        - A beam runs, or a sequence whose grammar must follow its token, or siblings are about to fork.
        - A draft is being verified, so that it is not known how far its sequence gets.
        - A waiting sequence may be admitted, or claim a place. It may share a prefix that is being computed.
        - The last step composed ahead lacked blocks, or a block must be moved to or from host memory.
        """
        if self._running.num_awaiting or computing.drafts or any(len(draws) > 1 for draws in computing.draws):
            return True
        if len(self._waiting) and (num_ending or self._policy.may_claim or self._admission.may_admit):
            return True
        return self._stalled is not None or self._lacked_blocks or self._moves_blocks

    @property
    def _moves_blocks(self) -> bool:
        """Whether the next step must move blocks to or from host memory."""
        return self._kv.hierarchy.host.has_transfers

    def _add_drafts(self, speculator: Speculator, step: PlannedStep) -> None:
        """Let sequences verify drafts, as far as there are blocks without a preemption."""
        streams = [*step.streams, *(seq for seq, _ in step.runs.values())]
        for seq_id, (seq, tokens) in speculator.choose(streams, self._max_tokens).items():
            place, num_known = seq.state.placed, seq.num_missing
            same_blocks = seq.tokens_until_eviction(seq.num_computed, self._kv.spec.block_size)
            tokens = tokens[: max(0, same_blocks - num_known)]
            if seq.num_computed + num_known + len(tokens) > place.holding.capacity:
                if self._kv.extend(seq, num_known + len(tokens), self._tenants.room) is not None:
                    self._running.grew(seq)
                else:
                    tokens = tokens[: place.holding.capacity - seq.num_computed - num_known]
            if tokens:
                step.drafts[seq_id] = tokens

    def _claim(self) -> Sequence | None:
        """Free places and blocks for the claimant if it may claim all that it lacks, and return it; else None.

        A claimant that lacks nothing is returned too, if it may be admitted before all others.
        """
        admission, running, policy = self._admission, self._running, self._policy
        if not len(running) or not len(self._waiting):
            return None
        first = self._waiting.head()
        head = policy.claimant(self._waiting.heads(), first, running.order)
        if head is None or first is None or admission.is_over_cap(head):
            return None
        num_places = admission.num_lacking_places(head)
        if num_places <= 0 and admission.num_lacking_blocks(head) <= 0:
            return head if policy.takes_turns and policy.may_pass(head, first) else None
        victims = [seq for seq in policy.victims(head, running.order) if self._tenants.helps(seq, head)]
        if num_places > len(victims) or not victims:
            return None
        bound = sum(seq.state.placed.bound for seq in victims)
        if admission.num_lacking_blocks(head) > self._kv.holdings.num_freed_by(victims) + bound:
            return None
        while victims and (admission.num_lacking_places(head) > 0 or admission.num_lacking_blocks(head) > 0):
            victims.remove(self._lifecycle.preempt_one_of(victims))
            victims = [seq for seq in victims if self._tenants.helps(seq, head)]
        return head

    def _share(self, step: PlannedStep, claimant: Sequence | None = None) -> StepBudget | None:
        """Share the step among streams, then prompts; returns the budget of the prompts, if there may be any."""
        short = not step.ahead and self._serve_stalled(step)
        streams: list[Sequence] = []
        prompts: list[Sequence] = []
        for seq in self._running.order:
            missing = seq.num_prompt_tokens + len(seq.output_token_ids) - seq.num_computed
            if missing == 1:
                streams.append(seq)
            elif missing:
                prompts.append(seq)
        num_streams = len(streams)
        if step.ahead and self._turns.time_of(streams) is not None:
            return None
        have_prompts = bool(prompts) or self._admission.has_place
        streams = self._turns.within_time(streams, have_prompts=have_prompts)
        self._lifecycle.counters.num_deferred_tokens += num_streams - len(streams)
        # Each may need a new block or a copy.
        most = 2 * len(streams) * len(self._kv.spec.groups)
        if self._policy.takes_turns and self._kv.pool.num_available - self._tenants.num_kept < most:
            first = self._first()
            streams.sort(key=lambda seq: (seq is not first, *self._policy.key(seq)))
        short |= self._serve_streams(streams, step)
        if step.ahead and short:
            step.streams.clear()
            return None
        left = self._max_tokens - len(step.streams)
        if left <= 0 or not (prompts or len(self._waiting)):
            return None
        context = 0 if self._latency is None else sum([seq.num_tokens for seq in step.streams])
        budget = StepBudget(left, self._latency, len(step.streams), context)
        if claimant is not None and not short and self._admit(claimant, budget, step, self._policy.share_of_first):
            bisect.insort(prompts, claimant, key=attrgetter("order"))
        self._serve_prompts(prompts, budget, step, short)
        return budget

    def _serve_stalled(self, step: PlannedStep) -> bool:
        """Find blocks for the first in order of service if the last step had none; returns whether another yielded."""
        first, self._stalled = self._stalled, None
        if first is None or first is not self._first():
            return False
        wanted = min(first.num_missing, self._kv.spec.block_size)
        yielded = False
        while not self._extend(first, wanted, step) and (others := self._others(first)):
            self._lifecycle.preempt_one_of(others)
            yielded = True
        return yielded

    def _first(self) -> Sequence | None:
        """Return the first in order of service among the running sequences that have tokens to compute."""
        return next((seq for seq in self._running.order if seq.num_missing), None)

    def _others(self, first: Sequence) -> list[Sequence]:
        """Return the sequences that may yield to the first: those behind it, or else all others (beams)."""
        behind, helps = self._running.after(first)[1:], self._tenants.helps
        others = [seq for seq in self._running.order if seq is not first]
        # As a last resort regardless of floors and caps, because the first must progress.
        return [seq for seq in behind if helps(seq, first)] or [seq for seq in others if helps(seq, first)] or others

    def _serve_streams(self, streams: list[Sequence], step: PlannedStep) -> bool:
        """Give each stream one token, in order of service; returns whether blocks ran out."""
        running = SequenceStatus.RUNNING
        served, short = step.streams, False
        # Without a call for each of them, because this runs for every token of every stream.
        full = [seq for seq in streams if (place := seq.state.place) and seq.num_computed >= place.holding.capacity]
        if not full or self._kv.extend_all(full):
            for seq in full:
                self._running.grew(seq)
            served.extend(streams)
            return False
        for seq in streams:
            if short and seq.status is not running:
                continue
            if seq.num_computed >= seq.state.placed.holding.capacity and not self._extend(seq, 1, step):
                short = True
                if step.ahead or not self._take_from_those_behind(seq, step):
                    continue
            served.append(seq)
        return short

    def _take_from_those_behind(self, seq: Sequence, step: PlannedStep) -> bool:
        """Find blocks for a stream's next token; False if the stream itself had to yield."""
        served = set(step.streams)
        while not self._extend(seq, 1, step):
            # The first in order of service yields to no other, so that every request ends eventually.
            first = self._first()
            if seq is first:
                behind = self._others(seq)
            else:  # the sequence itself, and those that may yield to it, in order of service
                others = [other for other in self._running.order if other is not first and other not in served]
                behind = [
                    each for each in others if self._policy.may_take(seq, each) and self._tenants.helps(each, seq)
                ]
            if not behind and self._kv.pins.yield_one():
                continue
            if self._lifecycle.preempt_one_of(behind or [seq]) is seq:
                return False
        return True

    def _serve_prompts(self, prompts: list[Sequence], budget: StepBudget, step: PlannedStep, short: bool) -> None:
        """Serve, or admit, the first prompt in order of service, then others by their rank."""
        if short:
            prompts = [seq for seq in prompts if seq.status is SequenceStatus.RUNNING]
        admission, waiting = self._admission, self._waiting
        admits = admission.has_place and not short and not step.ahead
        head = waiting.head() if admits else None
        ranking, share, first = self._policy.prompt_key, self._policy.share_of_first, self._policy.first_prompt(prompts)
        by_rank = sorted(prompts, key=ranking)
        if first is not None and (head is None or first.order < head.order):
            if len(prompts) > 1 or head is not None:
                short |= self._serve_prompt(first, budget, step, share)
        elif head is not None:
            alone = not prompts and len(waiting) == 1
            if self._admit(head, budget, step, 1 if alone else share):
                by_rank = sorted((*by_rank, head), key=ranking)
            elif first is not None:
                # The head does not fit yet, so the first running prompt is served next.
                short |= self._serve_prompt(first, budget, step, share)
        refused: list[Sequence] = []
        place = 0
        while budget.num_tokens > 0:
            prompt = by_rank[place] if place < len(by_rank) else None
            newcomer = None
            admits = admits and not short and admission.has_place
            if admits and budget.num_newcomers > 0 and len(refused) < MOST_REFUSED:
                nearest = waiting.candidates(len(refused) + 1)
                newcomer = next((seq for seq in nearest if seq not in refused), None)
            if newcomer is not None and (prompt is None or ranking(newcomer) < ranking(prompt)):
                if not self._admit(newcomer, budget, step, 1):
                    refused.append(newcomer)
            elif prompt is not None:
                place += 1
                if prompt.status is SequenceStatus.RUNNING:
                    short |= self._serve_prompt(prompt, budget, step, 1)
            else:
                break

    def _admit(self, seq: Sequence, budget: StepBudget, step: PlannedStep, share: int) -> bool:
        num_new = self._admission.admit(seq, budget, share)
        if not num_new:
            return False
        self._policy.admitted(seq)
        budget.take(seq.num_computed, num_new, scored=seq.request.is_scored)
        budget.num_newcomers -= 1 + seq.num_pending_siblings
        step.chunks[seq.seq_id] = (seq, num_new)
        return True

    def _serve_prompt(self, seq: Sequence, budget: StepBudget, step: PlannedStep, share: int) -> bool:
        """Serve a chunk of a prompt, on top of what it has in this step; returns whether it lacked blocks."""
        _, has = step.chunks.get(seq.seq_id, (seq, 0))
        start = seq.num_computed + has
        scored = seq.request.is_scored
        missing = min(seq.num_missing, seq.tokens_until_eviction(seq.num_computed, self._kv.spec.block_size))
        chunk = budget.chunk(start, missing - has, scored=scored, share=share)
        if not chunk:
            return False
        num_new = self._make_room(seq, has, chunk, step)
        if num_new:
            budget.take(start, num_new, scored=scored)
            step.chunks[seq.seq_id] = (seq, has + num_new)
        elif not has and not step.ahead and seq is self._first():
            self._stalled = seq
        return num_new < chunk

    def _make_room(self, seq: Sequence, has: int, chunk: int, step: PlannedStep) -> int:
        """Find blocks for as much of a chunk as possible; returns the number of its tokens."""
        while True:
            if self._extend(seq, has + chunk, step):
                return chunk
            capacity = self._kv.holdings[seq].capacity
            blocks = self._tenants.room(seq) // len(self._kv.spec.groups)
            fits = capacity + blocks * self._kv.spec.block_size - seq.num_computed - has
            if 0 < fits < chunk and self._extend(seq, has + fits, step):
                return fits
            if step.ahead:
                self._lacked_blocks = True
            if has or step.ahead:
                return 0
            behind = [s for s in self._running.after(seq)[1:] if s.seq_id not in step.chunks and s.num_missing != 1]
            behind = [s for s in behind if self._tenants.helps(s, seq)]
            if behind:
                self._lifecycle.preempt_one_of(behind)
            elif len(self._running) > 1 or not self._kv.pins.yield_one():
                return 0

    def _extend(self, seq: Sequence, num_tokens: int, step: PlannedStep) -> bool:
        """Allocate blocks for a running sequence's next tokens; False if there are too few."""
        kv, tenants = self._kv, self._tenants
        if step.ahead and not seq.state.placed.holding.capacity:
            return False  # it shares a block, which must be copied
        copies = kv.extend(seq, num_tokens, tenants.room)
        if copies is None and not step.ahead and tenants.restore_floor(seq.request.tenant):
            copies = kv.extend(seq, num_tokens, tenants.room)
        if copies is None:
            return False
        self._running.grew(seq)
        if copies:
            step.copies.extend(copies)
            place = seq.state.placed
            place.num_sent = min(place.num_sent, seq.num_computed // kv.spec.block_size)  # the rest is a copy
        return True

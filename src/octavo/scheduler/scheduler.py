"""Continuous batching over the KV cache: decides what each step computes. Pure bookkeeping, no tensors.

One rule: each sequence's `num_computed` chases its `num_tokens`. A new prompt, a chunk of one, a decode step and a
resumption after preemption differ only in how far behind they are.

    add ──> waiting ──admit──> running ──finish──> finished
               ^                  │
               └────preempt───────┘    blocks given back and num_computed = 0, or swapped out
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from octavo.errors import CapacityError, ContextLengthError, RequestError
from octavo.kvcache.manager import KVCacheManager
from octavo.request import FinishReason, Request, RequestId, Sequence, SequenceId, SequenceStatus
from octavo.scheduler.decoding import BeamDecoding, Decoding, Sampling
from octavo.scheduler.plan import SequenceUpdate, StepPlan, StepResult
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.preemption import LowestPriority, PreemptionMode, Recompute, VictimPolicy
from octavo.scheduler.queue import ArrivalOrder, WaitingQueue

DEFAULT_WATERMARK = 0.01
DEFAULT_HEADROOM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step.

    Attributes:
        watermark: share of the pool that admission leaves available, so that a newcomer does not force a
            preemption in the very next steps. Not applied while nothing runs.
        headroom_tokens: tokens that each running sequence, and the newcomer, must be able to grow by after an
            admission, as far as its max_tokens lets it; what is left of their prompts comes on top.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    watermark: float = DEFAULT_WATERMARK
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start.

    Attributes:
        recomputed_tokens: whose keys and values were given up without being swapped; what the prefix cache still has
            of them is not computed again.
    """

    num_preemptions: int = 0
    recomputed_tokens: int = 0


class Scheduler:
    """Decides the next step; told its result, moves the sequences on.

    Attributes:
        max_sequence_tokens: prompt and output of the longest sequence that the model and the pool have room for.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        victims: VictimPolicy | None = None,
        waiting: WaitingQueue | None = None,
        preemption: PreemptionMode | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.counters = SchedulerCounters()
        self._victims = victims or LowestPriority()
        self._preemption = preemption or Recompute()
        self._waiting = ArrivalOrder() if waiting is None else waiting
        self._running: list[Sequence] = []  # in order of service
        self._swapped: dict[SequenceId, Sequence] = {}  # waiting; `kv` knows which of them were given up since
        self._requests: dict[RequestId, Request] = {}
        self._pinning: list[Sequence] = []  # whose requests want prefixes pinned that are not yet computed
        self._sampling = Sampling(config.max_model_len)
        self._searches: dict[RequestId, BeamDecoding] = {}  # of those requests that do not sample
        self._builder = PlanBuilder(kv)
        self._admitted: list[Request] = []
        self._reserved_slots = 0  # of parallel samples and beams whose prompt is still being computed
        self._num_growing_groups = sum(group.sliding_window is None for group in kv.spec.groups)
        self.max_sequence_tokens = self._longest_sequence()
        self._watermark_blocks = int(config.watermark * kv.pool.num_blocks)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_swapped(self) -> int:
        """Of those that wait, how many have keys and values in host memory."""
        return self.kv.swap.num_sequences

    @property
    def request_ids(self) -> list[RequestId]:
        """Every request that has not ended."""
        return list(self._requests)

    @property
    def requests(self) -> list[Request]:
        """Every request that has not ended."""
        return list(self._requests.values())

    @property
    def planned(self) -> list[Sequence]:
        """The sequence of each row of the plan whose result is awaited."""
        return self._builder.sequences

    @property
    def drawing(self) -> list[Sequence]:
        """The sequence of each draw of the plan whose result is awaited."""
        return [seq for draws in self._builder.draws for seq in draws]

    @property
    def admitted(self) -> list[Request]:
        """Whom the last `schedule` admitted for the first time."""
        return self._admitted

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def check(self, num_prompt_tokens: int, max_tokens: int, n: int = 1, n_param: str = "n") -> None:
        """Refuse what can never be served, with the numbers.

        Args:
            n: sequences that are computed of one prompt.
            n_param: the parameter that says so.

        Raises:
            ContextLengthError: prompt + max_tokens is over max_model_len.
            CapacityError: one sequence needs more blocks than the pool has, or n is over max_num_seqs.
        """
        limit = self.config.max_model_len
        total = num_prompt_tokens + max_tokens
        if total > limit:
            raise ContextLengthError(
                f"this model's maximum context length is {limit} tokens, but {total} were requested: "
                f"{num_prompt_tokens} in the prompt and {max_tokens} for the completion (max_tokens)",
                param="max_tokens" if num_prompt_tokens < limit else "prompt",
            )
        if n > self.config.max_num_seqs:
            limit = self.config.max_num_seqs
            raise CapacityError(f"{n_param} is {n}, but at most {limit} sequences run at once", param=n_param)
        # The last token's key and value are never needed.
        blocks = self.kv.spec.peak_blocks(total - 1, self.config.max_num_batched_tokens)
        if blocks > (available := self.kv.pool.num_blocks - 1):
            raise CapacityError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens need {blocks} KV blocks of "
                f"{self.kv.spec.block_size} tokens, but the cache has {available} in all",
                param="max_tokens",
            )

    def _longest_sequence(self) -> int:
        """Prompt and output tokens of the longest sequence that `check` lets through; 0 where the pool holds none."""
        available = self.kv.pool.num_blocks - 1

        def too_long(total: int) -> bool:
            return self.kv.spec.peak_blocks(total - 1, self.config.max_num_batched_tokens) > available

        # The last token's key and value are never needed, and blocks only grow with tokens.
        return bisect.bisect_left(range(1, self.config.max_model_len + 1), True, key=too_long)

    def add(self, request: Request) -> None:
        """Queue a request; raises as `check` does, and where its id is in use, before anything changes."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        params = request.params
        self.check(len(request.prompt_token_ids), params.max_tokens or 1, params.num_sequences, params.width_param)
        self._requests[request.request_id] = request
        if params.use_beam_search:
            self._searches[request.request_id] = BeamDecoding(request)
        self._waiting.push(request.sequences[0])
        if request.pins:
            self._pinning.append(request.sequences[0])

    def end_request(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End every sequence of a request and free its blocks; None where it is not (any more) known."""
        request = self._requests.get(request_id)
        if request is not None:
            for seq in request.sequences:
                self.finish(seq, reason)
        return request

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Make `child` what `parent` is, over the same blocks; what the child held is given up.

        Where the parent has lost its blocks, or all places are taken, the child waits to be computed anew.
        """
        if child.status is SequenceStatus.RUNNING:
            self._leave_running(child)
        elif child.status is SequenceStatus.FORK_PENDING:
            self._reserved_slots -= 1
        self.kv.forget(child)
        child.become_child_of(parent)
        child.status = SequenceStatus.PARKED
        has_place = len(self._running) + self._reserved_slots < self.config.max_num_seqs
        if parent.status is SequenceStatus.RUNNING and has_place:
            self.kv.fork(parent, child)
            self._builder.fork(parent, child)
            child.status = SequenceStatus.RUNNING
            self._enter_running(child)
        else:
            child.num_computed = 0

    def resume(self, seq: Sequence) -> None:
        """A sequence has a next token to compute: queue it where it holds no blocks."""
        if seq.status is SequenceStatus.PARKED:
            self._waiting.push(seq)

    def vacate(self, seq: Sequence) -> None:
        """Nothing continues a sequence for now: give its blocks and its place among the running back."""
        if seq.status is SequenceStatus.RUNNING:
            self._leave_running(seq)
        elif seq.status is SequenceStatus.FORK_PENDING:
            self._reserved_slots -= 1
        self.kv.forget(seq)
        seq.num_computed = 0
        seq.status = SequenceStatus.PARKED

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence and free its blocks; nothing happens if it has ended."""
        if seq.finished:
            return
        was, seq.status = seq.status, SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if was is SequenceStatus.RUNNING:
            self._leave_running(seq)
        elif was is SequenceStatus.WAITING:
            self._waiting.discard(seq)
            self._swapped.pop(seq.seq_id, None)
        elif was is SequenceStatus.FORK_PENDING and seq.request.sequences[0].status is SequenceStatus.RUNNING:
            self._reserved_slots -= 1
        self.kv.forget(seq)
        if seq.request.finished:
            self._requests.pop(seq.request.request_id, None)
            self._searches.pop(seq.request.request_id, None)

    def schedule(self) -> StepPlan:
        """The next step: first those that run, in order of service, then newcomers into what is left."""
        builder = self._builder
        builder.begin()
        self._admitted = []
        self.kv.pins.expire()
        swap = self.kv.swap
        # A step that failed was never told to `update`; whatever it moved has been moved.
        swap.complete_transfers()
        preempted = self._schedule_running(builder)
        if not preempted:
            self._admit(builder)
        while not builder and self._running:
            # Nobody here has a token to compute: they are beams that wait for siblings, and stand in their way.
            self._preempt(self._victims.choose(self._running))
            self._admit(builder)
        if builder and swap.has_transfers:
            return builder.finish(*swap.take_transfers())
        return builder.finish()

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Take in what the runner computed: publish blocks, then let each request make of its samples what it does."""
        sequences, draws = self._builder.settle(plan)
        self.kv.swap.complete_transfers()
        for scores, logprobs in zip(plan.scores, result.prompt_logprobs, strict=True):
            sequences[scores.row].request.prompt_logprobs.extend(logprobs)
        updates: list[SequenceUpdate] = []
        first = 0
        for seq, start, length, drawing in zip(sequences, plan.starts, plan.lengths, draws, strict=True):
            seq.num_computed = start + length
            self.kv.commit(seq)
            if drawing:
                samples = [result.sample(first + i) for i in range(len(drawing))]
                first += len(drawing)
                self._decoding(seq).take(drawing, samples, self, updates)
        if self._pinning:
            # Before anything else is allocated: what ended in this very step is still cached.
            self._pinning = [seq for seq in self._pinning if not self._settle_pins(seq)]
        return updates

    def abandon_step(self) -> None:
        """The step planned last gave no result: what it moved has been moved, and the runner's state is unknown."""
        self._builder.abandon()
        self.kv.swap.complete_transfers()

    def _schedule_running(self, plan: PlanBuilder) -> bool:
        """Returns whether a sequence had to be preempted."""
        budget = self.config.max_num_batched_tokens
        preempted = False
        position = 0
        while position < len(self._running) and plan.num_tokens < budget:
            seq = self._running[position]
            num_new = min(seq.num_tokens - seq.num_computed, budget - plan.num_tokens)
            if num_new == 0:
                position += 1
                continue
            while (copies := self.kv.extend(seq, num_new)) is None:
                # The first in order of service yields to nobody, so that every request ends at last.
                candidates = self._running[max(position, 1) :]
                if not candidates and (self._give_up_swapped() or self.kv.pins.yield_one()):
                    continue
                victim = self._victims.choose(candidates or [seq])
                self._preempt(victim)
                preempted = True
                if victim is seq:
                    break
            if copies is None:
                continue  # seq itself yielded; its place in the list is the next one's
            plan.copies.extend(copies)
            self._plan_sequence(plan, seq, num_new, copied=bool(copies))
            position += 1
        return preempted

    def _admit(self, plan: PlanBuilder) -> None:
        budget = self.config.max_num_batched_tokens
        while plan.num_tokens < budget and (seq := self._waiting.peek()) is not None:
            pending = _pending_siblings(seq)
            if len(self._running) + self._reserved_slots + 1 + pending > self.config.max_num_seqs:
                break
            if self.kv.pool.num_available <= self._watermark_blocks and self._running:
                break
            if seq.seq_id in self._swapped and not self.kv.is_swapped(seq):
                self._start_over(seq)
            budget_left = budget - plan.num_tokens
            reserve = self._reserve_for_growth(seq, budget_left) if self._running else 0
            if seq.seq_id in self._swapped:
                num_new = self._swap_in(plan, seq, budget_left, reserve)
            else:
                num_new = self._start(seq, budget_left, reserve)
            if not num_new:
                if not self._running and (self._give_up_swapped(but=seq) or self.kv.pins.yield_one()):
                    continue
                break
            self._waiting.pop()
            seq.status = SequenceStatus.RUNNING
            self._reserved_slots += pending
            self._enter_running(seq)
            if seq.index == 0 and seq.num_preemptions == 0:
                self._admitted.append(seq.request)
            self._plan_sequence(plan, seq, num_new)

    def _reserve_for_growth(self, newcomer: Sequence, budget: int) -> int:
        """Blocks that must stay available when `newcomer` is admitted: those that the next steps will take.

        What slides gives up as many blocks as it takes: only groups of full attention count.
        """
        headroom, kv = self.config.headroom_tokens, self.kv
        if not headroom or not self._num_growing_groups:
            return self._watermark_blocks
        blocks_for = kv.spec.blocks_for_tokens
        # As if the newcomer had its first chunk.
        blocks = -blocks_for(min(newcomer.num_computed + budget, newcomer.num_tokens))
        for seq in (*self._running, newcomer):
            # The last token's key and value are never needed.
            may_grow = (seq.request.params.max_tokens or 1) - seq.num_output_tokens - 1
            blocks += blocks_for(seq.num_tokens + min(headroom, may_grow))
        blocks -= sum(len(kv.tables(seq)[0]) for seq in self._running)
        return max(self._watermark_blocks, blocks * self._num_growing_groups)

    def _start(self, seq: Sequence, budget: int, reserve: int) -> int:
        """Give a sequence without blocks what the prefix cache has of it; returns how many tokens to compute, or 0."""
        hit = self.kv.match(seq) if _may_skip(seq) else self.kv.no_hit
        num_new = min(seq.num_tokens - hit.num_tokens, budget)
        # Asked beforehand, because making room may evict what it speaks of.
        report = self.kv.explain(seq, hit) if seq.request.cache_report is None else None
        if not self.kv.admit(seq, hit, num_new, reserve):
            return 0
        if report is not None:
            seq.request.num_cached_tokens = hit.num_tokens
            self.kv.ledger.admitted(seq.request, report)
        seq.num_computed = hit.num_tokens
        return num_new

    def _swap_in(self, plan: PlanBuilder, seq: Sequence, budget: int, reserve: int) -> int:
        """Bring a swapped sequence back; returns how many tokens to compute, or 0 where there is no room."""
        num_new = min(seq.num_tokens - seq.num_computed, budget)
        copies = self.kv.swap_in(seq, num_new, reserve)
        if copies is None:
            return 0
        plan.copies.extend(copies)
        del self._swapped[seq.seq_id]
        return num_new

    def _plan_sequence(self, plan: PlanBuilder, seq: Sequence, num_new: int, *, copied: bool = False) -> None:
        start, end = seq.num_computed, seq.num_computed + num_new
        plan.add(seq, num_new, self._decoding(seq).drawing(seq) if end == seq.num_tokens else (), copied=copied)
        if seq.request.params.prompt_logprobs is not None:
            first = max(start, len(seq.request.prompt_logprobs))
            last = min(end, seq.num_prompt_tokens - 1)
            if first < last:
                plan.score_prompt(first, last)

    def _decoding(self, seq: Sequence) -> Decoding:
        return self._searches.get(seq.request.request_id, self._sampling)

    def _settle_pins(self, seq: Sequence) -> bool:
        """Pin those prefixes of a request that are computed; returns whether nothing more is to be expected."""
        request, size = seq.request, self.kv.spec.block_size
        for wanted in request.pins[len(request.pin_receipts) :]:
            if seq.num_computed < wanted.num_tokens // size * size:
                return seq.finished
            request.pin_receipts.append(self.kv.pin(request, wanted))
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave_running(seq)
        self.counters.num_preemptions += 1
        seq.num_preemptions += 1
        if seq.num_computed == seq.num_tokens:
            # A beam that waits for its siblings: nothing of it is to be computed, and what it knew is kept.
            self._start_over(seq)
            seq.status = SequenceStatus.PARKED
            return
        if self._preemption.swaps(seq) and self.kv.swap_out(seq):
            self._swapped[seq.seq_id] = seq
        else:
            self._start_over(seq)
        self._waiting.push(seq)

    def _start_over(self, seq: Sequence) -> None:
        """Give all its blocks back, wherever they are."""
        self.kv.release(seq)
        self._swapped.pop(seq.seq_id, None)
        self.counters.recomputed_tokens += seq.num_computed
        seq.num_computed = 0

    def _give_up_swapped(self, but: Sequence | None = None) -> bool:
        """Let the last in order of service of those that keep blocks while they are swapped start over.

        Called when nothing else can go on: what they keep may be what is missing. `but` is the last to be chosen.
        """
        keeping = [s for s in self._swapped.values() if self.kv.is_swapped(s) and self.kv.swap.keeps_blocks(s.seq_id)]
        victim = max(keeping, key=lambda seq: (seq is not but, seq.order), default=None)
        if victim is None:
            return False
        self._start_over(victim)
        return True

    def _enter_running(self, seq: Sequence) -> None:
        bisect.insort(self._running, seq, key=lambda s: s.order)

    def _leave_running(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._builder.drop(seq)
        self._reserved_slots -= _pending_siblings(seq)


def _may_skip(seq: Sequence) -> bool:
    """Whether cached tokens may go uncomputed: prompt logprobs still missing need every token's logits."""
    request = seq.request
    return request.params.prompt_logprobs is None or len(request.prompt_logprobs) >= seq.num_prompt_tokens - 1


def _pending_siblings(seq: Sequence) -> int:
    """Parallel samples or beams that wait for this sequence to compute their common prompt, and hold a slot with it."""
    if seq.index or len(seq.request.sequences) == 1:
        return 0
    return sum(s.status is SequenceStatus.FORK_PENDING for s in seq.request.sequences)

"""The life cycle of sequences: who waits, who runs, and every transition between.

`composer.py` decides what a step computes.

waiting ──admit──> running ──finish──> finished      by stop, length, abort or error, from any state
  ^ ^               │    │
  │ └────preempt────┘    ├──vacate──> parked         a beam without a next token
  └────────resume─────── │ ────────────┘
                         └──fork──> running          over the same blocks; parked if there is no place
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.kvcache.manager import KVCacheManager
from octavo.request import FinishReason, Request, RequestId, Sequence, SequenceStatus
from octavo.scheduler.kv_limits import TenantLimits
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.policy import FirstComeFirstServed, Policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.running import RunningSet
from octavo.scheduler.waiting import Fetching, WaitingQueue
from octavo.sequence_state import SequenceState

MayRun = Callable[[RequestId], bool]


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start.

    Attributes:
        recomputed_tokens: tokens whose keys and values were dropped without being swapped; those that the prefix cache
            still has are not in fact recomputed.
        num_deferred_tokens: tokens of running streams left to a later step, because the streams of several tenants
            would have exceeded the latency target.
    """

    num_preemptions: int = 0
    recomputed_tokens: int = 0
    num_deferred_tokens: int = 0


DEFAULT_HEADROOM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one step.

    Attributes:
        headroom_tokens: tokens, rounded up to blocks, that each running sequence, the newcomer and its parallel samples
            must be able to grow by after an admission, as far as max_tokens lets them, on top of the rest of their
            prompts, so that a newcomer does not force a preemption in the next few steps.
        itl_slo_ms: target for the time between two tokens of a running stream, in milliseconds, which limits the chunks
            of prompts, and the streams of several tenants; if None, only the token budget limits them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    headroom_tokens: int = DEFAULT_HEADROOM_TOKENS
    itl_slo_ms: float | None = None

    @property
    def num_places(self) -> int:
        """The maximum number of sequences that run at once: each running stream has a token in each step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Lifecycle:
    """The unfinished requests, and the state of each of their sequences.

    Args:
        policy: orders sequences; by default, first come, first served.
        preemption: decides whether a preempted sequence is swapped; by default, all are recomputed. It learns how long
            computing and moving blocks takes.
        by_prefix: whether waiting requests with the longest cached prefix are admitted first, as far as the policy
            allows.
        fetching: requests that wait for stores below host memory; None if there are no stores.

    Attributes:
        live: the requests that have not ended.
        running, waiting: their sequences that hold blocks, and that wait for some.
        tenants: the blocks that tenants may take.
        builder: tracks the state that the runner has of them.
        on_admitted, on_ended: called once with each request, when it is first admitted, and when it has ended.
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
    ) -> None:
        self.live: dict[RequestId, Request] = {}
        self.counters = SchedulerCounters()
        self.config = config
        self.kv = kv
        self.policy = policy or FirstComeFirstServed()
        self.preemption = preemption or Preemption()
        self.fetching = fetching
        self.builder = PlanBuilder(kv)
        self.running = RunningSet(kv, config.headroom_tokens, on_leave=self.builder.drop)
        self.tenants = TenantLimits(
            kv,
            self.running,
            max_num_seqs=config.num_places,
            max_model_len=config.max_model_len,
            max_step=config.max_num_batched_tokens,
        )
        self.waiting = WaitingQueue(self.policy, kv.cached_length if by_prefix else None, self.tenants.is_capped)
        self._failures: list[tuple[Request, Exception]] = []
        self.on_admitted: Callable[[Request], None] = lambda request: None
        self.on_ended: Callable[[Request], None] = lambda request: None

    @property
    def num_free_places(self) -> int:
        """The number of places that are neither taken nor promised."""
        return self.config.num_places - self.running.num_places

    def admit(self, seq: Sequence) -> None:
        """Let a waiting sequence run, once it has blocks."""
        self.waiting.admit(seq)
        seq.status = SequenceStatus.RUNNING
        self.running.enter(seq)
        if self.fetching is not None:
            self.fetching.release(seq)
        if not seq.request.was_admitted:
            seq.request.was_admitted = True
            self.on_admitted(seq.request)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Fork `child` from `parent` over the same blocks; blocks that the child held are released.

        If the parent has lost its blocks or all places are taken, the child is parked and will be recomputed.
        """
        self._give_up_blocks(child)
        child.become_child_of(parent)
        child.status = SequenceStatus.PARKED
        if parent.status is SequenceStatus.RUNNING and self.num_free_places > 0:
            self.kv.fork(parent, child)
            child.status = SequenceStatus.RUNNING
            self.running.fork(child)
            self.builder.fork(parent, child)
        else:
            child.num_computed = 0

    def resume(self, seq: Sequence) -> None:
        """Resume a sequence with a next token to compute: queue it if it has no blocks."""
        if seq.status is SequenceStatus.PARKED:
            self.waiting.push(seq)

    def vacate(self, seq: Sequence) -> None:
        """Suspend a sequence without a next token: release its blocks and its place among the running."""
        self._give_up_blocks(seq)
        seq.num_computed = 0
        seq.status = SequenceStatus.PARKED

    def preempt_one_of(self, candidates: list[Sequence]) -> Sequence:
        """Preempt the last of `candidates`, a non-empty list, in the policy's order of service.

        The first sequence in order of service that has tokens to compute is never among them, unless it runs alone.
        """
        # A sequence that has evicted tokens would have to compute all of them again if it cannot be swapped.
        spared = [seq for seq in candidates if seq.has_evicted and not self.kv.has_swap_room(seq)]
        if spared and len(spared) < len(candidates):
            candidates = [seq for seq in candidates if seq not in spared]
        victim = max(candidates, key=self.policy.key)
        self.preempt(victim)
        return victim

    def preempt(self, seq: Sequence) -> None:
        """Take away a running sequence's blocks and its place."""
        self.running.leave(seq)
        self.counters.num_preemptions += 1
        seq.num_preemptions += 1
        if not seq.num_missing:
            # A beam that waits for its siblings has nothing to compute, and its candidates are kept.
            self._drop_blocks(seq)
            seq.status = SequenceStatus.PARKED
            return
        # To recompute a sequence that has evicted tokens would take all of them again, however few it keeps.
        swaps = seq.has_evicted or self.preemption.swaps(self.kv.holdings.restore_cost(seq))
        if not (swaps and self.kv.demote(seq)):
            self._drop_blocks(seq)
        self.waiting.push(seq)

    def start_over_if_lost(self, seq: Sequence) -> None:
        """Make a waiting sequence start over if it can no longer resume, because its blocks were given up."""
        if seq.num_computed and not self.kv.can_resume(seq):
            # Remove and push it, because its place in the line depends on how much it has to compute.
            self.waiting.discard(seq)
            self._drop_blocks(seq)
            self.waiting.push(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence and free its blocks; does nothing if it has already ended."""
        if seq.finished:
            return
        if seq.status is SequenceStatus.WAITING:
            self.waiting.discard(seq)
        self._give_up_blocks(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if self.fetching is not None:
            self.fetching.release(seq)
        if seq.request.finished:
            self.live.pop(seq.request.request_id, None)
            self.policy.ended(seq.request)
            self.on_ended(seq.request)

    def end_request(self, request_id: RequestId, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End every sequence of a request and free its blocks; None if the request is unknown or has ended."""
        request = self.live.get(request_id)
        if request is None:
            return None
        # In reverse, because `finish` checks whether all have ended, starting with the first.
        waits = request.sequences[0].status is SequenceStatus.WAITING
        for seq in reversed(request.sequences):
            if waits and seq.status is SequenceStatus.FORK_PENDING:
                # A fast path: it holds no blocks, and many requests are aborted while they wait.
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
            else:
                self.finish(seq, reason)
        return request

    def trim(self, seq: Sequence) -> None:
        """Release the blocks that a sequence took for rejected draft tokens."""
        if seq.status is SequenceStatus.RUNNING and self.kv.trim(seq):
            place = self.running.grew(seq)
            place.num_sent = min(place.num_sent, len(place.holding.tables[0]))

    def fail(self, request: Request, error: Exception) -> None:
        """End a request whose handling raised an exception; `take_failures` reports it."""
        for seq in request.sequences:
            self.finish(seq, FinishReason.ERROR)
        self._failures.append((request, error))

    def take_failures(self) -> list[tuple[Request, Exception]]:
        """Return the requests that `fail` has ended, each once."""
        failures, self._failures = self._failures, []
        return failures

    def hold(self, request: Request) -> None:
        """Make a request that was just added wait until a `restart` that lets it run."""
        seq = request.sequences[0]
        if self.fetching is not None:
            self.fetching.release(seq)
        if seq.status is SequenceStatus.WAITING:
            self.waiting.discard(seq)
        seq.status = SequenceStatus.PARKED
        seq.state.is_held = True

    def abandon_step(self) -> None:
        """Abandon the plans in flight, which gave no result; their stores are lost, the runner's state is unknown."""
        self.builder.abandon()
        for seq in self.running:
            seq.state.placed.num_sent = -1
        self.kv.hierarchy.fail()

    def restart(self, may_run: MayRun | None = None) -> None:
        """Start over after a failed step, relying only on the requests and their tokens.

        All plans are dropped. Every sequence releases its blocks, on the device and in host memory, and waits to be
        recomputed; full blocks that were computed are found in the prefix cache. No request waits for a store any more.

        Args:
            may_run: whether a request may run before the next restart; the others keep waiting. By default all may.
        """
        self.abandon_step()
        self.running.clear()
        self.waiting.clear()
        if self.fetching is not None:
            self.fetching.clear()
        for seq in [seq for request in self.live.values() for seq in request.sequences]:
            is_waiting = seq.status is SequenceStatus.WAITING or seq.state.is_held or seq.state.fetch is not None
            seq.state = SequenceState(fetch=seq.state.fetch)
            if seq.status is SequenceStatus.RUNNING:
                # If nothing is left to compute, it is a beam that waits for its siblings.
                is_waiting = seq.num_missing > 0
                seq.num_preemptions += 1
            elif not is_waiting:
                continue
            self._drop_blocks(seq)
            seq.status = SequenceStatus.PARKED
            if is_waiting and (may_run is None or may_run(seq.request.request_id)):
                self.waiting.push(seq)
            else:
                seq.state.is_held = is_waiting

    def _drop_blocks(self, seq: Sequence) -> None:
        """Release all of a sequence's blocks, on device and host: it starts from its first token again."""
        self.kv.release(seq)
        self.counters.recomputed_tokens += seq.num_computed
        seq.num_computed = 0

    def _give_up_blocks(self, seq: Sequence) -> None:
        """Release a sequence's blocks, and its place if it has one or was promised one."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.leave(seq)
        elif seq.status is SequenceStatus.FORK_PENDING:
            self.running.lose_sibling(seq.request.sequences[0])
        self.kv.forget(seq)

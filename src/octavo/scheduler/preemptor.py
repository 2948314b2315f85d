"""The preemptor: frees blocks by preempting sequences, or by letting pins yield."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence, SequenceStatus
from octavo.scheduler.policy import Policy
from octavo.scheduler.preemption import PreemptionMode
from octavo.scheduler.running import RunningSet
from octavo.scheduler.waiting import WaitingQueue


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


class Preemptor:
    """Takes blocks and places from running sequences, which wait again, or from pins."""

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        waiting: WaitingQueue,
        mode: PreemptionMode,
        policy: Policy,
    ) -> None:
        self.counters = SchedulerCounters()
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self.mode = mode
        self._policy = policy

    def preempt_one_of(self, candidates: list[Sequence]) -> Sequence:
        """Preempt the last of `candidates`, a non-empty list, in the policy's order of service.

        The first sequence in order of service that has tokens to compute is never among them, unless it runs alone.
        """
        victim = max(candidates, key=self._policy.key)
        self.preempt(victim)
        return victim

    def preempt(self, seq: Sequence) -> None:
        """Take away a running sequence's blocks and its place."""
        self._running.leave(seq)
        self.counters.num_preemptions += 1
        seq.num_preemptions += 1
        if seq.num_computed == seq.num_tokens:
            # A beam that waits for its siblings has nothing to compute, and its candidates are kept.
            self.start_over(seq)
            seq.status = SequenceStatus.PARKED
            return
        if not (self.mode.swaps(seq) and self._kv.demote(seq)):
            self.start_over(seq)
        self._waiting.push(seq)

    def start_over(self, seq: Sequence) -> None:
        """Release all of a sequence's blocks, on device and host."""
        self._kv.release(seq)
        self.counters.recomputed_tokens += seq.num_computed
        seq.num_computed = 0

    def free_more(self) -> bool:
        """Let a pin yield when nothing else can progress; False if there is none."""
        return self._kv.pins.yield_one()

    def start_over_if_lost(self, seq: Sequence) -> None:
        """Make a waiting sequence start over if it can no longer resume, because its blocks were given up."""
        if seq.num_computed and not self._kv.can_resume(seq):
            # Remove and push it, because its place in the line depends on how much it has to compute.
            self._waiting.discard(seq)
            self.start_over(seq)
            self._waiting.push(seq)

"""Restarts after a failed step: requeues sequences, or holds them back until the next restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Request, RequestId, Sequence, SequenceId, SequenceStatus
from octavo.scheduler.waiting import WaitingLine
from octavo.scheduler.yielding import SchedulerCounters

MayRun = Callable[[RequestId], bool]


class HeldBack:
    """Sequences held outside the queue, which may not run until a later restart allows it."""

    def __init__(self) -> None:
        self._held: set[SequenceId] = set()

    def hold(self, seq: Sequence, waiting: WaitingLine) -> None:
        """Move a waiting sequence out of the line."""
        waiting.discard(seq)
        seq.status = SequenceStatus.PARKED
        self._held.add(seq.seq_id)

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._held.discard(seq.seq_id)

    def requeue(
        self,
        requests: Iterable[Request],
        may_run: MayRun | None,
        kv: KVCacheManager,
        waiting: WaitingLine,
        counters: SchedulerCounters,
    ) -> None:
        """Release the blocks of every sequence, and requeue it or hold it back."""
        held, self._held = self._held, set()
        for request in requests:
            for seq in request.sequences:
                is_waiting = seq.status is SequenceStatus.WAITING or seq.seq_id in held
                if seq.status is SequenceStatus.RUNNING:
                    # If nothing is left to compute, it is a beam that waits for its siblings.
                    is_waiting = seq.num_computed < seq.num_tokens
                    seq.num_preemptions += 1
                elif not is_waiting:
                    continue
                kv.release(seq)
                counters.recomputed_tokens += seq.num_computed
                seq.num_computed = 0
                seq.status = SequenceStatus.PARKED
                if is_waiting and (may_run is None or may_run(request.request_id)):
                    waiting.push(seq)
                elif is_waiting:
                    self._held.add(seq.seq_id)

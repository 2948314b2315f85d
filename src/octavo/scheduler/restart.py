"""Starting over after a step that failed: who waits anew, and who is held back until the next restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Request, RequestId, Sequence, SequenceId, SequenceStatus
from octavo.scheduler.waiting import WaitingLine
from octavo.scheduler.yielding import SchedulerCounters

MayRun = Callable[[RequestId], bool]


class HeldBack:
    """Sequences that wait outside the queue: they may not run until the next restart that lets them."""

    def __init__(self) -> None:
        self._held: set[SequenceId] = set()

    def hold(self, seq: Sequence, waiting: WaitingLine) -> None:
        """Take a waiting sequence out of the line."""
        waiting.discard(seq)
        seq.status = SequenceStatus.PARKED
        self._held.add(seq.seq_id)

    def forget(self, seq: Sequence) -> None:
        """A sequence ends."""
        self._held.discard(seq.seq_id)

    def requeue(
        self,
        requests: Iterable[Request],
        may_run: MayRun | None,
        kv: KVCacheManager,
        waiting: WaitingLine,
        counters: SchedulerCounters,
    ) -> None:
        """Every sequence gives its blocks back, and waits in an empty line or is held back."""
        held, self._held = self._held, set()
        for request in requests:
            for seq in request.sequences:
                is_waiting = seq.status is SequenceStatus.WAITING or seq.seq_id in held
                if seq.status is SequenceStatus.RUNNING:
                    # Else it is a beam that has its candidates and waits for its siblings.
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

"""Restarts after a failed step: requeues sequences, or holds them back until the next restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Request, RequestId, Sequence, SequenceStatus
from octavo.scheduler.waiting import WaitingQueue
from octavo.scheduler.yielding import SchedulerCounters
from octavo.sequence_state import SequenceState

MayRun = Callable[[RequestId], bool]


def hold_back(seq: Sequence, waiting: WaitingQueue) -> None:
    """Move a waiting sequence out of the line, until a restart lets it run."""
    waiting.discard(seq)
    seq.status = SequenceStatus.PARKED
    seq.state.is_held = True


def requeue(
    requests: Iterable[Request],
    may_run: MayRun | None,
    kv: KVCacheManager,
    waiting: WaitingQueue,
    counters: SchedulerCounters,
) -> None:
    """Release the blocks of every sequence, and requeue it or hold it back."""
    for seq in [seq for request in requests for seq in request.sequences]:
        is_waiting = seq.status is SequenceStatus.WAITING or seq.state.is_held
        seq.state = SequenceState(fetch=seq.state.fetch)
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
        if is_waiting and (may_run is None or may_run(seq.request.request_id)):
            waiting.push(seq)
        else:
            seq.state.is_held = is_waiting

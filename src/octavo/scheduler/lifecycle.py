"""The life cycle of sequences, from the waiting line to their end. What a step computes is decided elsewhere.

waiting ──admit──> running ──finish──> finished      by stop, length, abort or error, from any state
  ^ ^               │    │
  │ └────preempt────┘    ├──vacate──> parked         a beam without a next token
  └────────resume─────── │ ────────────┘
                         └──fork──> running          over the same blocks; parked if there is no place
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.kvcache.manager import KVCacheManager
from octavo.request import FinishReason, Request, RequestId, Sequence, SequenceStatus
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.running import RunningSet
from octavo.scheduler.waiting import WaitingQueue
from octavo.sequence_state import SequenceState

MayRun = Callable[[RequestId], bool]


class Lifecycle:
    """Forks, suspends, resumes and ends sequences: used by the scheduler and by what applies results.

    Args:
        on_finish: called with each sequence that has ended.

    Attributes:
        requests: the requests that have not ended.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        waiting: WaitingQueue,
        builder: PlanBuilder,
        max_num_seqs: int,
        on_finish: Callable[[Sequence], None],
    ) -> None:
        self.requests: dict[RequestId, Request] = {}
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._builder = builder
        self._max_num_seqs = max_num_seqs
        self._on_finish = on_finish
        self._failures: list[tuple[Request, Exception]] = []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Fork `child` from `parent` over the same blocks; blocks that the child held are released.

        If the parent has lost its blocks or all places are taken, the child is parked and will be recomputed.
        """
        running = self._running
        self._give_up_blocks(child)
        child.become_child_of(parent)
        child.status = SequenceStatus.PARKED
        has_place = running.num_places < self._max_num_seqs
        if parent.status is SequenceStatus.RUNNING and has_place:
            self._kv.fork(parent, child)
            self._builder.fork(parent, child)
            child.status = SequenceStatus.RUNNING
            running.fork(parent, child)
        else:
            child.num_computed = 0

    def resume(self, seq: Sequence) -> None:
        """Resume a sequence with a next token to compute: queue it if it holds no blocks."""
        if seq.status is SequenceStatus.PARKED:
            self._waiting.push(seq)

    def vacate(self, seq: Sequence) -> None:
        """Suspend a sequence without a next token: release its blocks and its place among the running."""
        self._give_up_blocks(seq)
        seq.num_computed = 0
        seq.status = SequenceStatus.PARKED

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a sequence and free its blocks; does nothing if it has already ended."""
        if seq.finished:
            return
        if seq.status is SequenceStatus.WAITING:
            self._waiting.discard(seq)
        self._give_up_blocks(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.request.finished:
            self.requests.pop(seq.request.request_id, None)
        self._on_finish(seq)

    def finish_request(self, request_id: RequestId, reason: FinishReason) -> Request | None:
        """End every sequence of a request; None if the request is unknown or has ended."""
        request = self.requests.get(request_id)
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

    def fail(self, request: Request, error: Exception) -> None:
        """End a request whose handling raised an exception; `take_failures` reports it."""
        for seq in request.sequences:
            self.finish(seq, FinishReason.ERROR)
        self._failures.append((request, error))

    def take_failures(self) -> list[tuple[Request, Exception]]:
        """Return the requests that `fail` has ended, each once."""
        failures, self._failures = self._failures, []
        return failures

    def hold_back(self, seq: Sequence) -> None:
        """Move a waiting sequence out of the line, until `start_over` lets it run."""
        self._waiting.discard(seq)
        seq.status = SequenceStatus.PARKED
        seq.state.is_held = True

    def start_over(self, may_run: MayRun | None) -> int:
        """Release the blocks of every sequence, and requeue it or, if it may not run, hold it back.

        Returns:
            The number of tokens whose keys and values were dropped.
        """
        self._running.clear()
        self._waiting.clear()
        num_dropped = 0
        for seq in [seq for request in self.requests.values() for seq in request.sequences]:
            is_waiting = seq.status is SequenceStatus.WAITING or seq.state.is_held
            seq.state = SequenceState(fetch=seq.state.fetch)
            if seq.status is SequenceStatus.RUNNING:
                # If nothing is left to compute, it is a beam that waits for its siblings.
                is_waiting = seq.num_computed < seq.num_tokens
                seq.num_preemptions += 1
            elif not is_waiting:
                continue
            self._kv.release(seq)
            num_dropped += seq.num_computed
            seq.num_computed = 0
            seq.status = SequenceStatus.PARKED
            if is_waiting and (may_run is None or may_run(seq.request.request_id)):
                self._waiting.push(seq)
            else:
                seq.state.is_held = is_waiting
        return num_dropped

    def _give_up_blocks(self, seq: Sequence) -> None:
        """Release a sequence's blocks, and its place if it has one or was promised one."""
        if seq.status is SequenceStatus.RUNNING:
            self._running.leave(seq)
        elif seq.status is SequenceStatus.FORK_PENDING:
            self._running.lose_sibling(seq.request.sequences[0])
        self._kv.forget(seq)


class Pinning:
    """Pins the prefixes of admitted requests as their blocks are computed.

    Args:
        fail: ends a request if pinning its prefix raised.
    """

    def __init__(self, kv: KVCacheManager, fail: Callable[[Request, Exception], None]) -> None:
        self._kv = kv
        self._fail = fail
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        """The number of sequences with prefixes still to be pinned."""
        return len(self._waiting)

    def admitted(self, seq: Sequence) -> None:
        """Start following a request whose first sequence was admitted; may be called again."""
        if seq.request.pins and seq not in self._waiting:
            self._waiting.append(seq)

    def settle(self) -> None:
        """Pin the prefixes that are computed by now.

        Must run after a step and before anything else is allocated, while sequences that ended in it are still cached.
        """
        if self._waiting:
            self._waiting = [seq for seq in self._waiting if not self._settle(seq)]

    def _settle(self, seq: Sequence) -> bool:
        """Pin the computed prefixes of a request; returns whether none is left to pin."""
        request, size = seq.request, self._kv.spec.block_size
        for wanted in request.pins[len(request.pin_receipts) :]:
            if seq.num_computed < wanted.num_tokens // size * size:
                return seq.finished
            try:
                request.pin_receipts.append(self._kv.pin(request, wanted))
            except Exception as error:
                self._fail(request, error)
                return True
        return True

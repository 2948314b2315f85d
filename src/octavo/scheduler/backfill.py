"""Backfilling: who may overtake a request that does not fit yet.

The head of the line may need more places or blocks than are free: parallel samples as many as run at once, or a prompt
as long as the pool. To let nobody pass would leave the rest of the machine idle; to let everybody pass would starve the
head. So, as batch schedulers of clusters do (EASY backfilling: Lifka, The ANL/IBM SP Scheduling System, 1995), the head
is promised a step by which it starts, from how long those that run may go on at most. Others pass as long as they keep
that promise:

    places                     │ promised step
      ▲   running ─────────────┤
      │   running ───────┐     │ head ─────────────
      │   running ──┐ ███│█████│ ───────────────── …      ███ passes, and has ended by then
      │             │    │  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ …      ▒▒▒ passes: the head leaves that much free
      └──────────────────────────────────────────▶ steps

Once the step is over and the head has not started (somebody's blocks were shared, so that their end freed less than was
thought), nobody passes any more until it has. So a head waits no longer than those that run when it becomes the head.

Passing costs the head no time, and yet it is service that the head's tenant does not receive. Where tenants take turns
nobody passes whose tenant is ahead of the head's by more than a bound (`VirtualTokenCounter.may_pass`): what is free
is then left idle, because else tenants of small requests would have the better of one whose requests fill the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.kvcache.spec import KVCacheSpec
from octavo.request import Sequence
from octavo.scheduler.fairness import VirtualTokenCounter
from octavo.scheduler.running import RunningSet, num_pending_siblings
from octavo.scheduler.waiting import num_missing


@dataclass(slots=True)
class _Promise:
    """That `head` starts by `step`; `places` and `blocks` is what will be left over then."""

    head: Sequence
    step: int
    places: int
    blocks: int


class Backfill:
    """The promise to the head of the line.

    Args:
        turns: how far ahead of the head's tenant others may be that pass; None: any tenant may.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        running: RunningSet,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        turns: VirtualTokenCounter | None = None,
    ) -> None:
        self._spec = spec
        self._running = running
        self._max_num_seqs = max_num_seqs
        self._max_step = max_num_batched_tokens
        self._chunk = max(1, max_num_batched_tokens // 4)
        self._turns = turns
        self._promise: _Promise | None = None

    def hold(self, head: Sequence, now: int, missing_blocks: int) -> None:
        """The head of the line does not fit in step `now`: it lacks that many blocks, or places, or both."""
        if self._promise is not None and self._promise.head is head:
            return
        wanted = 1 + num_pending_siblings(head)
        places = self._max_num_seqs - self._running.num_places - wanted
        blocks = -missing_blocks
        step = now
        steps_left = self._steps_left
        for seq in sorted(self._running, key=steps_left):
            if places >= 0 and blocks >= 0:
                break
            place = self._running.places[seq.seq_id]
            places += 1 + place.siblings
            blocks += place.held * len(self._spec.groups)
            step = now + steps_left(seq)
        self._promise = _Promise(head, step, max(0, places), max(0, blocks))

    def release(self) -> None:
        """The head of the line has been admitted."""
        self._promise = None

    def may_pass(self, seq: Sequence, head: Callable[[], Sequence | None], now: int) -> bool:
        """Whether a waiting sequence may be admitted although it is not the head of the line; it is taken to be."""
        outlasting = self._outlasting(seq, head, now)
        if outlasting is None:
            return False
        if self._promise is not None:
            self._promise.places -= outlasting[0]
            self._promise.blocks -= outlasting[1]
        return True

    def keeps_promise(self, seq: Sequence, head: Callable[[], Sequence | None], now: int) -> bool:
        """What `may_pass` would say."""
        return self._outlasting(seq, head, now) is not None

    def _outlasting(self, seq: Sequence, head: Callable[[], Sequence | None], now: int) -> tuple[int, int] | None:
        """Places and blocks that a waiting sequence would still have in the promised step; None: it may not pass."""
        promise = self._promise
        if promise is None or seq is promise.head or promise.head is not head():
            return 0, 0
        if now >= promise.step or (self._turns is not None and not self._turns.may_pass(seq, promise.head)):
            return None
        if now + self._steps_left(seq) <= promise.step:
            return 0, 0
        places, blocks = 1 + num_pending_siblings(seq), self._most_blocks(seq)
        return None if places > promise.places or blocks > promise.blocks else (places, blocks)

    def _steps_left(self, seq: Sequence) -> int:
        """Most steps until a sequence ends, once it runs."""
        prompt = num_missing(seq) // self._chunk
        return prompt + (seq.request.params.max_tokens or 1) - seq.num_output_tokens

    def _most_blocks(self, seq: Sequence) -> int:
        params = seq.request.params
        longest = seq.num_prompt_tokens + (params.max_tokens or 1) - 1
        return self._spec.peak_blocks(longest, self._max_step) * (1 + num_pending_siblings(seq))

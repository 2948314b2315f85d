"""Backfilling: which requests may overtake one that does not fit yet.

The head of the line may need more places or blocks than are free, if it has as many parallel samples as may run at once
or a prompt as long as the pool. Letting no other request pass would leave the rest of the machine idle; letting all
pass would starve the head. So, as batch schedulers of clusters do (EASY backfilling: Lifka, The ANL/IBM SP Scheduling
System, 1995), the head is promised a step by which it starts, computed from how long the running sequences may last at
most. Others pass as long as they keep that promise:

    places                     │ promised step
      ▲   running ─────────────┤
      │   running ───────┐     │ head ─────────────
      │   running ──┐ ███│█████│ ───────────────── …      ███ passes, and has ended by then
      │             │    │  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ …      ▒▒▒ passes: the head leaves that much free
      └──────────────────────────────────────────▶ steps

If the head has not started by that step, because the end of a sequence with shared blocks freed fewer than expected, no
other request passes until it has. So a head waits no longer than for the sequences that ran when it became the head.

Passing does not delay the head, but it is service that the head's tenant does not receive. If tenants take turns, no
request passes whose tenant is ahead of the head's by more than a bound (`Policy.may_pass`). Free blocks
then stay idle, because tenants with small requests would otherwise outdo one whose requests fill the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.kvcache.spec import KVCacheSpec
from octavo.request import Sequence
from octavo.scheduler.policy import Policy
from octavo.scheduler.running import RunningSet
from octavo.scheduler.sequences import num_missing, num_pending_siblings, place_of


@dataclass(slots=True)
class _Promise:
    """A promise that `head` starts by `step`, with `places` and `blocks` left over at that time."""

    head: Sequence
    step: int
    places: int
    blocks: int


class Backfill:
    """Keeps the promise to the head of the line.

    Args:
        policy: limits which sequences may pass the head at all.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        running: RunningSet,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy,
    ) -> None:
        self._spec = spec
        self._running = running
        self._max_num_seqs = max_num_seqs
        self._max_step = max_num_batched_tokens
        self._chunk = max(1, max_num_batched_tokens // 4)
        self._policy = policy
        self._promise: _Promise | None = None

    def hold(self, head: Sequence, now: int, missing_blocks: int) -> None:
        """Promise a step to the head of the line, which lacks blocks, places or both in step `now`."""
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
            place = place_of(seq)
            places += 1 + place.siblings
            blocks += place.held * len(self._spec.groups)
            step = now + steps_left(seq)
        self._promise = _Promise(head, step, max(0, places), max(0, blocks))

    def release(self) -> None:
        """Drop the promise, because the head of the line has been admitted."""
        self._promise = None

    def may_pass(self, seq: Sequence, head: Callable[[], Sequence | None], now: int) -> bool:
        """Whether a waiting sequence may pass the head of the line; if so, it is assumed to be admitted."""
        outlasting = self._outlasting(seq, head, now)
        if outlasting is None:
            return False
        if self._promise is not None:
            self._promise.places -= outlasting[0]
            self._promise.blocks -= outlasting[1]
        return True

    def keeps_promise(self, seq: Sequence, head: Callable[[], Sequence | None], now: int) -> bool:
        """Whether a waiting sequence may pass the head of the line, without assuming that it is admitted."""
        return self._outlasting(seq, head, now) is not None

    def _outlasting(self, seq: Sequence, head: Callable[[], Sequence | None], now: int) -> tuple[int, int] | None:
        """Return places and blocks that a sequence would still hold in the promised step; None if it may not pass."""
        promise = self._promise
        if promise is None or seq is promise.head or promise.head is not head():
            return 0, 0
        if now >= promise.step or not self._policy.may_pass(seq, promise.head):
            return None
        if now + self._steps_left(seq) <= promise.step:
            return 0, 0
        places, blocks = 1 + num_pending_siblings(seq), self._most_blocks(seq)
        return None if places > promise.places or blocks > promise.blocks else (places, blocks)

    def _steps_left(self, seq: Sequence) -> int:
        """Return an upper bound on the number of steps until a sequence ends."""
        prompt = num_missing(seq) // self._chunk
        return prompt + (seq.request.params.max_tokens or 1) - seq.num_output_tokens

    def _most_blocks(self, seq: Sequence) -> int:
        params = seq.request.params
        longest = seq.num_prompt_tokens + (params.max_tokens or 1) - 1
        return self._spec.peak_blocks(longest, self._max_step) * (1 + num_pending_siblings(seq))

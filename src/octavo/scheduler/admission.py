"""Admission: which waiting sequences start to run, and with how many blocks.

A newcomer is matched with the prefix cache first: blocks found there need not be allocated, only kept from eviction.
Besides its own blocks, admission must leave enough available for what the running sequences, the newcomer and its
parallel samples are bound to take in the next steps (`RunningSet.reserve`).

A sequence that did not fit is tried again only once as many blocks as it lacked have been freed or published, and
enough steps have passed that the cost of looking up its cached prefix is negligible.

**Backfilling** decides which requests may overtake one that does not fit yet. The head of the line may need more places
or blocks than are free, if it has as many parallel samples as may run at once or a prompt as long as the pool. Letting
no other request pass would leave the rest of the machine idle; letting all pass would starve the head. So, as batch
schedulers of clusters do (EASY backfilling: Lifka, The ANL/IBM SP Scheduling System, 1995), the head is promised a step
by which it starts, computed from how long the running sequences may last at most. Others pass as long as they keep that
promise:

    places                     │ promised step
      ▲   running ─────────────┤
      │   running ───────┐     │ head ─────────────
      │   running ──┐ ███│█████│ ───────────────── …      ███ passes, and has ended by then
      │             │    │  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ …      ▒▒▒ passes: the head leaves that much free
      └──────────────────────────────────────────▶ steps

If the head has not started by that step, because the end of a sequence with shared blocks freed fewer than expected, no
other request passes until it has. So a head waits no longer than for the sequences that ran when it became the head.

Passing does not delay the head, but it is service that the head's tenant does not receive. If tenants take turns, no
request passes whose tenant is ahead of the head's by more than a bound (`Policy.may_pass`). Free
blocks then stay idle, because tenants with small requests would otherwise outdo one whose requests fill the pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.kvcache.prefix import PrefixHit
from octavo.request import Sequence
from octavo.scheduler.lifecycle import Lifecycle
from octavo.scheduler.step_budget import StepBudget
from octavo.sequence_state import Refusal

MOST_REFUSED = 8
"""The maximum number of waiting sequences that a step may try to admit in vain."""

LONG_PROMPT = 4096
"""Blocks above which a prompt counts as long."""

LONG_BLOCKS_PER_STEP = 8192
"""Cached blocks of long prompts after which a step admits no other long prompt, because streams wait for the two
milliseconds that it takes to look them up and to take them."""

# A look-up of this many blocks, about 0.1 ms, may be repeated in every step.
_BLOCKS_PER_STEP = 200


@dataclass(slots=True)
class _Promise:
    """A promise that `head` starts by `step`, with `places` and `blocks` left over at that time."""

    head: Sequence
    step: int
    places: int
    blocks: int


class Admission:
    """Admits waiting sequences one by one."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._running = lifecycle.running
        self._waiting = lifecycle.waiting
        self._tenants = lifecycle.tenants
        self._max_step = lifecycle.config.max_num_batched_tokens
        self._chunk = max(1, self._max_step // 4)  # of the first prompt, in each step
        self._promise: _Promise | None = None
        self._step = 0
        self._num_long_blocks = 0  # of long prompts, found in this step

    def begin_step(self) -> None:
        self._step += 1
        self._num_long_blocks = 0
        self._waiting.bring_back(self._tenants.use_of)

    @property
    def has_place(self) -> bool:
        """Whether a waiting sequence may have a place."""
        return len(self._waiting) > 0 and self._lifecycle.num_free_places > 0

    @property
    def may_admit(self) -> bool:
        """Whether a step might admit a sequence, judging without a look-up of cached prefixes."""
        if not self.has_place:
            return False
        if self._tenants or not len(self._running):
            return True  # a tenant's floor, or an idle engine, overrules a refusal
        if not self._kv.pool.num_available:
            return False
        head = self._waiting.head
        return any(
            not self._is_refused(seq) and self._outlasting(seq) is not None
            for seq in (head(), *self._waiting.candidates(MOST_REFUSED))
            if seq is not None
        )

    def num_lacking_places(self, seq: Sequence) -> int:
        """Return the number of places that a waiting sequence and its siblings lack."""
        return 1 + seq.num_pending_siblings - self._lifecycle.num_free_places

    def num_lacking_blocks(self, seq: Sequence) -> int:
        """Return the number of blocks that a waiting sequence lacks to be admitted; 0 or negative if it lacks none."""
        kv = self._kv
        if (refusal := seq.state.refusal) is not None:
            # `_supply` also counts blocks that were freed and taken again, but another sequence would yield for these.
            return refusal.shortage - (self._num_unclaimed() - refusal.unclaimed)
        most = kv.spec.blocks_for_tokens(seq.num_tokens) * len(kv.spec.groups)
        if most + self._reserve(seq, seq.num_tokens) <= kv.pool.num_available:
            return 0
        self._lifecycle.start_over_if_lost(seq)
        hit = self._match(seq)
        shortage = kv.shortage(hit, 1, self._reserve(seq, hit.num_tokens + 1))
        if shortage > 0:
            self._refuse(seq, shortage, hit.num_tokens // kv.spec.block_size)
        return shortage

    def admit(self, seq: Sequence, budget: StepBudget, share: int = 1) -> int:
        """Give a waiting sequence a place, and blocks for its first chunk.

        Args:
            share: divisor of the chunk that the budget allows.

        Returns:
            The number of its tokens to compute in this step; if 0, it does not fit or the step has taken enough long
            prefixes, and nothing has changed.
        """
        outlasting = self._outlasting(seq)
        if outlasting is None and not self._is_within_floor(seq):
            return 0
        if self._num_long_blocks >= LONG_BLOCKS_PER_STEP and self._is_long(seq):
            return 0
        if self.is_over_cap(seq):
            self._waiting.set_aside(seq, self._tenants.use_of(seq.request.tenant))
            return 0
        is_head = seq is self._waiting.head()
        if self.num_lacking_places(seq) > 0:
            if is_head:
                self._hold(seq, 0)
            return 0
        while (num_new := self._take_blocks(seq, budget, share)) == 0:
            if len(self._running):
                if is_head:
                    refusal = seq.state.refusal
                    self._hold(seq, refusal.shortage if refusal else 1)
                return 0
            # No running sequence could free blocks by ending.
            if not self._kv.pins.yield_one():
                return 0
        if num_new is None:
            return 0
        if is_head:
            self._promise = None
        elif outlasting is not None and self._promise is not None:
            self._promise.places -= outlasting[0]
            self._promise.blocks -= outlasting[1]
        seq.state.refusal = None
        return num_new

    def _take_blocks(self, seq: Sequence, budget: StepBudget, share: int) -> int | None:
        """Allocate blocks for the first chunk of a sequence.

        Returns:
            The number of tokens in the chunk; 0 if there are too few blocks, None if the step has no budget left.
        """
        kv, running = self._kv, self._running
        within_floor = self._is_within_floor(seq)
        if within_floor:
            self._tenants.restore_floor(seq.request.tenant)
        elif len(running) and (not kv.pool.num_available or self._is_refused(seq)):
            return 0
        self._lifecycle.start_over_if_lost(seq)
        scored = seq.request.is_scored
        hit = self._match(seq)
        start = hit.num_tokens
        missing = min(seq.num_tokens - start, seq.tokens_until_eviction(start, kv.spec.block_size))
        num_new = budget.chunk(start, missing, scored=scored, is_new=True, share=share)
        if not num_new:
            return None
        reserve = self._reserve(seq, start + num_new)
        # Explain before admitting, because making room may evict the blocks that the report is about.
        report = kv.explain(seq, hit) if seq.request.cache_report is None else None
        if not kv.admit(seq, hit, num_new, reserve):
            shortage = kv.shortage(hit, num_new, reserve)
            self._refuse(seq, shortage, start // kv.spec.block_size)
            return 0
        if report is not None:
            seq.request.num_cached_tokens = start
            seq.request.cached_by_tier = kv.hierarchy.tokens_by_tier(hit)
            kv.ledger.admitted(seq.request, report)
        self._lifecycle.admit(seq)
        seq.num_computed = start  # only now, because the order of those that wait depends on it
        return num_new

    def _match(self, seq: Sequence) -> PrefixHit:
        """Return the tokens that need not be computed: those from before a preemption, or a cached prefix."""
        kv = self._kv
        if seq.request.needs_all_tokens and not kv.can_resume(seq):
            return kv.no_hit
        hit = kv.match(seq)
        if self._is_long(seq):
            self._num_long_blocks += hit.num_tokens // kv.spec.block_size
        return hit

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_tokens > LONG_PROMPT * self._kv.spec.block_size

    def _reserve(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many blocks must stay available once a newcomer has blocks for its first `num_tokens` tokens."""
        if not len(self._running):
            return 0
        available = self._kv.pool.num_available
        kept = available - self._tenants.room(seq) if self._tenants else 0
        if self._is_within_floor(seq):
            return kept
        return max(self._running.reserve + self._running.bound_of(seq, num_tokens), kept)

    def is_over_cap(self, seq: Sequence) -> bool:
        """Whether a waiting sequence exceeds its tenant's cap, together with the tenant's running sequences."""
        kv, left = self._kv, self._tenants.cap_left(seq)
        if left == math.inf or self._most_blocks(seq) <= left:
            return False
        hit = self._match(seq)
        bound = self._running.bound_of(seq, seq.num_tokens)
        return kv.num_needed(hit, seq.num_tokens - hit.num_tokens) + bound > left

    def _is_within_floor(self, seq: Sequence) -> bool:
        """Whether a waiting sequence fits its tenant's floor, together with the tenant's running sequences."""
        return bool(self._tenants) and self._tenants.is_within_floor(seq.request.tenant, self._most_blocks(seq))

    def _most_blocks(self, seq: Sequence) -> int:
        """Return the most blocks that a waiting sequence's tokens take at a time, and those that it is bound to take
        beyond."""
        budget = seq.request.params.kv_budget
        blocks = self._kv.spec.peak_blocks(seq.num_tokens, self._max_step, budget)
        return blocks + self._running.bound_of(seq, seq.num_tokens)

    def _is_refused(self, seq: Sequence) -> bool:
        refusal = seq.state.refusal
        if refusal is None:
            return False
        return self._step < refusal.again_at or self._supply() - refusal.supply < refusal.shortage

    def _refuse(self, seq: Sequence, shortage: int, num_blocks: int) -> None:
        again_at = self._step + num_blocks // _BLOCKS_PER_STEP
        seq.state.refusal = Refusal(shortage, self._supply(), self._num_unclaimed(), again_at)

    def _num_unclaimed(self) -> int:
        return self._kv.pool.num_available - self._running.reserve

    def _supply(self) -> int:
        """Return a counter that rises by at least one for each block that may reduce a refused sequence's shortage.

        These are blocks that became available or were published, and blocks that running sequences are no longer bound
        to take. The reserve falls when they end, and also when they take blocks, which others then lack.
        """
        pool = self._kv.pool
        return pool.num_freed + pool.num_published_ever - self._running.reserve

    def _hold(self, head: Sequence, missing_blocks: int) -> None:
        """Promise a step to the head of the line, which lacks blocks, places or both."""
        if self._promise is not None and self._promise.head is head:
            return
        wanted = 1 + head.num_pending_siblings
        places = self._lifecycle.num_free_places - wanted
        blocks = -missing_blocks
        step = now = self._step
        steps_left = self._steps_left
        for seq in sorted(self._running, key=steps_left):
            if places >= 0 and blocks >= 0:
                break
            place = seq.state.placed
            places += 1 + place.siblings
            blocks += self._running.num_held(place)
            step = now + steps_left(seq)
        self._promise = _Promise(head, step, max(0, places), max(0, blocks))

    def _outlasting(self, seq: Sequence) -> tuple[int, int] | None:
        """Return places and blocks that a sequence would still hold in the promised step; None if it may not pass."""
        promise, now = self._promise, self._step
        if promise is None or seq is promise.head or promise.head is not self._waiting.head():
            return 0, 0
        if now >= promise.step or not self._lifecycle.policy.may_pass(seq, promise.head):
            return None
        if now + self._steps_left(seq) <= promise.step:
            return 0, 0
        params, places = seq.request.params, 1 + seq.num_pending_siblings
        longest = seq.num_prompt_tokens + (params.max_tokens or 1) - 1
        blocks = self._kv.spec.peak_blocks(longest, self._max_step, params.kv_budget, seq.num_prompt_tokens) * places
        return None if places > promise.places or blocks > promise.blocks else (places, blocks)

    def _steps_left(self, seq: Sequence) -> int:
        """Return an upper bound on the number of steps until a sequence ends."""
        prompt = seq.num_missing // self._chunk
        return prompt + (seq.request.params.max_tokens or 1) - seq.num_output_tokens

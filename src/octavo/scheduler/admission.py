"""Who is given a place among the running, and with how many blocks.

A newcomer is matched with the prefix cache first: what it finds there need not be allocated, only kept from being
evicted. On top of its own blocks so many must stay available as those that run, and the newcomer with its parallel
samples, are bound to take in the next steps (`RunningSet.reserve`).

Looking up a long prefix takes long. So who did not fit is not looked at again before as much has been freed or
published as it lacked, nor before so many steps have passed that looking costs next to nothing a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kvcache.block import BlockCopy
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.matching import PrefixHit
from octavo.request import Sequence, SequenceId, SequenceStatus
from octavo.scheduler.backfill import Backfill
from octavo.scheduler.budget import StepBudget
from octavo.scheduler.fairness import VirtualTokenCounter
from octavo.scheduler.running import RunningSet, num_pending_siblings
from octavo.scheduler.tenant_shares import TenantShares
from octavo.scheduler.waiting import WaitingLine, is_scored, needs_all_tokens
from octavo.scheduler.yielding import Yielding

MOST_REFUSED = 8
"""Of those that wait, how many may be tried in vain in a step."""

# A look-up of so many blocks may be repeated with every step: about 0.1 ms.
_BLOCKS_PER_STEP = 200


@dataclass(slots=True)
class _Refusal:
    """Why a look-up need not be repeated.

    Attributes:
        shortage: blocks that were missing.
        supply: what had been freed or published until then (`Admission._supply`).
        unclaimed: blocks that were available then and that nobody who ran was bound to take.
        again_at: step before which it is not repeated.
    """

    shortage: int
    supply: int
    unclaimed: int
    again_at: int


class Admission:
    """Admits waiting sequences one by one.

    Attributes:
        copies: of blocks, that the step must do for those it has admitted.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        waiting: WaitingLine,
        yielding: Yielding,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark_blocks: int,
        tenants: TenantShares,
        turns: VirtualTokenCounter | None = None,
    ) -> None:
        self.copies: list[BlockCopy] = []
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._yielding = yielding
        self._tenants = tenants
        self._max_num_seqs = max_num_seqs
        self._watermark = watermark_blocks
        self._backfill = Backfill(kv.spec, running, max_num_seqs, max_num_batched_tokens, turns)
        self._refusals: dict[SequenceId, _Refusal] = {}
        self._over_cap: dict[str, int] = {}  # of tenants over their caps, what they held and were bound to take then
        self._step = 0

    def begin_step(self) -> None:
        self._step += 1
        self.copies = []
        self._waiting.line_up(self._may_fit_cap)

    @property
    def has_place(self) -> bool:
        return self._running.num_places < self._max_num_seqs and len(self._waiting) > 0

    @property
    def may_admit(self) -> bool:
        """Whether a step might admit somebody, as far as can be told without looking up what is cached."""
        if not self.has_place:
            return False
        if self._tenants or not len(self._running):
            return True  # a floor, or an empty machine, overrules a refusal
        if self._kv.pool.num_available <= self._watermark:
            return False
        head = self._waiting.head
        return any(
            not self._is_refused(seq) and self._backfill.keeps_promise(seq, head, self._step)
            for seq in (head(), *self._waiting.candidates(MOST_REFUSED))
            if seq is not None
        )

    def num_lacking_places(self, seq: Sequence) -> int:
        """Places that are missing for a waiting sequence and its siblings."""
        return self._running.num_places + 1 + num_pending_siblings(seq) - self._max_num_seqs

    def num_lacking_blocks(self, seq: Sequence) -> int:
        """Blocks that are missing for a waiting sequence to be admitted; 0 or less where none is."""
        kv = self._kv
        if (refusal := self._refusals.get(seq.seq_id)) is not None:
            # Not by supply: that counts blocks that were freed and taken again, and here somebody is to yield for it.
            return refusal.shortage - (self._num_unclaimed() - refusal.unclaimed)
        most = kv.spec.blocks_for_tokens(seq.num_tokens) * len(kv.spec.groups)
        if most + self._reserve(seq, seq.num_tokens) <= kv.pool.num_available:
            return 0
        self._yielding.settle(seq)
        hit = self._match(seq)
        shortage = kv.shortage(hit, 1, self._reserve(seq, hit.num_tokens + 1))
        if shortage > 0:
            self._refuse(seq, shortage, hit.num_tokens // kv.spec.block_size)
        return shortage

    def forget(self, seq: Sequence) -> None:
        """A sequence waits no more."""
        self._refusals.pop(seq.seq_id, None)

    def forget_refusals(self) -> None:
        """Tenants' floors or caps have changed."""
        self._refusals.clear()

    def admit(self, seq: Sequence, budget: StepBudget, share: int = 1) -> int:
        """Give a waiting sequence a place, and blocks for its first chunk.

        Args:
            share: it is offered the chunk that the budget allows, divided by this.

        Returns:
            How many of its tokens are to be computed in this step; 0: it does not fit, and nothing has changed.
        """
        if not self._backfill.may_pass(seq, self._waiting.head, self._step) and not self._is_within_floor(seq):
            return 0
        if self.is_over_cap(seq):
            tenant = seq.request.tenant
            self._over_cap[tenant] = self._tenants.use_of(tenant)
            self._waiting.set_aside(seq)
            return 0
        is_head = seq is self._waiting.head()
        if self.num_lacking_places(seq) > 0:
            if is_head:
                self._backfill.hold(seq, self._step, 0)
            return 0
        while (num_new := self._take_blocks(seq, budget, share)) == 0:
            if len(self._running):
                if is_head:
                    refusal = self._refusals.get(seq.seq_id)
                    self._backfill.hold(seq, self._step, refusal.shortage if refusal else 1)
                return 0
            # Nobody runs who could free anything by ending.
            if not self._yielding.free_more():
                return 0
        if num_new is None:
            return 0
        if is_head:
            self._backfill.release()
        self._refusals.pop(seq.seq_id, None)
        self._waiting.admit(seq)
        seq.status = SequenceStatus.RUNNING
        self._running.enter(seq)
        return num_new

    def _take_blocks(self, seq: Sequence, budget: StepBudget, share: int) -> int | None:
        """How many tokens it has blocks for now; 0 where it does not fit, None where the step has no room for it."""
        kv, running = self._kv, self._running
        within_floor = self._is_within_floor(seq)
        if within_floor:
            self._tenants.restore_floor(seq.request.tenant)
        elif len(running) and (kv.pool.num_available <= self._watermark or self._is_refused(seq)):
            return 0
        self._yielding.settle(seq)
        scored = is_scored(seq)
        hit = self._match(seq)
        start = hit.num_tokens
        num_new = _share_of(budget.chunk(start, seq.num_tokens - start, scored=scored), share)
        if not num_new:
            return None
        reserve = self._reserve(seq, start + num_new)
        # Asked beforehand, because making room may evict what it speaks of.
        report = kv.explain(seq, hit) if seq.request.cache_report is None else None
        if not kv.admit(seq, hit, num_new, reserve):
            shortage = kv.shortage(hit, num_new, reserve)
            self._refuse(seq, shortage, start // kv.spec.block_size)
            return 0
        if report is not None:
            seq.request.num_cached_tokens = start
            seq.request.cached_by_tier = kv.hierarchy.tokens_by_tier(hit)
            kv.ledger.admitted(seq.request, report)
        seq.num_computed = start
        return num_new

    def _match(self, seq: Sequence) -> PrefixHit:
        """What a waiting sequence need not compute: all that it had when it was preempted, or a cached prefix."""
        kv = self._kv
        return kv.no_hit if needs_all_tokens(seq) and not kv.can_resume(seq) else kv.match(seq)

    def _reserve(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that must stay available when a newcomer has blocks for its first `num_tokens` tokens."""
        if not len(self._running):
            return 0
        kept = self._tenants.kept_for_others(seq.request.tenant) if self._tenants else 0
        if self._is_within_floor(seq):
            return kept
        return max(self._watermark, self._running.reserve_with(seq, num_tokens), kept)

    def _may_fit_cap(self, seq: Sequence) -> bool:
        """Whether its tenant holds, and is bound to take, less than when a waiting sequence did not fit its cap."""
        tenant = seq.request.tenant
        return self._tenants.use_of(tenant) < self._over_cap[tenant]

    def is_over_cap(self, seq: Sequence) -> bool:
        """Whether a waiting sequence does not fit its tenant's cap, beside what else runs of the tenant."""
        tenants, kv = self._tenants, self._kv
        if not tenants.is_capped(seq.request.tenant):
            return False
        bound = self._bound(seq)
        whole = kv.spec.blocks_for_tokens(seq.num_tokens) * len(kv.spec.groups)
        if not tenants.num_over_cap(seq, whole + bound):
            return False
        hit = self._match(seq)
        return tenants.num_over_cap(seq, kv.num_needed(hit, seq.num_tokens - hit.num_tokens) + bound) > 0

    def _is_within_floor(self, seq: Sequence) -> bool:
        """Whether its tenant's floor holds a waiting sequence, beside what else runs of the tenant."""
        tenant, spec = seq.request.tenant, self._kv.spec
        if not (unused := self._tenants.unused_floor(tenant)):
            return False
        whole = spec.blocks_for_tokens(seq.num_tokens) * len(spec.groups)
        return whole + self._bound(seq) + self._tenants.bound_of(tenant) <= unused

    def _bound(self, seq: Sequence) -> int:
        """Blocks that a newcomer is bound to take beyond those of the tokens that it has."""
        return self._running.reserve_with(seq, seq.num_tokens) - self._running.reserve

    def _is_refused(self, seq: Sequence) -> bool:
        refusal = self._refusals.get(seq.seq_id)
        if refusal is None:
            return False
        return self._step < refusal.again_at or self._supply() - refusal.supply < refusal.shortage

    def _refuse(self, seq: Sequence, shortage: int, num_blocks: int) -> None:
        again_at = self._step + num_blocks // _BLOCKS_PER_STEP
        self._refusals[seq.seq_id] = _Refusal(shortage, self._supply(), self._num_unclaimed(), again_at)

    def _num_unclaimed(self) -> int:
        return self._kv.pool.num_available - self._running.reserve

    def _supply(self) -> int:
        """Rises by one at least with every block of which a refused sequence may come to lack one less.

        Those are blocks that became available or were published, and blocks that those who run are no longer bound to
        take: the reserve falls by as much when they take blocks, which then lack elsewhere, or when they end.
        """
        pool = self._kv.pool
        return pool.num_freed + pool.num_published_ever - self._running.reserve


def _share_of(chunk: int, share: int) -> int:
    return chunk if share == 1 else max(min(1, chunk), chunk // share)

"""Which tokens a step computes: running streams first, then prompts by how much they have left.

1. **Streams.** Every running sequence that lacks one token has it computed, whatever else waits: nobody's prompt and
   nobody's priority takes a running stream's token. Where the step has fewer tokens than there are streams, they take
   turns (`StreamRotation`).
2. **Prompts** share what is left of the tokens, and of the time where streams have a latency to keep (`StepBudget`):
   those in chunks, those that come back after a preemption, and those that wait. A quarter goes to the first of them in
   order of service, by priority and arrival. The rest goes to whoever has least left to compute, within a priority.
   Where priorities age, it goes by the order of service too; where tenants take turns, to the tenant that has received
   least for its weight of late, and a sixteenth to the prompt that arrived first.

Before that, the first in line may have claimed places and blocks of others (`Claims`). It is then served among the
prompts of the same step.

Why so: shortest remaining first gives the least mean time to a first token (Schrage 1968), and a short prompt is never
behind a long one. Alone it would starve long prompts under a stream of short ones. The quarter is the ageing: as
requests before it end, each prompt becomes the first in order of service, and from then on a stream of others costs it
at most three quarters of its speed. Sharing equally (processor sharing) would bound both as well, and delay the first
of k long prompts k times for nothing.

Blocks may run out. A stream takes those of the last in order of service behind it (`VictimPolicy`); a prompt takes what
is there, then those of prompts behind it, and else waits.

Everything ends at last, because the first in order of service among those with tokens to compute yields to nobody, and
gets blocks before anybody else in the step after one in which it found none. Running beams that wait for their siblings
have nothing to compute: they keep their blocks as long as somebody behind can yield, but stand in nobody's way. What a
sequence draws is never lost, so each time the first has drawn its token there is less to do for all.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from octavo.kvcache.block import BlockCopy
from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence, SequenceId, SequenceStatus
from octavo.scheduler.admission import MOST_REFUSED, Admission
from octavo.scheduler.budget import StepBudget, TimeLimit
from octavo.scheduler.claims import Claims
from octavo.scheduler.fairness import VirtualTokenCounter
from octavo.scheduler.rotation import StreamRotation
from octavo.scheduler.running import RunningSet, num_pending_siblings
from octavo.scheduler.tenant_shares import TenantShares
from octavo.scheduler.waiting import WaitingLine, is_scored, num_missing
from octavo.scheduler.yielding import Yielding

SHARE_OF_FIRST = 4
"""The first prompt in order of service has at least this part of what prompts share: 1 / 4."""

SHARE_OF_FIRST_IN_TURNS = 16
"""The same where tenants take turns: the rest goes by tenants, so that fewer prompts need it."""

MakeTimeLimit = Callable[[list[Sequence]], TimeLimit | None]


class StepShares:
    """The composition of a step while it is decided.

    Attributes:
        streams: sequences that compute one token.
        chunks: sequences that compute tokens of a prompt, and how many.
        admitted: those of them that have just been given their place.
        copied: those whose first block to write to is a new copy.
        copies: of blocks, before anything is computed.
    """

    def __init__(self) -> None:
        self.streams: list[Sequence] = []
        self.chunks: dict[SequenceId, tuple[Sequence, int]] = {}
        self.admitted: set[SequenceId] = set()
        self.copied: set[SequenceId] = set()
        self.copies: list[BlockCopy] = []

    def __bool__(self) -> bool:
        return bool(self.streams or self.chunks)


class Service:
    """Decides the shares of each step.

    Args:
        time_limit: given the streams of a step, how long its prompts may take; None where no latency is to be kept.
        turns: charged with what each tenant receives; where blocks run out, the least served tenant's streams have
            theirs first, and yield to those of others last. None: the order of service decides.
        claims: who may take the place of somebody that runs. None: nobody.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        running: RunningSet,
        waiting: WaitingLine,
        yielding: Yielding,
        admission: Admission,
        *,
        max_num_batched_tokens: int,
        tenants: TenantShares,
        time_limit: MakeTimeLimit | None = None,
        turns: VirtualTokenCounter | None = None,
        claims: Claims | None = None,
    ) -> None:
        self._kv = kv
        self._running = running
        self._waiting = waiting
        self._yielding = yielding
        self._admission = admission
        self._tenants = tenants
        self._max_tokens = max_num_batched_tokens
        self._time_limit = time_limit
        self._turns = turns
        self._claims = claims
        self._rotation = StreamRotation()
        self._stalled: Sequence | None = None  # the first in order of service, that found no blocks in the last step

    def share(self) -> StepShares:
        """Who computes how much in the next step; all of it has its blocks."""
        self._admission.begin_step()
        shares = StepShares()
        claimant = None if self._claims is None else self._claim(self._claims)
        self._share(shares, claimant)
        while not shares and len(self._running):
            # Those who have tokens to compute found no blocks, or wait: beams that wait for siblings are in their way.
            order = self._running.order
            idle = [seq for seq in order if not num_missing(seq)]
            self._yielding.preempt_one_of(idle or order[1:] or order)
            self._share(shares)
        shares.copies.extend(self._admission.copies)
        return shares

    def _claim(self, claims: Claims) -> Sequence | None:
        """Vacate places and blocks for the claimant, where it has a claim on all that it lacks; returns it.

        One that lacks nothing is returned too, where it goes before all others that wait.
        """
        admission, running = self._admission, self._running
        if not len(running) or not len(self._waiting):
            return None
        head = claims.claimant(self._waiting.queue, running.order)
        if head is None or admission.is_over_cap(head):
            return None
        num_places = admission.num_lacking_places(head)
        if len(running) - max(0, num_places) >= self._max_tokens:
            return None  # the step would have no token left for it
        if num_places <= 0 and admission.num_lacking_blocks(head) <= 0:
            return head if claims.goes_first(head, self._waiting.queue) else None
        victims = [seq for seq in claims.victims(head, running.order) if self._tenants.helps(seq, head)]
        if num_places > len(victims) or not victims:
            return None
        bound = sum(running.places[seq.seq_id].bound for seq in victims)
        if admission.num_lacking_blocks(head) > self._kv.num_freed_by(victims) + bound:
            return None
        while victims and (admission.num_lacking_places(head) > 0 or admission.num_lacking_blocks(head) > 0):
            victims.remove(self._yielding.preempt_one_of(victims))
            victims = [seq for seq in victims if self._tenants.helps(seq, head)]
        return head

    def _share(self, shares: StepShares, claimant: Sequence | None = None) -> None:
        short = self._serve_stalled(shares)
        streams: list[Sequence] = []
        prompts: list[Sequence] = []
        for seq in self._running.order:
            missing = seq.num_prompt_tokens + len(seq.output_token_ids) - seq.num_computed
            if missing == 1:
                streams.append(seq)
            elif missing:
                prompts.append(seq)
        budget = self._max_tokens
        if len(streams) >= budget:
            streams, for_prompts = self._rotation.choose(streams, bool(prompts), budget)
            budget = len(streams) + for_prompts
        if self._turns is not None and self._may_run_out(len(streams)):
            first = self._first()
            ordered = self._turns.in_order_of_service(seq for seq in streams if seq is not first)
            streams = ordered if first not in streams else [first, *ordered]
        short |= self._serve_streams(streams, shares)
        left = budget - len(shares.streams)
        if left > 0:
            limit = self._time_limit(shares.streams) if self._time_limit is not None and shares.streams else None
            step = StepBudget(left, limit, beside_streams=bool(shares.streams))
            if claimant is not None and not short and self._admit(claimant, step, shares, SHARE_OF_FIRST):
                bisect.insort(prompts, claimant, key=_order)
            self._serve_prompts(prompts, step, shares, short)

    def _serve_stalled(self, shares: StepShares) -> bool:
        """Blocks for the first in order of service, where it found none in the last step. Whether somebody yielded."""
        first, self._stalled = self._stalled, None
        if first is None or first is not self._first():
            return False
        wanted = min(num_missing(first), self._kv.spec.block_size)
        yielded = False
        while not self._extend(first, wanted, shares) and (others := self._others(first)):
            self._yielding.preempt_one_of(others)
            yielded = True
        return yielded

    def _first(self) -> Sequence | None:
        """The first in order of service among the running sequences that have tokens to compute."""
        return next((seq for seq in self._running.order if num_missing(seq)), None)

    def _others(self, first: Sequence) -> list[Sequence]:
        """Who may yield to the first: those behind it, or else those ahead, beams that wait for their siblings."""
        behind, helps = self._running.after(first)[1:], self._tenants.helps
        others = [seq for seq in self._running.order if seq is not first]
        # Whatever the tenants' floors and caps: it must go on.
        return [seq for seq in behind if helps(seq, first)] or [seq for seq in others if helps(seq, first)] or others

    def _serve_streams(self, streams: list[Sequence], shares: StepShares) -> bool:
        """One token for each, in order of service; returns whether somebody had to yield blocks."""
        places, running = self._running.places, SequenceStatus.RUNNING
        served, short = shares.streams, False
        for seq in streams:
            if short and seq.status is not running:
                continue
            if seq.num_computed >= places[seq.seq_id].capacity and not self._extend(seq, 1, shares):
                short = True
                if not self._take_from_those_behind(seq, shares):
                    continue
            served.append(seq)
        return short

    def _take_from_those_behind(self, seq: Sequence, shares: StepShares) -> bool:
        """Blocks for a stream's next token; False where it yielded itself."""
        while not self._extend(seq, 1, shares):
            # The first in order of service yields to nobody, so that every request ends at last.
            behind = self._others(seq) if seq is self._first() else self._behind(seq, shares)
            if not behind and self._yielding.free_more():
                continue
            if self._yielding.preempt_one_of(behind or [seq]) is seq:
                return False
        return True

    def _behind(self, seq: Sequence, shares: StepShares) -> list[Sequence]:
        """Itself and those who may yield to it, in order of service."""
        helps = self._tenants.helps
        if self._turns is None:
            return [other for other in self._running.after(seq) if helps(other, seq)]
        first, served = self._first(), set(map(id, shares.streams))
        others = (other for other in self._running.order if other is not first and id(other) not in served)
        return [other for other in others if helps(other, seq)]

    def _may_run_out(self, num_streams: int) -> bool:
        """Whether the pool may lack blocks for a token of each stream: a new block, or a copy of a shared one."""
        available = self._kv.pool.num_available - self._tenants.num_kept
        return available < 2 * num_streams * len(self._kv.spec.groups)

    def _serve_prompts(self, prompts: list[Sequence], budget: StepBudget, shares: StepShares, short: bool) -> None:
        if short:
            prompts = [seq for seq in prompts if seq.status is SequenceStatus.RUNNING]
        admission, waiting = self._admission, self._waiting
        head = waiting.head() if admission.has_place and not short else None
        ranking, share, first = self._precedence(prompts)
        by_rank = sorted(prompts, key=ranking)
        if first is not None and (head is None or first.order < head.order):
            if len(prompts) > 1 or head is not None:
                short |= self._serve_prompt(first, budget, shares, share)
        elif head is not None:
            alone = not prompts and len(waiting) == 1
            if self._admit(head, budget, shares, 1 if alone else share):
                by_rank = sorted((*by_rank, head), key=ranking)
            elif first is not None:
                # It does not fit yet: the first of those that run is next.
                short |= self._serve_prompt(first, budget, shares, share)
        refused: list[Sequence] = []
        place = 0
        while budget.num_tokens > 0:
            prompt = by_rank[place] if place < len(by_rank) else None
            newcomer = None
            if not short and admission.has_place and budget.num_newcomers > 0 and len(refused) < MOST_REFUSED:
                nearest = waiting.candidates(len(refused) + 1)
                newcomer = next((seq for seq in nearest if seq not in refused), None)
            if newcomer is not None and (prompt is None or ranking(newcomer) < ranking(prompt)):
                if not self._admit(newcomer, budget, shares, 1):
                    refused.append(newcomer)
            elif prompt is not None:
                place += 1
                if prompt.status is SequenceStatus.RUNNING:
                    short |= self._serve_prompt(prompt, budget, shares, 1)
            else:
                break

    def _precedence(
        self, prompts: list[Sequence]
    ) -> tuple[Callable[[Sequence], tuple[float, ...]], int, Sequence | None]:
        """What prompts are ranked by, and which running one has a part of the step anyway: one over how much."""
        if self._turns is None:
            return _size, SHARE_OF_FIRST, prompts[0] if prompts else None
        longest = min(prompts, key=lambda seq: (seq.request.arrival_time, seq.seq_id), default=None)
        return _least_served_lately(self._turns), SHARE_OF_FIRST_IN_TURNS, longest

    def _admit(self, seq: Sequence, budget: StepBudget, shares: StepShares, share: int) -> bool:
        num_new = self._admission.admit(seq, budget, share)
        if not num_new:
            return False
        if self._turns is not None:
            self._turns.admitted(seq)
        budget.take(seq.num_computed, num_new, scored=is_scored(seq))
        budget.num_newcomers -= 1 + num_pending_siblings(seq)
        shares.admitted.add(seq.seq_id)
        shares.chunks[seq.seq_id] = (seq, num_new)
        return True

    def _serve_prompt(self, seq: Sequence, budget: StepBudget, shares: StepShares, share: int) -> bool:
        """A chunk of a prompt, on top of what it has in this step; returns whether it lacked blocks."""
        _, has = shares.chunks.get(seq.seq_id, (seq, 0))
        start = seq.num_computed + has
        scored = is_scored(seq)
        chunk = budget.chunk(start, num_missing(seq) - has, scored=scored)
        if share > 1:
            chunk = max(min(1, chunk), chunk // share)
        if not chunk:
            return False
        num_new = self._make_room(seq, has, chunk, shares)
        if num_new:
            budget.take(start, num_new, scored=scored)
            shares.chunks[seq.seq_id] = (seq, has + num_new)
        elif not has and seq is self._first():
            self._stalled = seq
        return num_new < chunk

    def _make_room(self, seq: Sequence, has: int, chunk: int, shares: StepShares) -> int:
        """Blocks for as much of a chunk as there can be; returns how many tokens that is."""
        while True:
            if self._extend(seq, has + chunk, shares):
                return chunk
            place = self._running.places[seq.seq_id]
            blocks = self._tenants.room(seq) // len(self._kv.spec.groups)
            fits = place.capacity + blocks * self._kv.spec.block_size - seq.num_computed - has
            if 0 < fits < chunk and self._extend(seq, has + fits, shares):
                return fits
            if has:
                return 0
            behind = [s for s in self._running.after(seq)[1:] if s.seq_id not in shares.chunks and num_missing(s) != 1]
            behind = [s for s in behind if self._tenants.helps(s, seq)]
            if behind:
                self._yielding.preempt_one_of(behind)
            elif len(self._running) > 1 or not self._yielding.free_more():
                return 0

    def _extend(self, seq: Sequence, num_tokens: int, shares: StepShares) -> bool:
        """Room for a running sequence's next tokens; False where there are too few blocks."""
        kv, tenants = self._kv, self._tenants
        copies = kv.extend(seq, num_tokens, tenants.room)
        if copies is None and tenants.restore_floor(seq.request.tenant):
            copies = kv.extend(seq, num_tokens, tenants.room)
        if copies is None:
            return False
        self._running.grew(seq)
        if copies:
            shares.copies.extend(copies)
            shares.copied.add(seq.seq_id)
        return True


def _least_served_lately(turns: VirtualTokenCounter) -> Callable[[Sequence], tuple[float, ...]]:
    """Sort key of prompts where tenants take turns: of the tenant first that has received least for its weight of late.

    So the prompt of a tenant that sends little is not computed after those of others that send more, however many
    sequences of each happen to run. Within a tenant those with the least to compute are first. A client's priority says
    nothing between tenants.
    """

    def key(seq: Sequence) -> tuple[float, ...]:
        request = seq.request
        return (turns.recent(request.tenant), num_missing(seq), request.arrival_time, seq.seq_id)

    return key


def _order(seq: Sequence) -> tuple[int, float, int]:
    return seq.order


def _size(seq: Sequence) -> tuple[float, ...]:
    """Sort key of prompts: the most urgent first, then those with the least to compute; by age where priorities age."""
    if seq.request.due_time is not None:
        return seq.order
    return (seq.request.priority, num_missing(seq), *seq.order)

"""The waiting queue: sequences without blocks, in an order of admission in which none waits for ever.

    lines    ada   ■ ■ ■ ■      a line for each tenant: if tenants take turns, or if the longest cached prefix is first
             ben   ■ ■          within one; otherwise a line for all, and one for each tenant with a cap
             cap   ■ □ □ □      of which only the first sequence is offered, or none while it exceeds the cap

The policy ranks the lines. Within a line, sequences are in order of service or, if prefixes count, the longest cached
prefix is first, so that cached blocks are used before they are evicted: then only sequences of the same priority
overtake each other. After `max_overtakes` sequences have overtaken the first of a line, the first is next. So a
sequence with p others before it in its line is admitted after at most (p + 1) * (max_overtakes + 1) admissions from
that line, whatever arrives behind it. A preempted sequence is never overtaken.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence, SequenceStatus
from octavo.scheduler.policy import Key, Policy
from octavo.scheduler.preemption import Preemption

if TYPE_CHECKING:
    from octavo.tiers.lower import LowerTiers


@dataclass(eq=False, slots=True)
class _Line:
    """The waiting sequences of one tenant, or of all tenants without a line of their own.

    Attributes:
        seqs: never empty; the first in order of service is first.
        next: the sequence to admit; of a line with a cap, the only one offered. None if it is to be chosen.
        overtakes: how many sequences have overtaken the first in turn.
        use: of a line with a cap whose first sequence exceeds it, so that none is offered, the blocks that the tenant
            held and was bound to take then; else None.
    """

    seqs: SortedSequences
    is_capped: bool
    next: Sequence | None = None
    overtakes: int = 0
    use: int | None = None


class WaitingQueue:
    """The sequences that wait, in order of admission and, if short ones may pass, by the tokens to compute.

    Args:
        prefix_length: the length of a sequence's cached prefix; None if prefixes do not count.
        is_capped: whether a tenant has a cap.
        max_overtakes: how many sequences may overtake the first of a line.
        window: how many sequences of a line are compared by their prefixes.
    """

    def __init__(
        self,
        policy: Policy,
        prefix_length: Callable[[Sequence], int] | None = None,
        is_capped: Callable[[str], bool] = lambda tenant: False,
        *,
        max_overtakes: int = 16,
        window: int = 16,
    ) -> None:
        self._policy = policy
        self._prefix_length = prefix_length if policy.prefix_may_pass else None
        self._is_capped = is_capped
        self._max_overtakes = max_overtakes
        self._window = window
        self._size = 0
        self._lines: dict[str | None, _Line] = {}  # by tenant, or None for the others; none empty
        self._by_size = SortedSequences(policy.prompt_key)  # all that are offered, if short ones may pass
        self._head: Sequence | None = None  # None if it is to be chosen
        self._version = policy.version  # when the head was chosen

    def __len__(self) -> int:
        return self._size

    def push(self, seq: Sequence) -> None:
        """Add a new sequence, or one that was preempted; that returns to its old place."""
        seq.status = SequenceStatus.WAITING
        self._size += 1
        name = self._name(seq)
        line = self._lines.get(name)
        if line is None:
            is_capped = self._is_capped(seq.request.tenant)
            line = self._lines[name] = _Line(SortedSequences(attrgetter("order")), is_capped)
            if not is_capped:
                self._arrive(line, seq)
        line.seqs.add(seq)
        if not line.is_capped:
            self._enter(seq)
            line.next = None
            return
        if line.seqs[0] is seq:
            line.use = None  # it may need less
        self._offer_first(line)

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence that ended, or was admitted."""
        self._size -= 1
        name = self._name(seq)
        line = self._lines[name]
        if line.seqs[0] is seq:
            line.use = None
        line.seqs.discard(seq)
        if line.is_capped:
            self._offer_first(line)
        else:
            self._leave(seq)
            line.next = None
        if not line.seqs:
            del self._lines[name]

    def admit(self, seq: Sequence) -> None:
        """Remove an admitted sequence, whether it was its turn or not."""
        if seq is self.head():
            line = self._lines[self._name(seq)]
            line.overtakes = 0 if seq is line.seqs[0] else line.overtakes + 1
        self.discard(seq)

    def clear(self) -> None:
        """Forget all sequences."""
        self._size = 0
        self._lines = {}
        self._by_size = SortedSequences(self._policy.prompt_key)
        self._head = None

    def head(self) -> Sequence | None:
        """Return the next sequence in order of admission, or None."""
        if self._head is None or self._version != self._policy.version:
            best = min(self._offered(), key=self._rank, default=None)
            self._head = None if best is None else self._next(best)
            self._version = self._policy.version
        return self._head

    def heads(self) -> list[Sequence]:
        """Return the next sequence of each line."""
        return [self._next(line) for line in self._offered()]

    def candidates(self, count: int) -> list[Sequence]:
        """Return the sequences to try to admit besides the head, or if it does not fit.

        If short ones may pass, these are the most urgent (by priority) with the fewest tokens to compute; otherwise the
        first in order of admission.
        """
        return self._by_size[:count] if self._policy.short_may_pass else self.first(count)

    def first(self, count: int) -> list[Sequence]:
        """Return the first `count` sequences in order of admission.

        If tenants take turns, these are the first of each line in the order of turns, then the second of each, and so
        on.
        """
        if not self._policy.takes_turns:
            merged = heapq.merge(*(self._first_of(line, count) for line in self._offered()), key=attrgetter("order"))
            return list(islice(merged, count))
        ranked = sorted(self._offered(), key=self._rank)[:count]
        rows = chain.from_iterable(zip_longest(*(self._first_of(line, count) for line in ranked)))
        return [seq for seq in rows if seq is not None][:count]

    def set_aside(self, seq: Sequence, use: int) -> None:
        """Offer no sequence of a capped tenant until `bring_back`: its first exceeds the cap while `use` blocks do."""
        line = self._lines[self._name(seq)]
        line.use = use
        self._offer_first(line)

    def bring_back(self, use_of: Callable[[str], int]) -> None:
        """Offer the tenants again that hold and are bound to take fewer blocks than when they were set aside."""
        for line in self._lines.values():
            if line.use is not None and use_of(line.seqs[0].request.tenant) < line.use:
                line.use = None
                self._offer_first(line)

    def _name(self, seq: Sequence) -> str | None:
        tenant = seq.request.tenant
        own = self._policy.takes_turns or self._prefix_length is not None or self._is_capped(tenant)
        return tenant if own else None

    def _offered(self) -> list[_Line]:
        return [line for line in self._lines.values() if not line.is_capped or line.next is not None]

    def _rank(self, line: _Line) -> Key:
        return self._policy.line_rank(line.seqs[0], self._next(line))

    def _next(self, line: _Line) -> Sequence:
        """Return the sequence of a line that is admitted next."""
        if line.next is None:
            line.next = self._choose(line)
        return line.next

    def _choose(self, line: _Line) -> Sequence:
        first = line.seqs[0]
        if self._prefix_length is None or first.num_preemptions or line.overtakes >= self._max_overtakes:
            return first
        priority = first.request.priority
        rivals = [seq for seq in line.seqs[: self._window] if seq.request.priority == priority]
        # max() keeps the earliest among equals.
        return first if len(rivals) == 1 else max(rivals, key=self._prefix_length)

    def _first_of(self, line: _Line, count: int) -> list[Sequence]:
        if line.is_capped:
            return [self._next(line)]
        following = self._next(line)
        return [following, *(seq for seq in line.seqs[:count] if seq is not following)][:count]

    def _offer_first(self, line: _Line) -> None:
        """Offer only the first sequence of a line with a cap, or none if that exceeds the cap."""
        first = None if line.use is not None or not line.seqs else line.seqs[0]
        before, line.next = line.next, first
        if first is before:
            return
        if before is not None:
            self._leave(before)
        elif first is not None:
            self._arrive(line, first)
        if first is not None:
            self._enter(first)
        self._head = None

    def _arrive(self, line: _Line, seq: Sequence) -> None:
        tenants = (other.seqs[0].request.tenant for other in self._offered() if other is not line)
        self._policy.arrive(seq.request, tenants)

    def _enter(self, seq: Sequence) -> None:
        self._head = None
        if self._policy.short_may_pass:
            self._by_size.add(seq)

    def _leave(self, seq: Sequence) -> None:
        self._head = None
        if self._policy.short_may_pass:
            self._by_size.discard(seq)


class Fetching:
    """The requests whose prefix is being fetched from a store: they wait outside the queue and delay no other.

    add ──> fetching ──arrived, or too late──> waiting queue

    Each keeps its fetch until it is admitted or ends.

    Attributes:
        tiers: the stores.
        speed: how long computing takes, against which loads are weighed.
    """

    def __init__(self, kv: KVCacheManager, tiers: LowerTiers, speed: Preemption) -> None:
        self.speed = speed
        self.tiers = tiers
        self._kv = kv
        self._waiting: dict[Sequence, None] = {}  # in order of arrival; each has its fetch in its state

    def __len__(self) -> int:
        """The number of requests that wait for a fetch."""
        return len(self._waiting)

    def begin(self, seq: Sequence) -> bool:
        """Start a fetch for a new sequence; if True, it must wait until `arrived` returns it."""
        labels = self._kv.hierarchy.missing(seq, *self._kv.holdings.matchable(seq))
        per_token = self.speed.seconds_per_token
        cost = None if per_token is None else per_token * self._kv.spec.block_size
        fetch = self.tiers.prefetch(labels, seq.request.tenant, cost, seq.request.kv_hint)
        if fetch is None:
            return False
        seq.status = SequenceStatus.PARKED
        seq.state.fetch = fetch
        self._waiting[seq] = None
        return True

    def arrived(self) -> list[Sequence]:
        """Return the sequences that need not wait any longer."""
        self.tiers.poll()
        is_late = self.tiers.is_late
        ready = [seq for seq in self._waiting if not seq.state.fetch.pending or is_late(seq.state.fetch)]
        for seq in ready:
            del self._waiting[seq]
        return ready

    def clear(self) -> None:
        """Stop waiting for all fetches; each sequence keeps its fetch until `release`."""
        self._waiting.clear()

    def release(self, seq: Sequence) -> None:
        """Forget a sequence that was admitted, or has ended."""
        self._waiting.pop(seq, None)
        if (fetch := seq.state.fetch) is not None:
            seq.state.fetch = None
            self.tiers.release(fetch)


class SortedSequences(list[Sequence]):
    """Sequences by ascending key, which must be unique, and must not change while they are listed.

    A list: finding a place is a bisection, and moving the rest takes microseconds even for 10,000.
    """

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        super().__init__()
        self._key = key
        self._keys: list[Key] = []  # of each, because comparing tuples is much faster than making them

    def add(self, seq: Sequence) -> None:
        key = self._key(seq)
        place = bisect.bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self.insert(place, seq)

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence; raises `ValueError` if it is not listed."""
        place = bisect.bisect_left(self._keys, self._key(seq))
        if self[place : place + 1] != [seq]:
            raise ValueError(f"sequence {seq.seq_id} is not where its key says")
        del self[place], self._keys[place]

"""The waiting sequences, both in order of admission and by the number of tokens to compute."""

from __future__ import annotations

from collections.abc import Callable

from octavo.request import Sequence, SequenceStatus
from octavo.scheduler.keyed_heap import Key, KeyedHeap
from octavo.scheduler.queue import WaitingQueue


class WaitingLine:
    """A queue in order of admission, with the same sequences also ordered by length, shortest first.

    If a tenant has a cap, only its first sequence is in the queue, and the others wait behind it in order of service.
    If the cap leaves no room, none of them is in the queue, so that no other tenant waits for them.

    Attributes:
        num_tokens: tokens of all waiting sequences, including output from before a preemption. O(1), as is `len`.
    """

    def __init__(self, queue: WaitingQueue, is_capped: Callable[[str], bool] = lambda tenant: False) -> None:
        self.queue = queue
        self.num_tokens = 0
        self._size = 0
        self._by_size = KeyedHeap(_size_key)
        self._is_capped = is_capped
        self._capped: dict[str, KeyedHeap] = {}  # by tenant, all its waiting sequences; none empty
        self._in_queue: dict[str, Sequence] = {}  # by capped tenant, its sequence in the queue
        self._over_cap: dict[str, Sequence] = {}  # by capped tenant, its first sequence if over the cap

    def __len__(self) -> int:
        return self._size

    def push(self, seq: Sequence) -> None:
        """Add a new sequence, or one that was preempted."""
        self._size += 1
        self.num_tokens += seq.num_tokens
        tenant = seq.request.tenant
        if not self._is_capped(tenant):
            self._enter(seq)
            return
        seq.status = SequenceStatus.WAITING
        line = self._capped.setdefault(tenant, KeyedHeap(_order))
        line.push(seq)
        if line.peek() is seq:
            self._over_cap.pop(tenant, None)  # it may need less
        self._line_up(tenant)

    def head(self) -> Sequence | None:
        """Return the next sequence in order of admission, or None."""
        return self.queue.peek()

    def candidates(self, count: int) -> list[Sequence]:
        """Return the sequences to try to admit besides the head, or if it does not fit.

        If `short_may_pass`, these are the most urgent (by priority) with the fewest tokens to compute; otherwise the
        first in the queue.
        """
        return self._by_size.smallest(count) if self.queue.short_may_pass else self.queue.first(count)

    def admit(self, seq: Sequence) -> None:
        """Remove a sequence that was admitted."""
        if seq.request.tenant in self._capped or seq is not self.queue.peek():
            self.discard(seq)
            return
        self.queue.pop()
        self._by_size.discard(seq)
        self._left(seq)

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence that was admitted out of turn, or ended while waiting."""
        self._left(seq)
        tenant = seq.request.tenant
        if (line := self._capped.get(tenant)) is None:
            self._leave(seq)
            return
        line.discard(seq)
        if self._over_cap.get(tenant) is seq:
            del self._over_cap[tenant]
        self._line_up(tenant)
        if not len(line):
            del self._capped[tenant]

    def set_aside(self, seq: Sequence) -> None:
        """Keep all sequences of a capped tenant out of the queue until `line_up`, because its first exceeds the cap."""
        tenant = seq.request.tenant
        self._over_cap[tenant] = seq
        self._line_up(tenant)

    def line_up(self, fits: Callable[[Sequence], bool]) -> None:
        """Bring back the sequences that were set aside, if there is room for them again."""
        for tenant, seq in list(self._over_cap.items()):
            if fits(seq):
                del self._over_cap[tenant]
                self._line_up(tenant)

    def _line_up(self, tenant: str) -> None:
        """Keep only the first sequence of a capped tenant in the queue."""
        first = None if tenant in self._over_cap else self._capped[tenant].peek()
        before = self._in_queue.get(tenant)
        if first is before:
            return
        # Enter the next before the previous leaves, so that the tenant never seems to have nothing waiting.
        if first is not None:
            self._in_queue[tenant] = first
            self._enter(first)
        else:
            del self._in_queue[tenant]
        if before is not None:
            self._leave(before)

    def _enter(self, seq: Sequence) -> None:
        self.queue.push(seq)
        self._by_size.push(seq)

    def _leave(self, seq: Sequence) -> None:
        self.queue.discard(seq)
        self._by_size.discard(seq)

    def _left(self, seq: Sequence) -> None:
        self._size -= 1
        self.num_tokens -= seq.num_tokens


def num_missing(seq: Sequence) -> int:
    """Return the number of tokens to compute, some of which may turn out to be cached at admission."""
    return seq.num_tokens - seq.num_computed


def _order(seq: Sequence) -> Key:
    return seq.order


def is_scored(seq: Sequence) -> bool:
    """Whether log-probabilities of its prompt are still to be computed, which need the logits of every token."""
    request = seq.request
    return request.params.prompt_logprobs is not None and len(request.prompt_logprobs) < seq.num_prompt_tokens - 1


def needs_all_tokens(seq: Sequence) -> bool:
    """Whether all prompt tokens must be computed, because their log-probabilities or an embedding are wanted."""
    pooled = seq.request.pooled
    return is_scored(seq) or (pooled is not None and pooled.next_position < seq.num_prompt_tokens - 1)


def _size_key(seq: Sequence) -> Key:
    return (seq.request.priority, num_missing(seq), *seq.order)

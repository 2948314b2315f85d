"""The waiting sequences, in order of admission and by how much each has to compute."""

from __future__ import annotations

from collections.abc import Callable

from octavo.request import Sequence, SequenceStatus
from octavo.scheduler.keyed_heap import Key, KeyedHeap
from octavo.scheduler.queue import WaitingQueue


class WaitingLine:
    """One queue in order of admission, and beside it the same sequences with the shortest first.

    Of a tenant whose running requests are capped, only the first stands there; the others wait behind it, in order of
    service. Where its cap leaves no room, none of them does: so however many there are, nobody else waits for them.

    Attributes:
        num_tokens: of all that wait, prompts and what they had drawn before a preemption. O(1), as is `len`.
    """

    def __init__(self, queue: WaitingQueue, is_capped: Callable[[str], bool] = lambda tenant: False) -> None:
        self.queue = queue
        self.num_tokens = 0
        self._size = 0
        self._by_size = KeyedHeap(_size_key)
        self._is_capped = is_capped
        self._capped: dict[str, KeyedHeap] = {}  # by tenant, all its sequences that wait; none empty
        self._in_queue: dict[str, Sequence] = {}  # of these tenants, the one that stands in the queue
        self._over_cap: dict[str, Sequence] = {}  # the first of these tenants, where a cap leaves no room for it

    def __len__(self) -> int:
        return self._size

    def push(self, seq: Sequence) -> None:
        """A new sequence, or one that was preempted."""
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
        """The next sequence in order of admission."""
        return self.queue.peek()

    def candidates(self, count: int) -> list[Sequence]:
        """Whom to try to admit, besides the head or where it does not fit.

        Those most urgent (by priority) with the fewest tokens to compute, or as the queue has them.
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
        """A capped tenant's first does not fit its cap: all of the tenant wait outside the queue, until `line_up`."""
        tenant = seq.request.tenant
        self._over_cap[tenant] = seq
        self._line_up(tenant)

    def line_up(self, fits: Callable[[Sequence], bool]) -> None:
        """Let those that were set aside come back, where there is room for them again."""
        for tenant, seq in list(self._over_cap.items()):
            if fits(seq):
                del self._over_cap[tenant]
                self._line_up(tenant)

    def _line_up(self, tenant: str) -> None:
        """Let the first of a capped tenant stand in the queue, and no other."""
        first = None if tenant in self._over_cap else self._capped[tenant].peek()
        before = self._in_queue.get(tenant)
        if first is before:
            return
        # The next one first, so that the tenant does not seem to have had nothing waiting in between.
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
    """Tokens that are not computed yet; how many of them a prefix cache has is not known before admission."""
    return seq.num_tokens - seq.num_computed


def _order(seq: Sequence) -> Key:
    return seq.order


def is_scored(seq: Sequence) -> bool:
    """Whether its prompt's log-probabilities are wanted and not all known: they need every token's logits."""
    request = seq.request
    return request.params.prompt_logprobs is not None and len(request.prompt_logprobs) < seq.num_prompt_tokens - 1


def needs_all_tokens(seq: Sequence) -> bool:
    """Whether something is wanted of prompt tokens that a prefix cache does not keep, so that all are computed."""
    pooled = seq.request.pooled
    return is_scored(seq) or (pooled is not None and pooled.next_position < seq.num_prompt_tokens - 1)


def _size_key(seq: Sequence) -> Key:
    return (seq.request.priority, num_missing(seq), *seq.order)

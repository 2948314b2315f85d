"""The waiting sequences, in order of admission and by how much each has to compute."""

from __future__ import annotations

from octavo.request import Sequence
from octavo.scheduler.keyed_heap import Key, KeyedHeap
from octavo.scheduler.queue import WaitingQueue


class WaitingLine:
    """One queue in order of admission, and beside it the same sequences with the shortest first.

    Attributes:
        num_tokens: of all that wait, prompts and what they had drawn before a preemption. O(1), as is `len`.
    """

    def __init__(self, queue: WaitingQueue) -> None:
        self.queue = queue
        self.num_tokens = 0
        self._by_size = KeyedHeap(_size_key)

    def __len__(self) -> int:
        return len(self.queue)

    def push(self, seq: Sequence) -> None:
        """A new sequence, or one that was preempted."""
        self.queue.push(seq)
        self._by_size.push(seq)
        self.num_tokens += seq.num_tokens

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
        if seq is self.queue.peek():
            self.queue.pop()
        else:
            self.queue.discard(seq)
        self._leave(seq)

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence that ended while waiting."""
        self.queue.discard(seq)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        self._by_size.discard(seq)
        self.num_tokens -= seq.num_tokens


def num_missing(seq: Sequence) -> int:
    """Tokens that are not computed yet; how many of them a prefix cache has is not known before admission."""
    return seq.num_tokens - seq.num_computed


def _size_key(seq: Sequence) -> Key:
    return (seq.request.priority, num_missing(seq), *seq.order)

"""The running sequences, and how many more blocks they will need.

The total is updated whenever a sequence takes blocks, rather than summed over all, so an admission reads `reserve` in
O(1).

    blocks of one table   held          base                             most
    ├──────────────────────┤─────────────┤─ ─ ─ ─ headroom ─ ─ ─┤          │
                           of its prompt, │                      its answer ends there at the latest
                           not computed yet
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from octavo.sequence_state import Place


class RunningSet:
    """The running sequences in order of service.

    Args:
        on_leave: called with each sequence that stops running, before its id and its blocks are released.

    Attributes:
        order: the sequences; read-only for others.
        num_promised: places of parallel samples and beams whose prompt is still being computed.
        reserve: blocks, in all groups, that running sequences are bound to take.
        num_awaiting: sequences whose tokens must be known before the next step is planned.
    """

    def __init__(
        self, kv: KVCacheManager, headroom_tokens: int, on_leave: Callable[[Sequence], None] = lambda seq: None
    ) -> None:
        self.order: list[Sequence] = []
        self.num_promised = 0
        self.reserve = 0
        self.num_awaiting = 0
        self._kv = kv
        self._on_leave = on_leave
        self._size = kv.spec.block_size
        self._headroom = -(-headroom_tokens // self._size)
        self._kept = Counter(kv.spec.most_blocks())

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.order)

    @property
    def num_places(self) -> int:
        """The number of places taken or promised."""
        return len(self.order) + self.num_promised

    def enter(self, seq: Sequence) -> None:
        """Add a sequence that has been given blocks."""
        self._enter(seq, self._place(seq, seq.num_pending_siblings))

    def fork(self, child: Sequence) -> None:
        """Add a sequence that shares its parent's blocks; the first to write copies a partial block."""
        place = self._place(child, 0)
        place.copies = int(child.num_computed % self._size > 0)
        self._enter(child, place)

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence whose blocks are about to be released."""
        self.order.remove(seq)
        self._on_leave(seq)
        place = seq.state.placed
        seq.state.place = None
        self.num_promised -= place.siblings
        self.reserve -= place.bound
        self.num_awaiting -= seq.request.params.awaits_tokens

    def clear(self) -> None:
        """Remove all sequences; the caller releases their blocks and replaces their states."""
        self.order = []
        self.num_promised = self.reserve = self.num_awaiting = 0

    def grew(self, seq: Sequence) -> Place:
        """Account for new blocks of a sequence, or copies of shared ones."""
        place = seq.state.placed
        place.copies = 0
        self._count(place)
        return place

    def lose_sibling(self, seq: Sequence) -> None:
        """Give up the place promised to a sibling of this sequence, because it ends or starts."""
        place = seq.state.place
        if place is not None and place.siblings:
            place.siblings -= 1
            self.num_promised -= 1
            self._count(place)

    def bound_of(self, newcomer: Sequence, num_tokens: int) -> int:
        """Return the blocks that a newcomer is bound to take beyond those for its first `num_tokens` tokens."""
        return self._bound(self._place(newcomer, newcomer.num_pending_siblings), -(-num_tokens // self._size))

    def num_held(self, place: Place) -> int:
        """Return the blocks that a running sequence holds in all groups.

        Those of a step's tokens that a window is about to slide past are not counted.
        """
        held = len(place.holding.tables[0])
        return sum(min(held, most) * count for most, count in place.kept.items())

    def after(self, seq: Sequence) -> list[Sequence]:
        """Return a running sequence and those behind it, in order of service."""
        return self.order[bisect.bisect_left(self.order, seq.order, key=attrgetter("order")) :]

    def _enter(self, seq: Sequence, place: Place) -> None:
        if self.order and self.order[-1].order > seq.order:
            bisect.insort(self.order, seq, key=attrgetter("order"))
        else:
            self.order.append(seq)  # the usual case
        seq.state.place = place
        self.num_promised += place.siblings
        self.num_awaiting += seq.request.params.awaits_tokens
        self._count(place)

    def _place(self, seq: Sequence, siblings: int) -> Place:
        size, num_prompt = self._size, seq.num_prompt_tokens
        most = -(-(num_prompt + (seq.request.params.max_tokens or 1) - 1) // size)
        base = min(-(-seq.num_tokens // size), most)
        shared = num_prompt // size
        # The sequences of one request grow in step, and so take blocks at the same time.
        headroom = self._headroom
        if len(seq.request.sequences) > 1:
            headroom += -(-headroom // 2)
        sibling_blocks = min(-(-num_prompt // size) + headroom, most) - shared if siblings else 0
        kept, budget = self._kept, seq.request.params.kv_budget
        if budget is not None:
            kept = Counter(self._kv.spec.most_blocks(budget, num_prompt))
        return Place(self._kv.holdings.get(seq), base, most, kept, 0, siblings, sibling_blocks, headroom)

    def _bound(self, place: Place, held: int) -> int:
        target = min(max(held, place.base) + place.headroom, place.most)
        bound = 0
        for most, count in place.kept.items():
            own = max(0, min(target, most) - min(held, most))
            bound += (own + place.copies + place.siblings * min(place.sibling_blocks, most)) * count
        return bound

    def _count(self, place: Place) -> None:
        bound = self._bound(place, len(place.holding.tables[0]))
        self.reserve += bound - place.bound
        place.bound = bound

"""The scheduler's record of a sequence between steps: one record, `Sequence.state`.

It is replaced by a fresh one when the sequence gets a new id or everything starts over, so nothing about it can be left
behind in a table. Plain data: only the scheduler's modules read and write it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class Place:
    """The blocks of each table that a running sequence holds and may still take.

    Attributes:
        holding: its block tables, and the number of tokens that fit in those it does not share.
        base: blocks of the tokens it had when it was admitted.
        most: blocks of its prompt and its longest answer; the last token's key and value are never computed.
        kept: the most blocks that a group keeps; a longer table gives up as many as it takes. By number of blocks,
            how many groups.
        copies: shared blocks that it must copy before it writes to them.
        siblings: parallel samples or beams that start once it has computed their prompt, each in its own place.
        sibling_blocks: blocks that each of them takes then: a copy of the prompt's last, partly filled block, and
            headroom.
        headroom: blocks that it must be able to grow by, up to `most`.
        bound: blocks it is bound to take, including siblings, as counted in `RunningSet.reserve`.
        publish_at: number of computed tokens from which they must be committed to the cache.
        more_from: number of computed tokens from which a drawn token needs more than being appended; 0 means always.
        ending_ids: tokens that may end it, which need more than being appended too.
        num_sent: entries of each of its block tables that the runner has as they are; -1 if it does not know it.
    """

    holding: Any
    base: int
    most: int
    kept: Mapping[int, int]
    copies: int
    siblings: int
    sibling_blocks: int
    headroom: int
    bound: int = 0
    publish_at: int = 0
    more_from: int = 0
    ending_ids: Container[int] = ()
    num_sent: int = -1


@dataclass(eq=False, slots=True)
class Refusal:
    """A failed admission, recorded so that the look-up of a cached prefix is not repeated too early.

    Attributes:
        shortage: number of missing blocks.
        supply: `Admission._supply` at the time, which counts freed and published blocks.
        unclaimed: blocks that were available at the time and that no running sequence was bound to take.
        again_at: step before which the look-up is not repeated.
    """

    shortage: int
    supply: int
    unclaimed: int
    again_at: int


@dataclass(eq=False, slots=True)
class SequenceState:
    """The scheduler's record of one sequence.

    Attributes:
        place: what it holds while it runs; None while it does not.
        refusal: why it was not admitted yet; None while it may be tried.
        fetch: its blocks on the way from a store, or arrived, until it is admitted.
        is_held: whether it waits for a restart that lets it run.
        last_served: the turn in which it last had a token, while streams take turns.
        token_index: its tokens, in which drafts are looked for.
        suffix_block: the last block in which the tree of blocks had nothing that follows it.
        followed: its last draft, and how many of its drafts' tokens came true.
    """

    place: Place | None = None
    refusal: Refusal | None = None
    fetch: Any = None
    is_held: bool = False
    last_served: int = 0
    token_index: Any = None
    suffix_block: int = -1
    followed: Any = None

    @property
    def placed(self) -> Place:
        """The place of a running sequence."""
        assert self.place is not None, "it runs"
        return self.place

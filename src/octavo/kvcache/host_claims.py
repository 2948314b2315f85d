"""The slots of host memory that preempted sequences claim, and what became of the blocks in them.

not ──a sequence claims it──> planned ──a step takes the store──> out ──a step takes the load──> back
                                 │                                 │                              │
                                 └─last claim removed: not         └─: dropped                    └─: came in
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from octavo.errors import CacheError
from octavo.kvcache.audit import Findings, in_slices


class _Stage(Enum):
    """The state of a slot that preempted sequences claim, or claimed until its contents were loaded back."""

    NOT = "not claimed"
    PLANNED = "planned"  # no step has taken its store yet
    OUT = "out"
    BACK = "back"  # loaded back at least once


@dataclass(slots=True)
class ClaimCounters:
    """Totals since the start of claimed blocks, counted when steps take their transfers.

    `blocks_out` is exactly `blocks_in` + `blocks_dropped` + the blocks that are still claimed.
    """

    blocks_out: int = 0
    blocks_in: int = 0  # loaded back
    blocks_dropped: int = 0  # never loaded back: their sequence ended, or was given up


class HostClaims:
    """Counts the claims on slots, up to a limit; `HostMemory` holds the slots themselves.

    Args:
        most: slots that may be claimed at once.
    """

    __slots__ = ("_claims", "_returning", "_stages", "counters", "most", "num_slots")

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_slots = 0  # claimed slots
        self.counters = ClaimCounters()
        # By slot, for slots that were ever used.
        self._claims = array("i")
        self._stages: list[_Stage] = []
        self._returning = Counter[int]()  # by slot, number of planned loads to sequences that claimed it

    def grow(self) -> None:
        """Make room for one more slot."""
        self._claims.append(0)
        self._stages.append(_Stage.NOT)

    def __getitem__(self, slot: int) -> int:
        """The number of sequences that claim a slot."""
        return self._claims[slot]

    def total(self) -> int:
        """The number of claims on all slots. O(slots)."""
        return sum(self._claims)

    def may_add(self, count: int) -> bool:
        """Whether `count` more slots may be claimed."""
        return self.num_slots + count <= self.most

    def add(self, slot: int, *, planned: bool) -> None:
        """Add a sequence's claim to a slot.

        Args:
            planned: whether no step has taken the store that fills it yet.
        """
        self._claims[slot] += 1
        self.num_slots += self._claims[slot] == 1
        if self._stages[slot] is _Stage.NOT:
            self._stages[slot] = _Stage.PLANNED if planned else _Stage.OUT
            self.counters.blocks_out += not planned

    def remove(self, slot: int) -> None:
        """Remove a sequence's claim from a slot. Raises CacheError if there is none."""
        if self._claims[slot] < 1:
            raise CacheError(f"slot {slot} of host memory is given back more often than claimed")
        self._claims[slot] -= 1
        self.num_slots -= self._claims[slot] == 0
        self._settle(slot)

    def plan_return(self, slot: int) -> None:
        """Note that a load is planned for a sequence that claims the slot."""
        self._returning[slot] += 1

    def cancel_return(self, slot: int) -> None:
        """Note that such a load was cancelled."""
        self._returning[slot] -= 1
        self._settle(slot)

    def moved(self, stores: Iterable[int], loads: Iterable[int]) -> None:
        """Note that a step has taken all planned stores and loads of these slots."""
        for slot in stores:
            if self._stages[slot] is _Stage.PLANNED:
                self._stages[slot] = _Stage.OUT
                self.counters.blocks_out += 1
        returning, self._returning = self._returning, Counter()
        for slot in loads:
            if returning[slot] and self._stages[slot] is _Stage.OUT:
                self._stages[slot] = _Stage.BACK
            self._settle(slot)

    def check(self, holds: Iterable[int]) -> Findings:
        """Check that every claimed slot is held, and that the counters add up. O(slots).

        Args:
            holds: number of holds of each slot, including claims; 0 for free slots.
        """
        num_claimed = num_out = 0
        for slots in in_slices(enumerate(zip(holds, self._claims, self._stages, strict=True))):
            for slot, (num_holds, claims, stage) in slots:
                num_claimed += claims > 0
                num_out += stage in (_Stage.OUT, _Stage.BACK)
                if claims > num_holds or (claims and stage is _Stage.NOT):
                    yield f"slot {slot} of host memory has {claims} claims, {num_holds} holds, {stage.value}"
                if not num_holds and stage is not _Stage.NOT:
                    yield f"slot {slot} of host memory is held by nobody and {stage.value}"
            yield None
        if num_claimed != self.num_slots or num_claimed > self.most:
            yield f"{num_claimed} slots are claimed, {self.num_slots} are counted, {self.most} may be"
        counters = self.counters
        if counters.blocks_out != counters.blocks_in + counters.blocks_dropped + num_out:
            yield (
                f"{counters.blocks_out} blocks were moved out, but {counters.blocks_in} back, "
                f"{counters.blocks_dropped} were dropped and {num_out} are in host memory"
            )

    def _settle(self, slot: int) -> None:
        """Count what became of a slot, once there are no claims on it and no planned loads for claimants."""
        if self._claims[slot] or self._returning[slot]:
            return
        was, self._stages[slot] = self._stages[slot], _Stage.NOT
        self.counters.blocks_dropped += was is _Stage.OUT
        self.counters.blocks_in += was is _Stage.BACK

"""Which tenant each block in use counts for, where tenants have floors or caps."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import NULL_BLOCK


class BlockOwners:
    """Blocks in use by tenant. A block counts once, for the tenant that took it when nobody held it.

    So what several sequences of a tenant share counts once. What tenants of one cache group share counts for one of
    them, until none holds it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._owner = array("i", bytes(4 * num_blocks))
        self._index: dict[str, int] = {}
        self._held: list[int] = []

    def held(self, tenant: str) -> int:
        """Blocks in use that count for a tenant."""
        index = self._index.get(tenant)
        return 0 if index is None else self._held[index]

    def took(self, blocks: Iterable[int], tenant: str) -> None:
        """A tenant holds these blocks, which nobody held before."""
        index = self._index.get(tenant)
        if index is None:
            index = self._index[tenant] = len(self._held)
            self._held.append(0)
        count = 0
        for block in blocks:
            self._owner[block] = index
            count += 1
        self._held[index] += count

    def gave_back(self, blocks: Iterable[int]) -> None:
        """Nobody holds these blocks any more."""
        owner, held = self._owner, self._held
        for block in blocks:
            held[owner[block]] -= 1

    def check(self, ref_counts: array[int]) -> Findings:
        """The counts are those of the blocks in use. O(blocks)."""
        found = [0] * len(self._held)
        for blocks in in_slices(range(NULL_BLOCK + 1, len(ref_counts))):
            for block in blocks:
                if ref_counts[block]:
                    found[self._owner[block]] += 1
            yield None
        for tenant, index in self._index.items():
            if found[index] != self._held[index]:
                yield f"{found[index]} blocks count for tenant {tenant!r}, but {self._held[index]} are counted"

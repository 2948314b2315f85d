"""Counts blocks in use by tenant, if tenants have floors or caps."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from octavo.kvcache.audit import Findings, in_slices
from octavo.kvcache.block import NULL_BLOCK


class BlockOwners:
    """Counts blocks in use by tenant. A block counts once, for the tenant that took it when it was not in use.

    So a block shared by several sequences of a tenant counts once, and a block shared by tenants of one cache group
    counts for one of them until none holds it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._owner = array("i", bytes(4 * num_blocks))
        self._index: dict[str, int] = {}
        self._held: list[int] = []

    def held(self, tenant: str) -> int:
        """Return the number of blocks in use that count for a tenant."""
        index = self._index.get(tenant)
        return 0 if index is None else self._held[index]

    def took(self, blocks: Iterable[int], tenant: str) -> None:
        """Count these blocks, which were not in use, for a tenant."""
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
        """Discount these blocks, which are no longer in use."""
        owner, held = self._owner, self._held
        for block in blocks:
            held[owner[block]] -= 1

    def check(self, ref_counts: array[int]) -> Findings:
        """Check that the counts match the blocks in use. O(blocks)."""
        found = [0] * len(self._held)
        for blocks in in_slices(range(NULL_BLOCK + 1, len(ref_counts))):
            for block in blocks:
                if ref_counts[block]:
                    found[self._owner[block]] += 1
            yield None
        for tenant, index in self._index.items():
            if found[index] != self._held[index]:
                yield f"{found[index]} blocks count for tenant {tenant!r}, but {self._held[index]} are counted"

"""Pinned prefixes: cached blocks that a tenant protects from eviction, for a time and within a budget.

    pin ──> pinned ──ttl over──> expired ┐
              ├────unpin─────────────────┼──> ordinary cached blocks
              └────room is needed────────┘    (`yield_one`: the soonest to expire first)

Pins protect prefixes from other requests' blocks, but do not take precedence over serving: if a request that fits the
pool can get its blocks in no other way, they yield.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf

import numpy as np

from octavo.errors import CacheError
from octavo.kvcache.block import NULL_BLOCK, BlockIds, BlockTable, as_array, table_of, where
from octavo.kvcache.hashing import TokenChain, root_hash
from octavo.kvcache.pool import BlockPool
from octavo.kvcache.prefix import PrefixHit

FindPrefix = Callable[[TokenChain, int], PrefixHit]


@dataclass(frozen=True, slots=True)
class Pin:
    """One tenant's hold on one prefix.

    Attributes:
        pin_id: derived from tenant, salt and tokens, so that pinning the same prefix again renews it.
        blocks: the blocks that a request with this prefix would hit, in all groups, in order, without null blocks.
        expires_at: expiry by the clock of its `PinTable`.
    """

    pin_id: str
    tenant: str
    num_tokens: int
    blocks: BlockTable
    ttl_seconds: float
    expires_at: float


@dataclass(slots=True)
class PinCounters:
    """Totals since the start."""

    num_pinned: int = 0  # pins made, not counting renewals
    num_expired: int = 0
    num_yielded: int = 0
    num_unpinned: int = 0


class PinTable:
    """The pins over one pool.

    A block held by several pins counts once against the budget, and once against the share of each of their tenants. So
    a tenant cannot have more pins than its share has blocks, and the rest of the budget is left for others.

    Args:
        budget_blocks: maximum number of blocks pinned at once.
        tenant_blocks: maximum number of blocks that the pins of one tenant hold.
        find: returns the longest cached prefix of a chain, up to a number of full blocks.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        pool: BlockPool,
        budget_blocks: int,
        tenant_blocks: int,
        find: FindPrefix,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_blocks = budget_blocks
        self.tenant_blocks = tenant_blocks
        self.counters = PinCounters()
        self.clock = clock
        self._pool = pool
        self._find = find
        self._pins: dict[str, Pin] = {}
        self._next_expiry = inf  # no pin expires before it

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        """Iterate over all pins, the soonest to expire first."""
        return iter(sorted(self._pins.values(), key=lambda pin: pin.expires_at))

    def pin(self, chain: TokenChain, length: int, salt: str, tenant: str, ttl_seconds: float) -> Pin | None:
        """Pin the cached part of a chain's first `length` full blocks, as far as the tenant's share and the budget
        allow.

        Pinning the same prefix again renews its pin.

        Returns:
            The pin, which may cover less than `length` blocks; None if not even the first block could be pinned.
        """
        if not ttl_seconds > 0:
            raise CacheError(f"a pin's time to live must be positive, got {ttl_seconds} seconds")
        self.expire()
        length, blocks = self._affordable(chain, length, tenant)
        if not length:
            return None
        digest = blake2b(root_hash(tenant, salt) + chain.key(length), digest_size=8)
        pin_id = f"pin-{digest.hexdigest()}"
        expires_at = self.clock() + ttl_seconds
        before = self._pins.get(pin_id)
        if before is not None and before.blocks == blocks:
            pin = replace(before, ttl_seconds=ttl_seconds, expires_at=max(before.expires_at, expires_at))
        else:
            pin = Pin(pin_id, tenant, length * chain.block_size, blocks, ttl_seconds, expires_at)
            self._pool.pin(blocks)
            if before is None:
                self.counters.num_pinned += 1
            else:
                self._remove([before])
        self._pins[pin_id] = pin
        self._next_expiry = min(self._next_expiry, pin.expires_at)
        return pin

    def unpin(self, pin_id: str) -> bool:
        """Remove a pin before it expires; False if there is none."""
        self.expire()
        count = self._remove([self._pins[pin_id]] if pin_id in self._pins else [])
        self.counters.num_unpinned += count
        return bool(count)

    def expire(self) -> int:
        """Remove expired pins and return their number; if there are none, this only reads the clock."""
        if not self._pins or (now := self.clock()) < self._next_expiry:
            return 0
        count = self._remove([pin for pin in self._pins.values() if pin.expires_at <= now])
        self.counters.num_expired += count
        self._next_expiry = min((pin.expires_at for pin in self._pins.values()), default=inf)
        return count

    def yield_one(self) -> bool:
        """Remove the pin that expires first, to make room; False if there is none."""
        count = self._remove([*self][:1])
        self.counters.num_yielded += count
        return bool(count)

    def num_blocks_of(self, tenant: str) -> int:
        """Return the number of blocks that the pins of a tenant hold. O(those, once for each pin)."""
        return len(self._blocks_of(tenant))

    def check(self) -> Iterator[str]:
        """Yield every violation of the pins' own invariants. O(pinned blocks)."""
        held = Counter[int](block for pin in self._pins.values() for block in pin.blocks)
        counts = self._pool.blocks.pins_array
        for block_id in sorted(held.keys() | np.flatnonzero(counts).tolist()):
            if counts[block_id] != held[block_id]:
                yield f"the pool counts {counts[block_id]} pins of block {block_id}, there are {held[block_id]}"
        if len(held) > self.budget_blocks:
            yield f"{len(held)} blocks are pinned, over the budget of {self.budget_blocks}"
        for tenant in sorted({pin.tenant for pin in self._pins.values()}):
            if (num_blocks := self.num_blocks_of(tenant)) > self.tenant_blocks:
                yield f"tenant {tenant!r} pins {num_blocks} blocks, over its share of {self.tenant_blocks}"

    def _blocks_of(self, tenant: str) -> BlockIds:
        held = [as_array(pin.blocks) for pin in self._pins.values() if pin.tenant == tenant]
        return np.unique(np.concatenate([*held, np.empty(0, np.int32)]))

    def _affordable(self, chain: TokenChain, length: int, tenant: str) -> tuple[int, BlockTable]:
        """Return the length of the longest prefix that is cached and within the limits, and the blocks that hold it.

        Under a sliding window a shorter prefix needs other blocks, so each length is looked up again.
        """
        own = self._blocks_of(tenant)
        free, own_free = self.budget_blocks - self._pool.num_with_pins, self.tenant_blocks - len(own)
        while length > 0:
            tables = self._find(chain, length).tables
            length = len(tables[0])
            blocks = np.concatenate([as_array(table) for table in tables])
            blocks = where(blocks != NULL_BLOCK, blocks)
            num_new = np.count_nonzero(np.isin(blocks, own, invert=True))
            excess = max(len(self._pool.unpinned(blocks)) - free, int(num_new) - own_free)
            if excess <= 0:
                return length, table_of(blocks)
            # Shortening the prefix by one block frees at most one block per group.
            length -= -(-excess // len(tables))
        return 0, table_of(np.empty(0, np.int32))

    def _remove(self, pins: Sequence[Pin]) -> int:
        for pin in pins:
            del self._pins[pin.pin_id]
            # The tail first, so that it is evicted before the head.
            self._pool.unpin(pin.blocks[::-1])
        return len(pins)

"""Floors and caps: the blocks that each tenant can always have, and the most that it may have.

    pool  ├─ held by a ─┤─ a's unused floor ─┤─ held by b, beyond its floor ─┤─ for any ─────┤
          └─────────── a's floor ────────────┘

A tenant may take the blocks that are available beyond the unused floors of all others. Blocks that become available
within a floor are kept for its tenant, so no sequence is ever preempted for a floor, unless the floor was raised while
others held more. Blocks that are cached or pinned but unused count towards no tenant: they are evicted, and pins yield,
for a floor.

Neither limit applies to a sequence that runs alone, nor a cap to a tenant's only running sequence: `Capacity` checked
on arrival that they fit, and every accepted request must complete even if the limits have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from octavo.scheduler.kv_limits import KVLimits
from octavo.scheduler.running import RunningSet
from octavo.scheduler.sequences import place_of


class TenantShares:
    """Decides whether a tenant may take the blocks that its sequences need."""

    def __init__(self, kv: KVCacheManager, running: RunningSet, limits: Mapping[str, KVLimits]) -> None:
        self._kv = kv
        self._running = running
        self.set_limits(limits)

    def set_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Replace the tenants' floors and caps."""
        self._limits = limits
        self._floors = {tenant: limit.floor for tenant, limit in limits.items() if limit.floor}

    def __bool__(self) -> bool:
        return bool(self._limits)

    def is_capped(self, tenant: str) -> bool:
        return tenant in self._limits and self._limits[tenant].cap is not None

    def unused_floor(self, tenant: str) -> int:
        """Return how many blocks of its floor a tenant does not hold."""
        floor = self._floors.get(tenant, 0)
        return max(0, floor - self._held(tenant)) if floor else 0

    def kept_for_others(self, tenant: str) -> int:
        """Return the number of available blocks that a tenant may not take: the unused floors of all others."""
        return sum(self.unused_floor(other) for other in self._floors if other != tenant)

    @property
    def num_kept(self) -> int:
        """The number of available blocks that are kept for tenants' floors."""
        return sum(map(self.unused_floor, self._floors))

    def room(self, seq: Sequence) -> int:
        """Return the number of available blocks that a running sequence may take."""
        available = self._kv.pool.num_available
        if not self._limits or len(self._running) <= 1:
            return available
        tenant = seq.request.tenant
        room = available - self.kept_for_others(tenant)
        if self._holds_cap_against(seq):
            room = min(room, self._cap(tenant) - self._held(tenant))
        return max(0, room)

    def num_over_cap(self, seq: Sequence, num_blocks: int) -> int:
        """Return how many blocks a waiting sequence's tenant would be over its cap if it took `num_blocks`."""
        tenant = seq.request.tenant
        if not self.is_capped(tenant) or not self._runs(tenant):
            return 0
        return max(0, self.use_of(tenant) + num_blocks - self._cap(tenant))

    def use_of(self, tenant: str) -> int:
        """Return the blocks that a tenant holds or is still bound to take; -1 if none of its sequences runs."""
        return self._held(tenant) + self.bound_of(tenant) if self._runs(tenant) else -1

    def bound_of(self, tenant: str) -> int:
        """Return the blocks that the tenant's running sequences are still bound to take."""
        return sum(place_of(seq).bound for seq in self._running.order if seq.request.tenant == tenant)

    def helps(self, victim: Sequence, seq: Sequence) -> bool:
        """Whether `seq` could take blocks that `victim` gives back."""
        tenant, others = seq.request.tenant, victim.request.tenant
        if tenant == others or not self._limits:
            return True
        if self._holds_cap_against(seq) and self._held(tenant) >= self._cap(tenant):
            return False
        return self._held(others) > self._floors.get(others, 0)

    def restore_floor(self, tenant: str) -> bool:
        """Let pins yield until a tenant's floor is available; returns whether any did."""
        if not (unused := self.unused_floor(tenant)):
            return False
        kept, pool, yielded = self.kept_for_others(tenant), self._kv.pool, False
        while pool.num_available - kept < unused and self._kv.pins.yield_one():
            yielded = True
        return yielded

    def _cap(self, tenant: str) -> int:
        cap = self._limits[tenant].cap
        assert cap is not None
        return cap

    def _held(self, tenant: str) -> int:
        owners = self._kv.pool.owners
        return 0 if owners is None else owners.held(tenant)

    def _runs(self, tenant: str) -> bool:
        return any(seq.request.tenant == tenant for seq in self._running.order)

    def _holds_cap_against(self, seq: Sequence) -> bool:
        """Whether the cap applies: the tenant is capped and runs another sequence too."""
        tenant = seq.request.tenant
        if not self.is_capped(tenant):
            return False
        return any(other.request.tenant == tenant and other is not seq for other in self._running.order)

"""Floors and caps: how many blocks each tenant can always have, and how many it may have at most.

    pool  ├─ held by a ─┤─ a's unused floor ─┤─ held by b, beyond its floor ─┤─ for anybody ─┤
          └─────────── a's floor ────────────┘

A tenant may take what is available beyond the unused floors of all others. Blocks that become available within a floor
stay available for its tenant: so nobody is ever preempted for a floor, unless it was raised while others held more.
Blocks that are cached or pinned, and in no use, count for nobody: they are evicted, and pins yield, for a floor.

Neither limit holds against a sequence that runs alone, nor a cap against a tenant's only running sequence: whether they
fit was asked when they came (`Capacity`), and everything that came must end, though limits were changed since.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.kvcache.manager import KVCacheManager
from octavo.request import Sequence
from octavo.scheduler.kv_limits import KVLimits
from octavo.scheduler.running import RunningSet


class TenantShares:
    """Asks of every block that a sequence wants whether its tenant may have it."""

    def __init__(self, kv: KVCacheManager, running: RunningSet, limits: Mapping[str, KVLimits]) -> None:
        self._kv = kv
        self._running = running
        self.set_limits(limits)

    def set_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """From now on, by tenant."""
        self._limits = limits
        self._floors = {tenant: limit.floor for tenant, limit in limits.items() if limit.floor}

    def __bool__(self) -> bool:
        return bool(self._limits)

    def is_capped(self, tenant: str) -> bool:
        return tenant in self._limits and self._limits[tenant].cap is not None

    def unused_floor(self, tenant: str) -> int:
        """Blocks of a tenant's floor that it does not hold now."""
        floor = self._floors.get(tenant, 0)
        return max(0, floor - self._held(tenant)) if floor else 0

    def kept_for_others(self, tenant: str) -> int:
        """Available blocks that a tenant may not take: the unused floors of all others."""
        return sum(self.unused_floor(other) for other in self._floors if other != tenant)

    @property
    def num_kept(self) -> int:
        """Available blocks that somebody may not take."""
        return sum(map(self.unused_floor, self._floors))

    def room(self, seq: Sequence) -> int:
        """Available blocks that a running sequence may take."""
        available = self._kv.pool.num_available
        if not self._limits or len(self._running) <= 1:
            return available
        tenant = seq.request.tenant
        room = available - self.kept_for_others(tenant)
        if self._holds_cap_against(seq):
            room = min(room, self._cap(tenant) - self._held(tenant))
        return max(0, room)

    def num_over_cap(self, seq: Sequence, num_blocks: int) -> int:
        """By how many blocks a waiting sequence's tenant would be over its cap if it took so many."""
        tenant = seq.request.tenant
        if not self.is_capped(tenant) or not self._runs(tenant):
            return 0
        return max(0, self.use_of(tenant) + num_blocks - self._cap(tenant))

    def use_of(self, tenant: str) -> int:
        """Blocks that a tenant holds and is bound to take yet; -1 where nothing of it runs."""
        return self._held(tenant) + self.bound_of(tenant) if self._runs(tenant) else -1

    def bound_of(self, tenant: str) -> int:
        """Blocks that the tenant's running sequences are bound to take yet."""
        places = self._running.places
        return sum(places[seq.seq_id].bound for seq in self._running.order if seq.request.tenant == tenant)

    def helps(self, victim: Sequence, seq: Sequence) -> bool:
        """Whether a running sequence could take blocks that another gives back."""
        tenant, others = seq.request.tenant, victim.request.tenant
        if tenant == others or not self._limits:
            return True
        if self._holds_cap_against(seq) and self._held(tenant) >= self._cap(tenant):
            return False
        return self._held(others) > self._floors.get(others, 0)

    def restore_floor(self, tenant: str) -> bool:
        """Let pins yield until a tenant's floor is available, where it is not; returns whether any did."""
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
        """Whether its tenant is capped and runs another sequence beside it."""
        tenant = seq.request.tenant
        if not self.is_capped(tenant):
            return False
        return any(other.request.tenant == tenant and other is not seq for other in self._running.order)

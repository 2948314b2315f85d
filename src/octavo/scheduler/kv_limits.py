"""Floors and caps as the operator gives them, and as blocks of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec

Amount = int | float
"""Of the cache: tokens (int), or a part of it, 0 to 1 (float)."""

KVAmounts = Mapping[str, tuple[Amount | None, Amount | None]]
"""Floor and cap by tenant; None where a tenant has none."""


@dataclass(frozen=True, slots=True)
class KVLimits:
    """Blocks that a tenant can always hold, and that it may hold at most; None: no cap."""

    floor: int = 0
    cap: int | None = None


def resolve_limits(amounts: KVAmounts, spec: KVCacheSpec, num_blocks: int, max_step: int) -> dict[str, KVLimits]:
    """Floors and caps in blocks.

    Args:
        amounts: floor and cap by tenant. So many tokens are the blocks that one sequence of that length holds.
        num_blocks: of the pool, without the null block.
        max_step: tokens of a step, of which a sliding window holds blocks too.

    Raises:
        ConfigError: a floor is over its cap, or the floors together are over the pool; with the numbers.
    """

    def blocks(amount: Amount) -> int:
        if isinstance(amount, float):
            return int(amount * num_blocks)
        return spec.peak_blocks(amount, max_step)

    limits: dict[str, KVLimits] = {}
    for tenant, (floor, cap) in amounts.items():
        limit = KVLimits(0 if floor is None else blocks(floor), None if cap is None else min(blocks(cap), num_blocks))
        size = spec.block_size
        if limit.cap == 0:
            raise ConfigError(f"kv_cap of tenant {tenant} is less than one KV block of {size} tokens")
        if limit.cap is not None and limit.cap < limit.floor:
            numbers = f"{limit.cap} KV blocks of {size} tokens, below its kv_floor of {limit.floor}"
            raise ConfigError(f"kv_cap of tenant {tenant} is {numbers}")
        if limit != KVLimits():
            limits[tenant] = limit
    total = sum(limit.floor for limit in limits.values())
    if total > num_blocks:
        most = sorted(limits, key=lambda tenant: -limits[tenant].floor)
        shown = ", ".join(f"{tenant} {limits[tenant].floor}" for tenant in most[:8])
        raise ConfigError(
            f"the tenants' kv_floor add up to {total} KV blocks of {spec.block_size} tokens, but the cache has "
            f"{num_blocks}: {shown}{', …' if len(most) > 8 else ''}"
        )
    return limits

"""Tenants' floors and caps, as the operator specifies them and in blocks of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.kvcache.spec import KVCacheSpec

Amount = int | float
"""An amount of cache: tokens (int), or a fraction of it from 0 to 1 (float)."""

KVAmounts = Mapping[str, tuple[Amount | None, Amount | None]]
"""Floor and cap by tenant, each None if the tenant has none."""


@dataclass(frozen=True, slots=True)
class KVLimits:
    """The number of blocks that a tenant can always hold, and the most it may hold; a `cap` of None is no cap."""

    floor: int = 0
    cap: int | None = None


def resolve_limits(amounts: KVAmounts, spec: KVCacheSpec, num_blocks: int, max_step: int) -> dict[str, KVLimits]:
    """Convert floors and caps to blocks.

    Args:
        amounts: floor and cap by tenant; a number of tokens means the blocks of one sequence of that length.
        num_blocks: number of blocks in the pool, without the null block.
        max_step: maximum number of tokens in a step, for which a sliding window holds blocks too.

    Raises:
        ConfigError: a cap is below one block or below its floor, or the floors together exceed the pool; the message
            has the numbers.
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

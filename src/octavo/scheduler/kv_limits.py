"""Limits: what can ever be served, and the blocks that each tenant can always have, and may have at most.

    pool  ├─ held by a ─┤─ a's unused floor ─┤─ held by b, beyond its floor ─┤─ for any ─────┤
          └─────────── a's floor ────────────┘

A tenant may take the blocks that are available beyond the unused floors of all others, and no more than its cap leaves:
`TenantLimits.room`, which admission and growth both ask. Blocks that become available within a floor are kept for its
tenant, so no sequence is ever preempted for a floor, unless the floor was raised while others held more. Blocks that
are cached or pinned but unused count towards no tenant: they are evicted, and pins yield, for a floor.

Neither limit applies to a sequence that runs alone, nor a cap to a tenant's only running sequence: it was
checked on arrival that they fit, and every accepted request must complete even if the limits have changed since.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import CapacityError, ConfigError, ContextLengthError
from octavo.kv_budget import KVBudget
from octavo.kvcache.spec import KVCacheSpec
from octavo.request import Request, Sequence, SequenceStatus

if TYPE_CHECKING:  # the options of `octavo serve` need the amounts, and no numpy
    from octavo.kvcache.manager import KVCacheManager
    from octavo.scheduler.running import RunningSet

Amount = int | float
"""An amount of cache: tokens (int), or a fraction of it from 0 to 1 (float)."""

KVAmounts = Mapping[str, tuple[Amount | None, Amount | None]]
"""Floor and cap by tenant, each None if the tenant has none."""


@dataclass(frozen=True, slots=True)
class KVLimits:
    """The number of blocks that a tenant can always hold, and the most it may hold; a `cap` of None is no cap."""

    floor: int = 0
    cap: int | None = None


_NO_LIMITS = KVLimits()


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
        if limit != _NO_LIMITS:
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


class TenantLimits:
    """Decides which requests could ever be served, and whether a tenant may take the blocks that its sequences need.

    `check` and `max_sequence_tokens` are thread-safe, because nothing that they read is changed in place.

    Args:
        max_num_seqs: maximum number of sequences that run at once.
        max_step: maximum number of tokens in a step, for which a sliding window holds blocks too.
    """

    def __init__(
        self, kv: KVCacheManager, running: RunningSet, *, max_num_seqs: int, max_model_len: int, max_step: int
    ) -> None:
        self._kv = kv
        self._running = running
        self._num_blocks = kv.pool.num_blocks - 1
        self._max_num_seqs, self._max_model_len, self._max_step = max_num_seqs, max_model_len, max_step
        self.limits: Mapping[str, KVLimits] = {}
        # Blocks, the budget of a sequence, and the longest one that they hold.
        self._longest: tuple[int, KVBudget | None, int, int] = (-1, None, 0, 0)

    def set_limits(self, limits: Mapping[str, KVLimits]) -> None:
        """Replace the tenants' floors and caps."""
        self.limits = limits

    def __bool__(self) -> bool:
        return bool(self.limits)

    def is_capped(self, tenant: str) -> bool:
        return self._limits_of(tenant).cap is not None

    def room(self, seq: Sequence) -> int:
        """Return the number of available blocks that a sequence may take, running or waiting."""
        available = self._kv.pool.num_available
        if not self.limits or not any(other is not seq for other in self._running.order):
            return available
        room = min(available - self._kept_for_others(seq.request.tenant), self.cap_left(seq))
        return max(0, int(room))

    def cap_left(self, seq: Sequence) -> float:
        """Return how many more blocks a sequence's tenant may hold; infinite if no cap applies, negative if exceeded.

        For a waiting sequence, also without those that the tenant's running sequences are still bound to take.
        """
        tenant = seq.request.tenant
        cap = self._limits_of(tenant).cap
        if cap is None or not any(other is not seq for other in self._running_of(tenant)):
            return math.inf
        return cap - (self._held(tenant) if seq.status is SequenceStatus.RUNNING else self.use_of(tenant))

    def is_within_floor(self, tenant: str, num_blocks: int) -> bool:
        """Whether a tenant's running sequences and a newcomer that takes `num_blocks` fit the tenant's floor."""
        return bool(unused := self._unused_floor(tenant)) and num_blocks + self._bound_of(tenant) <= unused

    @property
    def num_kept(self) -> int:
        """The number of available blocks that are kept for tenants' floors."""
        return sum(map(self._unused_floor, self.limits))

    def use_of(self, tenant: str) -> int:
        """Return the blocks that a tenant holds or is still bound to take; -1 if none of its sequences runs."""
        return self._held(tenant) + self._bound_of(tenant) if self._running_of(tenant) else -1

    def helps(self, victim: Sequence, seq: Sequence) -> bool:
        """Whether `seq` could take blocks that `victim` gives back."""
        tenant, others = seq.request.tenant, victim.request.tenant
        if tenant == others or not self.limits:
            return True
        if self.cap_left(seq) <= 0:
            return False
        return self._held(others) > self._limits_of(others).floor

    def restore_floor(self, tenant: str) -> bool:
        """Let pins yield until a tenant's floor is available; returns whether any did."""
        if not (unused := self._unused_floor(tenant)):
            return False
        kept, pool, yielded = self._kept_for_others(tenant), self._kv.pool, False
        while pool.num_available - kept < unused and self._kv.pins.yield_one():
            yielded = True
        return yielded

    def _unused_floor(self, tenant: str) -> int:
        """Return how many blocks of its floor a tenant does not hold."""
        floor = self._limits_of(tenant).floor
        return max(0, floor - self._held(tenant)) if floor else 0

    def _kept_for_others(self, tenant: str) -> int:
        """Return the number of available blocks that a tenant may not take: the unused floors of all others."""
        return sum(self._unused_floor(other) for other in self.limits if other != tenant)

    def _bound_of(self, tenant: str) -> int:
        """Return the blocks that the tenant's running sequences are still bound to take."""
        return sum(seq.state.placed.bound for seq in self._running_of(tenant))

    def _held(self, tenant: str) -> int:
        owners = self._kv.pool.owners
        return 0 if owners is None else owners.held(tenant)

    def _running_of(self, tenant: str) -> list[Sequence]:
        return [seq for seq in self._running.order if seq.request.tenant == tenant]

    def _limits_of(self, tenant: str) -> KVLimits:
        return self.limits.get(tenant, _NO_LIMITS)

    def check(self, request: Request) -> None:
        """Refuse a request that could not be served however long it waits, with the numbers in the error.

        Raises:
            ContextLengthError: prompt + max_tokens is over max_model_len.
            CapacityError: one sequence needs more blocks than its tenant can have, or there are more sequences than run
                at once.
        """
        params, tenant = request.params, request.tenant
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.most_output_tokens
        limit = self._max_model_len
        total = num_prompt_tokens + max_tokens
        if total > limit:
            raise ContextLengthError(
                f"this model's maximum context length is {limit} tokens, but {total} were requested: "
                f"{num_prompt_tokens} in the prompt and {max_tokens} for the completion (max_tokens)",
                param="max_tokens" if num_prompt_tokens < limit else "prompt",
            )
        if (width := params.num_sequences) > self._max_num_seqs:
            raise CapacityError(
                f"{params.width_param} is {width}, but at most {self._max_num_seqs} sequences run at once, the smaller "
                "of max_num_seqs and max_num_batched_tokens",
                param=params.width_param,
            )
        blocks = self._blocks(num_prompt_tokens + max(1, max_tokens), params.kv_budget, num_prompt_tokens)
        most = self._most_blocks(tenant)
        if blocks > most:
            if most == self._num_blocks:
                limit_is = f"the cache has {most} in all"
            elif most == self._limits_of(tenant).cap:
                limit_is = f"this API key's tenant may hold {most} at once (kv_cap)"
            else:
                # Others' floors are the reason, but errors do not reveal other tenants' floors.
                limit_is = f"at most {most} are available to this API key's tenant"
            raise CapacityError(
                f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens need {blocks} KV blocks of "
                f"{self._kv.spec.block_size} tokens, but {limit_is}",
                param="max_tokens",
            )

    def max_sequence_tokens(self, tenant: str = "", budget: KVBudget | None = None, num_prompt_tokens: int = 0) -> int:
        """Return the length of a tenant's longest sequence that `check` accepts, in tokens; 0 if none fits."""
        most, prompt = self._most_blocks(tenant), num_prompt_tokens if budget is not None and budget.measures else 0
        *known, longest = self._longest  # read once: other threads replace it
        if known != [most, budget, prompt]:
            # Bisect: the number of blocks never falls as tokens are added.
            lengths = range(1, self._max_model_len + 1)
            longest = bisect.bisect_left(lengths, True, key=lambda total: self._blocks(total, budget, prompt) > most)
            self._longest = (most, budget, prompt, longest)
        return longest

    def _most_blocks(self, tenant: str) -> int:
        """Return the blocks that a tenant can have if no other tenant holds more than its floor."""
        limits = self.limits
        left = self._num_blocks - sum(limit.floor for other, limit in limits.items() if other != tenant)
        cap = self._limits_of(tenant).cap
        return left if cap is None else min(left, cap)

    def _blocks(self, total: int, budget: KVBudget | None, num_prompt_tokens: int) -> int:
        # The last token's key and value are never computed.
        return self._kv.spec.peak_blocks(total - 1, self._max_step, budget, num_prompt_tokens)

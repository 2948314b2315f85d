"""Eviction policies: which cached block is evicted first when a free one is needed.

| name     | first to go                                           | per operation |
|----------|-------------------------------------------------------|---------------|
| lru      | least recently used                                   | O(1)          |
| fifo     | first published                                       | O(log n)      |
| lfu      | fewest hits                                           | O(log n)      |
| priority | computed by the least important requests              | O(log n)      |
| cost     | cheapest to recompute, times how often it was used    | O(log n)      |
| adaptive | lowest observed rate of return at its age             | O(1)          |
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import ConfigError
from octavo.kvcache.eviction.adaptive import AdaptiveEviction
from octavo.kvcache.eviction.base import EvictionPolicy
from octavo.kvcache.eviction.cost import CostEviction, RecomputeCost
from octavo.kvcache.eviction.leaf_first import LeafFirstEviction
from octavo.kvcache.eviction.ranked import FifoEviction, LfuEviction, PriorityEviction
from octavo.kvcache.eviction.recency import LruEviction

__all__ = [
    "EVICTION_POLICIES",
    "AdaptiveEviction",
    "CostEviction",
    "EvictionPolicy",
    "FifoEviction",
    "LeafFirstEviction",
    "LfuEviction",
    "LruEviction",
    "PriorityEviction",
    "RecomputeCost",
    "make_eviction_policy",
    "make_lower_eviction",
]

EVICTION_POLICIES: dict[str, Callable[[RecomputeCost], EvictionPolicy]] = {
    "lru": lambda cost: LruEviction(),
    "fifo": lambda cost: FifoEviction(),
    "lfu": lambda cost: LfuEviction(),
    "priority": lambda cost: PriorityEviction(),
    "cost": CostEviction,
    "adaptive": lambda cost: AdaptiveEviction(),
}


def make_eviction_policy(name: str, cost: RecomputeCost | None = None) -> EvictionPolicy:
    """Return the eviction policy with the given name; raises ConfigError, listing the known names, if there is none."""
    try:
        make = EVICTION_POLICIES[name]
    except KeyError:
        raise ConfigError(f"eviction_policy must be one of {', '.join(EVICTION_POLICIES)}, got {name!r}") from None
    return make(cost or RecomputeCost())


def make_lower_eviction(name: str) -> EvictionPolicy:
    """Return the policy for a tier below the device; "lru" replaces "cost", because the tier does not know costs."""
    return make_eviction_policy("lru" if name == "cost" else name)

"""Eviction policies: which cached block is evicted first when a free one is needed.

| name     | first to go                                           | per operation |
|----------|-------------------------------------------------------|---------------|
| lru      | least recently used                                   | O(1)          |
| fifo     | first published                                       | O(log n)      |
| priority | computed by the least important requests              | O(log n)      |
| adaptive | lowest observed rate of return at its age             | O(1)          |
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.kvcache.eviction.adaptive import AdaptiveEviction
from octavo.kvcache.eviction.policies import EvictionPolicy, FifoEviction, LruEviction, PriorityEviction

__all__ = [
    "EVICTION_POLICIES",
    "AdaptiveEviction",
    "EvictionPolicy",
    "FifoEviction",
    "LruEviction",
    "PriorityEviction",
    "make_eviction_policy",
]

EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LruEviction,
    "fifo": FifoEviction,
    "priority": PriorityEviction,
    "adaptive": AdaptiveEviction,
}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """Return a new eviction policy, by its name in the configuration."""
    return EVICTION_POLICIES[name]()

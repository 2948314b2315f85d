"""A small host memory and its transfers, for tests."""

from __future__ import annotations

from octavo.kvcache.block import BlockId, HostBlockId
from octavo.kvcache.eviction import make_eviction_policy
from octavo.kvcache.hashing import Label, private_label
from octavo.kvcache.hierarchy import CacheHierarchy
from octavo.kvcache.host_memory import HostMemory
from octavo.request import SequenceId


def memory(num_swap_slots: int, num_prefix_slots: int) -> HostMemory:
    return HostMemory(num_swap_slots + num_prefix_slots, num_swap_slots, 1, make_eviction_policy("lru"))


def label(number: int) -> Label:
    return Label(number.to_bytes(16, "big"), b"parent of 16 byt", number.to_bytes(4, "little"))


def private(number: int) -> Label:
    return private_label(SequenceId(number), 0, 0)


def keep(host: HostMemory, wanted: Label, block: int = 5) -> HostBlockId | None:
    """Keep a block of the device for a preempted sequence; returns its slot, if there is room."""
    kept = host.keep([(BlockId(block), wanted)], "")
    return None if kept is None else kept[0]


def faults(host: HostMemory, *kept: HostBlockId) -> list[str]:
    return list(host.check(kept))


def step(tier: HostMemory | CacheHierarchy) -> None:
    tier.take()
    tier.complete()
    if isinstance(tier, CacheHierarchy):
        assert list(tier.check()) == []


def num_held(host: HostMemory) -> int:
    """The holds by requests that wait and by transfers; nothing is kept for preempted sequences."""
    return sum(host.pool.blocks.references) - len(host._writing)


def store(host: HostMemory, *numbers: int) -> None:
    for number in numbers:
        host.store_prefix(BlockId(number), label(number), "")
        step(host)

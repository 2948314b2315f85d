"""A small host memory and its transfers, for tests."""

from __future__ import annotations

from octavo.kvcache.block import BlockId
from octavo.kvcache.eviction import make_eviction_policy
from octavo.kvcache.hashing import Label, private_label
from octavo.kvcache.hierarchy import CacheHierarchy
from octavo.kvcache.host_memory import HostBlockId, HostMemory
from octavo.kvcache.host_transfers import HostTransfers
from octavo.request import SequenceId


def memory(num_swap_slots: int, num_prefix_slots: int) -> HostTransfers:
    host = HostMemory(num_swap_slots + num_prefix_slots, num_swap_slots, 1, make_eviction_policy("lru"))
    return HostTransfers(host)


def label(number: int) -> Label:
    return Label(number.to_bytes(16, "big"), b"parent", number.to_bytes(4, "little"))


def private(number: int) -> Label:
    return private_label(SequenceId(number), 0, 0)


def keep(transfers: HostTransfers, wanted: Label, block: int = 5) -> HostBlockId | None:
    """Keep a block of the device for a preempted sequence; returns its slot, if there is room."""
    kept = transfers.keep([(BlockId(block), wanted)], "")
    return transfers.host.kept(wanted.key) if kept else None


def faults(transfers: HostTransfers) -> list[str]:
    return list(transfers.host.check()) + list(transfers.check())


def step(transfers: HostTransfers | CacheHierarchy) -> None:
    transfers.take()
    transfers.complete()
    assert list(transfers.check()) + list(transfers.host.check()) == []


def store(transfers: HostTransfers, *numbers: int) -> None:
    for number in numbers:
        transfers.store_prefix(BlockId(number), label(number), "")
        step(transfers)

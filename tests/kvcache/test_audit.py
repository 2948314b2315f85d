"""The audit finds whatever is wrong with the books, one structure after the other."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from octavo.errors import CacheError
from octavo.kvcache.block import BlockId, HostBlockId
from octavo.kvcache.manager import KVCacheManager
from octavo.request import PinRequest
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence


def busy_manager() -> KVCacheManager:
    """One sequence runs, one is swapped out with a block in host memory, one has left a pinned prefix."""
    manager = make_manager(64, 4, num_host_blocks=1, pin_budget=1.0)
    gone, away, running = (make_sequence([i] * 14) for i in range(3))
    admit_and_compute(manager, gone)
    manager.pin(gone.request, PinRequest(8, 1000.0))
    manager.release(gone)
    admit_and_compute(manager, away)
    assert manager.demote(away)
    admit_and_compute(manager, running)
    manager.hierarchy.take()
    manager.audit()
    return manager


def _forget_a_place(kv: KVCacheManager) -> None:
    next(iter(kv.hierarchy._kept.values())).sequences.clear()


def _forget_a_sequence(kv: KVCacheManager) -> None:
    kv.hierarchy._left.clear()


def _remember_what_is_gone(kv: KVCacheManager) -> None:
    kv.blocks.children.add([BlockId(kv.pool._free[0])], [1234567])


def _lose_a_key(kv: KVCacheManager) -> None:
    index = kv.blocks.keys
    index._heads[:] = array("i", [0] * len(index._heads))


def _forget_a_store(kv: KVCacheManager) -> None:
    kv.hierarchy.host._stores_in_flight.clear()


CORRUPTIONS: dict[str, tuple[Callable[[KVCacheManager], Any], str]] = {
    "a lost block": (lambda kv: kv.pool.allocate(1), "counts 1 references, tables hold 0"),
    "a block freed twice": (lambda kv: kv.pool._free.append(kv.pool._free[0]), "stands twice in the free stack"),
    "a reference too many": (
        lambda kv: kv.pool.blocks.references.__setitem__(kv.pool._free[0], 1),
        "but free stack: True",
    ),
    "a referenced null block": (lambda kv: kv.blocks.references.__setitem__(0, 1), "the null block is referenced"),
    "a freed null block": (lambda kv: kv.pool._free.append(BlockId(0)), "the null block is referenced"),
    "a pin nobody has": (lambda kv: kv.pool.pin([list(kv.holdings.values())[-1].tables[0][0]]), "there are|pins of"),
    "a block of nobody in the index": (
        lambda kv: kv.prefix_cache.drop([BlockId(int(kv.blocks.published()[0]))]),
        "is free by its counts",
    ),
    "a note too many": (_remember_what_is_gone, "is published or listed with its parent.s children, but not both"),
    "a lost key": (_lose_a_key, "has a key or is published in the prefix cache, but not both"),
    "a key of nobody": (
        lambda kv: kv.blocks.groups.__setitem__(int(kv.blocks.published()[0]), -1),
        "has a key or is published in the prefix cache, but not both",
    ),
    "a broken ring": (lambda kv: kv.pool._eviction._next.__setitem__(-1, -1), "eviction policy: False|stands twice"),  # type: ignore[attr-defined]
    "a miscounted block": (lambda kv: setattr(kv.pool, "num_cached", 5), "blocks, but 5 are counted"),
    "a lost host block": (lambda kv: kv.hierarchy.host.pool.blocks.references.__setitem__(1, 0), "free stack: False"),
    "a hold of nobody": (
        lambda kv: kv.hierarchy.host.hold([HostBlockId(1)]),
        "counts 3 references, tables hold 2",
    ),
    "a store that nobody makes": (_forget_a_store, "noted as written by steps, those are"),
    "a host block of nobody": (_forget_a_sequence, "needs of preempted sequences are noted, they have 0"),
    "a lost hope": (_forget_a_place, "is not noted as needed"),
    "a miscounted slot": (lambda kv: setattr(kv.hierarchy, "num_kept", 5), "slots are kept, 5 counted"),
    "a slot beyond the swap space": (lambda kv: setattr(kv.hierarchy.host, "num_swap_slots", 0), "counted, 0 may be"),
    "a miscounted transfer": (
        lambda kv: setattr(kv.hierarchy.swapped, "blocks_in", 5),
        "blocks were moved out",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_whatever_is_wrong_is_found(name: str) -> None:
    corrupt, message = CORRUPTIONS[name]
    manager = busy_manager()
    corrupt(manager)
    with pytest.raises(CacheError, match=message):
        manager.audit()

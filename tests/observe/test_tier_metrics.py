"""What Prometheus reads of the tiers below the device."""

from __future__ import annotations

from pathlib import Path

from octavo.kvcache.block import BlockId, BlockTransfer, HostBlockId
from octavo.kvcache.host_memory import HostCounters
from octavo.observe.stats import EngineStats
from octavo.scheduler.plan import StepPlan, StepResult
from octavo.tiers.base import Reason
from octavo.tiers.store import Store
from tests.observe.test_stats import exposed, value
from tests.tiers.stores import BLOCK_BYTES, MEDIA, get, label, put

MOVED = BlockTransfer(BlockId(1), HostBlockId(0))


def test_each_tier_tells_its_hits_bytes_times_and_misses_by_reason(tmp_path: Path) -> None:
    stats = EngineStats(max_model_len=64)
    stats.host, stats.block_bytes = HostCounters(), 100
    stats.host.loaded, stats.host.stored, stats.host.refused, stats.host.lost = 3, 7, 5, 1
    stats.on_moved(StepPlan(loads=(MOVED,)), StepResult(load_seconds=0.25))
    stats.on_moved(StepPlan(stores=(MOVED,)), StepResult(store_seconds=0.5))
    store = Store(MEDIA["disk"](tmp_path))
    stats.stores = (store,)
    put(store, 1, 2)
    get(store, [label(1), label(9)])
    families = exposed(stats)
    for name, host, disk in (
        ("hit_blocks", 3, 1),
        ("stored_blocks", 7, 2),
        ("read_bytes", 300, BLOCK_BYTES),
        ("written_bytes", 700, 2 * BLOCK_BYTES),
    ):
        family = f"octavo:tier_{name}"
        assert value(families, family, f"{family}_total", tier="host") == host
        assert value(families, family, f"{family}_total", tier="disk") == disk
    of_disk = [s for s in families["octavo:tier_misses"].samples if s.labels["tier"] == "disk"]
    assert {s.labels["reason"]: s.value for s in of_disk if s.labels["operation"] == "read" and s.value} == {
        "absent": 1
    }
    assert len(of_disk) == 3 * len(Reason), "every reason has a series from the start, and there are no others"
    misses = "octavo:tier_misses"
    for reason, count in (("no_space", 5), ("io_error", 1)):
        assert value(families, misses, f"{misses}_total", tier="host", operation="write", reason=reason) == count
    seconds = "octavo:tier_transfer_seconds"
    for operation, total in (("read", 0.25), ("write", 0.5)):
        assert value(families, seconds, f"{seconds}_count", tier="host", operation=operation) == 1
        assert value(families, seconds, f"{seconds}_sum", tier="host", operation=operation) == total
    for operation, count, total in (
        ("read", 1, store.counters.read.seconds),
        ("write", 2, store.counters.write.seconds),
    ):
        assert value(families, seconds, f"{seconds}_count", tier="disk", operation=operation) == count
        assert value(families, seconds, f"{seconds}_sum", tier="disk", operation=operation) == total
    assert value(families, "octavo:tier_load_latency_seconds", tier="disk") == store.speed.per_load
    assert value(families, "octavo:tier_load_seconds_per_byte", tier="disk") == store.speed.per_byte
    for operation in ("read", "write"):
        assert value(families, "octavo:tier_open", tier="disk", operation=operation) == 1
    store.close()
    for operation in ("read", "write"):
        assert value(exposed(stats), "octavo:tier_open", tier="disk", operation=operation) == 0


def test_without_tiers_there_are_no_series_of_any() -> None:
    assert not [name for name in exposed(EngineStats(max_model_len=64)) if name.startswith("octavo:tier_")]


def test_a_stores_series_do_not_depend_on_host_memory_for_prefixes(tmp_path: Path) -> None:
    stats = EngineStats(max_model_len=64)
    store = Store(MEDIA["disk"](tmp_path))
    stats.stores = (store,)
    families = exposed(stats)
    store.close()
    assert value(families, "octavo:tier_open", tier="disk", operation="read") == 1
    assert {s.labels["tier"] for s in families["octavo:tier_misses"].samples} == {"disk"}

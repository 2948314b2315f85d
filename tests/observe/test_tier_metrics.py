"""What Prometheus reads of the tiers below the device."""

from __future__ import annotations

from pathlib import Path

from octavo.kvcache.host_memory import HostCounters
from octavo.observe.stats import EngineStats
from octavo.tiers.base import Reason
from octavo.tiers.store import Store
from tests.observe.test_stats import exposed, value
from tests.tiers.stores import BLOCK_BYTES, MEDIA, get, label, put


def test_each_tier_tells_its_hits_bytes_times_and_misses_by_reason(tmp_path: Path) -> None:
    stats = EngineStats(max_model_len=64)
    stats.host, stats.block_bytes = HostCounters(), 100
    stats.host.loaded, stats.host.stored = 3, 7
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
    misses = families["octavo:tier_misses"].samples
    assert {s.labels["reason"]: s.value for s in misses if s.labels["operation"] == "read" and s.value} == {"absent": 1}
    assert len(misses) == 3 * len(Reason), "every reason has a series from the start, and there are no others"
    seconds = "octavo:tier_transfer_seconds"
    for operation, count, total in (
        ("read", 1, store.counters.read_seconds),
        ("write", 2, store.counters.write_seconds),
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

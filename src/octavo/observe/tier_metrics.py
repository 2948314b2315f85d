"""Host memory and the stores below it, in Prometheus' format.

Labels are `tier` (host, disk, remote), `operation` (read, write) and `reason`, of which there are as many as `Reason`
has: no series is made by what requests hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.observe.stats import EngineStats
from octavo.tiers.base import Reason
from octavo.tiers.counters import LATENCY_BOUNDS
from octavo.tiers.store import Store

_UPPER_BOUNDS = (*map(str, LATENCY_BOUNDS), "+Inf")


class TierCollector(Collector):
    """A Prometheus collector over the tiers below the device; without any it has nothing to tell."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        if self._stats.host is not None:
            yield from self._moved()
        if self._stats.stores:
            yield from self._of_stores(self._stats.stores)

    def _moved(self) -> Iterator[Metric]:
        host, size = self._stats.host, self._stats.block_bytes
        assert host is not None
        totals = {"host": (host.loaded, host.stored, host.loaded * size, host.stored * size)}
        for store in self._stats.stores:
            own = store.counters
            totals[store.name] = (own.loaded, own.stored, own.read_bytes, own.written_bytes)
        names = (
            ("hit_blocks", "Blocks that a tier had: from host memory to the device, from a store to host memory."),
            ("stored_blocks", "Blocks written to a tier."),
            ("read_bytes", "Bytes of blocks that a tier had."),
            ("written_bytes", "Bytes of blocks written to a tier."),
        )
        for place, (name, help) in enumerate(names):
            counter = CounterMetricFamily(f"octavo:tier_{name}", help, labels=["model_name", "tier"])
            for tier, numbers in totals.items():
                counter.add_metric([self._model_name, tier], numbers[place])
            yield counter

    def _of_stores(self, stores: tuple[Store, ...]) -> Iterator[Metric]:
        labels = ["model_name", "tier"]
        usable = GaugeMetricFamily(
            "octavo:tier_open", "1 while a store is used, 0 after errors in a row.", labels=labels
        )
        closings = CounterMetricFamily("octavo:tier_closings", "Times that errors in a row closed it.", labels=labels)
        misses = CounterMetricFamily(
            "octavo:tier_misses", "Blocks not read or not written, by reason.", labels=[*labels, "operation", "reason"]
        )
        seconds = HistogramMetricFamily(
            "octavo:tier_transfer_seconds", "What a transfer of blocks took.", labels=[*labels, "operation"]
        )
        for store in stores:
            own, values = store.counters, [self._model_name, store.name]
            usable.add_metric(values, store.is_open)
            closings.add_metric(values, store.num_closings)
            for operation, missed, latency, total in (
                ("read", own.read_misses, own.read_latency, own.read_seconds),
                ("write", own.write_misses, own.write_latency, own.write_seconds),
            ):
                for reason in Reason:
                    misses.add_metric([*values, operation, reason.value], missed[reason])
                buckets = list(zip(_UPPER_BOUNDS, map(float, accumulate(list(latency))), strict=True))
                seconds.add_metric([*values, operation], buckets, total)
        yield from (usable, closings, misses, seconds)

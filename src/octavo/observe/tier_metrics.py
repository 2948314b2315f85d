"""Metrics of host memory and the stores below it, in Prometheus' format.

Labels are `tier` (host, disk, neighbour, remote), `operation` (read, write; of misses also open) and `reason` (the
members of `Reason`), so that the number of series does not depend on requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.observe.stats import EngineStats
from octavo.scheduler.waiting import Fetching
from octavo.tiers.base import LATENCY_BOUNDS, Reason
from octavo.tiers.store import Store

_UPPER_BOUNDS = (*map(str, LATENCY_BOUNDS), "+Inf")


class TierCollector(Collector):
    """A Prometheus collector over the tiers below the device; empty if there are none."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        if self._stats.host is not None:
            yield from self._moved()
        if self._stats.host is not None or self._stats.stores:
            yield from self._of_stores(self._stats.stores)
        if self._stats.fetching is not None:
            yield from self._cost(self._stats.fetching)

    def _moved(self) -> Iterator[Metric]:
        host, size = self._stats.host, self._stats.block_bytes
        assert host is not None
        totals = {"host": (host.loaded, host.stored, host.loaded * size, host.stored * size)}
        for store in self._stats.stores:
            own = store.counters
            totals[store.name] = (own.read.blocks, own.write.blocks, own.read.bytes, own.write.bytes)
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
            "octavo:tier_open",
            "1 while a store is read or written, 0 after errors in a row.",
            labels=[*labels, "operation"],
        )
        closings = CounterMetricFamily(
            "octavo:tier_closings", "Times that errors in a row stopped it.", labels=[*labels, "operation"]
        )
        misses = CounterMetricFamily(
            "octavo:tier_misses",
            "Blocks not read, not written, or damaged when opened, by reason.",
            labels=[*labels, "operation", "reason"],
        )
        seconds = HistogramMetricFamily(
            "octavo:tier_transfer_seconds", "What a transfer of blocks took.", labels=[*labels, "operation"]
        )
        latency = GaugeMetricFamily(
            "octavo:tier_load_latency_seconds", "Fitted fixed cost of a load, in seconds.", labels=labels
        )
        pace = GaugeMetricFamily(
            "octavo:tier_load_seconds_per_byte", "What each byte of a load takes, as measured.", labels=labels
        )
        if (host := self._stats.host) is not None:
            # As if it were a store: it has no room, or the step that wrote a block has failed.
            for reason, count in ((Reason.NO_SPACE, host.refused), (Reason.IO_ERROR, host.lost)):
                misses.add_metric([self._model_name, "host", "write", reason.value], count)
            for operation, times in (("read", self._stats.host_loads), ("write", self._stats.host_stores)):
                buckets = list(zip(_UPPER_BOUNDS, map(float, accumulate(times.counts)), strict=True))
                seconds.add_metric([self._model_name, "host", operation], buckets, times.total)
        for store in stores:
            if store.speed.per_load is not None and store.speed.per_byte is not None:
                latency.add_metric([self._model_name, store.name], store.speed.per_load)
                pace.add_metric([self._model_name, store.name], store.speed.per_byte)
            own, values = store.counters, [self._model_name, store.name]
            usable.add_metric([*values, "read"], store.is_open)
            usable.add_metric([*values, "write"], store.is_writable)
            for work, count in store.num_closings.items():
                closings.add_metric([*values, work.value], count)
            for reason in Reason:
                misses.add_metric([*values, "open", reason.value], own.open_misses[reason])
            for operation, totals in (("read", own.read), ("write", own.write)):
                for reason in Reason:
                    misses.add_metric([*values, operation, reason.value], totals.misses[reason])
                buckets = list(zip(_UPPER_BOUNDS, map(float, accumulate(list(totals.latency))), strict=True))
                seconds.add_metric([*values, operation], buckets, totals.seconds)
        yield from (usable, closings, misses, seconds, latency, pace)

    def _cost(self, fetching: Fetching) -> Iterator[Metric]:
        labels = ["model_name"]
        compute = GaugeMetricFamily(
            "octavo:tier_compute_seconds_per_token", "What computing a prompt token takes, as measured.", labels=labels
        )
        if (per_token := fetching.speed.seconds_per_token) is not None:
            compute.add_metric([self._model_name], per_token)
        skipped = CounterMetricFamily(
            "octavo:tier_loads_not_worth", "Loads that were expected to take longer than computing.", labels=labels
        )
        skipped.add_metric([self._model_name], fetching.tiers.num_not_worth)
        yield from (compute, skipped)

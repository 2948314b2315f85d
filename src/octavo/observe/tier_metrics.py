"""Metrics of host memory and the stores below it, in Prometheus' format.

Labels are `tier` (host, disk, neighbour, remote), `operation` (read, write; of misses also open) and `reason` (the
members of `Reason`), so that the number of series does not depend on requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from octavo.observe.collector import ModelCollector
from octavo.scheduler.waiting import Fetching
from octavo.tiers.base import LATENCY_BOUNDS, Reason


class TierCollector(ModelCollector):
    """A Prometheus collector over the tiers below the device; empty if there are none."""

    def collect(self) -> Iterator[Metric]:
        if self._stats.host is not None:
            yield from self._moved()
        if self._stats.host is not None or self._stats.stores:
            yield from self._of_stores()
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
            values = {tier: numbers[place] for tier, numbers in totals.items()}
            yield self._counter(f"octavo:tier_{name}", help, values, "tier")

    def _of_stores(self) -> Iterator[Metric]:
        stats, stores = self._stats, self._stats.stores
        usable = {(each.name, "read"): each.is_open for each in stores}
        usable |= {(each.name, "write"): each.is_writable for each in stores}
        closings = {(each.name, work.value): n for each in stores for work, n in each.num_closings.items()}
        misses: dict[tuple[str, ...], int] = {}
        observed: dict[tuple[str, ...], tuple[list[int], float]] = {}
        if stats.host is not None:
            # As if it were a store: it has no room, or the step that wrote a block has failed.
            misses["host", "write", Reason.NO_SPACE.value] = stats.host.refused
            misses["host", "write", Reason.IO_ERROR.value] = stats.host.lost
            for operation, times in (("read", stats.host_loads), ("write", stats.host_stores)):
                observed["host", operation] = times.counts, times.total
        for store in stores:
            own = store.counters
            of = {"open": own.open_misses, "read": own.read.misses, "write": own.write.misses}
            misses |= {(store.name, work, reason.value): of[work][reason] for work in of for reason in Reason}
            for operation, totals in (("read", own.read), ("write", own.write)):
                observed[store.name, operation] = totals.latency, totals.seconds
        per_load = {each.name: cost for each in stores if (cost := each.speed.per_load) is not None}
        per_byte = {each.name: cost for each in stores if (cost := each.speed.per_byte) is not None}
        work = "tier", "operation"
        yield self._gauge(
            "octavo:tier_open", "1 while a store is read or written, 0 after errors in a row.", usable, *work
        )
        yield self._counter("octavo:tier_closings", "Times that errors in a row stopped it.", closings, *work)
        yield self._counter(
            "octavo:tier_misses",
            "Blocks not read, not written, or damaged when opened, by reason.",
            misses,
            *(*work, "reason"),
        )
        yield self._histogram(
            "octavo:tier_transfer_seconds", "What a transfer of blocks took.", LATENCY_BOUNDS, observed, *work
        )
        yield self._gauge(
            "octavo:tier_load_latency_seconds", "Fitted fixed cost of a load, in seconds.", per_load, "tier"
        )
        yield self._gauge(
            "octavo:tier_load_seconds_per_byte", "What each byte of a load takes, as measured.", per_byte, "tier"
        )

    def _cost(self, fetching: Fetching) -> Iterator[Metric]:
        per_token = fetching.speed.seconds_per_token
        yield self._gauge(
            "octavo:tier_compute_seconds_per_token",
            "What computing a prompt token takes, as measured.",
            {} if per_token is None else per_token,
        )
        yield self._counter(
            "octavo:tier_loads_not_worth",
            "Loads that were expected to take longer than computing.",
            fetching.tiers.num_not_worth,
        )

"""Prometheus metrics of the server: answers by endpoint, and each tenant's use for holders of an admin key.

Labels are tenants' names (from the keys file, or derived from a hash of the key), at most `quota.MAX_SHOWN_TENANTS`;
all others are summed as "other". No series contains a key, a request id or text of a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.observe.collector import ModelCollector
from octavo.observe.stats import EngineStats
from octavo.observe.tenant_queues import Waiting
from octavo.server.quotas import Quotas
from octavo.server.route import ResponseCounts

_COUNTERS = (
    ("requests", "requests", "Requests that were let in."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that reached the engine."),
    ("cached_tokens", "cached_tokens", "Of these, tokens found in the prefix cache."),
    ("generation_tokens", "completion_tokens", "Generated tokens that were sent."),
)


class TenantCollector(ModelCollector):
    """A Prometheus collector over the tenants' use of one server."""

    def __init__(self, quotas: Quotas, stats: EngineStats, model_name: str) -> None:
        super().__init__(stats, model_name)
        self._quotas = quotas

    def collect(self) -> Iterator[Metric]:
        uses = self._quotas.shown()
        running = {tenant: use.running for tenant, use in uses.items()}
        yield self._gauge("octavo:tenant_requests_running", "Requests being served or waiting.", running, "tenant")
        yield self._counter(
            "octavo:tenant_refused_requests",
            "Requests refused: over the tenant's rate or concurrency, its queue full, or no room in the server.",
            {(tenant, reason): n for tenant, use in uses.items() for reason, n in sorted(use.refused.items())},
            *("tenant", "reason"),
        )
        for name, attribute, help in _COUNTERS:
            values = {tenant: getattr(use, attribute) for tenant, use in uses.items()}
            yield self._counter(f"octavo:tenant_{name}", help, values, "tenant")
        waiting: dict[str, Waiting] = dict.fromkeys(uses, Waiting())
        for tenant, own in self._stats.waiting.snapshot().items():
            name = self._quotas.shown_name(tenant)
            before = waiting.get(name, Waiting())
            waiting[name] = Waiting(before.requests + own.requests, before.tokens + own.tokens)
        for name, attribute, help in (
            ("requests_waiting", "requests", "Requests waiting for their first step."),
            ("waiting_tokens", "tokens", "Prompt tokens of these."),
        ):
            values = {tenant: getattr(own, attribute) for tenant, own in waiting.items()}
            yield self._gauge(f"octavo:tenant_{name}", help, values, "tenant")
        yield self._in_tiers()
        for name, attribute, help in (
            ("kv_floor_bytes", "floor_bytes", "KV cache that is always kept available for the tenant."),
            ("kv_cap_bytes", "cap_bytes", "KV cache that the tenant may hold at most; of tenants with a cap."),
        ):
            amounts: Counter[str] = Counter()
            for tenant, limits in self._stats.kv_limits.items():
                if (amount := limits[attribute]) is not None:
                    amounts[self._quotas.show(tenant)] += amount
            yield self._gauge(f"octavo:tenant_{name}", help, amounts, "tenant")

    def _in_tiers(self) -> Metric:
        """Return the bytes in each tier below the device, by tenant; not in Redis, which does not report them."""
        stats = self._stats
        tiers: dict[str, Mapping[str, int]] = {}
        if stats.host is not None:
            tiers["host"] = {tenant: count * stats.block_bytes for tenant, count in stats.host.by_tenant().items()}
        tiers |= {store.name: held for store in stats.stores if (held := store.medium.bytes_by_tenant()) is not None}
        amounts: Counter[tuple[str, str]] = Counter()
        for tier, held in tiers.items():
            for tenant, num_bytes in held.items():
                amounts[self._quotas.shown_name(tenant), tier] += num_bytes
        help = "Bytes of the tenant's blocks in host memory and on disk."
        return self._gauge("octavo:tenant_tier_bytes", help, amounts, "tenant", "tier")


class ResponseCollector(Collector):
    """A Prometheus collector over the counts of responses."""

    def __init__(self, responses: ResponseCounts) -> None:
        self._responses = responses

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "http_requests",
            "Requests answered, by endpoint and class of status.",
            labels=("handler", "method", "status"),
        )
        for labels, count in sorted(self._responses.counts.items()):
            family.add_metric(labels, count)
        yield family

"""`ResponseCounts` as a metric; apart from it, because importing prometheus_client takes a tenth of a second."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.server.http.response_counts import ResponseCounts


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

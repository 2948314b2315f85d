"""The base of Octavo's Prometheus collectors, which makes a family of metrics from its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.observe.stats import EngineStats

Values = Mapping[Any, float]
"""Values by those of a family's labels: one text for one label, a tuple for several."""


class ModelCollector(Collector):
    """A collector over one engine's statistics. Each of its metrics has the label `model_name` before its own."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def _gauge(self, name: str, help: str, values: Values | float, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(name, help, labels=["model_name", *labels]), values)

    def _counter(self, name: str, help: str, values: Values | float, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(name, help, labels=["model_name", *labels]), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values | float) -> Metric:
        for key, value in values.items() if isinstance(values, Mapping) else (((), values),):
            family.add_metric([self._model_name, *((key,) if isinstance(key, str) else key)], value)
        return family

    def _histogram(
        self,
        name: str,
        help: str,
        bounds: Sequence[float],
        observed: Mapping[tuple[str, ...], tuple[Sequence[int], float]],
        *labels: str,
    ) -> Metric:
        """Return a histogram of counts by upper bound, the last without one, and of sums, by the values of labels."""
        family = HistogramMetricFamily(name, help, labels=["model_name", *labels])
        uppers = (*map(str, bounds), "+Inf")
        for key, (counts, total) in observed.items():
            # Over a copy, so that the last bucket equals the sum even while the engine counts.
            covered = list(zip(uppers, map(float, accumulate(list(counts))), strict=True))
            family.add_metric([self._model_name, *key], covered, total)
        return family
